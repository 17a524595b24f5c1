"""Stop conditions: bounds on live values that end the faults and the run. Pure.

    [[stop]]
    metric = "goodput_ratio"
    min = 0.1
    for = "5s"

A condition *holds* while its value is beyond its bound, here below 0.1. While faults are on, each condition is compared
with live values at least once a second (`faultbed.harness.parts.stops.live_guard`). The first condition that holds for
its time (`for`) ends the faults and the run at once, as FAIL, or as INCONCLUSIVE if the experiment says so. A
condition is also INCONCLUSIVE

- if its value was never known;
- if its value was known for less than its time;
- if every known value within its time was beyond the bound, but some values in between were unknown;
- if it may have held while it was not evaluated: the gap between two known values, or before the first or after the
  last one, is longer than `MISSING_NS`, and long enough for its time. Counts that never fall have no such gaps.

Missing data end the faults, too, and the run is INCONCLUSIVE: if the value of a condition is unknown for more than
`MISSING_NS` although it was known before, or should be known by now. An experiment without `[[stop]]` has no guard.

Before the first fault the workload must be healthy (`faultbed.harness.parts.stops.live_guard`). Otherwise no fault is
armed (`Guard.refused`), and the run is INCONCLUSIVE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from faultbed.harness.verdict import Verdict

__all__ = ["METRICS", "Condition", "Metric"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A value that is known during a run. `bound` says whether a stop condition is its minimum or its maximum.

    `never_falls`: the value is a count of events, so that a later value includes what happened while nothing was read.
    """

    name: str
    unit: Literal["s", "ratio", "count"]
    bound: Literal["min", "max"]
    meaning: str
    never_falls: bool = False


_TABLE = (
    Metric(name="qp_errors", unit="count", bound="max", meaning="Queue pairs that were lost so far", never_falls=True),
    Metric(
        name="goodput_ratio",
        unit="ratio",
        bound="min",
        meaning="Goodput of all ranks in the last whole second, over the mean before the first fault",
    ),
    Metric(
        name="silence",
        unit="s",
        bound="max",
        meaning="Longest time since a machine of the lab last reported (each reports every 4 s, under emulation "
        "every 8 s)",
    ),
    Metric(
        name="kernel.broken",
        unit="count",
        bound="max",
        meaning="Machines whose kernel has reported its own bug",
        never_falls=True,
    ),
    Metric(
        name="slow_ranks",
        unit="count",
        bound="max",
        meaning="Ranks that compute slower than before, as named by the online detector",
    ),
)
METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _TABLE}
"""What a stop condition can bound, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Stop when `metric` is beyond `bound` (in its unit) for `for_ns` without a break; the run is then `verdict`."""

    metric: Metric
    bound: float
    for_ns: int = 0
    verdict: Verdict = Verdict.FAIL

    def holds(self, value: float) -> bool:
        """Return whether a value is beyond the bound."""
        return value > self.bound if self.metric.bound == "max" else value < self.bound
