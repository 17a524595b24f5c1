"""The flight recorder of a rank: its latest events, segment by segment, in a ring of fixed size.

An entry is (time in ns, event, iteration, step, peer, QP number, segment, PSN, connection). Events: `begin` and `end`
of an iteration, `post` and `ack` of a sent segment, `arrive` and `apply` of a received segment, `credit` (segment:
number of applied segments reported to the peer), `lost` and `up` of a connection. Segments count from 0 on each
lane in each iteration. The PSN is that of a segment's first packet, counted as by the RNIC (one per path MTU), and -1
if there is none. A connection has the same number at both ends; its two QPs have different ones.
"""

from __future__ import annotations

import time

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from faultbed.traffic.node.ranks.lane import Lane
    from faultbed.traffic.node.ranks.segments import Segment
    from faultbed.traffic.node.task import Conn

    Entry = tuple[int, str, int, int, int, int, int, int, int]
    Raw = tuple[int, str, int, list[Segment], int, int, int, int]

__all__ = ["FIELDS", "Recorder"]

FIELDS = ("at_ns", "what", "iteration", "step", "peer", "qpn", "segment", "psn", "connection")


class Recorder:
    """Keeps the latest `size` entries. Adding one costs one tuple; `entries` computes what it means."""

    def __init__(self, size: int = 1024) -> None:
        self.size = size
        self.count = 0
        self.first_iteration = 0
        """Iteration of the first round: a rank that resumes from a checkpoint counts its segments from there."""
        self._raw: list[Raw | None] = [None] * size

    def add_iteration(self, event: str, iteration: int) -> None:
        """Record the begin or end of an iteration, with the current time."""
        self._raw[self.count % self.size] = time.monotonic_ns(), event, iteration, [], -1, 0, -1, -1
        self.count += 1

    def add_segment(self, event: str, lane: Lane, conn: Conn, number: int, psn: int = -1) -> None:
        """Record an event of a lane's segment, with the current time."""
        # Not the lane itself, which has the recorder: a reference cycle.
        raw = time.monotonic_ns(), event, number, lane.segments, lane.peer, conn.qp.qpn, psn, conn.number
        self._raw[self.count % self.size] = raw
        self.count += 1

    def entries(self) -> list[Entry]:
        """Return the entries, oldest first."""
        at = self.count % self.size
        return [self._entry(raw) for raw in self._raw[at:] + self._raw[:at] if raw is not None]

    def _entry(self, raw: Raw) -> Entry:
        at_ns, event, number, segments, peer, qpn, psn, connection = raw
        if not segments:
            return at_ns, event, number, -1, peer, qpn, -1, psn, connection
        rounds, index = divmod(number, len(segments))
        step = segments[index].step
        return at_ns, event, self.first_iteration + rounds, step, peer, qpn, index, psn, connection
