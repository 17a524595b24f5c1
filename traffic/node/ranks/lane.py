"""The two ends of a lane: what a rank has sent to one peer, or received from it. Counts run over all iterations."""

from __future__ import annotations

from traffic.node.ranks.segments import Segment

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from typing import Any

__all__ = ["RecvLane", "SendLane", "packets"]


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
    """The sending end, on the connection `number`."""

    def __init__(self, number: int, peer: int, segments: list[Segment]) -> None:
        self.number = number
        self.peer = peer
        self.segments = segments
        self.base = 0  # number of the first segment of this iteration
        self.posted = 0
        self.acked = 0
        self.credits = 0  # segments that the peer has applied
        self.psn = 0  # of the next segment
        self.request: Any = None
        self.sge: Any = None

    def describe(self) -> dict[str, Any]:
        """Describe the progress of this iteration: segments posted and acknowledged, and the step of the next one."""
        begun, done = self.posted - self.base, self.acked - self.base
        return _described("out", self.peer, self.segments, begun=begun, done=done)


class RecvLane:
    """The receiving end, on the connection `number`, with its staging ring."""

    def __init__(self, number: int, peer: int, segments: list[Segment], staging: Any, mr: Any) -> None:
        self.number = number
        self.peer = peer
        self.segments = segments
        self.staging = staging
        self.mr = mr
        self.base = 0
        self.received = 0
        self.applied = 0
        self.credited = 0
        self.advertised = 0  # value of `applied` in the endpoint data that the peer last got
        self.psn = 0  # of the next segment
        self.credit: Any = None

    def describe(self) -> dict[str, Any]:
        """Describe the progress of this iteration: segments arrived and applied, and the step of the next one."""
        begun, done = self.received - self.base, self.applied - self.base
        return _described("in", self.peer, self.segments, begun=begun, done=done)
