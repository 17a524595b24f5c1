"""A lane: the segments that one rank sends to one peer, and the connections that carry them.

Segments are numbered from 0 over all rounds (`faultbed.traffic.node.ranks.executor`). Each is an RDMA write with
immediate into the receiver's staging ring of `slots` slots; segment s goes to slot s mod `slots`. The immediate is

    bit 31      this segment belongs to the last iteration
    bit 30      no segment, but a probe of a rebuilt connection, in a lane of several connections (`spray`, `dqplb`)
    bit 29      with bit 30: the probe before was acknowledged, so packets pass in both directions
    bits 0-23   towards the receiver: the segment's number mod 2^24
                towards the sender (a credit): the number of applied segments mod 2^24

A sender never has more than `slots` segments that the receiver has not reported as applied, nor more than `window` that
are not acknowledged. A slow receiver is therefore never overrun, and a receive is always posted. A receiver sends a
credit when half of the ring is applied, or a quarter if half a ring is less than the window.

On one connection, segments arrive in order. A lane with several connections has at most two unacknowledged segments on
each. The sender takes the connections in turn (`spray`), or the one with the fewest segments in flight (`dqplb`);
segments arrive in any order. When a connection is lost, the segments that did not arrive go to the others. That happens
after the receiver has closed its QP and reported what it has, so no segment arrives twice or late.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from faultbed.traffic.node.ranks.segments import Segment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from faultbed.traffic.node.ranks.parts_clock import PartsClock
    from faultbed.traffic.node.ranks.recorder import Recorder
    from faultbed.traffic.node.task import Conn

__all__ = ["LAST", "MASK", "PROBE", "PROBE_CONFIRMED", "Lane", "LaneSetup", "packets"]

LAST = 1 << 31
PROBE = 1 << 30
PROBE_CONFIRMED = PROBE | 1 << 29
MASK = (1 << 24) - 1
"""Bit mask of segment numbers, credits and PSNs, which have 24 bits."""


def packets(size_bytes: int, mtu: int) -> int:
    """Return the number of PSNs that a write uses: one even if it is empty."""
    return max(1, -(-size_bytes // mtu))


class LaneSetup(NamedTuple):
    """What all lanes of a rank share. `window` is the limit of unacknowledged segments on a connection."""

    conns: dict[int, Conn]
    slots: int
    window: int
    segment_bytes: int
    item_bytes: int
    mtu: int
    recorder: Recorder
    clock: PartsClock


class Lane:
    """Common part of both ends of a lane. A connection whose load has reached `limit` gets no more requests."""

    direction = ""

    def __init__(
        self, conn_numbers: list[int], peer: int, segments: list[Segment], limit: int, setup: LaneSetup
    ) -> None:
        self.conn_numbers = conn_numbers
        self.has_substitutes = len(conn_numbers) > 1  # segments of a lost connection go to the others
        self.peer = peer
        self.segments = segments  # of one round
        self.limit = limit
        self.conns = setup.conns
        self.item_bytes = setup.item_bytes
        self.sizes_bytes = [segment.size * setup.item_bytes for segment in segments]
        self.packets = [packets(size_bytes, setup.mtu) for size_bytes in self.sizes_bytes]
        self.recorder = setup.recorder
        self.clock = setup.clock
        self.base = 0  # number of the first segment of this round
        self.psns = dict.fromkeys(conn_numbers, 0)  # PSN of the next segment's first packet, by connection

    def next_psn(self, conn: Conn, index: int) -> int:
        """Return the PSN of a segment's first packet, and advance the connection's past the segment."""
        psn = self.psns[conn.number]
        self.psns[conn.number] = (psn + self.packets[index]) & MASK
        return psn

    def load(self, conn: Conn) -> int:
        """Return the number of requests in flight on a connection that count against `limit`."""
        raise NotImplementedError

    def progress(self) -> tuple[int, int]:
        """Return how many segments have begun and how many are done, over all rounds."""
        raise NotImplementedError

    def done(self) -> int:
        """Return how many segments, over all rounds, are applied (receiver) or may be overwritten (sender)."""
        raise NotImplementedError

    def free_connection(self) -> Conn | None:
        """Return the connection that takes the next request, or None if all are at their limit or down."""
        if not self.has_substitutes:
            conn = self.conns.get(self.conn_numbers[0])
            return conn if conn is not None and conn.state == "up" and self.load(conn) < self.limit else None
        best, least = None, self.limit
        for number in self.conn_numbers:
            conn = self.usable(number)
            if conn is not None and self.load(conn) < least:
                best, least = conn, self.load(conn)
        return best

    def usable(self, number: int) -> Conn | None:
        """Return a connection that has substitutes, if it may send.

        A rebuilt connection may be on a dead path. It is not used before a packet has passed in each direction.
        """
        conn = self.conns.get(number)
        return conn if conn is not None and conn.state == "up" and not conn.rebuilding else None

    def describe(self) -> dict[str, Any]:
        """Return the QP that explains a wait, the progress in this round, and the step of the next segment."""
        conns = [self.conns[number] for number in self.conn_numbers if number in self.conns]
        conn = min(conns, key=lambda candidate: candidate.state == "up", default=None)
        begun, done = (max(0, count - self.base) for count in self.progress())
        return {
            "qpn": conn.qp.qpn if conn is not None and conn.qp else 0,
            "state": conn.state if conn is not None else "new",
            "direction": self.direction,
            "peer": self.peer,
            "step": self.segments[min(done, len(self.segments) - 1)].step,
            "begun": begun,
            "done": done,
            "segments": len(self.segments),
        }
