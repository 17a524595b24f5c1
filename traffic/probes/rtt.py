"""Round trips of probes: the network's share, the responder's share, and the place that makes them long. Pure.

A process at the other end answers each probe (R-Pingmesh: Zhao et al., SIGCOMM 2024). Each end takes two times by its
own clock, so no two clocks need to agree:

    network RTT = (answer read - probe sent) at the prober - (answer sent - probe read) at the responder

R-Pingmesh takes these four times from the RNICs' completions. `STAMPS` names the source used here. *Software* times are
taken by the process that posts a send and reads a completion. A network RTT then includes the time that both processes
waited for a CPU before they read. A busy host therefore makes all its round trips long, and is named as the slow place.
The responder's delay runs from reading the probe to sending the answer.

The usual time of a path is the lower decile of the median network times of all paths with the same number of hops in
the run. This stays correct even if one of two spines is slow in both directions. If all paths are equally slow, none
counts as slow. A round trip is *slow* if the network took more than `SLOW` times the usual time. A place is named if
most round trips across it, in either direction, are slow, and take more than `SLOW` times as long as similar paths that
avoid it.

On a busy lab healthy paths differ several times, depending on CPU scheduling. The places are therefore located at each
of `LEVELS`, and the level at which they stand out most is used. A delay of 200 ms is found among round trips of 10 to
50 ms, most of which are slow by the first level.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from faultbed.traffic.engine.traffic_metrics import percentile
from faultbed.traffic.probes import tomography
from faultbed.traffic.probes.tomography import Place, Probes

__all__ = [
    "LEVELS",
    "SLOW",
    "STAMPS",
    "Echo",
    "PathTimes",
    "SlowPlace",
    "Times",
    "Trip",
    "echoes",
    "locate",
    "times_of",
]

STAMPS = "software"
"""Source of the timestamps: rxe stamps no completion, and the engine's completion queues request no RNIC timestamps."""
SLOW = 2.0
"""A slow round trip takes more than this many times the usual time of similar paths."""
LEVELS = (SLOW, 4.0, 8.0)
"""Thresholds for slow round trips, as multiples of the usual time."""
_LIKE_PERCENT = 10.0
_MOST = 0.5
"""Share of the round trips across a place that must be slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """One probe: when it was posted (controller ns), whether it arrived, and how long its answer took (ns).

    `whole_ns` is the time until the answer was read; None if it was not. `responder_ns` is the part that the responder
    took; None if it sent no answer.
    """

    connection: int
    sent_ns: int
    came: bool
    whole_ns: int | None
    responder_ns: int | None

    @property
    def network_ns(self) -> int | None:
        """Time that the network took; None without an answer. A negative difference of the two clocks counts as 0."""
        if self.whole_ns is None or self.responder_ns is None:
            return None
        return max(0, self.whole_ns - self.responder_ns)

    @property
    def lost_on_its_way_back(self) -> bool:
        """Whether an answer was sent but not read."""
        return self.responder_ns is not None and self.whole_ns is None

    @property
    def is_lost(self) -> bool:
        """Whether the probe did not arrive, or its answer was not read."""
        return not self.came or self.lost_on_its_way_back


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """A probe with its path and the path of its answer, with RNICs at both ends of each."""

    there: tuple[str, ...]
    back: tuple[str, ...]
    echo: Echo


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Statistics of durations, in ns."""

    min_ns: float
    median_ns: float
    p99_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PathTimes:
    """Round trips on one path there and one path back, with RNICs at both ends of each.

    `like_ns` is the usual network time of paths with as many hops in this run. `over[i]` of the `answered` round trips
    took more than `LEVELS[i]` times that. `network` and `responder` are None if no probe was answered.
    """

    path: tuple[str, ...]
    back: tuple[str, ...]
    sent: int
    answered: int
    over: tuple[int, ...]
    like_ns: float | None
    network: Times | None
    responder: Times | None

    @property
    def slow(self) -> int:
        """Number of round trips that took more than `SLOW` times the usual time."""
        return self.over[0]

    @property
    def places(self) -> tuple[str, ...]:
        """All nodes that a round trip crosses, in order."""
        return (*self.path, *self.back[1:])

    @property
    def crossed(self) -> frozenset[tuple[str, ...]]:
        """The directed links and the nodes that a round trip crosses."""
        return Probes(path=self.places, sent=1, lost=0).places

    @property
    def times(self) -> float | None:
        """Ratio of the median to the usual median of similar paths."""
        return self.network.median_ns / self.like_ns if self.network and self.like_ns else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowPlace(Place):
    """A link or node that makes round trips long: how many crossed it, and how many of those were slow.

    A round trip is slow if it takes more than `level` (one of `LEVELS`) times the usual time. `times` is the median,
    over the paths across the place, of their ratio to similar paths that avoid it. `alike` are places that the same
    round trips cross; for a host's link these always include both directions.
    """

    place: tuple[str, ...]
    answered: int
    level: float
    slow: int
    times: float
    gain: float
    alike: tuple[tuple[str, ...], ...] = ()


def echoes(sent: Iterable[Sequence[int]], came: Iterable[Sequence[int]], *, offset_ns: int = 0) -> tuple[Echo, ...]:
    """Build probes from the rows of both ends (`traffic/node/flows/echo.py`), matched by connection and number.

    Args:
        sent: (connection, number, sent ns, answer read ns or 0) by the prober's clock. If a probe is reported twice,
            the row with an answer counts.
        came: (connection, number, read ns, answer sent ns or 0) by the responder's clock.
        offset_ns: offset that converts the prober's clock to the controller's.
    """
    responder_ns_of = {
        (conn, number): answered_ns - read_ns if answered_ns else None for conn, number, read_ns, answered_ns in came
    }
    prober_rows: dict[tuple[int, int], tuple[int, int]] = {}
    for conn, number, sent_ns, read_ns in sent:
        if read_ns or (conn, number) not in prober_rows:
            prober_rows[conn, number] = sent_ns, read_ns
    return tuple(
        Echo(
            connection=key[0],
            sent_ns=sent_ns + offset_ns,
            came=key in responder_ns_of or bool(read_ns),
            whole_ns=read_ns - sent_ns if read_ns else None,
            responder_ns=responder_ns_of.get(key),
        )
        for key, (sent_ns, read_ns) in prober_rows.items()
    )


def times_of(trips: Iterable[Trip]) -> tuple[PathTimes, ...]:
    """Return the times of each path, there and back, with the usual time of paths of as many hops; sorted by path."""
    by_path: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Echo]] = defaultdict(list)
    for trip in trips:
        by_path[trip.there, trip.back].append(trip.echo)
    paths = [_times(path, back, echoes_of_path) for (path, back), echoes_of_path in sorted(by_path.items())]
    medians: dict[int, list[float]] = defaultdict(list)
    for path in paths:
        if path.network is not None:
            medians[len(path.places)].append(path.network.median_ns)
    usual_ns_by_hops = {hops: percentile(values, _LIKE_PERCENT) for hops, values in medians.items()}
    with_usual = []
    for path in paths:
        like_ns = usual_ns_by_hops.get(len(path.places))
        network_ns = [echo.network_ns for echo in by_path[path.path, path.back] if echo.network_ns is not None]
        over = () if like_ns is None else (sum(ns > level * like_ns for ns in network_ns) for level in LEVELS)
        with_usual.append(replace(path, over=tuple(over) or path.over, like_ns=like_ns))
    return tuple(with_usual)


def locate(paths: Sequence[PathTimes]) -> tuple[SlowPlace, ...]:
    """Return the places that make round trips long, the strongest evidence first; empty if no path stands out."""
    answered = [path for path in paths if path.answered]
    if not answered:
        return ()
    by_level = [_at(answered, number) for number in range(len(LEVELS))]
    return max(by_level, key=lambda places: sum(place.gain for place in places))


def _at(answered: Sequence[PathTimes], number: int) -> tuple[SlowPlace, ...]:
    """Return the places that make round trips longer than one of the levels."""
    votes = [Probes(path=path.places, sent=path.answered, lost=path.over[number]) for path in answered]
    suspects = tomography.locate(
        votes, background=None, least_share=_MOST, least_gain=tomography.LEAST_GAIN + math.log(len(LEVELS))
    )
    places = (
        SlowPlace(
            place=suspect.place,
            answered=suspect.sent,
            level=LEVELS[number],
            slow=suspect.lost,
            times=_ratio_to_others(answered, suspect.place),
            gain=suspect.gain,
            alike=suspect.alike,
        )
        for suspect in suspects
    )
    return tuple(place for place in places if place.times > SLOW)


def _ratio_to_others(paths: Sequence[PathTimes], place: tuple[str, ...]) -> float:
    """Return the median ratio between a path across a place and similar paths that avoid it, or else the usual time."""
    past: dict[int, list[float]] = defaultdict(list)
    for path in paths:
        if path.network is not None and place not in path.crossed:
            past[len(path.places)].append(path.network.median_ns)
    times = []
    for path in paths:
        if path.network is not None and place in path.crossed:
            similar_ns = past.get(len(path.places))
            like_ns = percentile(similar_ns, 50) if similar_ns else path.like_ns
            times.append(path.network.median_ns / like_ns if like_ns else 0.0)
    return percentile(times, 50)


def _times(path: tuple[str, ...], back: tuple[str, ...], echoes_of_path: Sequence[Echo]) -> PathTimes:
    network = [echo.network_ns for echo in echoes_of_path if echo.network_ns is not None]
    responder = [
        echo.responder_ns for echo in echoes_of_path if echo.network_ns is not None and echo.responder_ns is not None
    ]
    return PathTimes(
        path=path,
        back=back,
        sent=len(echoes_of_path),
        answered=len(network),
        over=(0,) * len(LEVELS),
        like_ns=None,
        network=_summed(network),
        responder=_summed(responder),
    )


def _summed(values: Sequence[float]) -> Times | None:
    if not values:
        return None
    return Times(min_ns=min(values), median_ns=percentile(values, 50), p99_ns=percentile(values, 99))
