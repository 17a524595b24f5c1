"""Decide a contrast within one run: a fault against the same run before and after it. Pure.

The level of a machine may move within a run. So a fault is compared with two controls, before it and after it, and with
the level tolerance of the machine: a bound holds if it holds against the less favourable control and a machine that was
τ times better meanwhile, and is broken if it is broken against the more favourable one and a machine that was τ times
worse. Without a control on both sides a contrast is undecided.

Each fault of a run is a member with its own decision: the bound holds if it holds for every member, each at the full
tail (Berger 1982, Technometrics 24:295), and is broken if it is broken for one member at the tail ÷ k (Bonferroni).
Both ranges of a member are made at the tail ÷ k, which is the stricter one for both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from faultbed.harness.ledger.statistics.decision import Decision, Outcome, Rule, Sign, Tolerance, settle, undecided

__all__ = ["Member", "decide_contrast"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One fault's contrast, a ratio of 0 or more.

    `before` and `after` are the ranges of the ratio against either control at the tail of one of all members; None:
    there is no such control, or its noise is not known.
    """

    name: str
    value: float
    before: tuple[float, float] | None
    after: tuple[float, float] | None


def decide_contrast(
    sign: Sign, bound: float, members: Sequence[Member], *, tolerance: Tolerance, tail: float
) -> Decision:
    """Decide a bound on the ratio of every member.

    Args:
        sign: min or max.
        bound: a ratio.
        members: one for each fault of the run, with ranges at `tail` ÷ their number.
        tolerance: of the machine.
        tail: probability of a wrong FAIL of this check.
    """
    rule = Rule(kind="contrast", tail=tail, tolerance=tolerance, members=max(1, len(members)))
    if not members or any(not math.isfinite(member.value) for member in members):
        return undecided(None, rule, "no-value")
    decisions = [_decide_member(sign, bound, member, tolerance, rule) for member in members]
    worst = (min if sign == "min" else max)(
        decisions, key=lambda decision: float(decision.observed) if decision.observed is not None else 0.0
    )
    for outcome in (Outcome.BROKEN, Outcome.UNDECIDED):
        those = [decision for decision in decisions if decision.outcome is outcome]
        if those:
            return worst if worst in those else those[0]
    return worst


def _decide_member(sign: Sign, bound: float, member: Member, tolerance: Tolerance, rule: Rule) -> Decision:
    if member.before is None or member.after is None:
        return undecided(member.value, rule, "no-control", subject=member.name)
    ranges = (member.before, member.after)
    low, high = min(known[0] for known in ranges), max(known[1] for known in ranges)
    apart = [
        settle(sign, bound, observed=member.value, low=known[0], high=known[1], rule=rule, why="within-error").outcome
        for known in ranges
    ]
    return settle(
        sign,
        bound,
        observed=member.value,
        low=low / tolerance.factor,
        high=high * tolerance.factor,
        rule=rule,
        why="controls-disagree" if len(set(apart)) > 1 else "within-tolerance",
        subject=member.name,
    )
