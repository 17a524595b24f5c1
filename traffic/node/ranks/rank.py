"""One rank of a collective: execute its program over RDMA writes with immediate, verify the result, and repeat.

Each lane (connection to or from one peer, of which there may be several) carries numbered segments into the receiver's
staging ring of `slots` slots; segment s goes to slot s mod `slots`. The immediate is

    bit 31      the iteration that this segment belongs to is the last one
    bit 30      no segment, but a test of a rebuilt connection, in a lane of several (`spray`, `dqplb`)
    bit 29      with bit 30: the test before was acknowledged, so packets pass in both directions
    bits 0-23   segment number mod 2^24 (towards the receiver), segments applied mod 2^24 (credits, towards the sender)

A sender never has more than `slots` segments that are not known to be applied, nor more than `window` that are not
acknowledged. A slow receiver is therefore never overrun, and a receive is always posted. A receiver sends a credit when
half of the ring is applied, or a quarter if half a ring is less than the window.

Without a number of iterations, rank 0 alone decides which iteration is the last, and the flag travels with the data.
Every result depends on rank 0's data (or a closing barrier follows the collective), so every rank has the flag before
its iteration ends.

A collective that is not complete `deadline_ms` after the rank entered it is reported as overdue, with the rank's state.

The first `warmup` iterations run like the others but are not reported: caches, translators and routes are cold in them.

A rank with `resume` begins after the iterations of a checkpoint, without warming up. It restores the state first,
unless `blank` is set: a test must see that this is noticed. Segments are numbered from its first iteration on. With
`history` it compares its state with the closed form at the end (`traffic.node.ranks.rank_state`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from selectors import BaseSelector
from typing import Any

import numpy as np

from traffic.node.gpu_client import GpuClient
from traffic.node.ranks.feed import Feed
from traffic.node.ranks.gate import Gate
from traffic.node.ranks.lane import MASK, RecvLane, SendLane, packets
from traffic.node.ranks.parts_clock import COMPLETION, COPY, POST, PartsClock
from traffic.node.ranks.rank_memory import Memory
from traffic.node.ranks.rank_state import State
from traffic.node.ranks.recorder import FIELDS, Recorder
from traffic.node.ranks.segments import LaneKey, Need, make_plan
from traffic.node.task import RECV_ID, Conn, Task
from traffic.node.verbs import Rnic, recv_request, write_request

__all__ = ["RankTask"]

LAST = 1 << 31
PROBE = 1 << 30
CONFIRMED = 1 << 29
CREDIT_ID = 1 << 61
PROBE_ID = 1 << 60
CONFIRM_ID = 1 << 59
CREDITS_IN_FLIGHT = 8
IN_FLIGHT = 2
"""Segments on each connection of a lane that has several: one is sent, one waits. A slow connection gets no more."""


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
        self.rank = program["rank"]
        self.slots, self.window = spec["slots"], spec["window"]
        self.sprays = spec["spread"] == "spray" and spec["qps_per_peer"] > 1
        self.credit_every = max(1, self.slots // (2 if self.slots >= 2 * self.window else 4))
        self.segment_bytes = spec["segment_bytes"]
        self.mtu = spec["qp"]["mtu"]
        self.deadline_ns = spec["deadline_ms"] * 1_000_000
        self.memory = Memory(program, spec["dtype"], spec["redop"])
        self.data = self.memory.array
        self.item_bytes = self.data.itemsize
        self.data_address = self.data.ctypes.data  # numpy makes an object for each `ctypes`: too slow for every post
        self.data_mr = rnic.register(self.data_address, self.data.nbytes)
        self.flight, self.split = Recorder(), PartsClock()
        self.gate = Gate(program.get("pauses", []), program["fences"])
        self.send_lanes: dict[LaneKey, SendLane] = {}
        self.recv_lanes: dict[LaneKey, RecvLane] = {}
        self.send_by_conn: dict[int, SendLane] = {}
        self.recv_by_conn: dict[int, RecvLane] = {}
        self.phases, self.phases_ns = self._make_lanes(program), list[int]()
        self.receive = recv_request(RECV_ID, self.data_mr)
        self.gpu = GpuClient(spec["gpu"], selector) if spec["compute_units"] else None
        self.feed = None
        keeps_state = spec.get("storage") and spec["storage"]["checkpoint_bytes"]
        self.state = State(program["results"] if keeps_state else [])
        if spec.get("storage"):
            self.feed = Feed(
                self.rank,
                spec["storage"],
                selector,
                state=self.state.words.tobytes,
                stored=self._stored,
                on_error=self._on_storage_error,
            )
        self.resume: dict[str, int] | None = None  # the checkpoint that the rank begins with
        self.history: list[dict[str, Any]] = []  # what its state is compared with at the end
        self.warmup = spec["warmup"]
        self.first, self.index = 0, -1
        self.last_lap: int | None = None
        """Number of the last iteration, counted from `first`: a flag from a peer may arrive before `first` is known."""
        self.phase = "idle"
        self.stopping = self.overdue = False
        self.end_ns: int | None = None
        self.begun_ns = self.start_ns = self.comm_ns = self.first_data_ns = self.compute_ns = 0
        self.compute_from_ns = self.storage_ns = 0
        self.last_duration_ns = self.wrong = 0
        self.split_ns: list[int] = []

    def _make_lanes(self, program: dict[str, Any]) -> list[tuple[Need, Need]]:
        """Create the lanes, and return the phases of the program (`traffic.node.ranks.segments.Plan`)."""
        spec = self.spec
        # With these two, all queue pairs to a peer are one lane.
        is_one = spec["spread"] in ("spray", "dqplb")
        qps, spread = (1, "split") if is_one else (spec["qps_per_peer"], spec["spread"])
        plan = make_plan(program, self.segment_bytes // self.item_bytes, qps, spread)
        numbers: dict[tuple[str, LaneKey], list[int]] = {}
        for number, direction, peer, qp in spec["lanes"]:
            numbers.setdefault((direction, (peer, qp % qps)), []).append(number)
        for (direction, key), mine in numbers.items():
            if direction == "out":
                out = self.send_lanes[key] = SendLane(mine, key[0], plan.sends[key])
                self.send_by_conn |= dict.fromkeys(mine, out)
            else:
                staging = np.zeros(self.slots * self.segment_bytes // self.item_bytes, dtype=self.data.dtype)
                mr = self.rnic.register(staging.ctypes.data, staging.nbytes)
                lane = self.recv_lanes[key] = RecvLane(mine, key[0], plan.recvs[key], staging, mr)
                self.recv_by_conn |= dict.fromkeys(mine, lane)
        if self.send_lanes.keys() != plan.sends.keys() or self.recv_lanes.keys() != plan.recvs.keys():
            raise ValueError(f"connections {spec['lanes']} are not those of the program's segments")
        return plan.phases

    # Connections.

    def capacity(self, conn: Conn) -> tuple[int, int]:
        return max(self.window, CREDITS_IN_FLIGHT) + 2, self.slots + 4

    def endpoint(self, conn: Conn) -> dict[str, Any]:
        lane = self.recv_by_conn.get(conn.number)
        if lane is None:
            return {"rkey": 0, "base": 0, "have": 0, "above": [], "applied": 0}
        lane.advertised[conn.number] = lane.applied
        return {
            "rkey": lane.mr.rkey,
            "base": lane.staging.ctypes.data,
            "have": lane.received,
            "above": lane.above(),
            "applied": lane.applied,
        }

    def joined(self, conn: Conn) -> None:
        if conn.number in self.recv_by_conn:
            lane = self.recv_by_conn[conn.number]
            lane.credited = lane.advertised[conn.number]
            lane.psns[conn.number] = conn.peer["psn"]
            if lane.credit is None:
                lane.credit, _ = write_request(wr_id=CREDIT_ID, mr=lane.mr, address=0, size=0, imm=True, signalled=True)
        else:
            out = self.send_by_conn[conn.number]
            if out.request is None:
                address = self.data_address
                out.request, out.sge = write_request(
                    wr_id=0, mr=self.data_mr, address=address, size=self.item_bytes, imm=True, signalled=True
                )
                out.probe, _ = write_request(
                    wr_id=PROBE_ID, mr=self.data_mr, address=address, size=0, imm=True, signalled=True
                )
        for _ in range(self.slots + 4):
            conn.qp.post_recv(self.receive)

    def go(self, conn: Conn, now_ns: int) -> None:
        conn.outstanding = 0
        out = self.send_by_conn.get(conn.number)
        if out is None:
            lane = self.recv_by_conn[conn.number]
            self._record("up", lane, conn, lane.received)
            self._credit(lane, now_ns)  # the peer may have been ready first and be waiting for this credit
        else:
            self._resume(out, conn)
            if conn.generation and out.has_substitutes:
                self._probe(out, conn, PROBE_ID, PROBE, now_ns)
        self._pump(now_ns)

    def _probe(self, out: SendLane, conn: Conn, wr_id: int, imm: int, now_ns: int) -> None:
        """Test the path of a rebuilt connection with an empty write."""
        out.probe.wr_id, out.probe.imm_data = wr_id, imm
        out.probe.set_wr_rdma(conn.peer["rkey"], conn.peer["base"])
        self.posted(conn, now_ns)
        conn.qp.post_send(out.probe)
        out.psns[conn.number] = (out.psns[conn.number] + 1) & MASK

    def shows_both_ways(self, wc: Any) -> bool:
        # A test without CONFIRMED proves one direction. The sender repeats it with CONFIRMED once it got the ACK.
        return bool(wc.wr_id != RECV_ID or wc.imm_data & (PROBE | CONFIRMED) != PROBE)

    def _resume(self, out: SendLane, conn: Conn) -> None:
        """Compare with what the peer has. What was lost with the connection before is posted again."""
        have = conn.peer["have"]
        # Other connections of the lane may have carried more since the peer reported that.
        if have > out.posted or (have < out.acked and not out.has_substitutes):
            raise ValueError(
                f"peer reports {have} received segments, but {out.acked} of {out.posted} posted ones are acknowledged"
            )
        lost = [out.segments[n % len(out.segments)].size for n in out.resume(conn.number, have, conn.peer["above"])]
        if conn.generation:
            self.emit(
                "redone",
                task=self.name,
                conn=conn.number,
                generation=conn.generation,
                segments=len(lost),
                size_bytes=sum(lost) * self.item_bytes,
            )
        # a peer that was ready first may have sent more credits since
        out.credits = max(out.credits, conn.peer["applied"])
        out.psns[conn.number] = conn.qp.psn
        self._record("up", out, conn, have)

    def lost(self, conn: Conn, status: str, now_ns: int) -> None:
        if conn.state != "lost" and not self.finished:
            lane = self.send_by_conn.get(conn.number) or self.recv_by_conn[conn.number]
            self._record(f"lost {status}", lane, conn, lane.acked if isinstance(lane, SendLane) else lane.received)
        super().lost(conn, status, now_ns)

    def down(self, conn: Conn, now_ns: int) -> None:
        lane = self.recv_by_conn.get(conn.number)
        if lane is not None and lane.has_substitutes:
            lane.credited = -self.slots  # a credit may have been lost with it: another connection repeats it
            self._credit(lane, now_ns)

    def completion(self, conn: Conn, wc: Any, now_ns: int) -> None:
        rebuilding = conn.rebuilding
        super().completion(conn, wc, now_ns)
        if rebuilding and not conn.rebuilding:  # a connection of a lane that has others can be used again
            lane = self.recv_by_conn.get(conn.number)
            if lane is not None:
                self._credit(lane, now_ns)

    def _free(self, lane: SendLane | RecvLane, most: int) -> Conn | None:
        """Return the connection of a lane that may send and has the smallest load, below `most`."""
        if not lane.has_substitutes:
            conn = self.conns.get(lane.numbers[0])
            return conn if conn is not None and conn.state == "up" and lane.load(conn) < most else None
        best, least = None, most
        for number in lane.numbers:
            conn = self._usable(number)
            if conn is not None and lane.load(conn) < least:
                best, least = conn, lane.load(conn)
        return best

    def _in_turn(self, out: SendLane, most: int) -> Conn | None:
        """Return the connection whose turn it is; None if that one has `most` segments in flight."""
        usable = [conn for number in out.numbers if (conn := self._usable(number)) is not None]
        if not usable:
            return None
        conn = usable[out.turn % len(usable)]
        return conn if out.load(conn) < most else None

    def _usable(self, number: int) -> Conn | None:
        """Return a connection with substitutes if it may send.

        A rebuilt one may be on a dead path: what others can carry does not wait for it.
        """
        conn = self.conns.get(number)
        return conn if conn is not None and conn.state == "up" and not conn.rebuilding else None

    # Iterations.

    def accept(self, request: dict[str, Any]) -> None:
        self.resume, self.history = request.get("resume"), request.get("history", [])

    def begin(self, now_ns: int) -> None:
        self.running = True
        self.begun_ns = now_ns
        if self.resume is not None and self.feed is not None:
            self.phase, self.storage_ns = "restore", now_ns
            if self.resume.get("blank"):
                self._restored(self.state.words.tobytes())
            else:
                self.feed.restore(self.resume, self._restored)
            return
        if not self.warmup:
            self._count_from(now_ns)
        if self.feed is not None:
            self.feed.begin()
        self._next_iteration()

    def _restored(self, data: bytes) -> None:
        resume = self.resume or {}
        try:
            self.state.restore(data)
        except ValueError as error:
            self._on_storage_error(str(error))
            return
        self.first = self.warmup + resume["iterations"]
        self.index = self.first - 1
        now_ns = time.monotonic_ns()
        self.emit("restored", task=self.name, at_ns=now_ns, iterations=resume["iterations"])
        self._count_from(now_ns)
        if resume["iterations"] == self.spec["iterations"]:  # the loss came after the last checkpoint
            self.phase = "idle"
            self._end(now_ns)
            return
        if self.feed is not None:
            self.feed.begin(resume["iterations"])
        self._next_iteration()

    def _count_from(self, now_ns: int) -> None:
        self.begun_ns = self.sampled_ns = now_ns
        self.series.start(now_ns)
        if self.spec["duration_ms"] is not None:
            self.end_ns = now_ns + self.spec["duration_ms"] * 1_000_000

    def stop(self, now_ns: int) -> None:
        self.stopping = True

    def _next_iteration(self) -> None:
        self.index += 1
        self.memory.fill(self.index)
        for out in self.send_lanes.values():
            out.base = (self.index - self.first) * len(out.segments)
        for lane in self.recv_lanes.values():
            lane.base = (self.index - self.first) * len(lane.segments)
        self.start_ns = time.monotonic_ns()
        self.flight.add("begin", iteration=self.index)
        wanted = self.spec["iterations"]
        if (wanted is not None and self.index + 1 >= self.warmup + wanted) or (
            self.rank == 0 and self._is_over(self.start_ns)
        ):
            self.last_lap = self.index - self.first
        self.compute_ns = 0
        self.phases_ns = []
        if self.feed is None:
            self._compute()
        else:
            self.phase, self.storage_ns = "data", self.start_ns
            self.feed.batch(self._compute)

    def _compute(self) -> None:
        self.compute_from_ns = time.monotonic_ns()
        if self.gpu is None:
            self._communicate(self.compute_from_ns)
        else:
            self.phase = "compute"
            self.gpu.compute(self.spec["compute_units"], self._computed)

    def _is_over(self, now_ns: int) -> bool:
        return self.stopping or (self.end_ns is not None and now_ns + self.last_duration_ns // 2 >= self.end_ns)

    def _computed(self, nanoseconds: int | None) -> None:
        if nanoseconds is None:
            self.phase = "idle"
            said = "is gone" if self.gpu is None or not self.gpu.error else f"reported an error: {self.gpu.error}"
            self.emit("error", error=f"{self.gpu.name if self.gpu else 'the GPU'} {said}", where=self.name)
            return
        now_ns = time.monotonic_ns()
        self.compute_ns = now_ns - self.compute_from_ns
        self._communicate(now_ns)

    def _communicate(self, now_ns: int) -> None:
        self.phase = "comm"
        self.comm_ns = now_ns
        self.split.begin(now_ns)
        self.gate.begin(now_ns)
        waiting = not any(lane.received > lane.base for lane in self.recv_lanes.values())
        self.first_data_ns = 0 if waiting else now_ns
        self.split.enter(COPY)
        self.memory.copy()
        self.split.enter(COMPLETION)
        self._pump(now_ns)

    # Data.

    def on_send(self, conn: Conn, wr_id: int, now_ns: int) -> None:
        if wr_id == PROBE_ID:
            self._probe(self.send_by_conn[conn.number], conn, CONFIRM_ID, PROBE | CONFIRMED, now_ns)
            return
        if wr_id == CONFIRM_ID:
            return
        if wr_id == CREDIT_ID:
            self._credit(self.recv_by_conn[conn.number], now_ns)
            return
        out = self.send_by_conn[conn.number]
        out.ack(conn.number, wr_id)
        self._record("ack", out, conn, wr_id)

    def on_recv(self, conn: Conn, imm: int, now_ns: int) -> None:
        if conn.state in ("joined", "up"):
            self.late_receives.post(conn, self.receive)
        lane = self.recv_by_conn.get(conn.number)
        if lane is None:
            self.send_by_conn[conn.number].credit(imm & MASK)
        elif imm & PROBE:
            lane.psns[conn.number] = (lane.psns[conn.number] + 1) & MASK
            return
        else:
            number = lane.arrive(imm & MASK, self.slots)
            if number is None:
                self.lost(conn, "OUT_OF_SEQUENCE", now_ns)
                return
            lap, index = divmod(number, len(lane.segments))
            if imm & LAST:
                self.last_lap = lap
            size_bytes = lane.segments[index].size * self.item_bytes
            self.series.add(now_ns, size_bytes)
            psn = lane.psns[conn.number]
            self._record("arrive", lane, conn, number, psn)
            lane.psns[conn.number] = (psn + packets(size_bytes, self.mtu)) & MASK
            if self.phase == "comm" and not self.first_data_ns:
                self.first_data_ns = now_ns

    def settle(self, now_ns: int) -> None:
        self._pump(now_ns)

    def slept(self, from_ns: int, to_ns: int) -> None:
        self.split.idle(from_ns, to_ns, is_pause=self.wake_ns is not None)

    def wake(self, now_ns: int) -> None:
        self._pump(now_ns)

    def _met(self, received: Need, acked: Need) -> bool:
        for key, number in received:
            lane = self.recv_lanes[key]
            if lane.applied - lane.base < number:
                return False
        for key, number in acked:
            out = self.send_lanes[key]
            if out.acked - out.base < number:
                return False
        return True

    def _pump(self, now_ns: int) -> None:
        if self.phase != "comm":
            return
        moved = True
        while moved:
            moved = self.split.needs_credit = False
            self.wake_ns = self.gate.advance(len(self.phases_ns), now_ns)
            # Comparing here first saves a call for each idle lane, of which 16 queue pairs per peer make many.
            for lane in self.recv_lanes.values():
                if lane.applied != lane.received:
                    moved |= self._apply(lane, now_ns)
            for out in self.send_lanes.values():
                if out.again or out.posted - out.base != len(out.segments):
                    moved |= self._send(out, now_ns)
            while len(self.phases_ns) < len(self.phases) and self._met(*self.phases[len(self.phases_ns)]):
                now_ns = time.monotonic_ns()
                self.phases_ns.append(now_ns - self.comm_ns)
                moved = True
        if len(self.phases_ns) == len(self.phases):
            self._finish()

    def _apply(self, lane: RecvLane, now_ns: int) -> bool:
        start = lane.applied
        size = self.segment_bytes // self.item_bytes
        limit = min(lane.received, lane.base + len(lane.segments))
        while lane.applied < limit:
            segment = lane.segments[lane.applied - lane.base]
            if (segment.received or segment.acked) and not self._met(segment.received, segment.acked):
                break
            at = lane.applied % self.slots * size
            source = lane.staging[at : at + segment.size]
            target = self.data[segment.offset : segment.offset + segment.size]
            self.split.enter(COPY)
            if segment.reduce:
                self.memory.reduce(target, source)
            else:
                target[:] = source
            self.split.enter(COMPLETION)
            self._record("apply", lane, self.conns[lane.numbers[0]], lane.applied)
            lane.applied += 1
        if lane.applied == start:
            return False
        self._credit(lane, now_ns)
        return True

    def _credit(self, lane: RecvLane, now_ns: int) -> None:
        if lane.applied - lane.credited < self.credit_every:
            return
        conn = self._free(lane, CREDITS_IN_FLIGHT)
        if conn is None:
            return
        lane.credit.imm_data = lane.applied & MASK
        lane.credited = lane.applied
        self._record("credit", lane, conn, lane.applied)
        self.posted(conn, now_ns)
        self.split.enter(POST)
        conn.qp.post_send(lane.credit)
        self.split.enter(COMPLETION)

    def _send(self, out: SendLane, now_ns: int) -> bool:
        moved = False
        most = IN_FLIGHT if out.has_substitutes else self.window
        while conn := self._in_turn(out, most) if self.sprays else self._free(out, most):
            if out.again:
                number = out.again.pop(0)
            elif self._may_send(out):
                number = out.posted
                out.posted += 1
            else:
                break
            self._post(out, conn, number, now_ns)
            out.turn += 1
            moved = True
        return moved

    def _may_send(self, out: SendLane) -> bool:
        """Return whether the next segment of this iteration may be posted."""
        if out.posted - out.base == len(out.segments) or out.posted - out.acked >= self.slots:
            return False
        if out.posted - out.credits >= self.slots:
            self.split.needs_credit = True
            return False
        segment = out.segments[out.posted - out.base]
        if segment.step >= self.gate.step:
            return False
        return not (segment.received or segment.acked) or self._met(segment.received, segment.acked)

    def _post(self, out: SendLane, conn: Conn, number: int, now_ns: int) -> None:
        self.split.enter(POST)
        segment = out.segments[number % len(out.segments)]
        request, sge = out.request, out.sge
        size_bytes = segment.size * self.item_bytes
        sge.addr = self.data_address + segment.offset * self.item_bytes
        sge.length = size_bytes
        request.set_wr_rdma(conn.peer["rkey"], conn.peer["base"] + number % self.slots * self.segment_bytes)
        request.imm_data = (number & MASK) | (LAST if self.last_lap == self.index - self.first else 0)
        request.wr_id = number
        psn = out.psns[conn.number]
        self._record("post", out, conn, number, psn)
        out.psns[conn.number] = (psn + packets(size_bytes, self.mtu)) & MASK
        out.in_flight[conn.number].append(number)
        self.posted(conn, now_ns)
        conn.qp.post_send(request)
        self.split.enter(COMPLETION)

    def _finish(self) -> None:
        self.split.enter(COPY)
        self.memory.divide()
        now_ns = time.monotonic_ns()
        self.split_ns = self.split.end(now_ns)
        self.phase, self.wake_ns = "idle", None
        self.flight.add("end", iteration=self.index)
        wrong = self.memory.count_wrong(self.index)
        self.wrong += wrong
        if self.index >= self.warmup and len(self.state.words):
            self.state.advance(self.data)
        if self.feed is None or self.index < self.warmup:
            self._iteration_over(now_ns, wrong)
        else:
            self.phase, self.storage_ns = "checkpoint", time.monotonic_ns()
            self.feed.checkpoint(self.index - self.warmup, lambda: self._iteration_over(now_ns, wrong))

    def _iteration_over(self, end_ns: int, wrong: int) -> None:
        """Complete an iteration whose collective ended at `end_ns`. It includes the wait for a checkpoint."""
        self.phase = "idle"
        if self.index >= self.warmup:
            self._report_iteration(end_ns, wrong)
        checked_ns = time.monotonic_ns()
        if self.index + 1 == self.warmup:
            self._count_from(checked_ns)
            self.emit("warm", task=self.name, at_ns=checked_ns, wrong=self.wrong)
        self.sample(checked_ns)
        self.last_duration_ns = checked_ns - self.start_ns
        if self.last_lap is not None and self.index - self.first >= self.last_lap:
            self._end(end_ns)
        else:
            self._next_iteration()

    def _end(self, end_ns: int) -> None:
        """End the work. The rank is done when its last checkpoint is stored."""
        self.finished = True
        self.sample(time.monotonic_ns(), last=True)
        if self.feed is None:
            self._done(end_ns)
        else:
            self.feed.settle(lambda: self._done(end_ns))

    def _done(self, end_ns: int) -> None:
        if self.history:
            self._verify_state()
        self.emit(
            "done",
            task=self.name,
            start_ns=self.begun_ns,
            end_ns=end_ns,
            iterations=max(0, self.index + 1 - self.warmup),
            wrong=self.wrong,
        )

    def _verify_state(self) -> None:
        """Compare the state with that of a job that was never interrupted. The last part of the history is this one."""
        *before, last = self.history
        last = {**last, "iterations": self.index + 1 - last["first"]}
        self.emit(
            "state",
            task=self.name,
            iterations=self.index + 1 - self.warmup,
            elements=len(self.state.words),
            wrong=self.state.count_wrong([*before, last], self.spec["dtype"], self.spec["redop"]),
            sha256=self.state.digest(),
        )

    def _stored(self, fields: dict[str, int]) -> None:
        self.emit("stored", task=self.name, size_bytes=self.spec["storage"]["checkpoint_bytes"], **fields)

    def _on_storage_error(self, text: str) -> None:
        self.phase = "idle"
        self.emit("error", error=text, where=self.name)

    def _report_iteration(self, now_ns: int, wrong: int) -> None:
        ingest_ns, checkpoint_ns = (self.feed.ingest_ns, self.feed.checkpoint_ns) if self.feed is not None else (0, 0)
        self.emit(
            "iteration",
            task=self.name,
            index=self.index - self.warmup,
            start_ns=self.start_ns,
            end_ns=now_ns + checkpoint_ns,
            compute_ns=self.compute_ns,
            ingest_ns=ingest_ns,
            checkpoint_ns=checkpoint_ns,
            comm_ns=now_ns - self.comm_ns,
            wait_ns=max(0, self.first_data_ns - self.comm_ns),
            phases_ns=self.phases_ns,
            paused_ns=self.gate.paused_ns,
            split_ns=self.split_ns,
            wrong=wrong,
        )

    def tick(self, now_ns: int) -> None:
        if not self.running or self.finished:
            return
        self.check_deadlines(now_ns)
        self.sample(now_ns)
        since_ns = {"comm": self.comm_ns, **dict.fromkeys(("data", "checkpoint", "restore"), self.storage_ns)}.get(
            self.phase, now_ns
        )
        if not self.overdue and now_ns - since_ns > self.deadline_ns:
            self.overdue = True
            after_ms = self.deadline_ns // 1_000_000
            self.emit("overdue", task=self.name, iteration=self.index, after_ms=after_ms, phase=self.phase)

    # The flight recorder.

    def _record(self, what: str, lane: RecvLane | SendLane, conn: Conn, number: int, psn: int = -1) -> None:
        lap, index = divmod(number, len(lane.segments))
        self.flight.add(
            what,
            iteration=self.first + lap,
            step=lane.segments[index].step,
            peer=lane.peer,
            qpn=conn.qp.qpn,
            segment=index,
            psn=psn,
            connection=conn.number,
        )

    def dump(self) -> None:
        """Report this rank's phase, every lane, and the contents of the flight recorder."""
        lanes = []
        ends: list[RecvLane | SendLane] = [*self.send_lanes.values(), *self.recv_lanes.values()]
        for lane in ends:
            conns = [self.conns[number] for number in lane.numbers if number in self.conns]
            # Of several connections, one that is not up explains a wait.
            conn = min(conns, key=lambda one: one.state == "up", default=None)
            qpn, state = (conn.qp.qpn if conn.qp else 0, conn.state) if conn is not None else (0, "new")
            lanes.append({"qpn": qpn, "state": state, **lane.describe()})
        self.emit(
            "flight",
            task=self.name,
            phase="over" if self.finished else self.phase,
            iteration=self.index,
            lanes=lanes,
            fields=FIELDS,
            entries=self.flight.entries(),
        )

    def close(self) -> None:
        super().close()
        if self.gpu is not None:
            self.gpu.close()
        if self.feed is not None:
            self.feed.close()
        self.gpu = self.feed = None  # both hold callbacks to this task, a reference cycle
        for lane in self.recv_lanes.values():
            lane.mr.close()
        self.data_mr.close()
