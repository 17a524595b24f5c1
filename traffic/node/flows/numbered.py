"""Flows over unreliable transports whose every arriving byte is verified.

Each message carries its number twice: in its content (`faultbed.traffic.node.flows.content`), and as its immediate,
which is not stored in memory that a peer can overwrite. From the immediate the receiver knows which message has
arrived, even after losses, reordering or duplication, and compares all bytes that belong to it. Damaged, mixed or
stale bytes do not match. A message that never arrives is not verified; it is missing from the count of arrived
messages.

Sends: each receive has its own memory and is posted again after the check. Receives complete in the order in which they
were posted, also after a message that lost a part (rxe_resp.c, do_class_d1e_error). The sender needs no credits.

Writes: a message goes to slot (number mod depth), and only the sender knows when it will write there next. It therefore
waits until the previous message in the slot is settled. The receiver reports the number up to which all messages have
arrived and were verified, as the immediate of an empty write. If a message or such a report is lost, the sender stalls.
After one silent tick it sends a query: an empty write with the number of its next message. Messages before that number
which have not arrived by then are given up. If there is no reply for `op_deadline_ms`, the queue pair counts as lost
and is rebuilt. The queue pair is also rebuilt if a part of a write of several packets is lost: rxe, still in the
middle of that write, accepts nothing more on the queue pair (rxe_resp.c, check_op_seq).

A message that arrives after it was given up (a copy, or one delayed by more than a tick) is not verified unless it is
complete. If such a late write lands between the arrival and the check of the next message in its slot, that message may
be reported as wrong.
"""

from __future__ import annotations

from collections import deque

from faultbed.traffic.node.flows.checked import CheckedSender
from faultbed.traffic.node.flows.content import Content, count_differing, nearest
from faultbed.traffic.node.flows.flow import CREDIT_ID, CREDITS_IN_FLIGHT
from faultbed.traffic.node.flows.unreliable import RECEIVES, UnreliableReceiver, UnreliableSender
from faultbed.traffic.node.task import RECV_ID, Conn
from faultbed.traffic.node.verbs import Rnic, recv_request, request

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["NumberedReceiver", "NumberedSender"]

QUERY = NUMBERS = 1 << 31
"""An immediate is a number modulo 2^31, and one bit that marks a query."""
QUERIES = 8
"""Maximum number of queries in flight."""
QUERY_ID = 1 << 60
REMEMBERED = 4096
"""Numbers below the highest one of which a receiver knows whether they arrived. An older message counts as a copy, as
with the anti-replay window of IPsec (RFC 4303, 3.4.3)."""
SLOTS_BYTES = 64 << 20
"""Memory for a flow's receives. Large messages get fewer than `RECEIVES`, but never fewer than two depths."""


class NumberedReceiver(UnreliableReceiver):
    """Counts and verifies arriving messages."""

    def __init__(self, name: str, rnic: Rnic, spec: dict[str, Any], emit: Callable[..., None]) -> None:
        super().__init__(name, rnic, spec, emit)
        self.writes = spec["verb"] == "write"
        self.receives = self.slots() + (QUERIES if self.writes else 0)
        self.credit_at = max(1, self.slots() // 4)
        self.content = Content(self.size)
        self.checked = self.wrong = 0
        # All dictionaries are by connection.
        self.bases: dict[int, int] = {}  # offset of its first slot
        self.requests: dict[int, deque[tuple[int, Any]]] = {}
        self.next_number: dict[int, int] = {}  # the number after the highest one that arrived
        self.settled: dict[int, int] = {}  # all messages below this number have arrived or are given up
        self.early: dict[int, set[int]] = {}  # numbers above `settled` that have arrived
        self.arrived: dict[int, set[int]] = {}  # the newest numbers that have arrived

    def slots(self) -> int:
        """Return the number of slots per QP."""
        depth: int = self.spec["depth"]
        if self.spec["verb"] == "write":
            return depth
        room: int = SLOTS_BYTES // (self.spec["qps"] * self.spec["part_bytes"])
        return max(2 * depth, min(RECEIVES, room))

    def memory_bytes(self) -> int:
        return int(self.spec["qps"] * self.slots() * self.spec["part_bytes"])

    def endpoint(self, conn: Conn) -> dict[str, Any]:
        base = self.bases.setdefault(conn.number, len(self.bases) * self.slots() * self.spec["part_bytes"])
        return {"rkey": self.buffer.mr.rkey, "base": self.buffer.address + base}

    def joined(self, conn: Conn) -> None:
        number = conn.number
        self.next_number.setdefault(number, 0)
        self.settled[number] = self.uncredited[number] = 0  # per QP: a repeated message may have any number
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
        for _, built in self.requests[number]:
            conn.qp.post_recv(built)

    def on_recv(self, conn: Conn, imm: int, now_ns: int) -> None:
        number = nearest(imm % NUMBERS, self.next_number[conn.number], NUMBERS)
        if self.writes and imm & QUERY:
            conn.qp.post_recv(self.receive)
            self._settle(conn, number)
            self.uncredited[conn.number] = self.credit_at
            self._send_report(conn, now_ns)
            return
        if self.writes:
            offset = self.bases[conn.number] + number % self.slots() * self.size
        else:
            self.requests[conn.number].rotate(-1)
            offset, self.receive = self.requests[conn.number][-1]
        self._verify(conn, number, self.buffer.read(self.size, offset + self.front))
        conn.qp.post_recv(self.receive)
        self.last_ns = now_ns
        if self._is_first(conn, number):
            self._count(conn, now_ns)
        self.next_number[conn.number] = max(self.next_number[conn.number], number + 1)
        if self.writes:
            if number >= self.settled[conn.number]:
                self.early[conn.number].add(number)
            self._settle(conn, self.settled[conn.number])
            self.uncredited[conn.number] += 1
            self._send_report(conn, now_ns)

    def _is_first(self, conn: Conn, number: int) -> bool:
        """Return whether a message has arrived for the first time. A copy is verified, but is not goodput."""
        arrived, oldest = self.arrived.setdefault(conn.number, set()), self.next_number[conn.number] - REMEMBERED
        if len(arrived) > 2 * REMEMBERED:
            self.arrived[conn.number] = arrived = {other for other in arrived if other >= oldest}
        if number < oldest or number in arrived:
            return False
        arrived.add(number)
        return True

    def _verify(self, conn: Conn, number: int, data: bytes) -> None:
        expected = self.content.of(conn.number, number)
        if data != expected:
            if self.writes and number < self.settled[conn.number]:  # late, and perhaps overwritten since
                return
            self.wrong += count_differing(data, expected)
        self.checked += len(data)

    def _settle(self, conn: Conn, before: int) -> None:
        """Settle all numbers below `before`, and the consecutive arrived numbers that follow."""
        early, settled = self.early[conn.number], self.settled[conn.number]
        if before > settled:
            early -= {number for number in early if number < before}
            settled = before
        while settled in early:
            early.remove(settled)
            settled += 1
        self.settled[conn.number] = settled

    def _send_report(self, conn: Conn, now_ns: int) -> None:
        if conn.state != "up" or conn.outstanding >= CREDITS_IN_FLIGHT or self.uncredited[conn.number] < self.credit_at:
            return
        credit, _ = self.credits[conn.number]
        credit.imm_data = self.settled[conn.number] % NUMBERS
        self.uncredited[conn.number] = 0
        conn.count_request(now_ns)
        conn.qp.post_send(credit)

    def extra_results(self) -> dict[str, Any]:
        return {"checked_bytes": self.checked, "wrong_bytes": self.wrong}


class NumberedSender(CheckedSender, UnreliableSender):
    """Fills and numbers its messages like a checked sender. As many writes are in flight as there are slots."""

    def __init__(self, name: str, rnic: Rnic, spec: dict[str, Any], emit: Callable[..., None]) -> None:
        super().__init__(name, rnic, spec, emit)
        if self.verb == "send":
            self.verb = "send-imm"
        self.queries: dict[int, Any] = {}
        self.stalled_ns: dict[int, int] = {}  # by connection: since when a stalled sender has had no report

    def capacity(self, conn: Conn) -> tuple[int, int]:
        sends, receives = super().capacity(conn)
        return sends + QUERIES, receives

    def joined(self, conn: Conn) -> None:
        super().joined(conn)
        self.stalled_ns.pop(conn.number, None)
        lane = self.lanes[conn.number]
        first = self.posted_messages[conn.number] - len(lane.in_flight)
        for number, index in enumerate(lane.in_flight, first):
            lane.keep[index][0].imm_data = number % NUMBERS
        if self.window is not None and conn.number not in self.queries:
            self.queries[conn.number] = request(
                "write-imm", wr_id=QUERY_ID, mr=self.buffer.mr, address=0, size=0, signalled=True
            )

    def before_post(self, conn: Conn, index: int) -> None:
        self.lanes[conn.number].keep[index][0].imm_data = self.posted_messages[conn.number] % NUMBERS
        super().before_post(conn, index)

    def on_recv(self, conn: Conn, imm: int, now_ns: int) -> None:
        self.stalled_ns.pop(conn.number, None)
        uncredited = self.lanes[conn.number].uncredited
        left = min(uncredited, (self.posted_messages[conn.number] - imm) % NUMBERS)
        super().on_recv(conn, uncredited - left, now_ns)

    def on_send(self, conn: Conn, wr_id: int, now_ns: int) -> None:
        if wr_id != QUERY_ID:
            super().on_send(conn, wr_id, now_ns)

    def tick(self, now_ns: int) -> None:
        super().tick(now_ns)
        if self.window is None or not self.running or self.finished or self.stopping_ns is not None:
            return
        for conn in self.conns.values():
            lane = self.lanes[conn.number]
            if conn.state != "up" or lane.uncredited < self.window or lane.left == 0:
                self.stalled_ns.pop(conn.number, None)
                continue
            silent_ns = now_ns - self.stalled_ns.setdefault(conn.number, now_ns)
            if silent_ns > self.op_deadline_ns:
                self.lost(conn, "OP_DEADLINE", now_ns)
            elif silent_ns and conn.outstanding < self.window + QUERIES:
                built, _ = self.queries[conn.number]
                built.imm_data = QUERY | self.posted_messages[conn.number] % NUMBERS
                conn.count_request(now_ns)
                conn.qp.post_send(built)
