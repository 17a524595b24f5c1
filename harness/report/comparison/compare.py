"""Compare two runs of one experiment: another firmware, another configuration, the same seed. Pure.

Each performance metric has the ratio B over A with its 99 % interval. It is *worse* or *better* only if the whole
interval is on that side of 1, or *higher* or *lower* for a metric that has no better side. Otherwise *no difference
shown* is reported, with the largest difference that the interval could hide. If only one run has wrong data, that run
is worse, without an interval. Job time is compared over the iterations that both runs finished. A recovery happened
once in each run, so it is never worse or better.

One pair of runs does not show the variation between runs. If the lab's noise floor (`faultbed.harness.analysis.noise`)
is given, it widens the intervals of job time, of metrics that depend on it (goodput, `jct_ratio`), and of `busbw.mean`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from faultbed.harness import confidence, judge
from faultbed.harness.analysis import timeline
from faultbed.harness.analysis.ettr import work_share
from faultbed.harness.analysis.intervals import disturbed, iteration_times
from faultbed.harness.analysis.links import emulation_headroom
from faultbed.harness.analysis.noise import NoiseFloor
from faultbed.harness.analysis.observations import Observation
from faultbed.harness.analysis.observe import Observed
from faultbed.harness.analysis.timeline import finished_iterations
from faultbed.harness.confidence import Interval
from faultbed.harness.experiment.metrics import METRICS, lookup
from faultbed.harness.experiment.run_plan import Plan
from faultbed.harness.ledger.sealed import Sealed
from faultbed.harness.proof import why_unproven_in
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.report.comparison.differences import of_plans, words

__all__ = ["HIGHER_IS_BETTER", "Outcome", "Row", "compare", "differences", "doubts"]

Outcome = Literal["better", "worse", "higher", "lower", "no difference shown", "not comparable"]
HIGHER_IS_BETTER = frozenset(
    {
        "goodput.mean",
        "busbw.mean",
        "goodput_min_ratio",
        "goodput_mean_ratio",
        "goodput.after_ratio",
        "bystander.goodput_ratio",
        "iterations",
        "ettr",
        "slo_attainment",
    }
)
"""Metrics of which more is better. Less is better for all others, except those with a prefix of `_NEITHER`."""
_NEITHER = ("split.", "bisection", "link_utilisation.")
"""Prefixes of metrics without a better side: utilisation of links, and shares of a whole, which grow when another share
improves."""
_WRONG_DATA = frozenset({"wrong_elements", "state_errors"})
"""Counts that are 0 unless something is broken, however often the run is repeated."""
_FLOOR = {"job time": "job_time", "goodput.mean": "job_time", "jct_ratio": "job_time", "busbw.mean": "collective"}
"""The entry of the noise floor that applies to each metric. A rate varies like the time over which it is measured."""
_RUNS = {"jct_ratio": 4}
"""Number of runs that enter a ratio, if not 2: `jct_ratio` also uses the twin of each run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One metric of both runs; `ratio` is B over A, None if undefined.

    `own` is the interval from the two runs alone. `interval`, which decides, is widened by the lab's noise floor.
    """

    metric: str
    unit: str
    a: float | str | None
    b: float | str | None
    ratio: float | None
    interval: Interval | None
    says: Outcome
    why: str
    own: Interval | None = None


def differences(first: Plan, second: Plan) -> tuple[str, ...]:
    """Describe every difference between two plans; empty for the same experiment, seed, faults and lab."""
    return words(of_plans(first, second))


def compare(
    run_a: RunEvidence,
    run_b: RunEvidence,
    *,
    sealed: tuple[Sealed, Sealed] = (Sealed(), Sealed()),
    floor: NoiseFloor | None = None,
) -> tuple[Row, ...]:
    """Compare B with A, job time first. If there is a doubt about a run (`doubts`), nothing is better or worse.

    `sealed` is the evidence of the parts of both runs.
    """
    observed_a, observed_b = judge.observed_of(run_a, sealed[0]), judge.observed_of(run_b, sealed[1])
    rows = [_job_time(run_a, run_b, observed_a, observed_b, floor)]
    for name, left in observed_a.metrics.items():
        right = observed_b.metrics.get(name)
        if right is not None and not (left.value is None and right.value is None):
            metric = METRICS.get(name) or lookup(name, observed_a.impacts)
            rows.append(_row(name, metric.unit if metric else "s", left, right, floor))
    doubt = next((f"{letter}: {why}" for letter, run in (("A", run_a), ("B", run_b)) for why in doubts(run)), None)
    if doubt is None:
        return tuple(rows)
    return tuple(replace(row, says="not comparable", why=doubt) for row in rows)


def doubts(run: RunEvidence) -> Iterator[str]:
    """Yield each reason why a run is not valid for its experiment, such as a fault that is not proved."""
    yield from run.lab.errors
    if run.workload.failure is not None:
        yield f"the workload failed: {run.workload.failure}"
    load = run.emulation
    if load is None:
        yield "nothing says whether the emulation carries the load: the evidence of it is missing"
    elif load.offered_bps is not None and emulation_headroom.exceeds_headroom(load.offered_bps, load.carried_bps):
        yield emulation_headroom.describe_headroom(load.offered_bps, load.carried_bps)
    for fault in run.injected.faults:
        yield from (f"{fault.plan.id} is not proven: {reason}" for reason in why_unproven_in(run, fault))
    if run.routing is not None:
        yield from (f"{run.routing.scheme} is not proven: {reason}" for reason in run.routing.unproven)


def _job_time(
    run_a: RunEvidence, run_b: RunEvidence, observed_a: Observed, observed_b: Observed, floor: NoiseFloor | None
) -> Row:
    series_a, series_b = timeline.paired(run_a.workload.series, run_b.workload.series)
    count = min(finished_iterations(series_a), finished_iterations(series_b))
    alike = work_share(run_a) == work_share(run_b)
    if count == 0 or not alike:
        why = "no iteration that both runs finished"
        if not alike:
            why = "a job went on with fewer ranks, so that its iterations are less work than the other job's"
        return Row(
            metric="job time", unit="s", a=None, b=None, ratio=None, interval=None, says="not comparable", why=why
        )
    times_a, times_b = (
        iteration_times(series, count, timeline.job_start_ns(run) or timeline.first_start_ns(run.workload.series))
        for run, series in ((run_a, series_a), (run_b, series_b))
    )
    own = confidence.total_ratio(
        times_b,
        times_a,
        quiet=~disturbed(run_b, observed_b.impacts, times_b),
        quiet_control=~disturbed(run_a, observed_a.impacts, times_a),
        before=0,
    )
    ratio = float(times_b.sum() / times_a.sum())
    interval = _widened("job time", ratio, own, floor)
    return Row(
        metric="job time",
        unit="s",
        a=float(times_a.sum()) / 1e9,
        b=float(times_b.sum()) / 1e9,
        ratio=ratio,
        interval=interval,
        says=_outcome("job time", interval),
        why=f"the first {count} iterations; " + (str(interval) if interval else "too few to know their noise"),
        own=own,
    )


def _row(name: str, unit: str, left: Observation, right: Observation, floor: NoiseFloor | None) -> Row:
    row = Row(
        metric=name,
        unit=unit,
        a=left.value,
        b=right.value,
        ratio=None,
        interval=None,
        says=_of_counts(name, left, right),
        why=right.detail,
    )
    if not (isinstance(left.value, int | float) and isinstance(right.value, int | float) and left.value > 0):
        return row
    ratio = float(right.value) / float(left.value)
    if _is_resolution_only(left) or _is_resolution_only(right):
        return replace(row, ratio=ratio, why="it happened once in each run; only repeats can compare it")
    if not (left.interval and right.interval) or left.censored or right.censored:
        return replace(row, ratio=ratio)
    if math.inf in (left.interval.high, right.interval.high):
        return replace(row, ratio=ratio, why="too few values for an upper end of the interval")
    own = confidence.ratio_interval(right.interval, left.interval, (float(right.value), float(left.value)))
    interval = _widened(name, ratio, own, floor)
    why = str(interval) if interval else "one of the intervals reaches to 0"
    return replace(row, ratio=ratio, interval=interval, own=own, says=_outcome(name, interval), why=why)


def _widened(name: str, ratio: float, interval: Interval | None, floor: NoiseFloor | None) -> Interval | None:
    """Widen an interval by the variation between runs, if the lab's noise floor covers the metric."""
    spread = floor.spreads.get(_FLOOR.get(name, "")) if floor else None
    if interval is None or spread is None:
        return interval
    source = f"the lab's noise floor of {spread.runs} fault-free runs"
    return confidence.widened(
        interval, ratio, math.sqrt(_RUNS.get(name, 2)) * spread.log_sd, freedom=spread.runs - 1, source=source
    )


def _is_resolution_only(observation: Observation) -> bool:
    """Return whether the interval only reflects the measurement's resolution, not the variation between runs."""
    return observation.interval is not None and observation.interval.level == 1


def _of_counts(name: str, left: Observation, right: Observation) -> Outcome:
    """Compare counts and names. Equal values show no difference; unequal values of two runs decide nothing.

    Exception: the run with wrong data is worse, if the other run checked all of its data.
    """
    if name in _WRONG_DATA and left.value == 0 and right.value and not left.censored:
        return "worse"
    if name in _WRONG_DATA and left.value and right.value == 0 and not right.censored:
        return "better"
    return "no difference shown" if left.value == right.value else "not comparable"


def _outcome(name: str, interval: Interval | None) -> Outcome:
    if interval is None:
        return "not comparable"
    if interval.low <= 1 <= interval.high:
        return "no difference shown"
    is_higher = interval.low > 1
    if name.startswith(_NEITHER):
        return "higher" if is_higher else "lower"
    return "better" if is_higher == (name in HIGHER_IS_BETTER) else "worse"
