"""The points of a sweep: every combination of values, resolved against the lab before anything runs."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from faultbed.harness.experiment import metrics as metrics_module
from faultbed.harness.experiment.experiment_file import Experiment
from faultbed.harness.experiment.metrics import Metric
from faultbed.harness.experiment.parameters import Parameter, with_values
from faultbed.harness.experiment.workload_file import duration_ns
from faultbed.harness.run.prepare.resolve import ResolvedRun, passes_before, refusal, resolve
from faultbed.harness.run.workload_kinds import kind_of
from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory.lab_inventory import Inventory

__all__ = ["MOST_RUNS", "Point", "expected_s", "metrics_for", "points_of"]

MOST_RUNS = 1000
"""Most runs of one sweep: a run takes nearly a minute."""
_OVERHEAD_S = 25.0
"""Time of a run without its workload (reset, holders, comparison, report), used until a run has been timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One combination of values, and a resolved run for each seed. `parameters` are the values, by path."""

    number: int
    parameters: Mapping[str, str]
    experiment: Experiment
    runs: tuple[ResolvedRun, ...]

    @property
    def name(self) -> str:
        """The point's values as text."""
        return ", ".join(f"{path}={value}" for path, value in self.parameters.items())

    @property
    def workload_s(self) -> float | None:
        """How long the workload of one run takes in all its passes; None: it ends by iterations."""
        length_ns = duration_ns(self.experiment.workload)
        return None if length_ns is None else length_ns / 1e9 * (1 + len(passes_before(self.runs[0].plan)))


def points_of(
    content: bytes, parameters: Sequence[Parameter], inventory: Inventory, *, source: str, seed: int | None, repeat: int
) -> tuple[Point, ...]:
    """Decide every run of a sweep; touches nothing. The last parameter changes fastest.

    Raises:
        ConfigError: a path or a value is wrong, or an experiment does not fit the lab.
        UsageError: a path is given twice, there are too many runs, or a fault does not fit its target.
        Unsupported: the lab does not support the experiment.
        Forbidden: the lab's owner does not allow its faults.
    """
    paths = [parameter.path for parameter in parameters]
    if len(set(paths)) < len(paths):
        raise UsageError(f"--over: {max(paths, key=paths.count)} is given twice; put its values after one --over")
    count = repeat
    for parameter in parameters:
        count *= len(parameter.values)
    if count > MOST_RUNS:
        raise UsageError(f"{count} runs, of at most {MOST_RUNS}; give fewer values, or a smaller --repeat")
    points: list[Point] = []
    for number, values in enumerate(itertools.product(*(parameter.values for parameter in parameters)), start=1):
        chosen = dict(zip(paths, values, strict=True))
        content_of_point, experiment = with_values(content, chosen, source=source)
        first = experiment.seed if seed is None else seed
        runs = tuple(resolve(experiment, content_of_point, inventory, seed=first + index) for index in range(repeat))
        for resolved in runs:
            if reason := refusal(resolved, inventory):
                raise reason
        duplicate = next((point for point in points if all(map(_is_same_run, point.runs, runs))), None)
        if duplicate is not None:
            raise UsageError(
                f"--over: points {duplicate.number} ({duplicate.name}) and {number} are the same; remove one"
            )
        points.append(Point(number=number, parameters=chosen, experiment=runs[0].experiment, runs=runs))
    return tuple(points)


def _is_same_run(first: ResolvedRun, second: ResolvedRun) -> bool:
    """Return whether two runs do the same and are judged the same: a size may be written as 64KiB and as 65536."""
    bounds = [(resolved.experiment.expectations, resolved.experiment.stops) for resolved in (first, second)]
    return first.plan == second.plan and bounds[0] == bounds[1]


def metrics_for(points: Sequence[Point], names: Sequence[str]) -> tuple[Metric, ...]:
    """Return the metrics of the table: those named, else those that the experiment bounds, else its rate.

    Raises:
        UsageError: no such metric; with the nearest.
    """
    experiment = points[0].experiment
    ids = [fault.id for fault in experiment.faults]
    chosen_metrics = []
    for name in dict.fromkeys(names):
        metric = metrics_module.lookup(name, ids)
        if metric is None:
            near = metrics_module.nearest(name, ids)
            hint = f"did you mean {near}?" if near else f"choose one of {', '.join(metrics_module.METRICS)}"
            raise UsageError(f'--metric: no metric "{name}"; {hint}')
        chosen_metrics.append(metric)
    chosen_metrics = chosen_metrics or list(
        dict.fromkeys(expectation.metric for expectation in experiment.expectations)
    )
    if chosen_metrics:
        return tuple(chosen_metrics)
    return (metrics_module.METRICS[kind_of(experiment.workload).default_metric(has_faults=bool(ids))],)


def expected_s(points: Sequence[Point], took_s: Mapping[int, Sequence[float]]) -> dict[int, float | None]:
    """Return how long one run of each point may take, by its number.

    Args:
        points: all points of the sweep.
        took_s: how long the runs of points that are done took, by number.

    The time of a workload that ends by iterations is the median of the finished runs; None before the first one.
    """
    by_number = {point.number: point for point in points}
    overheads_s = [
        took - work
        for number, took_of_point in took_s.items()
        for took in took_of_point
        if number in by_number and (work := by_number[number].workload_s) is not None
    ]
    all_took_s = [took for took_of_point in took_s.values() for took in took_of_point]
    overhead_s = statistics.median(overheads_s) if overheads_s else _OVERHEAD_S
    median_s = statistics.median(all_took_s) if all_took_s else None
    return {
        point.number: median_s if (work := point.workload_s) is None else max(work, work + overhead_s)
        for point in points
    }
