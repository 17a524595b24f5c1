"""Whether checkpoints delay the reads of storage: the 99th percentile of both kinds of reads. Pure.

A read is beside a checkpoint if any rank was storing one during a part of it. If the job has readers beside it, only
their reads count, and each from the time for which it was planned. The ranks' own reads would not show a burst of
checkpoints, because ranks that wait for their checkpoint read nothing. Without readers the reads are those of the
ranks. A rank reads the data of the next iteration while it works on this one, so a read may be slow although no rank
waits for it.

Reads and checkpoints are timed by several hosts. A read at the border of a checkpoint, within the error of their
clocks, may be of either kind: the interval holds for both ways to sort such reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from faultbed.harness import confidence
from faultbed.harness.confidence import LEVEL, Interval
from faultbed.harness.record.evidence.workload_evidence import RankSeries, ReaderRun

__all__ = ["Reads", "reads_of"]

_PERCENT = 99


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Times of reads in ns, those of each rank or reader in their order.

    `beside`: while a checkpoint was being stored; `alone`: the others. `readers` are the hosts of the readers; none:
    the ranks read. `late` counts the others that waited longer for a free connection than for their data. `failure` is
    why reads are missing; None: none is. `otherwise` are the same reads, with those that may be of either kind sorted
    in the two extreme ways; it is empty if there are none.
    """

    beside: tuple[tuple[int, ...], ...]
    alone: tuple[tuple[int, ...], ...]
    readers: tuple[str, ...] = ()
    late: int = 0
    failure: str | None = None
    otherwise: tuple[Reads, ...] = ()

    @property
    def p99_ratio(self) -> float | None:
        """99th percentile of reads beside checkpoints over that of the others.

        None: there are no reads of one kind, reads are missing, or the percentile of the others shows a backlog.
        """
        beside, alone = _joined(self.beside), _joined(self.alone)
        if not beside or not alone or self.failure is not None or self._fell_behind:
            return None
        return float(np.percentile(beside, _PERCENT) / np.percentile(alone, _PERCENT))

    @property
    def _fell_behind(self) -> bool:
        return self.late * 100 > len(_joined(self.alone)) * (100 - _PERCENT)

    def interval(self, level: float = LEVEL) -> Interval | None:
        """Return the interval of `p99_ratio`: the two percentiles share its risk. None: too few reads, or no ratio.

        It covers those of `otherwise`.
        """
        intervals = [reads._interval_as_sorted(level) for reads in (self, *self.otherwise)]  # noqa: SLF001
        known = [interval for interval in intervals if interval is not None]
        if len(known) < len(intervals):
            return None
        return dataclasses.replace(
            known[0], low=min(interval.low for interval in known), high=max(interval.high for interval in known)
        )

    def _interval_as_sorted(self, level: float) -> Interval | None:
        if self.p99_ratio is None:
            return None
        level_of_each = (1 + level) / 2
        beside, alone = _percentile(self.beside, level_of_each), _percentile(self.alone, level_of_each)
        if beside is None or alone is None or not alone.low:
            return None
        return Interval(
            low=beside.low / alone.high,
            high=beside.high / alone.low,
            level=level,
            method=f"two percentiles, {beside.method}; {alone.method}",
        )

    def describe(self) -> str:
        """Describe how many reads there are, or why there is no ratio."""
        if self.failure is not None:
            return self.failure
        beside, alone = len(_joined(self.beside)), len(_joined(self.alone))
        by = f" by {', '.join(self.readers)}" if self.readers else ""
        if not beside and not alone:
            return f"no data was read{by}" if by else "the job reads no data from storage"
        if not alone:
            return f"each of {beside} reads{by} was beside a checkpoint, so there is nothing to compare with"
        if not beside:
            return f"none of {alone} reads{by} was beside a checkpoint"
        if self._fell_behind:
            return (
                f"{self.late} of {alone} reads{by} without a checkpoint beside them began late: the storage had fallen "
                "behind, and they show its backlog; plan fewer (read_every)"
            )
        return f"of {beside} reads beside checkpoints and {alone} others{by}"


def reads_of(series: Sequence[RankSeries], readers: Sequence[ReaderRun] = (), *, clock_error_ns: int = 0) -> Reads:
    """Sort the reads of the readers, or else those of all ranks.

    Args:
        series: the ranks.
        readers: what reads the job's storage beside it.
        clock_error_ns: error of a host's clock; the times of two hosts are wrong by twice as much to each other.
    """
    sorted_reads = _sorted_reads(series, readers, 0)
    extremes = tuple(
        _sorted_reads(series, readers, margin_ns) for margin_ns in (2 * clock_error_ns, -2 * clock_error_ns)
    )
    is_sure = all(reads == sorted_reads for reads in extremes)
    return sorted_reads if is_sure else dataclasses.replace(sorted_reads, otherwise=extremes)


def _sorted_reads(series: Sequence[RankSeries], readers: Sequence[ReaderRun], margin_ns: int) -> Reads:
    """Sort the reads; `margin_ns` lengthens each checkpoint at both ends."""
    stored = [span for rank in series for span in rank.stored_ns]
    starts = np.array([start_ns - margin_ns for start_ns, _ in stored], dtype=np.int64)
    ends = np.array([end_ns + margin_ns for _, end_ns in stored], dtype=np.int64)

    def is_beside(start_ns: int, end_ns: int) -> bool:
        return bool(((starts < end_ns) & (ends > start_ns)).any())

    spans = [[(planned_ns, end_ns) for planned_ns, _, end_ns in reader.reads_ns] for reader in readers]
    beside: list[tuple[int, ...]] = []
    alone: list[tuple[int, ...]] = []
    for reads in spans if readers else [_of_rank(rank) for rank in series]:
        sorted_ns: tuple[list[int], list[int]] = ([], [])
        for start_ns, end_ns in reads:
            sorted_ns[is_beside(start_ns, end_ns)].append(end_ns - start_ns)
        alone.append(tuple(sorted_ns[False]))
        beside.append(tuple(sorted_ns[True]))
    failed = [f"{reader.host}: {reader.failure}" for reader in readers if reader.failure is not None]
    return Reads(
        beside=tuple(beside),
        alone=tuple(alone),
        readers=tuple(reader.host for reader in readers),
        late=sum(
            begin_ns - planned_ns > end_ns - begin_ns and not is_beside(planned_ns, end_ns)
            for reader in readers
            for planned_ns, begin_ns, end_ns in reader.reads_ns
        ),
        failure=f"reads are missing: {'; '.join(failed)}" if failed else None,
    )


def _of_rank(rank: RankSeries) -> list[tuple[int, int]]:
    """Return from when to when a rank read the data of each iteration."""
    begun_ns = [(step.start_ns + step.read_from_ns, step.read_ns) for step in rank.iterations if step.read_ns]
    return [(start_ns, start_ns + read_ns) for start_ns, read_ns in begun_ns]


def _percentile(ranks: Sequence[Sequence[int]], level: float) -> Interval | None:
    """Return the interval of a percentile over all ranks or readers, which share the storage host."""
    series = [np.array(times, dtype=np.float64) for times in ranks if times]
    independent = confidence.independent_of_all(series)
    if independent is None:
        return None
    return confidence.percentile_bounds(
        np.concatenate(series), _PERCENT, independent=int(independent), least=0.0, level=level
    )


def _joined(ranks: Sequence[Sequence[int]]) -> list[int]:
    return [time_ns for times in ranks for time_ns in times]
