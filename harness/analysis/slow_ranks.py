"""What the detector of soft errors would have said during a run, iteration by iteration. Pure, blind to the faults."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.analysis.soft_errors import MIN_RANKS, Detector
from harness.analysis.timeline import finished_iterations
from harness.record.measurements import Measurements

__all__ = ["SlowRank", "SlowRanks", "slow_ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """An alarm: found at `iteration` (ended at `at_ns`), slow since iteration `since`, by the share `slowdown`."""

    rank: int
    host: str
    iteration: int
    at_ns: int
    since: int
    slowdown: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRanks:
    """All alarms of a run; `smallest` slow-down that was looked for in the end; `begins_ns` of the iterations."""

    slow: tuple[SlowRank, ...]
    smallest: float | None
    begins_ns: tuple[int, ...]
    words: str

    def iterations_since(self, time_ns: int, one: SlowRank) -> int | None:
        """Iterations from the first that began at or after `time_ns` to the alarm; None: the alarm came before."""
        first = int(np.searchsorted(self.begins_ns, time_ns))
        return one.iteration - first + 1 if one.iteration >= first else None


def slow_ranks(run: Measurements) -> SlowRanks:
    """Feed a run's compute phases to a detector."""
    count = finished_iterations(run.series)
    ordered = [sorted(series.iterations, key=lambda step: step.index)[:count] for series in run.series]
    computed = [[step.compute_ns for step in rank] for rank in ordered]
    times = np.array(computed, dtype=np.float64).reshape(len(ordered), count).T
    if len(ordered) < MIN_RANKS or not count or not (times > 0).all():
        return SlowRanks(slow=(), smallest=None, begins_ns=(), words="no two ranks with a compute phase to compare")
    hosts = {rank.rank: rank.host for rank in run.ranks}
    ends = np.array([[step.end_ns for step in rank] for rank in ordered]).max(axis=0)
    detector = Detector(len(ordered), racks=_racks(run))
    alarms = [alarm for row in times for alarm in detector.add(row)]
    found = tuple(
        SlowRank(
            rank=run.series[alarm.rank].rank,
            host=hosts.get(run.series[alarm.rank].rank, f"rank {run.series[alarm.rank].rank}"),
            iteration=alarm.iteration,
            at_ns=int(ends[alarm.iteration]),
            since=alarm.since,
            slowdown=alarm.slowdown,
        )
        for alarm in alarms
    )
    return SlowRanks(
        slow=found,
        smallest=detector.smallest,
        begins_ns=tuple(min(rank[index].start_ns for rank in ordered) for index in range(count)),
        words=_words(found, detector.smallest, count),
    )


def _racks(run: Measurements) -> list[str]:
    """Of each series, the rack of its rank."""
    known = {name: host.rack for name, host in run.topology.host_by_name.items()}
    racks = {rank.rank: known.get(rank.host, "") for rank in run.ranks}
    return [racks.get(series.rank, "") for series in run.series]


def _words(found: tuple[SlowRank, ...], smallest: float | None, count: int) -> str:
    if found:
        return "; ".join(
            f"{one.host} about {100 * one.slowdown:.0f} % slower since iteration {one.since}, "
            f"found at iteration {one.iteration}"
            for one in found
        )
    if smallest is None:
        return f"{count} iterations are too few, or too noisy, to know what is normal"
    return f"no rank of {count} iterations; at the end {100 * smallest:.0f} % and more would have shown"
