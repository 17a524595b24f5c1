"""Effective bisection: the rate of n concurrent flows, over n times the rate of a flow that runs alone. Pure.

    effective bisection = aggregate / (n x solo)        (Hoefler, Schneider, Lumsdaine 2008, IEEE Cluster)

1 is full bisection: no flow is slowed by the others. Each permutation is a trial: its aggregate is compared with a flow
that ran alone right after it, so that a machine that slows down slows both. Trials are pooled by their logarithms,
with Student's t.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from faultbed.harness.confidence import LEVEL, Interval, student

__all__ = ["Trial", "bisection_of", "ratio"]

MIN_PERMUTATIONS = 3
"""Minimum number of permutations for an interval: the deviation of two is too uncertain."""


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
    """Return the effective bisection of several permutations, and its interval from the third one on.

    Both are None if no data arrived in some permutation.
    """
    if not trials or any(min(trial.aggregate_bps, trial.solo_bps) <= 0 for trial in trials):
        return None, None
    logs = [math.log(ratio(trial)) for trial in trials]
    middle = fmean(logs)
    if len(logs) < MIN_PERMUTATIONS:
        return math.exp(middle), None
    reach = student(len(logs) - 1, level) * stdev(logs) / math.sqrt(len(logs))
    words = f"Student's t of {len(logs)} permutations"
    return math.exp(middle), Interval(
        low=math.exp(middle - reach), high=math.exp(middle + reach), method=words, level=level
    )
