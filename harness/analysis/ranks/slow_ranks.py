"""Results of the fail-slow detector for a run, iteration by iteration. Pure, blind to the faults.

A finished run (`slow_ranks`) and a running one (the part `slow_ranks`) feed it through the same `StepFeed`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from faultbed.harness.analysis.ranks.fail_slow import MIN_RANKS, Alarm, Detector
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.record.evidence.workload_evidence import RankSeries
from faultbed.testbed.model.topology import Topology

__all__ = ["SlowRank", "SlowRanks", "StepFeed", "slow_ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """An alarm: raised at `iteration` (ended at `at_ns`), slow since iteration `since`, by the share `slowdown`.

    `place` is the number of the iteration among those that all ranks have.
    """

    rank: int
    host: str
    iteration: int
    place: int
    at_ns: int
    since: int
    slowdown: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRanks:
    """All alarms of a run, the `smallest` slow-down that was detectable at its end, and the start of each iteration.

    An iteration is left out unless every rank has a record of it: a killed engine loses the record of its last one.
    """

    slow: tuple[SlowRank, ...]
    smallest: float | None
    begins_ns: tuple[int, ...]
    words: str

    def iterations_since(self, time_ns: int, slow: SlowRank) -> int | None:
        """Return iterations from the first one at or after `time_ns` to the alarm; None if the alarm came before."""
        first = int(np.searchsorted(self.begins_ns, time_ns))
        return slow.place - first + 1 if slow.place >= first else None


class StepFeed:
    """Collects the ranks' compute phases in any order, and passes whole iterations to the detector in order.

    Ranks that share a GPU become slow together, so none of them is a healthy reference for the others. The detector
    therefore gets one time for each GPU, the median of its ranks. An alarm for a GPU is an alarm for each of its ranks.

    An iteration is whole when every rank has reported it. It is passed on after all earlier ones, from index 0 on.
    Iterations that some ranks never finish are ignored. Detection ends with an iteration in which a rank computed
    nothing, and does not start for jobs on fewer than `MIN_RANKS` GPUs.

    Args:
        rnics: the RNIC of each rank (`host3:rxe0`).
        topology: provides the racks of the hosts and the GPUs of the RNICs.
    """

    def __init__(self, rnics: Sequence[str], topology: Topology) -> None:
        racks = {name: host.rack for name, host in topology.host_by_name.items()}
        by_gpu: dict[str, list[int]] = {}
        for rank, name in enumerate(rnics):
            by_gpu.setdefault(_gpu_of(name, topology), []).append(rank)
        self.iterations = 0
        """Number of iterations that the detector has received."""
        self._ranks = len(rnics)
        self._sharing = list(by_gpu.values())
        """The ranks of each GPU."""
        self._detector: Detector | None = None
        if len(by_gpu) >= MIN_RANKS:
            hosts = [rnics[ranks[0]].partition(":")[0] for ranks in self._sharing]
            self._detector = Detector(len(by_gpu), racks=[racks.get(host, "") for host in hosts])
        self._incomplete: dict[int, dict[int, int]] = {}
        """By incomplete iteration: time in ns by rank."""

    @property
    def smallest(self) -> float | None:
        """The smallest slow-down that is detectable on every rank now; None while learning, or without a detector."""
        return None if self._detector is None else self._detector.smallest

    @property
    def slow(self) -> tuple[int, ...] | None:
        """Ranks that are slow now; None if not known."""
        gpus = () if self._detector is None else self._detector.slow
        named = tuple(sorted(rank for gpu in gpus for rank in self._sharing[gpu]))
        return None if not named and self.smallest is None else named

    def add(self, rank: int, index: int, compute_ns: int) -> tuple[Alarm, ...]:
        """Add the compute time of a rank in an iteration, and return the alarms of iterations that became whole."""
        alarms: list[Alarm] = []
        if self._detector is not None:
            self._incomplete.setdefault(index, {})[rank] = compute_ns
        while self._detector is not None and len(self._incomplete.get(self.iterations, ())) == self._ranks:
            reported = self._incomplete.pop(self.iterations)
            if min(reported.values()) <= 0:
                self._detector = None
                self._incomplete.clear()
            else:
                times = [median(reported[rank] for rank in ranks) for ranks in self._sharing]
                alarms += (
                    replace(alarm, rank=rank)
                    for alarm in self._detector.add(times)
                    for rank in self._sharing[alarm.rank]
                )
                self.iterations += 1
        return tuple(alarms)


def _gpu_of(name: str, topology: Topology) -> str:
    """Return the GPU of the ranks on an RNIC: the RNIC's own GPU, or else the host's first one; without GPUs `name`."""
    host_name, _, rnic_name = name.partition(":")
    host = topology.host_by_name.get(host_name)
    rnic = next((candidate for candidate in (host.rnics if host else ()) if candidate.name == rnic_name), None)
    gpu_name = (rnic and rnic.gpu) or next((gpu.name for gpu in (host.gpus if host else ())), None)
    return f"{host_name}:{gpu_name}" if gpu_name else name


def slow_ranks(run: RunEvidence) -> SlowRanks:
    """Return the alarms of the detector for a run's compute phases. The results of the last two runs are cached.

    The judge and several parts of the report each call this.
    """
    return _slow_ranks(_ByIdentity(run.workload.series), _ByIdentity(run.workload.ranks), _ByIdentity(run.lab.topology))


class _ByIdentity:
    """A cache key that compares objects by identity, because measurements are too large to compare by value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and self.value is other.value


@functools.lru_cache(maxsize=2)
def _slow_ranks(series_of: _ByIdentity, ranks: _ByIdentity, topology: _ByIdentity) -> SlowRanks:
    every: tuple[RankSeries, ...] = series_of.value
    hosts = {rank.rank: rank.host for rank in ranks.value}
    rnics = {rank.rank: f"{rank.host}:{rank.rnic}" for rank in ranks.value}
    feed = StepFeed([rnics.get(series.rank, f"rank {series.rank}") for series in every], topology.value)
    indices = [{step.index for step in series.iterations} for series in every]
    common = sorted(set.intersection(*indices)) if indices else []
    number = {index: place for place, index in enumerate(common)}
    alarms = [
        alarm
        for rank, series in enumerate(every)
        for step in series.iterations
        if step.index in number
        for alarm in feed.add(rank, number[step.index], step.compute_ns)
    ]
    if not feed.iterations:
        return SlowRanks(slow=(), smallest=None, begins_ns=(), words="no two GPUs with a compute phase to compare")
    by_rank = [{step.index: step for step in series.iterations} for series in every]
    whole = [[steps[index] for steps in by_rank] for index in common[: feed.iterations]]
    slow = tuple(
        SlowRank(
            rank=every[alarm.rank].rank,
            host=hosts.get(every[alarm.rank].rank, f"rank {every[alarm.rank].rank}"),
            iteration=common[alarm.iteration],
            place=alarm.iteration,
            at_ns=max(step.end_ns for step in whole[alarm.iteration]),
            since=common[alarm.since],
            slowdown=alarm.slowdown,
        )
        for alarm in alarms
    )
    return SlowRanks(
        slow=slow,
        smallest=feed.smallest,
        begins_ns=tuple(min(step.start_ns for step in steps) for steps in whole),
        words=_words(slow, feed.smallest, feed.iterations),
    )


def _words(slow: tuple[SlowRank, ...], smallest: float | None, count: int) -> str:
    if slow:
        hosts = dict.fromkeys(alarm.host for alarm in slow)
        return "; ".join(_describe_alarms([alarm for alarm in slow if alarm.host == host]) for host in hosts)
    if smallest is None:
        return f"{count} iterations are too few, or too noisy, to know what is normal"
    return (
        f"no slow rank in {count} iterations; at the end, slow-downs of {100 * smallest:.0f} % or more were detectable"
    )


def _describe_alarms(alarms: Sequence[SlowRank]) -> str:
    """Describe the alarms of a host; if several ranks are slow, only the slowest."""
    count = len({alarm.rank for alarm in alarms})
    alarms_shown = alarms if count == 1 else [max(alarms, key=lambda alarm: alarm.slowdown)]
    host = alarms[0].host if count == 1 else f"{alarms[0].host} ({count} ranks)"
    return "; ".join(
        f"{host} about {100 * alarm.slowdown:.0f} % slower since iteration {alarm.since}, "
        f"found at iteration {alarm.iteration}"
        for alarm in alarms_shown
    )
