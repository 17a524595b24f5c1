"""Compare two pools of runs, such as those of two fabrics, for equivalence within a margin. Pure.

Runs of one pool differ in nothing but their seed. Those of the other pool have the same workload on another lab, with
other faults, or with another routing scheme: that is what is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from faultbed.harness import judge
from faultbed.harness.analysis import timeline
from faultbed.harness.analysis.ettr import work_share
from faultbed.harness.analysis.intervals import iteration_times
from faultbed.harness.experiment.metrics import lookup
from faultbed.harness.experiment.run_plan import Plan
from faultbed.harness.ledger.sealed import Sealed
from faultbed.harness.ledger.statistics.equivalence import Equivalence, equivalence
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.report.comparison.compare import doubts
from faultbed.harness.report.comparison.differences import of_plans
from faultbed.testbed.errors import UsageError

__all__ = ["JOB_TIME", "PooledRun", "compare_pools"]

JOB_TIME = "job time"
"""The default of what is compared: the time of the iterations that all runs finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledRun:
    """A run of a pool: its plan, what it measured, and the evidence of its parts."""

    plan: Plan
    run: RunEvidence
    sealed: Sealed


def compare_pools(
    pool_a: Mapping[str, PooledRun], pool_b: Mapping[str, PooledRun], margin: float, metric: str = JOB_TIME
) -> Equivalence:
    """Compare two pools by one value of each run.

    A run without a value, or one that does not show what its experiment is about, leaves nothing shown: without it, the
    others would be a choice.

    Args:
        pool_a: runs by their names.
        pool_b: the others.
        margin: the largest difference that does not matter, such as 0.05.
        metric: what is compared.

    Raises:
        UsageError: the pools are not comparable, there is no such metric, or a value has no logarithm.
    """
    _refuse_unlike(pool_a, pool_b)
    if metric != JOB_TIME and lookup(metric, ()) is None:
        raise UsageError(f"--metric: no metric {metric}; docs/metrics.md lists them, and {JOB_TIME!r} is the default")
    runs = {**pool_a, **pool_b}
    values, why = _job_times(runs) if metric == JOB_TIME else _values(runs, metric)
    why = [f"{name}: {reason}" for name, one in runs.items() for reason in _doubts(one)][:1] + why
    try:
        result = equivalence(
            [values[name] for name in pool_a if name in values],
            [values[name] for name in pool_b if name in values],
            margin,
        )
    except ValueError as error:
        raise UsageError(f"{metric}: {error}") from error
    return replace(result, says="not shown", more=None, why=why[0]) if why else result


def _doubts(one: PooledRun) -> Iterator[str]:
    """Yield each reason why a run does not show what its experiment is about."""
    yield from doubts(one.run)
    recorded = {fault.plan.id for fault in one.run.injected.faults}
    yield from (f"nothing is recorded of the fault {fault.id}" for fault in one.plan.faults if fault.id not in recorded)
    if one.plan.fabric and one.run.routing is None:
        yield f"nothing is recorded of the routing scheme {one.plan.fabric.routing}"


def _refuse_unlike(pool_a: Mapping[str, PooledRun], pool_b: Mapping[str, PooledRun]) -> None:
    if twice := sorted(pool_a.keys() & pool_b.keys()):
        raise UsageError(f"{twice[0]} is in both pools; a run says nothing about two settings")
    for pool in (pool_a, pool_b):
        (first, one), *others = pool.items()
        for name, other in others:
            apart = [difference for difference in of_plans(one.plan, other.plan) if difference.what != "seed"]
            if apart:
                raise UsageError(
                    f"{first} and {name} are of one pool, but differ in {apart[0].what} ({apart[0].a}, {apart[0].b}); "
                    "compare runs of one experiment on one lab with those of another"
                )
    first_a, first_b = next(iter(pool_a)), next(iter(pool_b))
    between = of_plans(pool_a[first_a].plan, pool_b[first_b].plan)
    if apart := [difference for difference in between if difference.part == "workload"]:
        raise UsageError(
            f"{first_a} and {first_b} differ in the workload's {apart[0].what} ({apart[0].a} and {apart[0].b}); "
            "compare runs of one workload"
        )


def _job_times(runs: Mapping[str, PooledRun]) -> tuple[dict[str, float], list[str]]:
    """Return the time in s of the iterations that all runs finished, and why some have none."""
    count = min(timeline.finished_iterations(one.run.workload.series) for one in runs.values())
    if count == 0:
        none = next(name for name, one in runs.items() if not timeline.finished_iterations(one.run.workload.series))
        return {}, [f"{none}: no iteration that all ranks finished; compare another metric (--metric)"]
    if len({work_share(one.run) for one in runs.values()}) > 1:
        return {}, ["a job went on with fewer ranks, so that its iterations are less work than those of another one"]
    times = {}
    for name, one in runs.items():
        start_ns = timeline.job_start_ns(one.run) or timeline.first_start_ns(one.run.workload.series)
        times[name] = float(iteration_times(one.run.workload.series, count, start_ns).sum()) / 1e9
    return times, []


def _values(runs: Mapping[str, PooledRun], metric: str) -> tuple[dict[str, float], list[str]]:
    values: dict[str, float] = {}
    why: list[str] = []
    for name, one in runs.items():
        observed = judge.observed_of(one.run, one.sealed).metrics.get(metric)
        if observed is None or not isinstance(observed.value, int | float):
            why.append(f"{name}: {metric} has no value: {observed.detail if observed else 'it is not measured'}")
        elif observed.censored:
            why.append(f"{name}: {metric} is only known to be at least {observed.value:g}: {observed.detail}")
        else:
            values[name] = float(observed.value)
    return values, why
