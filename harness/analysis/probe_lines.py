"""What background probes show about each directed link, window by window. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from faultbed.traffic.probes import results
from faultbed.traffic.probes.results import WindowStats
from faultbed.traffic.probes.rtt import Trip

__all__ = ["WINDOW_NS", "LinkWindow", "ProbedLink", "lines"]

WINDOW_NS = 2_000_000_000
"""Short enough for a fault of a few seconds, long enough for several dozen probes per link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkWindow:
    """One window (controller ns) of a link's direction: the probes that crossed it, and round trips across it."""

    start_ns: int
    end_ns: int
    sent: int
    lost: int
    answered: int
    slow: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedLink:
    """One direction of a link over the whole run. Windows in which nothing crossed it are left out."""

    link: tuple[str, str]
    windows: tuple[LinkWindow, ...]

    @property
    def name(self) -> str:
        """Name such as `rtsw1 -> ctsw1`."""
        return " -> ".join(self.link)

    @property
    def sent(self) -> int:
        """Number of probes and answers that crossed the link."""
        return sum(window.sent for window in self.windows)

    @property
    def lost(self) -> int:
        """Number of probes and answers over the link that were lost anywhere on their path."""
        return sum(window.lost for window in self.windows)

    @property
    def worst(self) -> float:
        """Highest share of lost or slow probes in a window."""
        return max(
            (
                max(window.lost / window.sent, window.slow / window.answered if window.answered else 0.0)
                for window in self.windows
            ),
            default=0.0,
        )


def lines(trips: Sequence[Trip], *, start_ns: int, end_ns: int) -> tuple[ProbedLink, ...]:
    """Return every directed link that probes or answers took, by name. A loss on a path counts for all of its links."""
    by_link: dict[tuple[str, str], list[LinkWindow]] = {}
    for window in results.windows(trips, length_ns=WINDOW_NS, start_ns=start_ns, end_ns=end_ns):
        for link, at in _by_link(window).items():
            by_link.setdefault(link, []).append(at)
    return tuple(ProbedLink(link=link, windows=tuple(windows)) for link, windows in sorted(by_link.items()))


def _by_link(window: WindowStats) -> dict[tuple[str, str], LinkWindow]:
    crossed: dict[tuple[str, str], list[int]] = {}
    for group in window.probes:
        for link in itertools.pairwise(group.path):
            counts = crossed.setdefault(link, [0, 0, 0, 0])
            counts[0] += group.sent
            counts[1] += group.lost
    for times in window.paths:
        for link in set(itertools.pairwise(times.places)):
            counts = crossed.setdefault(link, [0, 0, 0, 0])
            counts[2] += times.answered
            counts[3] += times.slow
    return {
        link: LinkWindow(
            start_ns=window.start_ns, end_ns=window.end_ns, sent=sent, lost=lost, answered=answered, slow=slow
        )
        for link, (sent, lost, answered, slow) in crossed.items()
        if sent
    }
