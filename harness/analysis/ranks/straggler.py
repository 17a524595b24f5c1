"""Which rank a fault slowed: its compute phases against those of the other ranks in the same iterations. Pure.

What all ranks share cancels out: a machine that has other work to do, a longer batch. A rank is a straggler where its
iterations under a fault are slower, against the others', than its fault-free ones, by `RATIO` and by more than chance:
the rank-sum test (Mann and Whitney 1947), one-sided, corrected for the number of ranks and faults (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.record.measurements import Iteration, RankSeries

__all__ = ["ENOUGH", "LEVEL", "RATIO", "Slowdown", "chance", "slowdowns", "slowest"]

RATIO = 1.25
LEVEL = 0.01
ENOUGH = 2
"""Iterations under a fault, and without one, below which nothing is said."""
_MOST = 0.5
"""Share of a compute phase above which it is under a fault; what is only partly so is counted to neither."""
_EXACT = 2000
"""Pairs up to which the distribution of the rank sum is counted out; beyond, it is as good as normal."""

_Window = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """A rank's median compute phase without a fault and under this one.

    `iterations` of each; `ratio` is the growth of what it is of the other ranks' median; `chance` how often it would be
    as large by chance.
    """

    rank: int
    fault_id: str
    before_ns: float
    during_ns: float
    iterations: tuple[int, int]
    ratio: float
    chance: float


def slowdowns(series: Sequence[RankSeries], fired: Mapping[str, _Window]) -> tuple[Slowdown, ...]:
    """Of each rank under each fault, where both have enough iterations. `fired`: first firing and removal, in ns."""
    computed = {one.rank: {step.index: step for step in one.iterations if step.compute_ns > 0} for one in series}
    whole = sorted(set.intersection(*(set(one) for one in computed.values()))) if computed else []
    found = []
    for rank, steps in computed.items():
        others = [steps for other, steps in computed.items() if other != rank] or [steps]
        against = {
            at: math.log(steps[at].compute_ns / np.median([one[at].compute_ns for one in others])) for at in whole
        }
        free = [at for at in whole if not any(_share(steps[at], window) for window in fired.values())]
        for fault_id, window in fired.items():
            under = [at for at in whole if _share(steps[at], window) > _MOST]
            if min(len(free), len(under)) < ENOUGH:
                continue
            before, during = [against[at] for at in free], [against[at] for at in under]
            found.append(
                Slowdown(
                    rank=rank,
                    fault_id=fault_id,
                    before_ns=_median(steps[at].compute_ns for at in free),
                    during_ns=_median(steps[at].compute_ns for at in under),
                    iterations=(len(free), len(under)),
                    ratio=math.exp(_median(during) - _median(before)),
                    chance=chance(before, during),
                )
            )
    return tuple(found)


def slowest(slow: Sequence[Slowdown]) -> tuple[Slowdown | None, bool]:
    """The rank that stands out most, and whether chance is ruled out; None: nobody was slower by `RATIO`."""
    large = [one for one in slow if one.ratio >= RATIO]
    sure = [one for one in large if one.chance * len(slow) <= LEVEL]
    return max(sure or large, key=lambda one: one.ratio, default=None), bool(sure)


def chance(before: Sequence[float], during: Sequence[float]) -> float:
    """Probability that values of one kind, parted by chance, are as much larger in `during` as these are, or more."""
    values = np.concatenate([during, before])
    ranks = np.empty(len(values), dtype=np.int64)
    # Of equal values those of `during` come first, which can only make the probability larger.
    ranks[np.argsort(values, kind="stable")] = np.arange(1, len(values) + 1)
    count, total, seen = len(during), len(values), int(ranks[: len(during)].sum())
    if count * len(before) > _EXACT:
        mean, variance = count * (total + 1) / 2, count * len(before) * (total + 1) / 12
        return 0.5 * math.erfc((seen - 0.5 - mean) / math.sqrt(2 * variance))
    most = count * (2 * total - count + 1) // 2
    ways = np.zeros((count + 1, most + 1))
    ways[0, 0] = 1.0
    for rank in range(1, total + 1):
        ways[1:, rank:] += ways[:-1, : most + 1 - rank]  # the right side is taken before any of it changes
    return float(ways[count, seen:].sum() / math.comb(total, count))


def _share(step: Iteration, window: _Window) -> float:
    """How much of its compute phase lies in the window, 0 to 1."""
    start_ns = step.start_ns + step.ingest_ns
    end_ns = start_ns + step.compute_ns
    return max(0, min(end_ns, window[1]) - max(start_ns, window[0])) / step.compute_ns


def _median(values: Iterable[float]) -> float:
    return float(np.median(list(values)))
