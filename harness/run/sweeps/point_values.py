"""Results of the runs at one point of a sweep: a verdict, and the values of its metrics with their intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from faultbed.harness.analysis.observations import Observation, faster_than_twin
from faultbed.harness.analysis.prediction import goodput_under_loss
from faultbed.harness.bounds import sampled_bounds
from faultbed.harness.confidence import level_for
from faultbed.harness.experiment.metrics import Metric
from faultbed.harness.record.rundir import RunDir
from faultbed.harness.record.sweep_file import SweptPoint, SweptRun, SweptValue
from faultbed.harness.run.repeats import pooled
from faultbed.harness.run.repeats.pooled import Trial, pooled_observation, why_left_out
from faultbed.harness.run.repeats.trials import trial_of
from faultbed.harness.run.sweeps.sweep_points import Point
from faultbed.harness.verdict import Check, Verdict, VerdictFile

__all__ = ["MODEL", "point_value", "swept_point", "took_s"]

MODEL = (
    "go-back-N without waiting: (1 - p) / (1 - p + n p) of the clean goodput at most, for a share p that is lost and n "
    "packets in flight on a queue pair"
)


def swept_point(point: Point, runs: Sequence[RunDir], metrics: Sequence[Metric], folder: Path) -> SweptPoint:
    """Judge the runs of a point that are done; a point has a verdict once all of its runs are.

    A DIRTY lab ends a sweep: the point then has the verdict of the runs that it has. A point that passes without
    a value of some metric is INCONCLUSIVE: it does not show what the sweep measures.
    """
    verdicts = [run.read_verdict() for run in runs]
    swept = SweptPoint(
        number=point.number,
        parameters=dict(point.parameters),
        runs=tuple(_swept_run(run, verdict_of_run, folder) for run, verdict_of_run in zip(runs, verdicts, strict=True)),
    )
    is_dirty = any(verdict_of_run.lab_state == "DIRTY" for verdict_of_run in verdicts)
    if not runs or (len(runs) < len(point.runs) and not is_dirty):
        return swept
    level = level_for(sampled_bounds(point.experiment.expectations))
    trials = [
        trial_of(run, verdict_of_run, point.experiment.expectations)
        for run, verdict_of_run in zip(runs, verdicts, strict=True)
    ]
    checks: Sequence[Check] = verdicts[0].checks
    verdict = verdicts[0].verdict
    if len(trials) > 1:
        pool = pooled.pool(trials, point.experiment.expectations)
        checks, verdict = pool.checks, pool.verdict
    predicted = goodput_under_loss(runs[0].read_run())
    why = _why(verdict, checks)
    if verdict is Verdict.PASS and (unknown := _first_unknown(metrics, trials, level)):
        verdict, why = Verdict.INCONCLUSIVE, unknown
    return SweptPoint(
        number=swept.number,
        parameters=swept.parameters,
        runs=swept.runs,
        verdict=verdict,
        why=why,
        values=tuple(_value(metric, trials, verdict, level, predicted) for metric in metrics),
    )


def took_s(run: RunDir) -> float:
    """Return how long a finished run took, from its directory."""
    return max(0.0, (run.path / "verdict.json").stat().st_mtime - run.started.timestamp())


def _swept_run(run: RunDir, verdict: VerdictFile, folder: Path) -> SweptRun:
    return SweptRun(
        seed=verdict.seed,
        run_dir=str(run.path.relative_to(folder)),
        verdict=verdict.verdict,
        lab_state=verdict.lab_state,
        took_s=round(took_s(run), 1),
    )


def _why(verdict: Verdict, checks: Sequence[Check]) -> str:
    """Return the first check that made a verdict what it is, unless that is PASS."""
    if verdict is Verdict.PASS:
        return ""
    return next((f"{check.name}: {check.detail}" for check in checks if check.verdict is verdict), "no check was made")


def _first_unknown(metrics: Sequence[Metric], trials: Sequence[Trial], level: float) -> str:
    """Return the first metric without a value, and why; empty: all have one."""
    for metric in metrics:
        observation = point_value(metric, _counted_metrics(trials), Verdict.PASS, level=level)
        if observation.value is None:
            return f"{metric.name}: {observation.detail}"
    return ""


def _counted_metrics(trials: Sequence[Trial]) -> list[Mapping[str, Observation]]:
    """Return the metrics of the runs that count; a run that left the lab DIRTY does not."""
    return [
        trial.metrics for trial in trials if why_left_out(trial.verdict) is None and trial.verdict.lab_state == "CLEAN"
    ]


def _value(
    metric: Metric, trials: Sequence[Trial], verdict: Verdict, level: float, predicted: float | None
) -> SweptValue:
    observation = point_value(metric, _counted_metrics(trials), verdict, level=level)
    interval = observation.interval
    # The interval of a censored value is that of the lower bound: the truth may lie anywhere above it.
    is_open = interval is None or observation.censored or math.isinf(interval.high)
    return SweptValue(
        metric=metric.name,
        unit=metric.unit,
        value=observation.value,
        low=None if interval is None else interval.low,
        high=None if interval is None or is_open else interval.high,
        level=None if interval is None else interval.level,
        censored=observation.censored,
        detail=observation.detail if interval is None else f"{observation.detail}; {interval.method}",
        predicted=predicted if metric.name == "goodput_mean_ratio" else None,
    )


def point_value(
    metric: Metric, runs: Sequence[Mapping[str, Observation]], verdict: Verdict, *, level: float
) -> Observation:
    """Return a metric at a point; no value where the point shows nothing, or the machine was disturbed."""
    if not verdict.is_conclusive:
        return Observation(value=None, detail=f"the point is {verdict}")
    observations = [
        metrics_of_run.get(metric.name) or Observation(value=None, detail="not measured") for metrics_of_run in runs
    ]
    if not observations:
        return Observation(value=None, detail="no run counts: a condition of it is not met, or a fault not proven")
    observation = observations[0] if len(observations) == 1 else pooled_observation(metric, observations, level=level)
    if reason := faster_than_twin(metric.name, observation):
        return Observation(value=None, detail=reason)
    return observation
