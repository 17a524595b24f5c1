"""Decide a share of independent trials, such as the probes that a link loses, by its exact binomial range. Pure."""

from __future__ import annotations

from scipy import special

from faultbed.harness.ledger.statistics.decision import Decision, Rule, Sign, settle, undecided

__all__ = ["decide_share"]


def decide_share(sign: Sign, bound: float, count: int, total: int, *, tail: float) -> Decision:
    """Decide a bound on the share of trials that have a property (Clopper and Pearson 1934, Biometrika 26:404).

    Args:
        sign: min or max.
        bound: a share, 0 to 1.
        count: trials with the property.
        total: all trials.
        tail: probability of a wrong decision on each side.

    Raises:
        ValueError: not 0 <= count <= total.
    """
    if not 0 <= count <= total:
        raise ValueError(f"{count} of {total} trials is no share; count each trial once")
    rule = Rule(kind="binomial", tail=tail)
    if not total:
        return undecided(None, rule, "no-value")
    low = 0.0 if count == 0 else float(special.betaincinv(count, total - count + 1, tail))
    high = 1.0 if count == total else float(special.betaincinv(count + 1, total - count, 1 - tail))
    return settle(sign, bound, observed=count / total, low=low, high=high, rule=rule, why="not-significant")
