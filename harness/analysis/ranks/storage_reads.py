"""Whether checkpoints delay the reads of training data: the 99th percentile of both kinds of reads. Pure.

A read counts as one beside checkpoints if any rank was storing one during a part of it. The data of the next iteration
are read while the ranks work on this one, so a read may be slow although no rank waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness import confidence
from harness.confidence import LEVEL, Interval
from harness.record.measurements import RankSeries

__all__ = ["Reads", "reads_of"]

_PERCENT = 99


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Times of reads in ns, those of each rank in their order: while a checkpoint was being stored, and otherwise."""

    beside: tuple[tuple[int, ...], ...]
    alone: tuple[tuple[int, ...], ...]

    @property
    def p99_ratio(self) -> float | None:
        """99th percentile of reads beside checkpoints over that of the others; None: there are none of one kind."""
        beside, alone = _joined(self.beside), _joined(self.alone)
        if not beside or not alone:
            return None
        return float(np.percentile(beside, _PERCENT) / np.percentile(alone, _PERCENT))

    def interval(self, level: float = LEVEL) -> Interval | None:
        """Return the interval of `p99_ratio`: the two percentiles share its risk. None: too few reads."""
        each = (1 + level) / 2
        beside, alone = _percentile(self.beside, each), _percentile(self.alone, each)
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
        beside, alone = len(_joined(self.beside)), len(_joined(self.alone))
        if not beside and not alone:
            return "the job reads no data from storage"
        if not alone:
            return f"each of {beside} reads was beside a checkpoint, so there is nothing to compare with"
        if not beside:
            return f"none of {alone} reads was beside a checkpoint"
        return f"of {beside} reads beside checkpoints and {alone} others"


def reads_of(series: Sequence[RankSeries]) -> Reads:
    """Sort the reads of all ranks."""
    stored = [span for rank in series for span in rank.stored_ns]
    starts = np.array([start_ns for start_ns, _ in stored], dtype=np.int64)
    ends = np.array([end_ns for _, end_ns in stored], dtype=np.int64)
    beside: list[tuple[int, ...]] = []
    alone: list[tuple[int, ...]] = []
    for rank in series:
        of_rank: tuple[list[int], list[int]] = ([], [])
        for step in rank.iterations:
            if step.read_ns:
                begun_ns = step.start_ns + step.read_from_ns
                is_beside = bool(((starts < begun_ns + step.read_ns) & (ends > begun_ns)).any())
                of_rank[is_beside].append(step.read_ns)
        alone.append(tuple(of_rank[False]))
        beside.append(tuple(of_rank[True]))
    return Reads(beside=tuple(beside), alone=tuple(alone))


def _percentile(ranks: Sequence[Sequence[int]], level: float) -> Interval | None:
    """Return the interval of a percentile over all ranks, whose reads depend on each other and on those of others.

    Ranks share the storage host, so that together they are worth no more independent reads than one rank is.
    """
    series = [np.array(times, dtype=np.float64) for times in ranks if times]
    counts = [confidence.independent_of(times) for times in series]
    known = [count for count in counts if count is not None]
    if not series or len(known) < len(counts):
        return None
    return confidence.percentile_bounds(
        np.concatenate(series), _PERCENT, independent=int(min(known)), least=0.0, level=level
    )


def _joined(ranks: Sequence[Sequence[int]]) -> list[int]:
    return [time_ns for times in ranks for time_ns in times]
