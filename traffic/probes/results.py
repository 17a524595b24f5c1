"""Results of probes: where they were lost and where they were slow, in total or by window. Pure.

A trip covers two one-way journeys: the probe, which arrived or did not, and its answer, which was read or was not. Both
are evidence for where datagrams are lost (`faultbed.traffic.probes.tomography`). Completed trips are evidence for what
makes them long (`faultbed.traffic.probes.rtt`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from faultbed.testbed.model.topology import Topology
from faultbed.traffic.probes import rtt, tomography
from faultbed.traffic.probes.rtt import PathTimes, SlowPlace, Trip
from faultbed.traffic.probes.tomography import Probes, Suspect

__all__ = ["ProbeTrips", "WindowStats", "lossy", "one_way", "uncovered", "window_stats", "windows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTrips:
    """Probes with known paths, in the order of their start, and the number of probes without one.

    `trouble` is why the probes ended early, or why no path is known; None if neither happened.
    """

    trips: tuple[Trip, ...] = ()
    unknown: int = 0
    trouble: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowStats:
    """Evidence of the probes that were posted in an interval (controller ns).

    `suspects` are the places that lose probes, `paths` the round trips by path there and back, `slow` the places that
    make them long.
    """

    start_ns: int
    end_ns: int
    probes: tuple[Probes, ...]
    suspects: tuple[Suspect, ...]
    paths: tuple[PathTimes, ...]
    slow: tuple[SlowPlace, ...]


def window_stats(trips: Sequence[Trip], *, start_ns: int, end_ns: int) -> WindowStats:
    """Return the evidence of the trips that began in an interval."""
    chosen = [trip for trip in trips if start_ns <= trip.echo.sent_ns < end_ns]
    probes, paths = one_way(chosen), rtt.times_of(chosen)
    return WindowStats(
        start_ns=start_ns,
        end_ns=end_ns,
        probes=probes,
        suspects=tomography.locate(probes),
        paths=paths,
        slow=rtt.locate(paths),
    )


def windows(trips: Sequence[Trip], *, length_ns: int, start_ns: int, end_ns: int) -> tuple[WindowStats, ...]:
    """Return the evidence of consecutive windows of `length_ns`. A shorter window at the end is left out."""
    by_window: dict[int, list[Trip]] = {}
    for trip in trips:
        by_window.setdefault((trip.echo.sent_ns - start_ns) // length_ns, []).append(trip)
    starts = range(start_ns, end_ns - length_ns + 1, length_ns)
    return tuple(
        window_stats(by_window.get(number, ()), start_ns=at_ns, end_ns=at_ns + length_ns)
        for number, at_ns in enumerate(starts)
    )


def lossy(trips: Sequence[Trip], *, length_ns: int) -> tuple[WindowStats, ...]:
    """Return the intervals in which places lose probes, the strongest evidence first. They do not overlap.

    One window, two, four and so on up to all of them are examined: rare loss is visible only over many windows.
    """
    if not trips:
        return ()
    start_ns, end_ns = trips[0].echo.sent_ns, trips[-1].echo.sent_ns + 1
    count = max(1, -(-(end_ns - start_ns) // length_ns))
    by_window: list[list[Trip]] = [[] for _ in range(count)]
    for trip in trips:
        by_window[(trip.echo.sent_ns - start_ns) // length_ns].append(trip)
    spans = [(first, min(first + size, count)) for size in _scales(count) for first in range(0, count, size)]
    least_gain = tomography.LEAST_GAIN + math.log(len(spans))
    candidates = []
    for first, last in spans:
        chosen = [trip for window in by_window[first:last] for trip in window]
        suspects = tomography.locate(one_way(chosen), least_gain=least_gain)
        if suspects:
            candidates.append((suspects[0].gain, first, last))
    chosen_spans: list[tuple[int, int]] = []
    for _, first, last in sorted(candidates, reverse=True):
        if all(last <= other_first or other_last <= first for other_first, other_last in chosen_spans):
            chosen_spans.append((first, last))
    return tuple(
        window_stats(trips, start_ns=start_ns + first * length_ns, end_ns=min(start_ns + last * length_ns, end_ns))
        for first, last in chosen_spans
    )


def _scales(count: int) -> Iterator[int]:
    size = 1
    while size < count:
        yield size
        size *= 2
    yield count


def one_way(trips: Iterable[Trip]) -> tuple[Probes, ...]:
    """Count probes and answers by their path, sent and lost; sorted by path."""
    sent: Counter[tuple[str, ...]] = Counter()
    lost: Counter[tuple[str, ...]] = Counter()
    for trip in trips:
        sent[trip.there] += 1
        lost[trip.there] += not trip.echo.came
        if trip.echo.responder_ns is not None:
            sent[trip.back] += 1
            lost[trip.back] += trip.echo.lost_on_its_way_back
    return tuple(Probes(path=path, sent=count, lost=lost[path]) for path, count in sorted(sent.items()))


def uncovered(topology: Topology, probes: Sequence[Probes]) -> tuple[str, ...]:
    """Return directed links between RNICs and switches, and between switches, that no probe and no answer crossed."""
    crossed = tomography.links_of(probes)
    links = []
    for link in topology.links:
        far = link.b.node if link.rnic is None else f"{link.b.node}:{link.rnic}"
        links += [(link.a.node, far), (far, link.a.node)]
    return tuple(f"{near} -> {far}" for near, far in links if not crossed.get((near, far), (0, 0))[0])
