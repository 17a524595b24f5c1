"""One experiment, run several times with seeds that follow each other: how often each check held. Pure.

The seeds decide what the experiment leaves to chance (moments, places), so that the runs are trials of it: the share
that passed has an exact binomial interval, the observed value the interval of its median by order statistics, whatever
its distribution. A single run says whether it held once; this says how often it does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from harness.confidence import Interval, percentile_interval, share_interval
from harness.verdict import Check, Verdict, VerdictFile

__all__ = ["LEVEL", "Repeated", "over"]

LEVEL = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """One check over all runs. `values` are what was observed, where it was a number, in the order of the runs.

    `passed` is the share of runs in which it held, `middle` the interval of the median; None: too few numbers for one.
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


def over(verdicts: Sequence[VerdictFile]) -> tuple[Repeated, ...]:
    """Each check of the runs of one experiment, in the order of the first run that has it; `lab_restored` too.

    A run that a check is missing from (it ended in an ERROR) did not pass it.
    """
    checks_by_name: dict[tuple[str, str, str], list[Check]] = {}
    for verdict in verdicts:
        for check in verdict.checks:
            checks_by_name.setdefault((check.name, check.unit, str(check.bound)), []).append(check)
    return tuple(_one(checks, len(verdicts)) for checks in checks_by_name.values())


def _one(checks: Sequence[Check], runs: int) -> Repeated:
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
