"""Whether checkpoints delay the reads of storage: the 99th percentile of both kinds of reads. Pure.

A read is beside a checkpoint if any rank was storing one during a part of it. If the job has readers beside it, only
their reads count, and each from the time for which it was planned. The ranks' own reads would not show a burst of
checkpoints, because ranks that wait for their checkpoint read nothing. Without readers the reads are those of the
ranks. A rank reads the data of the next iteration while it works on this one, so a read may be slow although no rank
waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from faultbed.harness import confidence
from faultbed.harness.confidence import LEVEL, Interval
from faultbed.harness.record.measurements import RankSeries, ReaderRun

__all__ = ["Reads", "reads_of"]

_PERCENT = 99


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Times of reads in ns, those of each rank or reader in their order.

    `beside`: while a checkpoint was being stored; `alone`: the others. `readers` are the hosts of the readers; none:
    the ranks read. `late` counts the others that waited longer for a free connection than for their data. `failure` is
    why reads are missing; None: none is.
    """

    beside: tuple[tuple[int, ...], ...]
    alone: tuple[tuple[int, ...], ...]
    readers: tuple[str, ...] = ()
    late: int = 0
    failure: str | None = None

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
        """Return the interval of `p99_ratio`: the two percentiles share its risk. None: too few reads, or no ratio."""
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


def reads_of(series: Sequence[RankSeries], readers: Sequence[ReaderRun] = ()) -> Reads:
    """Sort the reads of the readers, or else those of all ranks."""
    stored = [span for rank in series for span in rank.stored_ns]
    starts = np.array([start_ns for start_ns, _ in stored], dtype=np.int64)
    ends = np.array([end_ns for _, end_ns in stored], dtype=np.int64)

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
