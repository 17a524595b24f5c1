"""Decide a property of the setting from one run: only beyond the level tolerance of the machine. Pure.

A single run cannot tell the setting from the level that the machine had in it. The machine's level differs between two
equal runs by at most the factor τ; a bound holds if it holds for a machine that was τ times better in this run than it
will be, and is broken if it is broken for one that was τ times worse (the sensitivity analysis of Rosenbaum 2002,
Observational Studies, chapter 4). The sampling error within the run comes on top.

τ is declared for each kind of machine, or measured: the largest of m ratios of two fault-free runs under equal
conditions. The next such ratio exceeds it with the probability 1 / (m + 1) (Wilks 1941, Ann. Math. Stat. 12:91).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from faultbed.harness.ledger.statistics.decision import Decision, Rule, Sign, Tolerance, settle, undecided

__all__ = ["DECLARED", "MIN_RATIOS", "decide_from_one_run", "declared_tolerance", "measured_tolerance"]

MIN_RATIOS = 19
"""Number of A/A ratios that may lower a declared tolerance: the next ratio exceeds the largest of 19 in one of 20
cases. Fewer can only raise it."""

DECLARED = {
    "emulated": Tolerance(factor=1.75, source="emulated"),
    "kvm": Tolerance(factor=1.2, source="kvm"),
    "rack": Tolerance(factor=1.1, source="rack"),
}
"""Level tolerance by kind of machine."""


def declared_tolerance(lab_kind: Literal["soft", "rack"], accelerator: str | None) -> Tolerance:
    """Return the declared tolerance of a lab. A soft lab whose accelerator is not known counts as emulated."""
    if lab_kind == "rack":
        return DECLARED["rack"]
    return DECLARED["kvm" if accelerator == "kvm" else "emulated"]


def measured_tolerance(ratios: Sequence[float], declared: Tolerance) -> Tolerance:
    """Return the tolerance that A/A ratios show: the largest of them, in either direction.

    Fewer than `MIN_RATIOS` ratios never lower the declared tolerance. `ratios` are those of disjoint pairs of
    fault-free runs under equal conditions.

    Raises:
        ValueError: a ratio is not a positive number.
    """
    if any(not (math.isfinite(ratio) and ratio > 0) for ratio in ratios):
        raise ValueError(f"A/A ratios {[*ratios]}: each has to be a positive number; leave out runs without a time")
    largest = max((max(ratio, 1 / ratio) for ratio in ratios), default=1.0)
    if largest <= 1 or (len(ratios) < MIN_RATIOS and largest <= declared.factor):
        return declared
    return Tolerance(factor=largest, source="measured", level=1 / (len(ratios) + 1))


def decide_from_one_run(
    sign: Sign,
    bound: float,
    value: float | None,
    *,
    interval: tuple[float, float] | None,
    tolerance: Tolerance,
    tail: float,
) -> Decision:
    """Decide a bound on a property of the setting from one run.

    Args:
        sign: how the value compares with the bound.
        bound: in the unit of the value.
        value: of this run, 0 or more; None: there is none.
        interval: where the run's own noise leaves the value, with the probability `tail` beyond each end; None: the
            noise is not known.
        tolerance: of the machine.
        tail: probability of a sampling error on one side.
    """
    rule = Rule(kind="tolerance", tail=tail, tolerance=tolerance)
    if value is None or not math.isfinite(value):
        return undecided(None, rule, "no-value")
    if interval is None or any(math.isnan(end) for end in interval) or interval[0] < 0:
        return undecided(value, rule, "no-interval")
    low, high = interval[0] / tolerance.factor, interval[1] * tolerance.factor
    return settle(sign, bound, observed=value, low=low, high=high, rule=rule, why="within-tolerance")
