"""Decide what happened in this run: counts, bytes, shares and means, by value and error of measurement. Pure.

No sampling error counts, because nothing is said about other runs. A value that no finite number describes decides
nothing, and a censored one (the true value is at least this) can break a maximum but never keep it.
"""

from __future__ import annotations

import math

from faultbed.harness.ledger.statistics.decision import Decision, Outcome, Rule, Sign, settle, undecided

__all__ = ["decide_fact"]


def decide_fact(
    sign: Sign,
    bound: float | str,
    value: float | str | None,
    *,
    between: tuple[float, float] | None = None,
    censored: bool = False,
) -> Decision:
    """Decide a bound on a fact.

    Args:
        sign: how the value compares with the bound.
        bound: in the unit of the value; a name for a value that is a name.
        value: what was measured; None: nothing was.
        between: lowest and highest value that errors of measurement leave open; None: the value is exact.
        censored: the true value is at least `value`.
    """
    rule = Rule(kind="value" if between is None else "range")
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return undecided(None, rule, "no-value")
    if isinstance(value, str) or isinstance(bound, str):
        return _decide_name(sign, bound, value, rule, censored=censored)
    low, high = between or (value, value)
    return settle(
        sign,
        bound,
        observed=value,
        low=low,
        high=math.inf if censored else high,
        rule=rule,
        why="censored" if censored else "within-error",
    )


def _decide_name(sign: Sign, bound: float | str, value: float | str, rule: Rule, *, censored: bool) -> Decision:
    """Compare names, which can only be equal or not."""
    if sign != "equals" or censored:
        return undecided(value, rule, "censored" if censored else "no-value")
    return Decision(outcome=Outcome.HOLDS if value == bound else Outcome.BROKEN, observed=value, rule=rule)
