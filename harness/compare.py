"""Two runs of one experiment beside each other: another firmware, another configuration, the same seed. Pure.

Each performance has the ratio B over A with its 99 % interval, and it is *worse* or *better* only when the whole
interval says so; everything else is *no difference shown*, with how large one could hide in it. Job time is compared
over the iterations that both finished. A recovery happened once in each run: one of each says nothing about the next.
What differs from run to run anyhow is not in one pair: give the lab's noise floor (`harness.noise`) where it is known,
and the interval of the job time is widened by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from harness import statistics
from harness.intervals import disturbed, iteration_times
from harness.measurements import Measurements
from harness.metrics import METRICS, lookup
from harness.noise import NoiseFloor
from harness.observe import Observation, Observed, observe
from harness.plan import Plan
from harness.statistics import Interval
from harness.timeline import finished_iterations

__all__ = ["HIGHER_IS_BETTER", "Row", "Says", "compare", "differences"]

Says = Literal["better", "worse", "no difference shown", "not comparable"]
HIGHER_IS_BETTER = frozenset({"goodput.mean", "busbw.mean", "goodput_min_ratio", "iterations"})
"""Of all others less is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One metric of both runs; `ratio` is B over A, None where there is none."""

    metric: str
    unit: str
    a: float | str | None
    b: float | str | None
    ratio: float | None
    interval: Interval | None
    says: Says
    why: str


def differences(a: Plan, b: Plan) -> tuple[str, ...]:
    """What makes two runs more than one change apart, in words; nothing: same experiment, seed, faults and lab."""
    pairs: Mapping[str, tuple[object, object]] = {
        "experiment": (a.experiment, b.experiment),
        "seed": (a.seed, b.seed),
        "inventory": (a.inventory[:12], b.inventory[:12]),
        "version of faultbed": (a.faultbed, b.faultbed),
    }
    found = [f"{name}: {left} and {right}" for name, (left, right) in pairs.items() if left != right]
    if a.workload != b.workload:
        keys = sorted(key for key in {*a.workload, *b.workload} if a.workload.get(key) != b.workload.get(key))
        found.append(f"workload: {', '.join(f'{key} {a.workload.get(key)} and {b.workload.get(key)}' for key in keys)}")
    if a.faults != b.faults:
        found.append("the faults, or when they come")
    return tuple(found)


def compare(a: Measurements, b: Measurements, *, floor: NoiseFloor | None = None) -> tuple[Row, ...]:
    """B against A, the job's time first."""
    seen_a, seen_b = observe(a), observe(b)
    rows = [_job_time(a, b, seen_a, seen_b, floor)]
    for name, left in seen_a.metrics.items():
        right = seen_b.metrics.get(name)
        if right is not None and not (left.value is None and right.value is None):
            metric = METRICS.get(name) or lookup(name, seen_a.impacts)
            rows.append(_row(name, metric.unit if metric else "s", left, right))
    return tuple(rows)


def _job_time(a: Measurements, b: Measurements, seen_a: Observed, seen_b: Observed, floor: NoiseFloor | None) -> Row:
    count = min(finished_iterations(a.series), finished_iterations(b.series))
    if count == 0:
        why = "no iteration that both runs finished"
        return Row(
            metric="job time", unit="s", a=None, b=None, ratio=None, interval=None, says="not comparable", why=why
        )
    times_a, times_b = iteration_times(a.series, count), iteration_times(b.series, count)
    interval = statistics.total_ratio(
        times_b,
        times_a,
        quiet=~disturbed(b, seen_b.impacts, times_b),
        quiet_control=~disturbed(a, seen_a.impacts, times_a),
        before=0,
    )
    spread = floor.spreads.get("job_time") if floor else None
    if interval is not None and spread is not None:
        source = f"the lab's noise floor of {spread.runs} fault-free runs"
        interval = statistics.widened(interval, math.sqrt(2) * spread.log_sd, source=source)
    ratio = float(times_b.sum() / times_a.sum())
    return Row(
        metric="job time",
        unit="s",
        a=float(times_a.sum()) / 1e9,
        b=float(times_b.sum()) / 1e9,
        ratio=ratio,
        interval=interval,
        says=_says("job time", interval),
        why=f"the first {count} iterations; " + (str(interval) if interval else "too few to know their noise"),
    )


def _row(name: str, unit: str, left: Observation, right: Observation) -> Row:
    ratio, interval, says, why = None, None, _same(left, right), right.detail
    if isinstance(left.value, int | float) and isinstance(right.value, int | float) and left.value > 0:
        ratio = float(right.value) / float(left.value)
        if _once(left) or _once(right):
            why = "it happened once in each run; only repeats can compare it"
        elif left.interval and right.interval and not (left.censored or right.censored):
            interval = statistics.ratio_interval(right.interval, left.interval, ratio)
            says, why = _says(name, interval), str(interval) if interval else "one of the intervals reaches to 0"
    return Row(metric=name, unit=unit, a=left.value, b=right.value, ratio=ratio, interval=interval, says=says, why=why)


def _once(one: Observation) -> bool:
    """Whether its interval is what the measurement resolves, and not how much it differs from time to time."""
    return one.interval is not None and one.interval.level == 1


def _same(left: Observation, right: Observation) -> Says:
    """Counts and names that are alike differ in nothing; two counts that are not say nothing without repeats."""
    return "no difference shown" if left.value == right.value else "not comparable"


def _says(name: str, interval: Interval | None) -> Says:
    if interval is None:
        return "not comparable"
    if interval.low > 1:
        return "better" if name in HIGHER_IS_BETTER else "worse"
    if interval.high < 1:
        return "worse" if name in HIGHER_IS_BETTER else "better"
    return "no difference shown"
