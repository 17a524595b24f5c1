"""Round trips of probes: what the network took, what the responder took, and which place makes them long. Pure.

A probe is answered by a process at its other end (R-Pingmesh: Zhao et al., SIGCOMM 2024). Each end takes two times by
its own clock, so that no clock has to agree with another one:

    network RTT = (answer read - probe sent) at the prober - (answer sent - probe read) at the responder

R-Pingmesh takes the times at which an RNIC completed each of the four. `STAMPS` says what ours are: *software* times
are taken by the process that posts a send and that reads a completion, so that a network RTT here holds what both
waited for a CPU until they read; a busy host makes all its round trips long, and it is then the host that is named. The
responder's delay is from its reading of the probe to its sending of the answer.

What is usual of a path is what the network takes on paths of as many hops in the same run: the lower decile over those
paths of their medians, which still holds when one spine of two is slow both ways. Where all paths are alike slow,
nothing is. A round trip is *slow* when the network took more than `SLOW` times that. A place is named when most of what
crosses it, either way, is slow, and takes more than `SLOW` times what like paths past it do. On a busy lab healthy
paths take several times as long as each other, by whose turn it was on the CPU: therefore it is told by the one of
`LEVELS` at which places stand out most. A delay of 200 ms is seen among round trips of 10 to 50 ms, most of which are
slow by the first level.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from traffic.engine.traffic_metrics import percentile
from traffic.probes import tomography
from traffic.probes.tomography import Probes

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
"""Whose times these are: rxe stamps no completion, and the engine's completion queues ask no RNIC for it."""
SLOW = 2.0
"""A slow round trip takes so many times what it takes on paths like its own."""
LEVELS = (SLOW, 4.0, 8.0)
"""What is much slower than that is looked for by these."""
_LIKE_PERCENT = 10.0
_MOST = 0.5
"""Of what crosses a slow place, more than this share is slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """One probe: when it was posted (controller ns), whether it came, and, in ns, how long until its answer was read.

    Of that the responder had it for `responder_ns`; None: it sent no answer. `whole_ns` None: none was read.
    """

    connection: int
    sent_ns: int
    came: bool
    whole_ns: int | None
    responder_ns: int | None

    @property
    def network_ns(self) -> int | None:
        """What the network took; never below 0, though four readings of two clocks may come out so."""
        if self.whole_ns is None or self.responder_ns is None:
            return None
        return max(0, self.whole_ns - self.responder_ns)

    @property
    def lost_on_its_way_back(self) -> bool:
        """Whether it was answered, and nobody read that."""
        return self.responder_ns is not None and self.whole_ns is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """A probe with the way that it took, and the way that its answer would: RNICs at both ends of each."""

    there: tuple[str, ...]
    back: tuple[str, ...]
    echo: Echo


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Of some durations, in ns."""

    min_ns: float
    median_ns: float
    p99_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PathTimes:
    """The round trips on one way there and one way back, RNICs at both ends of each.

    `like_ns` is what the network takes on paths of as many hops in this run; of the `answered`, `over[i]` took more
    than `LEVELS[i]` times that. `network` and `responder` None: no probe was answered.
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
        """How many took more than `SLOW` times what is usual."""
        return self.over[0]

    @property
    def places(self) -> tuple[str, ...]:
        """All that a round trip crosses, in order."""
        return (*self.path, *self.back[1:])

    @property
    def crossed(self) -> frozenset[tuple[str, ...]]:
        """The directed links and the nodes among them."""
        return Probes(path=self.places, sent=1, lost=0).places

    @property
    def times(self) -> float | None:
        """The median over that of paths like it."""
        return self.network.median_ns / self.like_ns if self.network and self.like_ns else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowPlace:
    """A link or a node that makes round trips long: how many crossed it, how many of them were slow.

    Slow: longer than `level` (one of `LEVELS`) times what is usual. `times` is the median, over the paths that cross
    it, of how many times as long they take as like paths that do not. `alike` are places that the same round trips
    cross; of a host's link these are always both directions.
    """

    place: tuple[str, ...]
    answered: int
    level: float
    slow: int
    times: float
    gain: float
    alike: tuple[tuple[str, ...], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """`rtsw1 -> ctsw1`, or `host3`; then those that are alike."""
        return tuple(" -> ".join(place) for place in (self.place, *self.alike))


def echoes(sent: Iterable[Sequence[int]], came: Iterable[Sequence[int]], *, offset_ns: int = 0) -> tuple[Echo, ...]:
    """Probes from the rows that both ends tell (`traffic.node.flows.echo`), each by its connection and number.

    Args:
        sent: (connection, number, sent ns, answer read ns or 0) by the prober's clock; of a probe that is told again,
            the row with an answer counts.
        came: (connection, number, read ns, answer sent ns or 0) by the responder's.
        offset_ns: what makes the prober's clock the controller's.
    """
    held = {
        (conn, number): answered_ns - read_ns if answered_ns else None for conn, number, read_ns, answered_ns in came
    }
    told: dict[tuple[int, int], tuple[int, int]] = {}
    for conn, number, sent_ns, read_ns in sent:
        if read_ns or (conn, number) not in told:
            told[conn, number] = sent_ns, read_ns
    return tuple(
        Echo(
            connection=key[0],
            sent_ns=sent_ns + offset_ns,
            came=key in held or bool(read_ns),
            whole_ns=read_ns - sent_ns if read_ns else None,
            responder_ns=held.get(key),
        )
        for key, (sent_ns, read_ns) in told.items()
    )


def times_of(trips: Iterable[Trip]) -> tuple[PathTimes, ...]:
    """The times of each path, there and back, held against those of paths of as many hops; sorted by path."""
    by_path: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Echo]] = defaultdict(list)
    for trip in trips:
        by_path[trip.there, trip.back].append(trip.echo)
    found = [_times(path, back, echoed) for (path, back), echoed in sorted(by_path.items())]
    medians: dict[int, list[float]] = defaultdict(list)
    for one in found:
        if one.network is not None:
            medians[len(one.places)].append(one.network.median_ns)
    like = {hops: percentile(values, _LIKE_PERCENT) for hops, values in medians.items()}
    judged = []
    for one in found:
        like_ns = like.get(len(one.places))
        took = [each.network_ns for each in by_path[one.path, one.back] if each.network_ns is not None]
        over = () if like_ns is None else (sum(ns > level * like_ns for ns in took) for level in LEVELS)
        judged.append(replace(one, over=tuple(over) or one.over, like_ns=like_ns))
    return tuple(judged)


def locate(paths: Sequence[PathTimes]) -> tuple[SlowPlace, ...]:
    """Places that make round trips long, the most telling first; nothing: none is longer than paths like it."""
    seen = [one for one in paths if one.answered]
    if not seen:
        return ()
    by_level = [_at(seen, number) for number in range(len(LEVELS))]
    return max(by_level, key=lambda found: sum(one.gain for one in found))


def _at(seen: Sequence[PathTimes], number: int) -> tuple[SlowPlace, ...]:
    """The places, of round trips longer than one of the levels."""
    votes = [Probes(path=one.places, sent=one.answered, lost=one.over[number]) for one in seen]
    found = tomography.locate(
        votes, background=None, least_share=_MOST, least_gain=tomography.LEAST_GAIN + math.log(len(LEVELS))
    )
    places = (
        SlowPlace(
            place=one.place,
            answered=one.sent,
            level=LEVELS[number],
            slow=one.lost,
            times=_beside(seen, one.place),
            gain=one.gain,
            alike=one.alike,
        )
        for one in found
    )
    return tuple(one for one in places if one.times > SLOW)


def _beside(paths: Sequence[PathTimes], place: tuple[str, ...]) -> float:
    """How many times as long a path over a place takes as like paths past it do; where none goes past, as is usual."""
    past: dict[int, list[float]] = defaultdict(list)
    for one in paths:
        if one.network is not None and place not in one.crossed:
            past[len(one.places)].append(one.network.median_ns)
    times = []
    for one in paths:
        if one.network is not None and place in one.crossed:
            others = past.get(len(one.places))
            like_ns = percentile(others, 50) if others else one.like_ns
            times.append(one.network.median_ns / like_ns if like_ns else 0.0)
    return percentile(times, 50)


def _times(path: tuple[str, ...], back: tuple[str, ...], echoed: Sequence[Echo]) -> PathTimes:
    network = [one.network_ns for one in echoed if one.network_ns is not None]
    responder = [one.responder_ns for one in echoed if one.network_ns is not None and one.responder_ns is not None]
    return PathTimes(
        path=path,
        back=back,
        sent=len(echoed),
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
