"""The result of a decision about a number: holds, broken or undecided, with its rule as a value. Pure."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Literal

import msgspec

__all__ = [
    "RUN_RISK",
    "TAIL",
    "Decision",
    "Estimand",
    "Look",
    "Outcome",
    "Reason",
    "Rule",
    "Sign",
    "Tolerance",
    "describe",
    "settle",
    "tail_for",
    "undecided",
]

TAIL = 0.005
"""Largest probability of a wrong FAIL, and of a wrong PASS, of one check whose true value is its bound."""
RUN_RISK = 0.01
"""Largest probability that any check of an experiment is a wrong FAIL, if all true values are their bounds."""

Sign = Literal["min", "max", "equals"]
Estimand = Literal["fact", "event", "contrast", "setting"]
"""What a number stands for: `fact` is what happened in this run; `event` the time of an event in it; `contrast` a fault
against the same run without it; `setting` what runs of this experiment do in general."""
RuleKind = Literal["value", "range", "contrast", "tolerance", "sign-flips", "signs", "binomial"]
Reason = Literal[
    "no-value",
    "within-error",
    "censored",
    "no-interval",
    "no-control",
    "controls-disagree",
    "within-tolerance",
    "too-few-runs",
    "not-significant",
    "missing-runs",
    "faster-than-twin",
]
"""Why a decision is undecided."""


class Outcome(enum.StrEnum):
    """Whether the bound holds, is broken, or is undecided."""

    HOLDS = "HOLDS"
    BROKEN = "BROKEN"
    UNDECIDED = "UNDECIDED"


class Tolerance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """By which factor (at least 1) the level of a machine may differ between two equal runs.

    `source` is the kind of machine for which it is declared, or `measured`. Then `level` is the probability that the
    next ratio of two fault-free runs exceeds `factor`.
    """

    factor: float
    source: Literal["emulated", "kvm", "rack", "measured"]
    level: float | None = None

    def __post_init__(self) -> None:
        """Refuse a factor that would tolerate nothing, or that is not a number."""
        if not (math.isfinite(self.factor) and self.factor > 1):
            raise ValueError(f"tolerance: {self.factor} is no factor above 1; declare or measure one")


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """One analysis: after `runs` runs, with the probability `tail` of an error on each side."""

    runs: int
    tail: float


class Rule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a number was decided, for programs; `describe` is the same for people.

    Attributes:
        kind: the method.
        tail: largest probability of a wrong FAIL, and of a wrong PASS; None: no sampling error counts.
        tolerance: the level tolerance of the machine, if it counts.
        runs: number of runs or pairs that were decided together, 0: the check is about one run.
        missing: how many of them have no value; they count against every verdict.
        members: number of members that each have to hold, such as faults.
        looks: the analyses that were planned, if there are several.
        unseen_share: share of runs that may break the bound without any of so many runs showing it.
    """

    kind: RuleKind
    tail: float | None = None
    tolerance: Tolerance | None = None
    runs: int = 0
    missing: int = 0
    members: int = 1
    looks: tuple[Look, ...] = ()
    unseen_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The outcome for one bound. `interval` is the range that decided; None: there is none.

    `why` is the reason of an undecided outcome, None for any other. `subject` names the member that decided, such as a
    fault; empty: there is only one.
    """

    outcome: Outcome
    observed: float | int | str | None
    rule: Rule
    interval: tuple[float, float] | None = None
    why: Reason | None = None
    subject: str = ""

    def __post_init__(self) -> None:
        """Assert that exactly the undecided outcomes have a reason."""
        if (self.outcome is Outcome.UNDECIDED) == (self.why is None):
            raise AssertionError(f"{self.outcome} with the reason {self.why}")


def tail_for(bounds: int) -> float:
    """Return the tail of each bound of an experiment that has so many bounds with a sampling error (Bonferroni)."""
    return min(TAIL, RUN_RISK / max(bounds, 1))


def undecided(observed: float | str | None, rule: Rule, why: Reason, *, subject: str = "") -> Decision:
    """Return an undecided outcome."""
    return Decision(outcome=Outcome.UNDECIDED, observed=observed, rule=rule, why=why, subject=subject)


def settle(
    sign: Sign,
    bound: float,
    *,
    observed: float,
    low: float,
    high: float,
    rule: Rule,
    why: Reason,
    subject: str = "",
    is_open: bool = False,
) -> Decision:
    """Compare a bound with a range of possible values: HOLDS if all of it is inside, BROKEN if all is outside.

    `why` is the reason if the bound lies within the range. A range with an end that is not a number decides nothing.
    `is_open`: a bound that equals an end of the range is within it, as in a rank test of values that tie with the
    bound.
    """
    if math.isnan(low) or math.isnan(high) or low > high:
        return undecided(observed, rule, "no-interval", subject=subject)
    if sign == "equals":
        inside, outside = low == bound == high, not low <= bound <= high
    elif sign == "max":
        inside, outside = high < bound or (high == bound and not is_open), low > bound
    else:
        inside, outside = low > bound or (low == bound and not is_open), high < bound
    outcome = Outcome.HOLDS if inside else Outcome.BROKEN if outside else Outcome.UNDECIDED
    return Decision(
        outcome=outcome,
        observed=observed,
        interval=(low, high),
        rule=rule,
        why=why if outcome is Outcome.UNDECIDED else None,
        subject=subject,
    )


def describe(rule: Rule) -> str:
    """Return how a number was decided, in words; empty if its value alone was compared."""
    words = {
        "value": "",
        "range": "decided by all values that the error of measurement leaves open",
        "contrast": "decided against the lower and the higher control, each with its interval",
        "tolerance": "decided from one run beyond the level tolerance of the machine",
        "sign-flips": f"decided by sign flips of {rule.runs} pairs",
        "signs": f"decided by a sign test on one value from each of {rule.runs} runs (their median)",
        "binomial": "decided by an exact binomial interval",
    }[rule.kind]
    parts = [words] if words else []
    if rule.members > 1:
        parts.append(f"each of {rule.members} has to hold")
    if rule.tolerance is not None:
        level = "" if rule.tolerance.level is None else f", exceeded by {100 * rule.tolerance.level:.2g} % of A/A pairs"
        parts.append(f"level tolerance {rule.tolerance.factor:.4g} ({rule.tolerance.source}{level})")
    if rule.missing:
        parts.append(f"{rule.missing} without a value count against every verdict")
    if len(rule.looks) > 1:
        looks = ", ".join(f"{look.runs} ({100 * look.tail:.2g} %)" for look in rule.looks)
        parts.append(f"looked at after {looks}")
    if rule.tail is not None:
        parts.append(f"wrong FAIL at most {100 * rule.tail:.3g} %")
    if rule.unseen_share is not None:
        parts.append(f"up to {100 * rule.unseen_share:.0f} % of runs may be slow unseen")
    return "; ".join(parts)
