"""Decide whether two settings are equivalent within a margin, from runs of each: two one-sided tests. Pure.

A missing difference is no proof of equality: few or noisy runs show none either. Two one-sided tests (Schuirmann 1987,
J. Pharmacokinet. Biopharm. 15:657) turn the burden of proof round. Settings are equivalent only if the interval of
their ratio lies within the margin, and different only if it lies outside. Logarithms of runs are compared, with the
degrees of freedom of Welch (1947, Biometrika 34:28): one setting may vary more than the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import ndtri, stdtrit

__all__ = ["TAIL", "Equivalence", "Outcome", "equivalence"]

TAIL = 0.05
"""Risk of calling two settings equivalent whose ratio is just the margin, and of calling them different there."""
_LEAST_RUNS = 3
_POWER = 0.8
"""Chance that the number of runs that is suggested decides, if mean and noise are as they were."""
_MOST_RUNS = 1000

Outcome = Literal["equivalent", "different", "not shown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalence:
    """What runs of two settings show.

    Attributes:
        says: the outcome.
        ratio: geometric mean of B over that of A.
        low, high: interval of the ratio, with `TAIL` on each side.
        margin: as given; the ratio may lie between 1 / (1 + margin) and 1 + margin.
        runs: values of A and of B.
        more: runs that are missing on each side for a decision; None: decided, or not to be reached with `_MOST_RUNS`.
        why: why nothing is shown; empty if something is.
    """

    says: Outcome
    ratio: float
    low: float
    high: float
    margin: float
    runs: tuple[int, int]
    more: int | None = None
    why: str = ""


def equivalence(values_a: Sequence[float], values_b: Sequence[float], margin: float) -> Equivalence:
    """Compare two settings by one value of each run.

    Args:
        values_a: values of A, above 0.
        values_b: values of B.
        margin: the largest difference that does not matter, such as 0.05.

    Raises:
        ValueError: the margin is not above 0, or a value is not finite and above 0.
    """
    if not (math.isfinite(margin) and margin > 0):
        raise ValueError(f"a margin of {margin:g} leaves no room for noise; give more than 0")
    for value in (*values_a, *values_b):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"a run with the value {value:g} has no logarithm; compare another metric")
    runs = len(values_a), len(values_b)
    if min(runs) < _LEAST_RUNS:
        return Equivalence(
            says="not shown",
            ratio=_ratio(values_a, values_b),
            low=0.0,
            high=math.inf,
            margin=margin,
            runs=runs,
            more=_LEAST_RUNS - min(runs),
            why=f"{min(runs)} runs on one side; at least {_LEAST_RUNS} show how much runs differ",
        )
    logs_a, logs_b = np.log(np.array(values_a)), np.log(np.array(values_b))
    difference = float(logs_b.mean() - logs_a.mean())
    of_a, of_b = float(logs_a.var(ddof=1)), float(logs_b.var(ddof=1))
    if not of_a or not of_b:
        # Values that are rounded, or copied, say nothing about noise. An interval without width would decide.
        return Equivalence(
            says="not shown",
            ratio=math.exp(difference),
            low=0.0,
            high=math.inf,
            margin=margin,
            runs=runs,
            why="all values of one side are equal, so that nothing is known about noise; compare another metric",
        )
    error = math.sqrt(of_a / runs[0] + of_b / runs[1])
    freedom = error**4 / ((of_a / runs[0]) ** 2 / (runs[0] - 1) + (of_b / runs[1]) ** 2 / (runs[1] - 1))
    half = float(stdtrit(freedom, 1 - TAIL)) * error
    low, high, limit = difference - half, difference + half, math.log1p(margin)
    says: Outcome = "not shown"
    if -limit < low and high < limit:
        says = "equivalent"
    elif low > limit or high < -limit:
        says = "different"
    more, why = None, ""
    if says == "not shown":
        more = _more_runs(abs(abs(difference) - limit), of_a + of_b, max(runs))
        beyond = "" if more else f", and {_MOST_RUNS} runs a side would not decide either"
        why = f"the interval reaches across the margin{beyond}"
    return Equivalence(
        says=says,
        ratio=math.exp(difference),
        low=math.exp(low),
        high=math.exp(high),
        margin=margin,
        runs=runs,
        more=more,
        why=why,
    )


def _ratio(values_a: Sequence[float], values_b: Sequence[float]) -> float:
    if not values_a or not values_b:
        return math.nan
    return float(np.exp(np.log(np.array(values_b)).mean() - np.log(np.array(values_a)).mean()))


def _more_runs(room: float, variance: float, runs: int) -> int | None:
    """Return how many more runs a side probably decide, if the difference is `room` away from the margin."""
    counts = np.arange(runs + 1, _MOST_RUNS + 1)
    needed = (stdtrit(2 * counts - 2, 1 - TAIL) + ndtri(_POWER)) * np.sqrt(variance / counts)
    enough = counts[needed < room]
    return int(enough[0]) - runs if len(enough) else None
