"""Effective bisection: the rate of n concurrent flows, over n times the rate of a flow that runs alone. Pure.

    effective bisection = aggregate / (n x solo)        (Hoefler, Schneider, Lumsdaine 2008, IEEE Cluster)

1 is full bisection: no flow is slowed by the others. Each permutation is a trial: its aggregate is compared with a flow
that ran alone right after it, so that a machine that slows down slows both. Permutations are drawn at random, so that
their median has an interval by a sign test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from faultbed.harness.confidence import LEVEL, Interval, tail_of
from faultbed.harness.ledger.statistics.unpaired_runs import median_range

__all__ = ["Trial", "bisection_of", "ratio"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One permutation: `flows` flows got `aggregate_bps` together, and one alone got `solo_bps`.

    `silent` are the flows of which nothing arrived: the others may make up for them in the sum.
    """

    flows: int
    aggregate_bps: float
    solo_bps: float
    silent: tuple[str, ...] = ()


def ratio(trial: Trial) -> float:
    """Return the effective bisection of one permutation."""
    return trial.aggregate_bps / (trial.flows * trial.solo_bps)


def bisection_of(trials: Sequence[Trial], *, level: float = LEVEL) -> tuple[float | None, Interval | None]:
    """Return the median effective bisection of several permutations, and its interval if there are enough for one.

    Both are None if no data arrived in some permutation.
    """
    if not trials or any(min(trial.aggregate_bps, trial.solo_bps) <= 0 for trial in trials):
        return None, None
    ratios = [ratio(trial) for trial in trials]
    low, high = median_range(ratios, 0, len(ratios), tail_of(level))
    if math.isinf(low):
        return median(ratios), None
    return median(ratios), Interval(low=low, high=high, method=f"sign test of {len(ratios)} permutations", level=level)
