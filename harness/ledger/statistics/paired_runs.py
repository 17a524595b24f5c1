"""Decide a property of the setting from runs and their fault-free twins: sign flips. Pure.

If the faults multiply the time of every run by exactly the bound, the sign of log(run ÷ twin) - log(bound) is as good
as a coin, provided that the machine treats both of a pair alike (Fisher 1935, The Design of Experiments). Fisher
draws the order of each pair. Here the twin always runs first, so a drift that lasts for many pairs is a bias: the
symmetry is an assumption about the machine, and not yet a design. The signs are weighted by the ranks of the
differences, which are bounded, so that a pair without a value has a least favourable one.

A rejected bound says that not every run is beyond it (Caughey, Dafoe, Li and Miratrix 2023, J. R. Stat. Soc. B
85:1471). It is a bound of *the* factor only if that is constant. `Rule.unseen_share` is the share of runs that may be
slow without any of the pairs showing it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from faultbed.harness.ledger.statistics.decision import Decision, Look, Reason, Rule, Sign, settle, undecided
from faultbed.harness.ledger.statistics.missing_runs import known_values, with_missing

__all__ = ["decide_pairs", "factor_range"]


def decide_pairs(
    sign: Sign, bound: float, ratios: Sequence[float | None], *, looks: Sequence[Look], planned: Sequence[Look] = ()
) -> Decision:
    """Decide a bound on the factor by which the faults lengthen a run.

    Args:
        sign: min or max.
        bound: a factor above 0.
        ratios: time of each run over that of its twin, in the order of the runs; None: the pair has no value.
        looks: the analyses that are due, in order. The first one that decides counts.
        planned: all analyses, also those that are not due yet; empty: `looks`.
    """
    outcome = undecided(None, _rule(0, 0, None, planned or looks), "too-few-runs")
    for look in looks:
        outcome = _decide_once(sign, bound, ratios[: look.runs], look, planned or looks)
        if outcome.why is None:
            break
    return outcome


def _decide_once(
    sign: Sign, bound: float, ratios: Sequence[float | None], look: Look, planned: Sequence[Look]
) -> Decision:
    known, missing = known_values(ratio if ratio is None or ratio > 0 else None for ratio in ratios)
    missing += max(0, look.runs - len(ratios))
    rule = _rule(len(known) + missing, missing, look.tail, planned)
    if not known:
        return undecided(None, rule, "missing-runs" if missing else "too-few-runs")
    middle = math.exp(math.fsum(map(math.log, known)) / len(known))
    low, high = factor_range(known, missing, look.tail)
    if math.isinf(high) and low == 0:
        return undecided(middle, rule, "missing-runs" if missing else "too-few-runs")
    why: Reason = "missing-runs" if missing else "not-significant"
    return settle(sign, bound, observed=middle, low=low, high=high, rule=rule, why=why, is_open=True)


def _rule(runs: int, missing: int, tail: float | None, planned: Sequence[Look]) -> Rule:
    unseen = None if not runs or tail is None else 1 - tail ** (1 / runs)
    looks = tuple(planned) if len(planned) > 1 else ()
    return Rule(kind="sign-flips", tail=tail, runs=runs, missing=missing, looks=looks, unseen_share=unseen)


def factor_range(known: Sequence[float], missing: int, tail: float) -> tuple[float, float]:
    """Return the factors that sign flips do not reject at `tail` on each side; 0 and infinity: nothing is rejected.

    The ends are means of two logarithms (Hodges and Lehmann 1963, Ann. Math. Stat. 34:598): so many of all such means
    lie beyond an end as the sum of ranks may have at this tail.
    """
    beyond = _most_beyond(len(known) + missing, tail)
    if beyond is None:
        return 0.0, math.inf
    logs = np.log(np.array(known))
    low = _mean_of_two(np.array(with_missing(logs.tolist(), missing, worst=-math.inf)), beyond)
    high = -_mean_of_two(-np.array(with_missing(logs.tolist(), missing, worst=math.inf)), beyond)
    return math.exp(low), math.exp(high) if high < math.inf else math.inf


def _mean_of_two(logs: np.ndarray[tuple[int], np.dtype[np.float64]], beyond: int) -> float:
    """Return the mean of two values, or of one with itself, that exceeds `beyond` others of such means."""
    first, second = np.triu_indices(len(logs))
    return float(np.partition((logs[first] + logs[second]) / 2, beyond)[beyond])


@functools.cache
def _most_beyond(runs: int, tail: float) -> int | None:
    """Return the largest sum of ranks that coins exceed downwards with at most the probability `tail`; None: none.

    The ranks are 1 to `runs`, and each counts if its coin falls on heads.
    """
    chances = np.zeros(runs * (runs + 1) // 2 + 1)
    chances[0] = 1.0
    for rank in range(1, runs + 1):
        chances[rank:] = (chances[rank:] + chances[:-rank]) / 2
        chances[:rank] /= 2
    most = int(np.searchsorted(np.cumsum(chances), tail * (1 + 1e-9), side="right")) - 1
    return most if most >= 0 else None
