"""The receiving end of a lane: notes segments that arrive in its staging ring, and reports applied ones by credits."""

from __future__ import annotations

from faultbed.traffic.node.ranks.lane import MASK, Lane, LaneSetup
from faultbed.traffic.node.ranks.parts_clock import COMPLETION, POST
from faultbed.traffic.node.ranks.segments import Segment
from faultbed.traffic.node.verbs import write_request

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from typing import Any

    from faultbed.traffic.node.task import Conn

__all__ = ["CREDITS_IN_FLIGHT", "CREDIT_ID", "RecvLane"]

CREDIT_ID = 1 << 61
CREDITS_IN_FLIGHT = 8
"""Credits on each connection that may be unacknowledged."""


class RecvLane(Lane):
    """Receiving end of a lane. `staging` is the array of its ring, and `mr` the ring's memory region."""

    direction = "in"

    def __init__(
        self, conn_numbers: list[int], peer: int, segments: list[Segment], setup: LaneSetup, *, mr: Any, staging: Any
    ) -> None:
        super().__init__(conn_numbers, peer, segments, CREDITS_IN_FLIGHT, setup)
        self.slots = setup.slots
        self.staging = staging
        self.mr = mr
        self.received = 0  # all segments below this number have arrived
        self.applied = 0  # all segments below this number are copied or reduced into the rank's memory
        self.credited = 0  # `applied` in the last credit
        self.credit_every = max(1, self.slots // (2 if self.slots >= 2 * setup.window else 4))
        self._arrived = 0  # bitmap of the segments from `received` on
        self._reported = dict.fromkeys(conn_numbers, 0)  # `applied` in the last `endpoint`, by connection
        self._credit, _ = write_request(wr_id=CREDIT_ID, mr=mr, address=0, size=0, imm=True, signalled=True)

    def load(self, conn: Conn) -> int:
        return conn.outstanding

    def progress(self) -> tuple[int, int]:
        return self.received, self.applied

    def done(self) -> int:
        return self.applied

    def endpoint(self, conn: Conn) -> dict[str, Any]:
        """Return what the sender needs: the ring, and which segments have arrived and are applied."""
        self._reported[conn.number] = self.applied
        return {
            "rkey": self.mr.rkey,
            "base": self.staging.ctypes.data,
            "have": self.received,
            "above": [self.received + bit for bit in range(self._arrived.bit_length()) if self._arrived >> bit & 1],
            "applied": self.applied,
        }

    def joined(self, conn: Conn) -> None:
        """Record what the sender has learnt from `endpoint`, and its first PSN."""
        self.credited = self._reported[conn.number]
        self.psns[conn.number] = conn.peer["psn"]

    def resume(self, conn: Conn, now_ns: int) -> None:
        """Continue on a connection. The sender may have been ready first and wait for this credit."""
        self.recorder.add_segment("up", self, conn, self.received)
        self.send_credit(now_ns)

    def arrive(self, conn: Conn, sequence: int) -> int | None:
        """Note a segment, given its number mod 2^24. Return its number, or None if it must not arrive now."""
        distance = (sequence - self.received) & MASK
        if distance >= (self.slots if self.has_substitutes else 1) or self._arrived >> distance & 1:
            return None
        number = self.received + distance
        self._arrived |= 1 << distance
        while self._arrived & 1:
            self._arrived >>= 1
            self.received += 1
        psn = self.next_psn(conn, number % len(self.segments))
        self.recorder.add_segment("arrive", self, conn, number, psn)
        return number

    def arrive_probe(self, conn: Conn) -> None:
        """Note an empty write that probes the connection: it has a PSN too."""
        self.psns[conn.number] = (self.psns[conn.number] + 1) & MASK

    def send_credit(self, now_ns: int) -> None:
        """Report the applied segments to the sender, if there are enough and a connection is free."""
        if self.applied - self.credited < self.credit_every:
            return
        conn = self.free_connection()
        if conn is None:
            return
        self._credit.imm_data = self.applied & MASK
        self.credited = self.applied
        self.recorder.add_segment("credit", self, conn, self.applied)
        conn.count_request(now_ns)
        self.clock.enter(POST)
        conn.qp.post_send(self._credit)
        self.clock.enter(COMPLETION)

    def repeat_credit(self, now_ns: int) -> None:
        """Send a credit on another connection: the last one may have been lost with its connection."""
        self.credited = -self.slots
        self.send_credit(now_ns)
