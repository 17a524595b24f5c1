"""Probes that are answered: datagrams with a number, sent back by the process at the other end, with the times of both.

The prober keeps when it posted each probe and when it read its answer, the responder when it read the probe and when it
posted the answer; each tells its own every few seconds, and nobody's clock is compared with another's
(`traffic.probes.rtt`). The number is the immediate of both datagrams. A responder that has `ANSWERS` of a connection
under way answers no more.

Rows of `stamps` are (connection, number, ns, ns). A prober's are posted and read: a probe is told when its answer has
come, or, with 0, when none has after `GIVE_UP_NS`; an answer that comes still later is told again. A responder's are
read and answered, with 0 for what it did not answer.
"""

from __future__ import annotations

import time

from traffic.node.flows import buffer
from traffic.node.flows.unreliable import (
    GRH_BYTES,
    QKEY,
    QUIET_NS,
    RECEIVES,
    Ud,
    UnreliableReceiver,
    UnreliableSender,
)
from traffic.node.task import RECV_ID, Conn
from traffic.node.verbs import Rnic, recv_request, request

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["EchoReceiver", "EchoSender"]

ANSWERS = 8
ANSWERED = 64
"""Receives that a prober posts for answers: all queue pairs of an RNIC share one completion queue."""
GIVE_UP_NS = 2_000_000_000
FORGET_NS = 30_000_000_000
"""An answer that is later than this finds nobody who waits for it."""
TELL_NS = 3_000_000_000
"""Every line costs an emulated host some milliseconds."""


class _Told:
    """Rows that a task tells the controller now and then."""

    def __init__(self, task: EchoSender | EchoReceiver) -> None:
        self.task = task
        self.rows: list[tuple[int, int, int, int]] = []
        self.told_ns = 0

    def look(self, now_ns: int, *, last: bool = False) -> None:
        """Tell them when it is time."""
        if self.rows and (last or now_ns - self.told_ns >= TELL_NS):
            self.told_ns = now_ns
            rows, self.rows = self.rows, []
            self.task.emit("stamps", task=self.task.name, rows=rows)


class EchoSender(UnreliableSender):
    """Numbers its probes and keeps the times of each."""

    def __init__(self, name: str, rnic: Rnic, spec: dict[str, Any], emit: Callable[..., None]) -> None:
        super().__init__(name, rnic, spec, emit)
        self.verb = "send-imm"
        self.answers = buffer.make(rnic, self.size + GRH_BYTES, None)
        self.answer = recv_request(RECV_ID, self.answers.mr, self.size + GRH_BYTES)
        self.counts: dict[int, int] = {}
        self.waiting: dict[
            tuple[int, int], int
        ] = {}  # of each probe that nobody has answered yet: posted, oldest first
        self.given_up: dict[tuple[int, int], int] = {}
        self.told = _Told(self)

    def capacity(self, conn: Conn) -> tuple[int, int]:
        return self.spec["depth"], ANSWERED

    def joined(self, conn: Conn) -> None:
        super().joined(conn)
        self.counts.setdefault(conn.number, 0)
        for _ in range(ANSWERED):
            conn.rc.post_recv(self.answer)

    def leaves(self, conn: Conn, index: int) -> None:
        number = self.counts[conn.number]
        self.counts[conn.number] = number + 1
        self.lanes[conn.number].heads[index].imm_data = number
        self.waiting[conn.number, number] = time.monotonic_ns()

    def on_recv(self, conn: Conn, imm: int, now_ns: int) -> None:
        conn.rc.post_recv(self.answer)
        key = conn.number, imm
        posted_ns = self.waiting.pop(key, None) or self.given_up.pop(key, None)
        if posted_ns is not None:
            self.told.rows.append((*key, posted_ns, now_ns))

    def tick(self, now_ns: int) -> None:
        for key in _older(self.waiting, now_ns - GIVE_UP_NS):
            posted_ns = self.given_up[key] = self.waiting.pop(key)
            self.told.rows.append((*key, posted_ns, 0))
        for key in _older(self.given_up, now_ns - FORGET_NS):
            del self.given_up[key]
        super().tick(now_ns)
        self.told.look(now_ns)

    def _end_if_done(self, now_ns: int) -> None:
        late = self.stopping_ns is not None and now_ns - self.stopping_ns > QUIET_NS
        if late or not self.waiting:
            super()._end_if_done(now_ns)

    def extras(self) -> dict[str, Any]:
        self.told.rows += [(*key, posted_ns, 0) for key, posted_ns in self.waiting.items()]
        self.told.look(0, last=True)
        return {}

    def sample(self, now_ns: int, *, last: bool = False) -> None:
        """Nobody asks for the goodput of probes."""

    def close(self) -> None:
        super().close()
        self.answers.close()


class EchoReceiver(UnreliableReceiver):
    """Sends each probe back, and keeps when it came and went."""

    def __init__(self, name: str, rnic: Rnic, spec: dict[str, Any], emit: Callable[..., None]) -> None:
        super().__init__(name, rnic, spec, emit)
        self.replies: dict[int, list[tuple[Any, Any]]] = {}
        self.idle: dict[int, list[int]] = {}
        self.told = _Told(self)

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
        if isinstance(conn.rc, Ud):
            for made, _ in replies:
                made.set_wr_ud(conn.rc.ah, conn.peer["qpn"], QKEY)
        self.idle[conn.number] = list(range(ANSWERS))

    def on_recv(self, conn: Conn, imm: int, now_ns: int) -> None:
        super().on_recv(conn, imm, now_ns)
        idle = self.idle[conn.number]
        answered_ns = 0
        if idle and conn.state in ("joined", "up"):
            made, _ = self.replies[conn.number][idle.pop()]
            made.imm_data = imm
            self.posted(conn, now_ns)
            answered_ns = time.monotonic_ns()
            conn.rc.post_send(made)
        self.told.rows.append((conn.number, imm, now_ns, answered_ns))

    def on_send(self, conn: Conn, wr_id: int, now_ns: int) -> None:
        self.idle[conn.number].append(wr_id)

    def sample(self, now_ns: int, *, last: bool = False) -> None:
        """As the prober's."""

    def tick(self, now_ns: int) -> None:
        super().tick(now_ns)
        self.told.look(now_ns)

    def extras(self) -> dict[str, Any]:
        self.told.look(0, last=True)
        return {}


def _older(posted: dict[tuple[int, int], int], before_ns: int) -> list[tuple[int, int]]:
    """Of probes by the time at which they were posted, oldest first: those from before a time."""
    found = []
    for key, posted_ns in posted.items():
        if posted_ns >= before_ns:
            break
        found.append(key)
    return found
