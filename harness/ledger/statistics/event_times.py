"""Decide how long something took that happened in this run: recovery, restart, convergence. Pure.

The range of a time has the errors of both clocks, the resolution of what saw its end, and what may be chance. If the
end was not seen, the time is at least that long: it can break a maximum, and never keeps one.
"""

from __future__ import annotations

import math

from faultbed.harness.ledger.statistics.decision import Decision, Rule, Sign, settle, undecided

__all__ = ["decide_event_time"]


def decide_event_time(
    sign: Sign, bound: float, value: float | None, *, between: tuple[float, float] | None = None, censored: bool = False
) -> Decision:
    """Decide a bound on a time.

    Args:
        sign: how the time compares with the bound.
        bound: seconds.
        value: seconds as measured; None: the event was not seen at all.
        between: shortest and longest time that the errors leave open; None: one clock stamped both ends.
        censored: the end was not seen, so that the time is at least the low end of `between`.
    """
    rule = Rule(kind="value" if between is None else "range")
    if value is None or not math.isfinite(value):
        return undecided(None, rule, "no-value")
    low, high = between or (value, value)
    return settle(
        sign,
        bound,
        observed=value,
        low=min(low, value) if censored else low,
        high=math.inf if censored else high,
        rule=rule,
        why="censored" if censored else "within-error",
    )
