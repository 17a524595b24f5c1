"""Decide a property of the setting from runs without a twin: a sign test on one value from each run. Pure.

The decision is about the median of runs, for any distribution of their values (Conover 1999, Practical Nonparametric
Statistics, section 3.4). Its range ends at two of the values.

Consecutive runs share the slow level of a machine, and nothing random separates it from the setting. So they count as
the number of independent runs that an AR(1) series of their ranks is worth, with a lag-1 correlation that is
`_CAUTION` standard errors above the estimated one (Kendall 1954; Zwiers and von Storch 1995). About 20 runs are worth
the 8 that a decision at 0.5 % needs. Units that are drawn at random, such as permutations, count in full.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
from scipy import special

from faultbed.harness.ledger.statistics.decision import Decision, Look, Reason, Rule, Sign, settle, undecided
from faultbed.harness.ledger.statistics.missing_runs import known_values, with_missing

__all__ = ["WORTH", "decide_runs", "independent_runs", "median_range"]

WORTH = 0.45
"""How many independent runs a consecutive one is worth, if their order shows no correlation."""
_CAUTION = 1.75
_HALF = 0.5


def decide_runs(
    sign: Sign,
    bound: float,
    values: Sequence[float | None],
    *,
    looks: Sequence[Look],
    planned: Sequence[Look] = (),
    are_drawn: bool = False,
) -> Decision:
    """Decide a bound on the median of runs.

    Args:
        sign: min or max.
        bound: in the unit of the values.
        values: one of each run, in the order of the runs; None: the run has none.
        looks: the analyses that are due, in order. The first one that decides counts.
        planned: all analyses, also those that are not due yet; empty: `looks`.
        are_drawn: the runs are drawn independently at random, so that their order carries nothing.
    """
    outcome = undecided(None, _rule(0, 0, None, planned or looks), "too-few-runs")
    for look in looks:
        outcome = _decide_once(sign, bound, values[: look.runs], look, planned or looks, are_drawn=are_drawn)
        if outcome.why is None:
            break
    return outcome


def _decide_once(
    sign: Sign,
    bound: float,
    values: Sequence[float | None],
    look: Look,
    planned: Sequence[Look],
    *,
    are_drawn: bool,
) -> Decision:
    known, missing = known_values(values)
    missing += max(0, look.runs - len(values))
    rule = _rule(len(known) + missing, missing, look.tail, planned)
    if not known:
        return undecided(None, rule, "missing-runs" if missing else "too-few-runs")
    middle = float(np.median(known))
    worth = float(len(known) + missing) if are_drawn else independent_runs(known) * (1 + missing / len(known))
    low, high = median_range(known, missing, worth, look.tail)
    if math.isinf(low) and math.isinf(high):
        return undecided(middle, rule, "missing-runs" if missing else "too-few-runs")
    why: Reason = "missing-runs" if missing else "not-significant"
    return settle(sign, bound, observed=middle, low=low, high=high, rule=rule, why=why, is_open=True)


def _rule(runs: int, missing: int, tail: float | None, planned: Sequence[Look]) -> Rule:
    looks = tuple(planned) if len(planned) > 1 else ()
    return Rule(kind="signs", tail=tail, runs=runs, missing=missing, looks=looks)


def median_range(known: Sequence[float], missing: int, worth: float, tail: float) -> tuple[float, float]:
    """Return the medians that a sign test does not reject at `tail` on each side; infinite ends: too few runs.

    `worth` is the number of independent runs with the same information as all of them.
    """
    count = len(known) + missing
    adverse = _most_adverse(math.floor(min(worth, count) + 1e-9), tail)
    if adverse is None:
        return -math.inf, math.inf
    place = math.floor(adverse * count / max(min(worth, count), 1.0) + 1e-9)
    low = sorted(with_missing(known, missing, worst=-math.inf))[place]
    high = sorted(with_missing(known, missing, worst=math.inf))[count - 1 - place]
    return low, high


@functools.cache
def _most_adverse(runs: int, tail: float) -> int | None:
    """Return the largest number of heads in `runs` tosses that fewer have with at most the probability `tail`."""
    if runs < 1:
        return None
    chances = special.bdtr(np.arange(runs + 1.0), runs, _HALF)
    most = int(np.searchsorted(chances, tail * (1 + 1e-9), side="right")) - 1
    return most if most >= 0 else None


def independent_runs(values: Sequence[float]) -> float:
    """Return how many independent runs a series of consecutive ones is worth, from 1 to their number."""
    count = len(values)
    _, place, ties = np.unique(np.array(values), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(ties) - (ties - 1) / 2)[place]
    deviations = ranks - ranks.mean()
    squares = float(deviations @ deviations)
    if count < 4:  # noqa: PLR2004 - a correlation of so few pairs says nothing
        return 1.0
    if not squares:
        return float(count)
    correlation = float(deviations[1:] @ deviations[:-1]) / squares
    unbiased = min(max((correlation + 1 / count) / (1 - 4 / count), -0.99), 0.99) if count > 4 else 0.99  # noqa: PLR2004
    lag1 = unbiased + _CAUTION * math.sqrt((1 - unbiased**2) / count + 4 / count**2)
    lag1 = min(max(lag1, 0.0), 0.995)
    inflation = (1 + lag1) / (1 - lag1) - 2 * lag1 * (1 - lag1**count) / (count * (1 - lag1) ** 2)
    return min(max(count / inflation, 1.0), float(count))
