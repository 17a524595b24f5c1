"""Find the rank that a fault slowed, by its compute phases relative to other ranks in the same iterations. Pure.

Effects common to all ranks cancel, such as other work on the machine or a longer batch. A rank is a straggler if its
iterations under a fault are slower, relative to the others, than its fault-free ones, by `RATIO` and by more than
chance: the rank-sum test (Mann and Whitney 1947), one-sided, corrected for the number of ranks and faults (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from faultbed.harness.record.evidence.workload_evidence import Iteration, RankSeries

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ENOUGH", "LEVEL", "RATIO", "Slowdown", "chance", "slowdowns", "slowest"]

RATIO = 1.25
LEVEL = 0.01
ENOUGH = 2
"""Minimum number of iterations under a fault and without one."""
_MOST = 0.5
"""Share of a compute phase above which the phase counts as under the fault.

A phase with a smaller share, except 0, counts neither as under the fault nor as fault-free.
"""
_EXACT = 2000
"""Number of pairs up to which the rank-sum distribution is enumerated; beyond, the normal approximation is used."""

_Window = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """A rank's median compute phase without a fault and under one fault.

    `iterations` counts both. `ratio` is the growth relative to the other ranks' median. `chance` is the probability of
    a growth as large by chance.
    """

    rank: int
    fault_id: str
    before_ns: float
    during_ns: float
    iterations: tuple[int, int]
    ratio: float
    chance: float


def slowdowns(series: Sequence[RankSeries], fired: Mapping[str, _Window]) -> tuple[Slowdown, ...]:
    """Return the slow-down of each rank under each fault, if both have enough iterations.

    `fired`: first firing and removal, in ns.
    """
    computed = {
        rank_series.rank: {step.index: step for step in rank_series.iterations if step.compute_ns > 0}
        for rank_series in series
    }
    whole = sorted(set.intersection(*(set(steps_by_index) for steps_by_index in computed.values()))) if computed else []
    slowdowns_found = []
    for rank, steps in computed.items():
        other_ranks = [steps for other, steps in computed.items() if other != rank] or [steps]
        against = {
            at: math.log(steps[at].compute_ns / median(steps_of_other[at].compute_ns for steps_of_other in other_ranks))
            for at in whole
        }
        free = [at for at in whole if not any(_share(steps[at], window) for window in fired.values())]
        for fault_id, window in fired.items():
            under = [at for at in whole if _share(steps[at], window) > _MOST]
            if min(len(free), len(under)) < ENOUGH:
                continue
            before, during = [against[at] for at in free], [against[at] for at in under]
            slowdowns_found.append(
                Slowdown(
                    rank=rank,
                    fault_id=fault_id,
                    before_ns=float(median(steps[at].compute_ns for at in free)),
                    during_ns=float(median(steps[at].compute_ns for at in under)),
                    iterations=(len(free), len(under)),
                    ratio=math.exp(median(during) - median(before)),
                    chance=chance(before, during),
                )
            )
    return tuple(slowdowns_found)


def slowest(slow: Sequence[Slowdown]) -> tuple[Slowdown | None, bool]:
    """Return the rank that stands out most, and whether chance is excluded; None if no rank was slower by `RATIO`."""
    large = [slowdown for slowdown in slow if slowdown.ratio >= RATIO]
    sure = [slowdown for slowdown in large if slowdown.chance * len(slow) <= LEVEL]
    return max(sure or large, key=lambda slowdown: slowdown.ratio, default=None), bool(sure)


def chance(before: Sequence[float], during: Sequence[float]) -> float:
    """Return the probability that a random split of the values makes `during` at least as much larger as it is."""
    values = np.concatenate([during, before])
    ranks = np.empty(len(values), dtype=np.int64)
    # Ties are ordered with `during` first, which can only increase the probability.
    ranks[np.argsort(values, kind="stable")] = np.arange(1, len(values) + 1)
    count, total, rank_sum = len(during), len(values), int(ranks[: len(during)].sum())
    if count * len(before) > _EXACT:
        mean, variance = count * (total + 1) / 2, count * len(before) * (total + 1) / 12
        return 0.5 * math.erfc((rank_sum - 0.5 - mean) / math.sqrt(2 * variance))
    return float(_ways(count, total)[rank_sum:].sum() / math.comb(total, count))


@lru_cache(maxsize=64)
def _ways(count: int, total: int) -> NDArray[np.float64]:
    """Return in how many ways `count` of the ranks 1 to `total` have each sum, by sum from 0.

    Cached, because the computation for each rank of a run needs the same numbers.
    """
    most = count * (2 * total - count + 1) // 2
    ways = np.zeros((count + 1, most + 1))
    ways[0, 0] = 1.0
    for rank in range(1, total + 1):
        ways[1:, rank:] += ways[:-1, : most + 1 - rank]  # the right side is evaluated before the assignment
    sums: NDArray[np.float64] = ways[count]
    return sums


def _share(step: Iteration, window: _Window) -> float:
    """Return the share of a compute phase that lies in the window, 0 to 1."""
    start_ns = step.start_ns + step.ingest_ns
    end_ns = start_ns + step.compute_ns
    return max(0, min(end_ns, window[1]) - max(start_ns, window[0])) / step.compute_ns
