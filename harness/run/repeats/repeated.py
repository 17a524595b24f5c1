"""One experiment, run several times with seeds that follow each other: how often each check passed. Pure.

The seeds select what the experiment leaves open (times, targets), so the runs are independent trials. The share of runs
that passed has an exact binomial interval. The median of the observed values has an interval by order statistics, which
holds for any distribution.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from harness.confidence import Interval, percentile_interval, share_interval
from harness.verdict import Check, Verdict, VerdictFile

__all__ = ["LEVEL", "Repeated", "repeated_checks"]

LEVEL = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """One check over all runs. `values` are the numbers that were observed, in the order of the runs.

    `passed` is the interval of the share of runs that passed it, `middle` the interval of the median; None: too few
    numbers for one.
    """

    name: str
    unit: str
    bound: float | int | str | None
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    values: tuple[float, ...] = ()
    passed: Interval
    middle: Interval | None

    @property
    def median(self) -> float | None:
        """Median of the values; None: there are none."""
        return float(np.median(self.values)) if self.values else None


def repeated_checks(verdicts: Sequence[VerdictFile]) -> tuple[Repeated, ...]:
    """Return the checks of all runs of one experiment, `lab_restored` included, in order of their first run.

    A run that lacks a check, because it ended in an ERROR, counts as not passed.
    """
    checks_by_name: dict[tuple[str, str, str], list[Check]] = {}
    for verdict in verdicts:
        for check in verdict.checks:
            checks_by_name.setdefault((check.name, check.unit, str(check.bound)), []).append(check)
    return tuple(_repeated(checks, len(verdicts)) for checks in checks_by_name.values())


def _repeated(checks: Sequence[Check], runs: int) -> Repeated:
    values = tuple(
        float(check.observed)
        for check in checks
        if isinstance(check.observed, int | float) and not isinstance(check.observed, bool)
    )
    verdicts = Counter(check.verdict for check in checks)
    return Repeated(
        name=checks[0].name,
        unit=checks[0].unit,
        bound=checks[0].bound,
        verdicts=verdicts,
        values=values,
        passed=share_interval(verdicts[Verdict.PASS], runs, level=LEVEL),
        middle=percentile_interval(np.array(values), 50, level=LEVEL),
    )
