"""One experiment, run several times with consecutive seeds: how often each check passed. Pure.

The bound of a check may differ from run to run, such as the load that the emulation forwards, which is measured again.
Each run is then judged by its own bound.

The seeds select what the experiment leaves open (times, targets), so the runs are independent trials. The share of runs
that passed has an exact binomial interval. The median of the observed values has an interval by order statistics, which
holds for any distribution.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from faultbed.harness.check_places import Place, places
from faultbed.harness.confidence import Interval, percentile_interval, share_interval
from faultbed.harness.verdict import Check, Verdict, VerdictFile

__all__ = ["LEVEL", "Repeated", "repeated_checks"]

LEVEL = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """One check over all runs. `values` are the numbers that were observed, in the order of the runs.

    `bounds` are the bounds that it was compared with, each once, in that order; more than one if they differ.
    `passed` is the interval of the share of runs that passed it, `middle` the interval of the median; None: too few
    numbers for one.
    """

    name: str
    unit: str
    bounds: tuple[float | int | str | None, ...]
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
    by_place: dict[Place, list[Check]] = {}
    for verdict in verdicts:
        for place, check in places(verdict.checks):
            by_place.setdefault(place, []).append(check)
    return tuple(_repeated(checks, len(verdicts)) for checks in by_place.values())


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
        bounds=tuple(dict.fromkeys(check.bound for check in checks)),
        verdicts=verdicts,
        values=values,
        passed=share_interval(verdicts[Verdict.PASS], runs, level=LEVEL),
        middle=percentile_interval(np.array(values), 50, level=LEVEL),
    )
