"""The traffic engine of one host: `python3 -m faultbed.traffic.node.engine`, JSON lines on stdin and stdout.

Requests                                                          replies and later events
    {"do": "clock", seq?}                                         clock {monotonic_ns, pid, seq}
    {"do": "task", task, kind, rnic, address, spec}               task {task, rnic, gid_index}
    {"do": "qp", task, conn, generation, psn, flow_label}         qp {task, conn, generation, end}
    {"do": "connect", task, conn, generation, peer}               joined | join_failed {task, conn, generation}
    {"do": "go", task, conn, generation}                          (recovered {at_ns} after a rebuild)
    {"do": "start", task, resume?, history?}                      sample, iteration, qp_error, overdue, done
    {"do": "stop", task}                                          done, a little later; of a rank with a number of
                                                                  iterations: stopping {task, round}
    {"do": "end_after", task, round}                              done, when it has finished that round
    {"do": "psn", task}                                           psn {task, conns}
    {"do": "dump", task}                                          flight {task, ...}, of a rank
    {"do": "forget"}                                              forgotten
    {"do": "quit"}                                                (end of stdout)

`resume` {generation, rank, iterations} names the checkpoint that a rank begins with; the rank reports `restored` first.
With `history` the rank compares its final state with the one that this history leads to, and reports `state`.

`kind` is rank, program, flow_tx or flow_rx (or unreliable_, numbered_, echo_, admitted_ or checked_). The requests qp,
connect and go on both ends establish a connection, and rebuild it after an error; the controller pairs them. `forget`
releases all tasks, so that the next run can use the same engine. A request that fails is answered with {"event":
"error", "error", "where"}. The end of stdin means that the controller is gone: the engine closes everything and ends.

The engine has one thread. A selector waits for stdin, the completion channels, and the sockets of GPU and storage. A
second waiting thread would hold the GIL inside pyverbs, and on one core two threads only take turns.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import sys
import time

from faultbed.traffic.node.completions import reject_overrun
from faultbed.traffic.node.flows.late import LateReceives
from faultbed.traffic.node.ready_files import handle_ready
from faultbed.traffic.node.task import Conn, Task
from faultbed.traffic.node.verbs import Rnic

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

__all__ = ["Engine", "main"]

TICK_NS = 50_000_000
ENCODE = json.JSONEncoder(separators=(",", ":")).encode
POLL_ROUNDS = 4
STANDSTILL_NS = 500_000_000
"""An engine that has not run for this long was stopped or got no CPU time; normal scheduling delays are shorter."""
FLOW_TASKS = {
    "flow": ("flow", "FlowSender", "FlowReceiver"),
    "unreliable": ("unreliable", "UnreliableSender", "UnreliableReceiver"),
    "numbered": ("numbered", "NumberedSender", "NumberedReceiver"),
    "echo": ("echo", "EchoSender", "EchoReceiver"),
    "admitted": ("admission", "AdmittedSender", "AdmittedReceiver"),
    "checked": ("checked", "CheckedSender", "CheckedReceiver"),
}
"""Module in `faultbed.traffic.node.flows`, and classes of the two ends, by the first part of a flow's `kind`."""


class Engine:
    """The event loop of the engine. Every task gets a `tick` each `tick_ns`."""

    def __init__(self, tick_ns: int = TICK_NS) -> None:
        self.tick_ns = tick_ns
        self.selector = selectors.DefaultSelector()
        self.rnics: dict[str, Rnic] = {}
        self.tasks: dict[str, Task] = {}
        self.by_qpn: dict[tuple[str, int], Conn] = {}
        self.late_receives = LateReceives()
        self.buffer = b""
        self.unwritten: list[dict[str, Any]] = []
        self.writes_soon = False
        self.open = True

    def emit(self, event: str, **fields: object) -> None:
        """Write one event to the controller.

        The event `iteration` is written with the next other event, at the latest at the next tick. A write takes 5 ms
        on an emulated CPU, and sshd as long again; an operation of a small collective takes less. Events that are
        encoded together find the encoder in the CPU's caches.

        The iterations of a job with checkpoints are written as soon as the engine has nothing else to do. If the host
        is lost before that, they are missing in the results, unless the job repeats them.
        """
        self.unwritten.append({"event": event, **fields})
        if event != "iteration":
            self._write()
        elif any(task.keeps_checkpoints for task in self.tasks.values()):
            self.writes_soon = True

    def _write(self) -> None:
        lines = "".join(ENCODE(event) + "\n" for event in self.unwritten).encode()
        self.unwritten = []
        self.writes_soon = False
        while lines:
            lines = lines[os.write(1, lines) :]

    def run(self) -> None:
        """Serve until the controller requests the end or is gone."""
        self.selector.register(0, selectors.EVENT_READ, self._readable)
        tick_due_ns = time.monotonic_ns() + self.tick_ns
        ticked_ns, cpu_ns = time.monotonic_ns(), time.process_time_ns()
        while self.open:
            wakes = [task.wake_ns for task in self.tasks.values() if task.wake_ns is not None]
            self._wait(min(tick_due_ns, self.late_receives.due_ns or tick_due_ns, *wakes))
            now_ns = time.monotonic_ns()
            self.late_receives.wake(now_ns)
            if wakes:
                for task in list(self.tasks.values()):
                    if task.wake_ns is not None and now_ns >= task.wake_ns:
                        task.wake(now_ns)
            if now_ns >= tick_due_ns:
                used_ns = time.process_time_ns() - cpu_ns
                # Without tasks a standstill delays nothing.
                if self.tasks and now_ns - ticked_ns - used_ns > STANDSTILL_NS:
                    self.emit("standstill", start_ns=ticked_ns, end_ns=now_ns)
                ticked_ns, cpu_ns = now_ns, cpu_ns + used_ns
                self._tick(now_ns)
                tick_due_ns = time.monotonic_ns() + self.tick_ns

    def _tick(self, now_ns: int) -> None:
        self.late_receives.check_fault()
        for task in list(self.tasks.values()):
            task.tick(now_ns)
        self._write()

    def _wait(self, until_ns: int) -> None:
        """Wait for events until a time, and handle those that came."""
        slept_ns = time.monotonic_ns()
        ready = self.selector.select(0.0 if self.writes_soon else max(0.0, (until_ns - slept_ns) / 1e9))
        woke_ns = time.monotonic_ns()
        for task in self.tasks.values():
            task.slept(slept_ns, woke_ns)
        handle_ready(self.selector, ready)
        if self.writes_soon and not ready:
            self._write()

    def close(self) -> None:
        """Release all resources: tasks first, then the devices that they use."""
        with contextlib.suppress(OSError):  # the controller may be gone
            self._write()
        for task in self.tasks.values():
            task.close()
        for rnic in self.rnics.values():
            rnic.context.close()

    def _readable(self) -> None:
        data = os.read(0, 1 << 16)
        if not data:
            self.open = False
            return
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in lines:
            if line.strip():
                self._serve(line)

    def _serve(self, line: bytes) -> None:
        where = "engine"
        try:
            request = json.loads(line)
            where = request.get("task", where)
            handler = getattr(self, f"do_{request['do']}")
            handler(request)
        except Exception as error:  # noqa: BLE001  # reported to the controller, which decides
            self.emit("error", error=f"{type(error).__name__}: {error}", where=where, request=line.decode()[:200])

    def _completions(self, rnic: Rnic) -> None:
        """Handle all completions of an RNIC, and arm its next notification.

        Handling takes long enough for further completions to arrive. They are polled before a notification is armed,
        which saves a wake-up with its four system calls. The rounds are limited, so that other work gets its turn.
        """
        rnic.clear_event()
        for _ in range(POLL_ROUNDS):
            completions = rnic.poll()
            if not completions:
                break
            self._handle(rnic, completions)
        self._handle(rnic, rnic.drain())

    def _handle(self, rnic: Rnic, completions: list[Any]) -> None:
        now_ns = time.monotonic_ns()
        tasks: dict[Task, None] = {}  # in the order of their completions
        for completion in completions:
            conn = self.by_qpn.get((rnic.name, completion.qp_num))
            if conn is not None:  # otherwise a completion of a QP that was destroyed since
                conn.task.completion(conn, completion, now_ns)
                tasks[conn.task] = None
        for task in tasks:
            task.settle(now_ns)

    def do_clock(self, request: dict[str, Any]) -> None:
        """Report the clock and the process id."""
        self.emit("clock", monotonic_ns=time.monotonic_ns(), pid=os.getpid(), seq=request.get("seq"))

    def do_task(self, request: dict[str, Any]) -> None:
        """Create a task: its memory, but no QP yet."""
        name = request["rnic"]
        if name not in self.rnics:
            rnic = self.rnics[name] = Rnic(name, request["address"])
            self.selector.register(rnic.fd, selectors.EVENT_READ, lambda: self._completions(rnic))
        task = self.tasks[request["task"]] = self._make(request, self.rnics[name])
        task.late_receives = self.late_receives
        self.emit("task", task=request["task"], rnic=name, gid_index=self.rnics[name].gid_index())

    def _make(self, request: dict[str, Any], rnic: Rnic) -> Task:
        kind, arguments = request["kind"], (request["task"], rnic, request["spec"], self.emit)
        if kind == "rank":
            from faultbed.traffic.node.ranks.rank import RankTask  # numpy takes seconds to load on an emulated CPU

            return RankTask(*arguments, self.selector)
        if kind == "program":
            from faultbed.traffic.node.programs.program_task import ProgramTask

            return ProgramTask(*arguments, self.selector)
        flow_kind, _, end = kind.rpartition("_")
        module, sender, receiver = FLOW_TASKS[flow_kind]
        name = {"tx": sender, "rx": receiver}[end]
        # Only this module is imported, because each import takes time on an emulated CPU.
        task: Task = getattr(importlib.import_module(f"faultbed.traffic.node.flows.{module}"), name)(*arguments)
        return task

    def do_qp(self, request: dict[str, Any]) -> None:
        """Create the QP of a connection. A previous QP of the connection is replaced."""
        task = self.tasks[request["task"]]
        if request["generation"] == 0:  # later, a fault may have changed the MTU
            task.rnic.check_mtu(task.spec["qp"]["mtu"])
        conn = task.conns.setdefault(request["conn"], Conn(task, request["conn"]))
        if conn.qp is not None:
            self._destroy_qp(conn)
        sends, receives = task.capacity(conn)
        in_use = _requests_of_other_qps(conn, self.tasks.values())
        reject_overrun(task.rnic.name, in_use, sends + receives, entries=task.rnic.cq_entries)
        params = {**task.spec["qp"], "flow_label": request["flow_label"]}
        conn.qp = task.make_qp(sends=sends, receives=receives, psn=request["psn"], params=params)
        conn.generation = request["generation"]
        conn.state = "ready"
        self.by_qpn[task.rnic.name, conn.qp.qpn] = conn
        end = {"address": task.rnic.address, "qpn": conn.qp.qpn, "psn": conn.qp.psn, **task.endpoint(conn)}
        self.emit("qp", task=task.name, conn=conn.number, generation=conn.generation, end=end)

    def _destroy_qp(self, conn: Conn) -> None:
        """Destroy the QP of a connection that is rebuilt.

        The QP is stopped, and its completions are handled, before the new QP exists: the peer resumes after the last
        message that arrived completely.
        """
        rnic = conn.task.rnic
        conn.task.mark_lost(conn, time.monotonic_ns())
        conn.rebuilding = True
        conn.qp.halt()
        self._completions(rnic)
        self.by_qpn.pop((rnic.name, conn.qp.qpn), None)
        conn.qp.close()

    def _conn(self, request: dict[str, Any]) -> Conn | None:
        """Return the connection that a request names; None: it has been rebuilt since."""
        conn = self.tasks[request["task"]].conns[request["conn"]]
        return conn if conn.generation == request["generation"] else None

    def do_connect(self, request: dict[str, Any]) -> None:
        """Move a QP to RTS.

        A next hop that does not resolve is reported as `join_failed`, and the controller retries.
        """
        conn = self._conn(request)
        if conn is None or conn.qp is None:
            return
        conn.peer = request["peer"]
        fields = {"task": request["task"], "conn": conn.number, "generation": conn.generation}
        try:
            conn.qp.connect(conn.peer)
            conn.state = "joined"
            conn.task.joined(conn)
        except Exception as error:  # noqa: BLE001  # PyverbsRDMAError, GidMissing, OSError: all mean that the QP did not connect
            self.emit("join_failed", **fields, error=str(error))
        else:
            self.emit("joined", **fields)

    def do_go(self, request: dict[str, Any]) -> None:
        """Allow a connection to send: both ends are joined."""
        conn = self._conn(request)
        if conn is not None and conn.state == "joined":
            conn.state = "up"
            conn.task.go(conn, time.monotonic_ns())

    def do_start(self, request: dict[str, Any]) -> None:
        """Start the work of a task."""
        task = self.tasks[request["task"]]
        task.accept(request)
        task.begin(time.monotonic_ns())

    def do_stop(self, request: dict[str, Any]) -> None:
        """Stop a task in an orderly way."""
        self.tasks[request["task"]].stop(time.monotonic_ns())

    def do_end_after(self, request: dict[str, Any]) -> None:
        """Name the last round of a rank that is stopping."""
        self.tasks[request["task"]].end_after(request["round"])

    def do_psn(self, request: dict[str, Any]) -> None:
        """Report the current PSNs of a task's QPs."""
        conns = []
        for conn in self.tasks[request["task"]].conns.values():
            if conn.qp is not None:
                sq_psn, rq_psn = conn.qp.psns()
                conns.append({"conn": conn.number, "qpn": conn.qp.qpn, "sq_psn": sq_psn, "rq_psn": rq_psn})
        self.emit("psn", task=request["task"], conns=conns)

    def do_dump(self, request: dict[str, Any]) -> None:
        """Report the state of a task."""
        self.tasks[request["task"]].dump()

    def do_forget(self, _request: dict[str, Any]) -> None:
        """Release all tasks; the devices stay open."""
        for task in self.tasks.values():
            task.close()
        self.tasks.clear()
        self.late_receives.clear()
        self.by_qpn.clear()
        for rnic in self.rnics.values():
            rnic.drain()
        self.emit("forgotten")

    def do_quit(self, _request: dict[str, Any]) -> None:
        """End the loop."""
        self.open = False


def _requests_of_other_qps(conn: Conn, tasks: Iterable[Task]) -> int:
    """Return how many requests all other QPs on the RNIC of a connection can hold."""
    others = [
        other
        for task in tasks
        if task.rnic is conn.task.rnic
        for other in task.conns.values()
        if other is not conn and other.qp is not None
    ]
    return sum(sum(other.task.capacity(other)) for other in others)


def main(tick_ns: int = TICK_NS) -> None:
    """Run the engine."""
    engine = Engine(tick_ns)
    try:
        engine.run()
    except BrokenPipeError:  # the controller closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    finally:
        engine.close()
    sys.stdout = None  # nothing is buffered there; a flush at exit could only fail


if __name__ == "__main__":
    main()
