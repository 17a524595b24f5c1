"""Flows over unreliable transports of which every byte that comes is looked at.

Each message carries its number twice: in its content (`traffic.node.flows.content`) and as its immediate, which is in
no memory that anyone writes to. By the immediate the receiver knows which message has come, whatever was lost,
overtaken or doubled before it, and compares all of what is where it should be: what is damaged, of two messages, or
left over from another one does not fit. What never comes is not looked at; it is missing from the count of what came.

A send has a receive with memory of its own, which is posted again after the look; receives are used in the order in
which they were posted, also after a message of which a part was lost (rxe_resp.c, do_class_d1e_error). So nobody has to
hold its sender back.

A write goes to the place of its number modulo the depth, and nobody but its sender knows when the next one goes there:
it waits until the one before is over with. The receiver tells up to which number all have come and were looked at, by
an empty write with that as its immediate. Where one is missing, or what tells was lost, the sender is held back; after
a silence of a tick it asks, by an empty write with the number of its next message, and what has not come before that
will not come any more. When nothing answers for `op_deadline_ms`, the queue pair is lost, and made again: so is one on
which a part of a write of several packets was lost, for rxe takes nothing more on it (rxe_resp.c, check_op_seq: it is
still in the middle of that write). A message that comes when its place was given up (a copy of it, or one that was
overtaken for more than a tick) and is not whole there is not looked at; the next one of its place may be called wrong,
if such a write lands in the moment between its landing and the look.
"""

from __future__ import annotations

from collections import deque

from traffic.node.flows.checked import CheckedSender
from traffic.node.flows.content import Content, differing, nearest
from traffic.node.flows.flow import CREDIT_ID, CREDITS_IN_FLIGHT
from traffic.node.flows.unreliable import RECEIVES, UnreliableReceiver, UnreliableSender
from traffic.node.task import RECV_ID, Conn
from traffic.node.verbs import Rnic, recv_request, request

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["NumberedReceiver", "NumberedSender"]

ASK = NUMBERS = 1 << 31
"""An immediate is a number modulo 2^31, and one bit: whether it asks."""
ASKS = 8
"""Under way at a time."""
ASK_ID = 1 << 60
PLACES_BYTES = 64 << 20
"""Memory of a flow's receives; fewer than `RECEIVES`, but never than two depths, where messages are large."""


class NumberedReceiver(UnreliableReceiver):
    """Counts what comes, and looks at it."""

    def __init__(self, name: str, rnic: Rnic, spec: dict[str, Any], emit: Callable[..., None]) -> None:
        super().__init__(name, rnic, spec, emit)
        self.writes = spec["verb"] == "write"
        self.receives = self.places() + (ASKS if self.writes else 0)
        self.tell_at = max(1, self.places() // 4)
        self.content = Content(self.size)
        self.checked = self.wrong = 0
        self.bases: dict[int, int] = {}  # by connection: where its places begin
        self.requests: dict[int, deque[tuple[int, Any]]] = {}
        self.due: dict[int, int] = {}  # the number after the highest that came
        self.over: dict[int, int] = {}  # the first number whose place is not given up
        self.early: dict[int, set[int]] = {}  # numbers above that which came

    def places(self) -> int:
        """Of one QP."""
        depth: int = self.spec["depth"]
        if self.spec["verb"] == "write":
            return depth
        room: int = PLACES_BYTES // (self.spec["qps"] * self.spec["part_bytes"])
        return max(2 * depth, min(RECEIVES, room))

    def memory_bytes(self) -> int:
        return int(self.spec["qps"] * self.places() * self.spec["part_bytes"])

    def endpoint(self, conn: Conn) -> dict[str, Any]:
        base = self.bases.setdefault(conn.number, len(self.bases) * self.places() * self.spec["part_bytes"])
        return {"rkey": self.buffer.mr.rkey, "base": self.buffer.address + base}

    def joined(self, conn: Conn) -> None:
        number = conn.number
        self.due.setdefault(number, 0)
        self.over[number] = self.untold[number] = 0  # of this QP: what was sent again may have any number
        self.early[number] = set()
        if self.writes:
            super().joined(conn)
            if number not in self.credits:
                self.credits[number] = request(
                    "write-imm", wr_id=CREDIT_ID, mr=self.buffer.mr, address=0, size=0, signalled=True
                )
            return
        self.counts.setdefault(number, [0, 0, 0])
        if number not in self.requests:
            bytes_each = self.size + self.front
            offsets = [self.bases[number] + place * bytes_each for place in range(self.receives)]
            self.requests[number] = deque(
                (offset, recv_request(RECV_ID, self.buffer.mr, bytes_each, offset)) for offset in offsets
            )
        for _, made in self.requests[number]:
            conn.rc.post_recv(made)

    def on_recv(self, conn: Conn, imm: int, now_ns: int) -> None:
        number = nearest(imm % NUMBERS, self.due[conn.number], NUMBERS)
        if self.writes and imm & ASK:
            conn.rc.post_recv(self.receive)
            self._give_up(conn, number)
            self.untold[conn.number] = self.tell_at
            self._tell(conn, now_ns)
            return
        if self.writes:
            offset = self.bases[conn.number] + number % self.places() * self.size
        else:
            self.requests[conn.number].rotate(-1)
            offset, self.receive = self.requests[conn.number][-1]
        self._look(conn, number, self.buffer.read(self.size, offset + self.front))
        super().on_recv(conn, imm, now_ns)
        self.due[conn.number] = max(self.due[conn.number], number + 1)
        if self.writes:
            if number >= self.over[conn.number]:
                self.early[conn.number].add(number)
            self._give_up(conn, self.over[conn.number])
            self.untold[conn.number] += 1
            self._tell(conn, now_ns)

    def _look(self, conn: Conn, number: int, data: bytes) -> None:
        want = self.content.of(conn.number, number)
        if data != want:
            if self.writes and number < self.over[conn.number]:
                return
            self.wrong += differing(data, want)
        self.checked += len(data)

    def _give_up(self, conn: Conn, before: int) -> None:
        """Places of numbers below `before`, and of those that came in a row from there on."""
        early, over = self.early[conn.number], self.over[conn.number]
        if before > over:
            early -= {number for number in early if number < before}
            over = before
        while over in early:
            early.remove(over)
            over += 1
        self.over[conn.number] = over

    def _tell(self, conn: Conn, now_ns: int) -> None:
        if conn.state != "up" or conn.outstanding >= CREDITS_IN_FLIGHT or self.untold[conn.number] < self.tell_at:
            return
        credit, _ = self.credits[conn.number]
        credit.imm_data = self.over[conn.number] % NUMBERS
        self.untold[conn.number] = 0
        self.posted(conn, now_ns)
        conn.rc.post_send(credit)

    def extras(self) -> dict[str, Any]:
        return {"checked_bytes": self.checked, "wrong_bytes": self.wrong}


class NumberedSender(CheckedSender, UnreliableSender):
    """Fills and numbers its messages as a checked one does; of writes as many are under way as there are places."""

    def __init__(self, name: str, rnic: Rnic, spec: dict[str, Any], emit: Callable[..., None]) -> None:
        super().__init__(name, rnic, spec, emit)
        if self.verb == "send":
            self.verb = "send-imm"
        self.asks: dict[int, Any] = {}
        self.held_ns: dict[int, int] = {}  # by connection: since when nothing was told to one that is held back

    def capacity(self, conn: Conn) -> tuple[int, int]:
        sends, receives = super().capacity(conn)
        return sends + ASKS, receives

    def joined(self, conn: Conn) -> None:
        super().joined(conn)
        self.held_ns.pop(conn.number, None)
        lane = self.lanes[conn.number]
        first = self.posted_messages[conn.number] - len(lane.flying)
        for number, index in enumerate(lane.flying, first):
            lane.keep[index][0].imm_data = number % NUMBERS
        if self.window is not None and conn.number not in self.asks:
            self.asks[conn.number] = request(
                "write-imm", wr_id=ASK_ID, mr=self.buffer.mr, address=0, size=0, signalled=True
            )

    def leaves(self, conn: Conn, index: int) -> None:
        self.lanes[conn.number].keep[index][0].imm_data = self.posted_messages[conn.number] % NUMBERS
        super().leaves(conn, index)

    def on_recv(self, conn: Conn, imm: int, now_ns: int) -> None:
        self.held_ns.pop(conn.number, None)
        ahead = self.lanes[conn.number].ahead
        left = min(ahead, (self.posted_messages[conn.number] - imm) % NUMBERS)
        super().on_recv(conn, ahead - left, now_ns)

    def on_send(self, conn: Conn, wr_id: int, now_ns: int) -> None:
        if wr_id != ASK_ID:
            super().on_send(conn, wr_id, now_ns)

    def tick(self, now_ns: int) -> None:
        super().tick(now_ns)
        if self.window is None or not self.running or self.finished or self.stopping_ns is not None:
            return
        for conn in self.conns.values():
            lane = self.lanes[conn.number]
            if conn.state != "up" or lane.ahead < self.window or lane.left == 0:
                self.held_ns.pop(conn.number, None)
                continue
            silent_ns = now_ns - self.held_ns.setdefault(conn.number, now_ns)
            if silent_ns > self.op_deadline_ns:
                self.lost(conn, "OP_DEADLINE", now_ns)
            elif silent_ns and conn.outstanding < self.window + ASKS:
                made, _ = self.asks[conn.number]
                made.imm_data = ASK | self.posted_messages[conn.number] % NUMBERS
                self.posted(conn, now_ns)
                conn.rc.post_send(made)
