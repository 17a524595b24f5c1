"""Echo probes: numbered datagrams that the process at the other end sends back, timed at both ends.

The prober records when it posted each probe and when it read the answer. The responder records when it read the probe
and when it posted the answer. Each end reports its own times every few seconds, and the clocks of the two hosts are
never compared (`faultbed.traffic.probes.rtt`). The number is the immediate of both datagrams. A responder with
`ANSWERS` answers of a connection in flight does not answer further probes.

Rows of `stamps` are (connection, number, ns, ns). For a prober the times are posted and read. A probe is reported when
its answer arrives, or with 0 after `GIVE_UP_NS` without an answer. A later answer is reported in a second row. For a
responder the times are read and answered, with 0 for a probe that it did not answer.
"""

from __future__ import annotations

import time

from faultbed.traffic.node.flows import buffer
from faultbed.traffic.node.flows.unreliable import (
    GRH_BYTES,
    QKEY,
    QUIET_NS,
    RECEIVES,
    UdQp,
    UnreliableReceiver,
    UnreliableSender,
)
from faultbed.traffic.node.task import RECV_ID, Conn
from faultbed.traffic.node.verbs import Rnic, recv_request, request

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["EchoReceiver", "EchoSender"]

ANSWERS = 8
ANSWER_RECEIVES = 64
"""Receives that a prober posts for answers. It is limited because all QPs of an RNIC share one completion queue."""
GIVE_UP_NS = 2_000_000_000
FORGET_NS = 30_000_000_000
"""An answer later than this is ignored."""
REPORT_NS = 3_000_000_000
"""Interval between reports: every line costs an emulated host some milliseconds."""


class _StampReporter:
    """Rows of timestamps that a task reports to the controller in batches."""

    def __init__(self, task: EchoSender | EchoReceiver) -> None:
        self.task = task
        self.rows: list[tuple[int, int, int, int]] = []
        self.reported_ns = 0

    def report_if_due(self, now_ns: int, *, last: bool = False) -> None:
        """Report the rows if the interval is over."""
        if self.rows and (last or now_ns - self.reported_ns >= REPORT_NS):
            self.reported_ns = now_ns
            rows, self.rows = self.rows, []
            self.task.emit("stamps", task=self.task.name, rows=rows)


class EchoSender(UnreliableSender):
    """Sends numbered probes and records the times of each."""

    def __init__(self, name: str, rnic: Rnic, spec: dict[str, Any], emit: Callable[..., None]) -> None:
        super().__init__(name, rnic, spec, emit)
        self.verb = "send-imm"
        self.answers = buffer.make(rnic, self.size + GRH_BYTES, None)
        self.answer = recv_request(RECV_ID, self.answers.mr, self.size + GRH_BYTES)
        self.counts: dict[int, int] = {}
        self.waiting: dict[tuple[int, int], int] = {}  # unanswered probes, oldest first: when each was posted
        self.given_up: dict[tuple[int, int], int] = {}
        self.reporter = _StampReporter(self)

    def capacity(self, conn: Conn) -> tuple[int, int]:
        return self.spec["depth"], ANSWER_RECEIVES

    def joined(self, conn: Conn) -> None:
        super().joined(conn)
        self.counts.setdefault(conn.number, 0)
        for _ in range(ANSWER_RECEIVES):
            conn.qp.post_recv(self.answer)

    def before_post(self, conn: Conn, index: int) -> None:
        number = self.counts[conn.number]
        self.counts[conn.number] = number + 1
        self.lanes[conn.number].heads[index].imm_data = number
        self.waiting[conn.number, number] = time.monotonic_ns()

    def on_recv(self, conn: Conn, imm: int, now_ns: int) -> None:
        conn.qp.post_recv(self.answer)
        key = conn.number, imm
        posted_ns = self.waiting.pop(key, None) or self.given_up.pop(key, None)
        if posted_ns is not None:
            self.reporter.rows.append((*key, posted_ns, now_ns))

    def tick(self, now_ns: int) -> None:
        for key in _posted_before(self.waiting, now_ns - GIVE_UP_NS):
            posted_ns = self.given_up[key] = self.waiting.pop(key)
            self.reporter.rows.append((*key, posted_ns, 0))
        for key in _posted_before(self.given_up, now_ns - FORGET_NS):
            del self.given_up[key]
        super().tick(now_ns)
        self.reporter.report_if_due(now_ns)

    def _end_if_done(self, now_ns: int) -> None:
        late = self.stopping_ns is not None and now_ns - self.stopping_ns > QUIET_NS
        if late or not self.waiting:
            super()._end_if_done(now_ns)

    def extra_results(self) -> dict[str, Any]:
        self.reporter.rows += [(*key, posted_ns, 0) for key, posted_ns in self.waiting.items()]
        self.reporter.report_if_due(0, last=True)
        return {}

    def sample(self, now_ns: int, *, last: bool = False) -> None:
        """Report nothing: the goodput of probes is not of interest."""

    def close(self) -> None:
        super().close()
        self.answers.close()


class EchoReceiver(UnreliableReceiver):
    """Sends each probe back and records when it arrived and when the answer was posted."""

    def __init__(self, name: str, rnic: Rnic, spec: dict[str, Any], emit: Callable[..., None]) -> None:
        super().__init__(name, rnic, spec, emit)
        self.replies: dict[int, list[tuple[Any, Any]]] = {}
        self.idle: dict[int, list[int]] = {}
        self.reporter = _StampReporter(self)

    def capacity(self, conn: Conn) -> tuple[int, int]:
        return ANSWERS, RECEIVES

    def joined(self, conn: Conn) -> None:
        super().joined(conn)
        replies = self.replies.setdefault(conn.number, [])
        while len(replies) < ANSWERS:
            replies.append(
                request(
                    "send-imm",
                    wr_id=len(replies),
                    mr=self.buffer.mr,
                    address=self.buffer.address,
                    size=self.size,
                    signalled=True,
                )
            )
        if isinstance(conn.qp, UdQp):
            for reply, _ in replies:
                reply.set_wr_ud(conn.qp.ah, conn.peer["qpn"], QKEY)
        self.idle[conn.number] = list(range(ANSWERS))

    def on_recv(self, conn: Conn, imm: int, now_ns: int) -> None:
        super().on_recv(conn, imm, now_ns)
        idle = self.idle[conn.number]
        answered_ns = 0
        if idle and conn.state in ("joined", "up"):
            reply, _ = self.replies[conn.number][idle.pop()]
            reply.imm_data = imm
            conn.count_request(now_ns)
            answered_ns = time.monotonic_ns()
            conn.qp.post_send(reply)
        self.reporter.rows.append((conn.number, imm, now_ns, answered_ns))

    def on_send(self, conn: Conn, wr_id: int, now_ns: int) -> None:
        self.idle[conn.number].append(wr_id)

    def sample(self, now_ns: int, *, last: bool = False) -> None:
        """Report nothing: the goodput of answers is not of interest."""

    def tick(self, now_ns: int) -> None:
        super().tick(now_ns)
        self.reporter.report_if_due(now_ns)

    def extra_results(self) -> dict[str, Any]:
        self.reporter.report_if_due(0, last=True)
        return {}


def _posted_before(posted: dict[tuple[int, int], int], before_ns: int) -> list[tuple[int, int]]:
    """Return the keys of the probes that were posted before `before_ns`. `posted` is in order of time."""
    keys = []
    for key, posted_ns in posted.items():
        if posted_ns >= before_ns:
            break
        keys.append(key)
    return keys
