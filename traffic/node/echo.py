"""Probes that are answered: datagrams with a number, sent back by the process at the other end, with the times of both.

The prober keeps when it posted each probe and when it read its answer, the responder when it read the probe and when it
posted the answer; each tells its own at the end, and nobody's clock is compared with another's (`traffic.rtt`). The
number is the immediate of both datagrams. A responder that has `ANSWERS` of a connection under way answers no more.
"""

from __future__ import annotations

import time

from traffic.node import buffer
from traffic.node.task import RECV_ID, Conn
from traffic.node.unreliable import GRH_BYTES, QKEY, QUIET_NS, RECEIVES, Ud, UnreliableReceiver, UnreliableSender
from traffic.node.verbs import Rnic, recv_request, request

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["EchoReceiver", "EchoSender"]

ANSWERS = 8
ANSWERED = 64
"""Receives that a prober posts for answers: all queue pairs of an RNIC share one completion queue."""
MOST_STAMPS = 20_000
"""Of one task; later probes are sent and answered, but their times are not kept."""


class EchoSender(UnreliableSender):
    """Numbers its probes and keeps the times of each."""

    def __init__(self, name: str, rnic: Rnic, spec: dict[str, Any], emit: Callable[..., None]) -> None:
        super().__init__(name, rnic, spec, emit)
        self.verb = "send-imm"
        self.answers = buffer.make(rnic, self.size + GRH_BYTES, None)
        self.answer = recv_request(RECV_ID, self.answers.mr, self.size + GRH_BYTES)
        self.stamps: dict[int, list[list[int]]] = {}  # of each connection, by number: posted, answer read (0: not yet)
        self.kept = self.waiting = 0

    def capacity(self, conn: Conn) -> tuple[int, int]:
        return self.spec["depth"], ANSWERED

    def joined(self, conn: Conn) -> None:
        super().joined(conn)
        self.stamps.setdefault(conn.number, [])
        for _ in range(ANSWERED):
            conn.rc.post_recv(self.answer)

    def leaves(self, conn: Conn, index: int) -> None:
        stamps = self.stamps[conn.number]
        self.lanes[conn.number].heads[index].imm_data = len(stamps)
        if self.kept < MOST_STAMPS:
            self.kept += 1
            self.waiting += 1
            stamps.append([time.monotonic_ns(), 0])

    def on_recv(self, conn: Conn, imm: int, now_ns: int) -> None:
        conn.rc.post_recv(self.answer)
        stamps = self.stamps[conn.number]
        if imm < len(stamps) and not stamps[imm][1]:
            stamps[imm][1] = now_ns
            self.waiting -= 1

    def _end_if_done(self, now_ns: int) -> None:
        late = self.stopping_ns is not None and now_ns - self.stopping_ns > QUIET_NS
        if late or not self.waiting:
            super()._end_if_done(now_ns)

    def extras(self) -> dict[str, Any]:
        rows = [[conn, number, *both] for conn, stamps in self.stamps.items() for number, both in enumerate(stamps)]
        return {"stamps": rows}

    def close(self) -> None:
        super().close()
        self.answers.close()


class EchoReceiver(UnreliableReceiver):
    """Sends each probe back, and keeps when it came and went."""

    def __init__(self, name: str, rnic: Rnic, spec: dict[str, Any], emit: Callable[..., None]) -> None:
        super().__init__(name, rnic, spec, emit)
        self.replies: dict[int, list[tuple[Any, Any]]] = {}
        self.idle: dict[int, list[int]] = {}
        self.stamps: list[list[int]] = []

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
        if not idle or conn.state not in ("joined", "up"):
            return
        made, _ = self.replies[conn.number][idle.pop()]
        made.imm_data = imm
        self.posted(conn, now_ns)
        answered_ns = time.monotonic_ns()
        conn.rc.post_send(made)
        if len(self.stamps) < MOST_STAMPS:
            self.stamps.append([conn.number, imm, now_ns, answered_ns])

    def on_send(self, conn: Conn, wr_id: int, now_ns: int) -> None:
        self.idle[conn.number].append(wr_id)

    def extras(self) -> dict[str, Any]:
        return {"stamps": self.stamps}
