"""One rank of a collective: execute its program once per iteration, verify the result, and repeat.

In an iteration the rank waits for its data (`data`), computes on its GPU (`compute`), executes its program over RDMA
(`comm`, see `faultbed.traffic.node.ranks.executor`), and waits for a checkpoint to be stored (`checkpoint`). Without a
GPU and storage only `comm` is left.

Without a number of iterations, rank 0 alone decides which iteration is the last, and the flag travels with the data.
Every result depends on rank 0's data (or a closing barrier follows the collective), so every rank has the flag before
its iteration ends.

A rank that spends longer than `deadline_ms` on one of these, other than `compute`, is reported as overdue.

The first `warmup` iterations run like the others but are not reported: caches, translators and routes are cold in them.

A rank with `resume` first restores the state of a checkpoint, and continues after its iterations, without warm-up. With
`blank` it restores nothing: tests verify that such a job is detected. With `history` the rank compares its state at the
end with the closed form (`faultbed.traffic.node.ranks.rank_state`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from selectors import BaseSelector
from typing import Any

from faultbed.traffic.node.gpu_client import GpuClient
from faultbed.traffic.node.ranks.executor import Executor
from faultbed.traffic.node.ranks.feed import Feed
from faultbed.traffic.node.ranks.lane import LAST, MASK, PROBE, PROBE_CONFIRMED
from faultbed.traffic.node.ranks.rank_memory import Memory
from faultbed.traffic.node.ranks.rank_state import State
from faultbed.traffic.node.ranks.recorder import FIELDS, Recorder
from faultbed.traffic.node.ranks.recv_lane import CREDIT_ID, CREDITS_IN_FLIGHT
from faultbed.traffic.node.ranks.send_lane import CONFIRM_ID, PROBE_ID
from faultbed.traffic.node.task import RECV_ID, Conn, Task
from faultbed.traffic.node.verbs import Rnic, recv_request

__all__ = ["RankTask"]

HAVE_DEADLINE = ("restore", "data", "comm", "checkpoint")
"""Activities that are overdue after the deadline."""


class RankTask(Task):
    """A rank as a task of the engine: runs the iterations of its program and reports their results.

    `spec` holds the program, `lanes` ([conn, "out"|"in", peer, number of the queue pair]), the element type, sizes and
    the duration.
    """

    def __init__(
        self, name: str, rnic: Rnic, spec: dict[str, Any], emit: Callable[..., None], selector: BaseSelector
    ) -> None:
        super().__init__(name, rnic, spec, emit)
        program = spec["program"]
        self.slots, self.window = spec["slots"], spec["window"]
        self.deadline_ns = spec["deadline_ms"] * 1_000_000
        self.recorder = Recorder()
        self.memory = Memory(program, spec["dtype"], spec["redop"])
        self.executor = Executor(rnic, spec, self.conns, self.memory, self.recorder)
        self.receive = recv_request(RECV_ID, self.executor.mr)
        self.gpu = GpuClient(spec["gpu"], selector) if spec["compute_units"] else None
        storage = spec.get("storage")
        self.state = State(program["results"] if storage and storage["checkpoint_bytes"] else [])
        self.feed = None
        self.keeps_checkpoints = bool(storage and storage["checkpoint_bytes"])
        if storage:
            self.feed = Feed(
                program["rank"],
                storage,
                selector,
                state=self.state.words.tobytes,
                stored=self._on_stored,
                on_error=self._on_storage_error,
            )
        self.resume: dict[str, int] | None = None  # the checkpoint that the rank begins with
        self.history: list[dict[str, Any]] = []  # the parts of the job that lead to its state at the end
        self.warmup = spec["warmup"]
        self.iteration = -1  # counted from the job's start, warm-up included
        self.activity = "idle"
        self.activity_start_ns = 0
        self.is_stopping = self.is_overdue = self.is_held = False
        self.planned_end_ns: int | None = None
        self.counted_from_ns = 0  # end of the warm-up
        self.start_ns = self.compute_ns = self.last_duration_ns = 0  # of the iteration
        self.wrong = 0  # elements, over all iterations

    # Connections.

    def capacity(self, conn: Conn) -> tuple[int, int]:
        return max(self.window, CREDITS_IN_FLIGHT) + 2, self.slots + 4

    def endpoint(self, conn: Conn) -> dict[str, Any]:
        lane = self.executor.recv_by_conn.get(conn.number)
        if lane is None:
            return {"rkey": 0, "base": 0, "have": 0, "above": [], "applied": 0}
        return lane.endpoint(conn)

    def joined(self, conn: Conn) -> None:
        lane = self.executor.recv_by_conn.get(conn.number)
        if lane is not None:
            lane.joined(conn)
        for _ in range(self.slots + 4):
            conn.qp.post_recv(self.receive)

    def go(self, conn: Conn, now_ns: int) -> None:
        conn.outstanding = 0
        lane = self.executor.recv_by_conn.get(conn.number)
        if lane is not None:
            lane.resume(conn, now_ns)
        else:
            out = self.executor.send_by_conn[conn.number]
            lost = self.executor.resume(out, conn)
            if conn.generation:
                self.emit(
                    "redone",
                    task=self.name,
                    conn=conn.number,
                    generation=conn.generation,
                    segments=len(lost),
                    size_bytes=sum(out.sizes_bytes[number % len(out.segments)] for number in lost),
                )
                if out.has_substitutes:
                    out.probe(conn, now_ns)
        self.settle(now_ns)

    def shows_both_ways(self, wc: Any) -> bool:
        # A first probe proves one direction. The sender confirms it once it got the ACK.
        return bool(wc.wr_id != RECV_ID or wc.imm_data & PROBE_CONFIRMED != PROBE)

    def recovered(self, conn: Conn, now_ns: int) -> None:
        lane = self.executor.recv_by_conn.get(conn.number)
        if lane is not None:
            lane.send_credit(now_ns)

    def lost(self, conn: Conn, status: str, now_ns: int) -> None:
        if conn.state != "lost" and not self.finished:
            lane = self.executor.recv_by_conn.get(conn.number)
            if lane is not None:
                self.recorder.add_segment(f"lost {status}", lane, conn, lane.received)
            else:
                out = self.executor.send_by_conn[conn.number]
                self.recorder.add_segment(f"lost {status}", out, conn, out.acked)
        super().lost(conn, status, now_ns)

    def down(self, conn: Conn, now_ns: int) -> None:
        lane = self.executor.recv_by_conn.get(conn.number)
        if lane is not None and lane.has_substitutes:
            lane.repeat_credit(now_ns)

    # Completions.

    def on_send(self, conn: Conn, wr_id: int, now_ns: int) -> None:
        if wr_id < CONFIRM_ID:
            self.executor.send_by_conn[conn.number].acknowledge(conn, wr_id)
        elif wr_id == CREDIT_ID:
            self.executor.recv_by_conn[conn.number].send_credit(now_ns)
        elif wr_id == PROBE_ID:
            self.executor.send_by_conn[conn.number].confirm_probe(conn, now_ns)

    def on_recv(self, conn: Conn, imm: int, now_ns: int) -> None:
        if conn.state in ("joined", "up"):
            self.late_receives.post(conn, self.receive)
        executor = self.executor
        lane = executor.recv_by_conn.get(conn.number)
        if lane is None:
            executor.send_by_conn[conn.number].credit(imm & MASK)
            return
        if imm & PROBE:
            lane.arrive_probe(conn)
            return
        number = executor.arrive(lane, conn, imm & MASK)
        if number is None:
            self.lost(conn, "OUT_OF_SEQUENCE", now_ns)
            return
        round_number, index = divmod(number, len(lane.segments))
        self.series.add(now_ns, lane.sizes_bytes[index])
        if imm & LAST:
            executor.last_round = round_number
        if self.activity == "comm" and not executor.first_data_ns:
            executor.first_data_ns = now_ns

    def settle(self, now_ns: int) -> None:
        if self.activity != "comm":
            self.executor.repeat_lost(now_ns)
            return
        is_complete = self.executor.advance(now_ns)
        self.wake_ns = self.executor.wake_ns
        if is_complete:
            self._end_collective()

    def wake(self, now_ns: int) -> None:
        self.settle(now_ns)

    def slept(self, from_ns: int, to_ns: int) -> None:
        self.executor.clock.idle(from_ns, to_ns, is_pause=self.wake_ns is not None)

    # Begin and end of the work.

    def accept(self, request: dict[str, Any]) -> None:
        self.resume, self.history = request.get("resume"), request.get("history", [])

    def begin(self, now_ns: int) -> None:
        self.running = True
        self.counted_from_ns = now_ns
        if self.resume is not None and self.feed is not None:
            self._enter("restore", now_ns)
            if self.resume.get("blank"):
                self._on_restored(self.state.words.tobytes())
            else:
                self.feed.restore(self.resume, self._on_restored)
            return
        if not self.warmup:
            self._count_from(now_ns)
        if self.feed is not None:
            self.feed.begin()
        self._next_iteration()

    def _on_restored(self, data: bytes) -> None:
        resume = self.resume or {}
        try:
            self.state.restore(data)
        except ValueError as error:
            self._on_storage_error(str(error))
            return
        self.recorder.first_iteration = self.warmup + resume["iterations"]
        self.iteration = self.recorder.first_iteration - 1
        now_ns = time.monotonic_ns()
        self.emit("restored", task=self.name, at_ns=now_ns, iterations=resume["iterations"])
        self._count_from(now_ns)
        if resume["iterations"] == self.spec["iterations"]:  # the loss came after the last checkpoint
            self.activity = "idle"
            self._end(now_ns)
            return
        if self.feed is not None:
            self.feed.begin(resume["iterations"])
        self._next_iteration()

    def _count_from(self, now_ns: int) -> None:
        """Begin the time that counts: the warm-up is over."""
        self.counted_from_ns = self.sampled_ns = now_ns
        self.series.start(now_ns)
        if self.spec["duration_ms"] is not None:
            self.planned_end_ns = now_ns + self.spec["duration_ms"] * 1_000_000

    def stop(self, now_ns: int) -> None:
        """Begin to stop. Ranks with a number of iterations may exchange no data, so the controller makes them agree.

        Such a rank reports its round, and begins no other one until `end_after` names the last one.
        """
        if self.spec["iterations"] is None:
            self.is_stopping = True
            return
        if self.executor.last_round is None:
            self.is_stopping = True
        self.emit("stopping", task=self.name, round=self.executor.round)

    def end_after(self, last_round: int) -> None:
        """End after a round that is the furthest of all ranks. A rank that is held continues until that round."""
        if self.executor.last_round is not None:
            return
        self.executor.last_round = last_round
        if self.is_held:
            self.is_held = False
            if self.executor.round >= last_round:
                self._end(time.monotonic_ns())
            else:
                self._next_iteration()

    def _end(self, end_ns: int) -> None:
        """End the work. The rank is done when its last checkpoint is stored."""
        self.finished = True
        self.sample(time.monotonic_ns(), last=True)
        if self.feed is None:
            self._report_done(end_ns)
        else:
            self.feed.settle(lambda: self._report_done(end_ns))

    def _report_done(self, end_ns: int) -> None:
        if self.history:
            self._report_state()
        self.emit(
            "done",
            task=self.name,
            start_ns=self.counted_from_ns,
            end_ns=end_ns,
            iterations=max(0, self.iteration + 1 - self.warmup),
            wrong=self.wrong,
        )

    def _report_state(self) -> None:
        """Compare the state with that of a job that was never interrupted. The last part of the history is this one."""
        *before, last = self.history
        last = {**last, "iterations": self.iteration + 1 - last["first"]}
        self.emit(
            "state",
            task=self.name,
            iterations=self.iteration + 1 - self.warmup,
            elements=len(self.state.words),
            wrong=self.state.count_wrong([*before, last], self.spec["dtype"], self.spec["redop"]),
            sha256=self.state.digest(),
        )

    def close(self) -> None:
        super().close()
        if self.gpu is not None:
            self.gpu.close()
        if self.feed is not None:
            self.feed.close()
        self.gpu = self.feed = None  # both hold callbacks to this task, a reference cycle
        self.executor.close()

    # Iterations.

    def _enter(self, activity: str, now_ns: int) -> None:
        self.activity, self.activity_start_ns = activity, now_ns

    def _next_iteration(self) -> None:
        if self.is_stopping and self.spec["iterations"] is not None and self.executor.last_round is None:
            self.is_held = True
            return
        self.iteration += 1
        self.memory.fill(self.iteration)
        self.executor.next_round()
        self.start_ns = time.monotonic_ns()
        self.recorder.add_iteration("begin", self.iteration)
        if self._is_last():
            self.executor.last_round = self.executor.round
        self.compute_ns = 0
        if self.feed is None:
            self._compute()
        else:
            self._enter("data", self.start_ns)
            self.feed.batch(self._compute)

    def _is_last(self) -> bool:
        """Return whether this rank decides that the iteration is the last one."""
        total = self.spec["iterations"]
        if total is not None:
            return bool(self.iteration + 1 >= self.warmup + total)
        if self.spec["program"]["rank"] != 0:
            return False
        end_ns = self.planned_end_ns
        return self.is_stopping or (end_ns is not None and self.start_ns + self.last_duration_ns // 2 >= end_ns)

    def _compute(self) -> None:
        now_ns = time.monotonic_ns()
        if self.gpu is None:
            self._communicate(now_ns)
        else:
            self._enter("compute", now_ns)
            self.gpu.compute(self.spec["compute_units"], self._on_computed)

    def _on_computed(self, gpu_ns: int | None) -> None:
        if gpu_ns is None:
            self.activity = "idle"
            problem = "is gone" if self.gpu is None or not self.gpu.error else f"reported an error: {self.gpu.error}"
            name = self.gpu.name if self.gpu else "the GPU"
            self.emit("error", error=f"{name} {problem}", where=self.name, part="gpu")
            return
        now_ns = time.monotonic_ns()
        self.compute_ns = now_ns - self.activity_start_ns
        self._communicate(now_ns)

    def _communicate(self, now_ns: int) -> None:
        self._enter("comm", now_ns)
        self.executor.begin(now_ns)
        self.settle(now_ns)

    def _end_collective(self) -> None:
        end_ns = self.executor.end()
        self.activity, self.wake_ns = "idle", None
        self.recorder.add_iteration("end", self.iteration)
        wrong = self.memory.count_wrong(self.iteration)
        self.wrong += wrong
        is_warm = self.iteration >= self.warmup
        if is_warm and len(self.state.words):
            self.state.advance(self.memory.array)
        if self.feed is None or not is_warm:
            self._end_iteration(end_ns, wrong)
        else:
            self._enter("checkpoint", time.monotonic_ns())
            self.feed.checkpoint(self.iteration - self.warmup, lambda: self._end_iteration(end_ns, wrong))

    def _end_iteration(self, end_ns: int, wrong: int) -> None:
        """Complete an iteration whose collective ended at `end_ns`. It includes the wait for a checkpoint."""
        self.activity = "idle"
        if self.iteration >= self.warmup:
            self._report_iteration(end_ns, wrong)
        now_ns = time.monotonic_ns()
        if self.iteration + 1 == self.warmup:
            self._count_from(now_ns)
            self.emit("warm", task=self.name, at_ns=now_ns, wrong=self.wrong)
        self.sample(now_ns)
        self.last_duration_ns = now_ns - self.start_ns
        if self.executor.last_round is not None and self.executor.round >= self.executor.last_round:
            self._end(end_ns)
        else:
            self._next_iteration()

    def _report_iteration(self, end_ns: int, wrong: int) -> None:
        executor, feed = self.executor, self.feed
        checkpoint_ns = 0 if feed is None else feed.checkpoint_ns
        storage = {}
        if feed is not None:
            begun_ns, ended_ns = feed.read_ns
            storage = {
                "ingest_ns": feed.ingest_ns,
                "checkpoint_ns": checkpoint_ns,
                "read_from_ns": begun_ns - self.start_ns,
                "read_ns": ended_ns - begun_ns,
            }
        self.emit(
            "iteration",
            task=self.name,
            index=self.iteration - self.warmup,
            start_ns=self.start_ns,
            end_ns=end_ns + checkpoint_ns,
            compute_ns=self.compute_ns,
            comm_ns=end_ns - executor.start_ns,
            wait_ns=max(0, executor.first_data_ns - executor.start_ns),
            phases_ns=executor.phases_ns,
            paused_ns=executor.gate.paused_ns,
            split_ns=executor.parts_ns,
            wrong=wrong,
            **storage,
        )

    # Storage.

    def _on_stored(self, fields: dict[str, int]) -> None:
        self.emit("stored", task=self.name, size_bytes=self.spec["storage"]["checkpoint_bytes"], **fields)

    def _on_storage_error(self, text: str) -> None:
        self.activity = "idle"
        self.emit("error", error=text, where=self.name)

    # Observation.

    def tick(self, now_ns: int) -> None:
        if not self.running or self.finished:
            return
        self.check_deadlines(now_ns)
        self.sample(now_ns)
        if self.is_overdue or self.activity not in HAVE_DEADLINE:
            return
        if now_ns - self.activity_start_ns > self.deadline_ns:
            self.is_overdue = True
            after_ms = self.deadline_ns // 1_000_000
            self.emit("overdue", task=self.name, iteration=self.iteration, after_ms=after_ms, phase=self.activity)

    def dump(self) -> None:
        """Report what the rank is doing, every lane, and the contents of the flight recorder."""
        executor = self.executor
        self.emit(
            "flight",
            task=self.name,
            phase="over" if self.finished else self.activity,
            iteration=self.iteration,
            lanes=[lane.describe() for lane in (*executor.send_lanes.values(), *executor.recv_lanes.values())],
            fields=FIELDS,
            entries=self.recorder.entries(),
        )
