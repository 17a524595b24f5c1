"""The two ends of a lane: what a rank has sent to one peer, or received from it. Counts run over all iterations.

A lane has one connection, on which segments arrive in order, or several (`spray`, `dqplb`). Of several, the sender
takes the next one, or the one with the fewest segments in flight; segments arrive in any order, and the receiver keeps
a bitmap of those that came before an earlier one. When a connection is lost, its segments that did not arrive go to
the others. That happens when the receiver has closed its QP and reported what it has: nothing can arrive twice, nor
late.
"""

from __future__ import annotations

from traffic.node.ranks.segments import Segment

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

    from traffic.node.task import Conn

__all__ = ["MASK", "RecvLane", "SendLane", "packets"]

MASK = (1 << 24) - 1
"""Segments and credits are numbered modulo 2^24 in immediates."""


def _described(direction: str, peer: int, segments: list[Segment], *, begun: int, done: int) -> dict[str, Any]:
    step = segments[min(max(done, 0), len(segments) - 1)].step
    return {
        "direction": direction,
        "peer": peer,
        "step": step,
        "begun": max(0, begun),
        "done": max(0, done),
        "segments": len(segments),
    }


def packets(size_bytes: int, mtu: int) -> int:
    """Return the number of PSNs that a write uses: one even if it is empty."""
    return max(1, -(-size_bytes // mtu))


class SendLane:
    """The sending end, on the connections `numbers`."""

    def __init__(self, numbers: list[int], peer: int, segments: list[Segment]) -> None:
        self.numbers = numbers
        self.has_substitutes = len(numbers) > 1  # segments of a lost connection go to the others
        self.peer = peer
        self.segments = segments
        self.base = 0  # number of the first segment of this iteration
        self.posted = 0
        self.turn = 0  # counts what was posted, repetitions included: whose turn it is (`spray`)
        self.acked = 0  # all segments below this number are acknowledged
        self.credits = 0  # segments that the peer has applied
        self.in_flight: dict[int, list[int]] = {number: [] for number in numbers}  # segments by connection
        self.again: list[int] = []  # segments that were lost with their connection, in order
        self.psns = dict.fromkeys(numbers, 0)  # of the next segment, by connection
        self.request: Any = None
        self.sge: Any = None
        self.probe: Any = None
        self._acked_above: set[int] = set()

    def load(self, conn: Conn) -> int:
        """Return the number of segments in flight on a connection."""
        return len(self.in_flight[conn.number])

    def ack(self, connection: int, number: int) -> None:
        """Take in the completion of a segment."""
        self.in_flight[connection].remove(number)
        self._acked(number)

    def resume(self, connection: int, have: int, above: Collection[int]) -> list[int]:
        """Return the segments that were lost with a connection that is rebuilt: they are posted again.

        The peer has all segments below `have`, and those of `above`.
        """
        lost = []
        for number in self.in_flight[connection]:
            if number < have or number in above:
                self._acked(number)
            else:
                lost.append(number)
        self.in_flight[connection] = []
        self.again = sorted([*self.again, *lost])
        return lost

    def credit(self, value: int) -> None:
        """Take in a credit. Credits on several connections may overtake each other: an older one is ignored."""
        more = (value - self.credits) & MASK
        if more <= MASK >> 1:
            self.credits += more

    def _acked(self, number: int) -> None:
        self._acked_above.add(number)
        while self.acked in self._acked_above:
            self._acked_above.remove(self.acked)
            self.acked += 1

    def describe(self) -> dict[str, Any]:
        """Describe the progress of this iteration: segments posted and acknowledged, and the step of the next one."""
        begun, done = self.posted - self.base, self.acked - self.base
        return _described("out", self.peer, self.segments, begun=begun, done=done)


class RecvLane:
    """The receiving end, on the connections `numbers`, with its staging ring."""

    def __init__(self, numbers: list[int], peer: int, segments: list[Segment], staging: Any, mr: Any) -> None:
        self.numbers = numbers
        self.has_substitutes = len(numbers) > 1  # segments of a lost connection go to the others
        self.peer = peer
        self.segments = segments
        self.staging = staging
        self.mr = mr
        self.base = 0
        self.received = 0  # all segments below this number have arrived
        self.arrived = 0  # bitmap of the segments from `received` on
        self.applied = 0
        self.credited = 0
        self.advertised = dict.fromkeys(numbers, 0)  # `applied` in the endpoint data that the peer last got
        self.psns = dict.fromkeys(numbers, 0)  # of the next segment, by connection
        self.credit: Any = None

    def load(self, conn: Conn) -> int:
        """Return the number of credits that a connection has under way."""
        return conn.outstanding

    def arrive(self, sequence: int, slots: int) -> int | None:
        """Take in a segment by its number modulo 2^24. Return its full number, or None if it must not arrive now."""
        distance = (sequence - self.received) & MASK
        if distance >= (slots if self.has_substitutes else 1) or self.arrived >> distance & 1:
            return None
        number = self.received + distance
        self.arrived |= 1 << distance
        while self.arrived & 1:
            self.arrived >>= 1
            self.received += 1
        return number

    def above(self) -> list[int]:
        """Return the segments that arrived before an earlier one did."""
        return [self.received + bit for bit in range(self.arrived.bit_length()) if self.arrived >> bit & 1]

    def describe(self) -> dict[str, Any]:
        """Describe the progress of this iteration: segments arrived and applied, and the step of the next one."""
        begun, done = self.received - self.base, self.applied - self.base
        return _described("in", self.peer, self.segments, begun=begun, done=done)
