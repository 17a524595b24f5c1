"""Interface between the engine's loop and a task (one end of a flow, or one rank of a collective)."""

from __future__ import annotations

from faultbed.traffic.node.flows.late import LateReceives
from faultbed.traffic.node.series import Series
from faultbed.traffic.node.verbs import STATUS, RcQp, Rnic

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["RECV_ID", "Conn", "Task"]

RECV_ID = 1 << 62
"""Work request id of all receives. Ids below it belong to the task."""

SAMPLE_NS = 500_000_000


class Conn:
    """One end of a task's connection. `qp` is replaced at every rebuild, and `generation` counts the rebuilds.

    `state` goes new -> ready (QP created) -> joined (RTS) -> up (both ends are joined: may send) -> lost (error seen).
    A rebuild returns from any of these to ready.
    """

    def __init__(self, task: Task, number: int) -> None:
        self.task = task
        self.number = number
        self.generation = -1
        self.qp: RcQp = None  # type: ignore[assignment]  # set before any traffic
        self.peer: dict[str, Any] = {}
        self.state = "new"
        self.rebuilding = False
        self.outstanding = 0
        self.progress_ns = 0

    def count_request(self, now_ns: int) -> None:
        """Count a signalled request. The deadline of an operation runs from the last progress."""
        if not self.outstanding:
            self.progress_ns = now_ns
        self.outstanding += 1


class Task:
    """Base of the tasks: connections by number, samples and reports. Subclasses generate the traffic."""

    has_arrived = True
    """Whether the bytes of the task's samples have arrived at their receiver."""
    keeps_checkpoints = False
    """Whether the task can continue from a checkpoint after its host was lost."""

    def __init__(self, name: str, rnic: Rnic, spec: dict[str, Any], emit: Callable[..., None]) -> None:
        self.name = name
        self.rnic = rnic
        self.spec = spec
        self.emit = emit
        self.conns: dict[int, Conn] = {}
        self.series = Series()
        self.running = False
        self.finished = False
        self.late_receives = LateReceives()  # an engine replaces this by the object that all its tasks share
        self.sampled_ns = 0
        self.wake_ns: int | None = None  # when `wake` is to be called, if at all
        self.op_deadline_ns = spec["op_deadline_ms"] * 1_000_000

    # Hooks for subclasses.

    def capacity(self, conn: Conn) -> tuple[int, int]:
        """Return how many sends and receives the QP must hold."""
        raise NotImplementedError

    def endpoint(self, conn: Conn) -> dict[str, Any]:
        """Return what the peer needs besides the QP: memory, and where to resume."""
        raise NotImplementedError

    def make_qp(self, **options: Any) -> RcQp:
        """Create a QP with room for `sends` and `receives` that sends from `psn` on, with `params`."""
        return RcQp(self.rnic, **options)

    def joined(self, conn: Conn) -> None:
        """Handle a QP that has reached RTS: post receives. The peer may not be ready yet."""

    def go(self, conn: Conn, now_ns: int) -> None:
        """Start to send, now that both ends are ready. After a rebuild, resume where the peer is."""

    def down(self, conn: Conn, now_ns: int) -> None:
        """Handle the loss of a QP: nothing can be sent until the next `go`."""

    def recovered(self, conn: Conn, now_ns: int) -> None:
        """Handle the first completion that shows that a rebuilt connection carries packets both ways."""

    def accept(self, request: dict[str, Any]) -> None:
        """Accept the other fields of the request that starts the work, just before `begin`."""

    def begin(self, now_ns: int) -> None:
        """Start the work."""

    def stop(self, now_ns: int) -> None:
        """Stop soon, in an orderly way."""

    def end_after(self, last_round: int) -> None:
        """End after a round (`faultbed.traffic.node.ranks.rank`); other tasks have none."""

    def tick(self, now_ns: int) -> None:
        """Do periodic work; called at the engine's interval (50 ms; 250 ms in an engine of probes)."""

    def wake(self, now_ns: int) -> None:
        """Continue after a wait; called when `wake_ns` has passed."""

    def slept(self, from_ns: int, to_ns: int) -> None:
        """Note that the engine has waited for events of all its tasks."""

    def on_send(self, conn: Conn, wr_id: int, now_ns: int) -> None:
        """Handle the completion of a signalled request."""

    def on_recv(self, conn: Conn, imm: int, now_ns: int) -> None:
        """Handle a message that consumed a receive: a send, or a write with immediate `imm`."""

    def shows_both_ways(self, wc: Any) -> bool:
        """Return whether a completion on a rebuilt connection shows that it carries packets both ways."""
        return True

    def settle(self, now_ns: int) -> None:
        """Continue after a batch of completions: one decision for all of them costs less than one for each."""

    def dump(self) -> None:
        """Report the state of the work, for the diagnosis of a failure."""

    def close(self) -> None:
        """Release all resources. Clearing the connections breaks the reference cycle, so memory is freed at once."""
        for conn in self.conns.values():
            if conn.qp is not None:
                conn.qp.close()
        self.conns.clear()

    # Behaviour shared by all tasks.

    def completion(self, conn: Conn, wc: Any, now_ns: int) -> None:
        """Dispatch one completion, or report the loss of the connection."""
        status = wc.status
        if status:
            self.lost(conn, STATUS.get(status, str(status)), now_ns)
            return
        wr_id = wc.wr_id
        if wr_id == RECV_ID:
            self.on_recv(conn, wc.imm_data, now_ns)
        else:
            conn.outstanding -= 1
            conn.progress_ns = now_ns
            self.on_send(conn, wr_id, now_ns)
        if conn.rebuilding and conn.state == "up" and self.shows_both_ways(wc):
            conn.rebuilding = False
            self.emit("recovered", task=self.name, conn=conn.number, generation=conn.generation, at_ns=now_ns)
            self.recovered(conn, now_ns)

    def lost(self, conn: Conn, status: str, now_ns: int) -> None:
        """Report the first error of a QP. Its other requests are flushed and carry no more information."""
        if conn.state == "lost" or self.finished:
            return
        self.mark_lost(conn, now_ns)
        self.emit(
            "qp_error",
            task=self.name,
            conn=conn.number,
            generation=conn.generation,
            qpn=conn.qp.qpn if conn.qp else 0,
            status=status,
            outstanding=conn.outstanding,
            at_ns=now_ns,
        )

    def mark_lost(self, conn: Conn, now_ns: int) -> None:
        """Mark a connection as lost, whichever end saw the error first."""
        if conn.state != "lost":
            conn.state = "lost"
            self.down(conn, now_ns)

    def check_deadlines(self, now_ns: int) -> None:
        """Report a QP as lost if it has requests in flight and none has completed for `op_deadline_ms`."""
        for conn in self.conns.values():
            if conn.state == "up" and conn.outstanding and now_ns - conn.progress_ns > self.op_deadline_ns:
                self.lost(conn, "OP_DEADLINE", now_ns)

    def sample(self, now_ns: int, *, last: bool = False) -> None:
        """Report the completed 100 ms bins, about twice a second."""
        if not last and now_ns - self.sampled_ns < SAMPLE_NS:
            return
        self.sampled_ns = now_ns
        bins = self.series.take(now_ns, all_bins=last)
        if bins is not None:
            more = {} if self.has_arrived else {"has_arrived": False}
            self.emit("sample", task=self.name, start_ns=bins[0], sizes=bins[1], **more)
