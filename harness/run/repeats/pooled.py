"""Several runs of one experiment, decided together. Pure.

    run --repeat N                 decides once, after N runs
    run --until-decided --most N   decides after every run from the third on, until no pooled check is open
                                   (`faultbed.harness.run.repeats.alpha_spending`)

Runs are independent, because a lab starts each run from the same state. Therefore the pool compares the values of runs.
Noise within a run only adds to the differences between runs.

* A time or a rate (`UNBIASED`, and link utilisation) is pooled by the logarithms of the runs' values, with Student's t.
  If one of the values is 0, the values themselves are used.
* A percentile, a share or a minimum of a single run is biased. Its pooled interval covers two intervals: that of the
  runs' values, and the mean of the runs' own intervals. So the pool never decides more boldly than its runs.
* Every other check counts in each run with the bound that it has in that run, and the worst run decides.

A run is left out, with the reason, if the harness had an error, if a fault or the routing scheme is not proven, or if
its load was more than the emulation forwards. At least `FIRST` runs, and half of all, must remain. If no check is
pooled, all runs must remain. A pooled check is no PASS if one of the remaining runs has no value.

A run that was faster than its twin is kept, because leaving it out would raise the mean. If all runs together are
faster than their twins, the machine was disturbed, and the check is INCONCLUSIVE.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeGuard

import msgspec
import numpy as np

from faultbed.harness.analysis.observations import Observation, faster_than_twin
from faultbed.harness.bounds import COMPARISONS, NO_INTERVAL, bounds_of, is_noisy, noisy_checks, risk
from faultbed.harness.check_places import Place, comparison_of, places
from faultbed.harness.conditions import unmet
from faultbed.harness.confidence import LEVEL, Interval, decide, level_for, student, tail_of
from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.experiment.metrics import Metric
from faultbed.harness.json_text import json_text
from faultbed.harness.run.repeats.alpha_spending import FIRST, tails
from faultbed.harness.verdict import Check, LabState, Verdict, VerdictFile, worst
from faultbed.testbed.errors import UsageError

__all__ = [
    "UNBIASED",
    "PooledFile",
    "PooledRun",
    "Trial",
    "decode",
    "encode",
    "is_unbiased",
    "pool",
    "pooled_observation",
    "undecided",
    "why_left_out",
]

UNBIASED = frozenset({"jct_ratio", "ettr", "goodput.mean", "busbw.mean", "bisection"})
_UNBIASED_PREFIX = "link_utilisation."
_RULE = "decided by the pooled {level:.5g} % interval: PASS wholly inside, FAIL wholly outside, else INCONCLUSIVE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of the pool. `metrics` are its observations; their intervals are used for percentiles and minima."""

    run_dir: str
    verdict: VerdictFile
    metrics: Mapping[str, Observation] = field(default_factory=dict)


class PooledRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run in `pooled.json`. `left_out` is the reason why its values do not count; None: they count."""

    seed: int
    run_dir: str
    verdict: Verdict
    lab_state: LabState
    left_out: str | None = None


class PooledFile(msgspec.Struct, frozen=True, kw_only=True):
    """`pooled.json`. `most` is the maximum number of runs if the pool was decided after every run; None: only once."""

    schema: Literal[1] = 1
    experiment: str
    lab: str
    verdict: Verdict
    lab_state: LabState
    checks: tuple[Check, ...]
    runs: tuple[PooledRun, ...]
    most: int | None = None


def encode(pooled: PooledFile) -> bytes:
    """Return `pooled.json` as bytes."""
    return json_text(pooled)


def decode(content: bytes) -> PooledFile:
    """Read `pooled.json`.

    Raises:
        msgspec.ValidationError: not a pool of schema 1.
    """
    return msgspec.json.decode(content, type=PooledFile)


def pool(trials: Sequence[Trial], expectations: Sequence[Expectation], *, most: int | None = None) -> PooledFile:
    """Decide an experiment by all runs.

    `most` is the maximum number of runs if the pool is decided after every run; None: it is decided only once.

    Raises:
        UsageError: a run is of another experiment or lab, or was judged by a bound that `expectations` do not have.
    """
    _require_same_experiment_and_bounds(trials, expectations)
    left_out = {trial.run_dir: why_left_out(trial.verdict) for trial in trials}
    kept = [trial for trial in trials if left_out[trial.run_dir] is None]
    noisy = noisy_checks(expectations)
    checks = [
        _noisy_check(expectation.metric, sign, bound, kept, noisy, most)
        for expectation in expectations
        for sign, bound in bounds_of(expectation)
        if is_noisy(expectation.metric, sign, bound) and not isinstance(bound, str)
    ]
    by_interval = {(check.name, comparison_of(check), check.bound) for check in checks}
    checks = [_enough_runs(trials, kept, noisy), *_exact_checks(trials, left_out, by_interval), *checks]
    dirty = any(trial.verdict.lab_state == "DIRTY" for trial in trials)
    return PooledFile(
        experiment=trials[0].verdict.experiment,
        lab=trials[0].verdict.lab,
        verdict=worst(check.verdict for check in checks),
        lab_state="DIRTY" if dirty else "CLEAN",
        checks=tuple(checks),
        runs=tuple(
            PooledRun(
                seed=trial.verdict.seed,
                run_dir=trial.run_dir,
                verdict=trial.verdict.verdict,
                lab_state=trial.verdict.lab_state,
                left_out=left_out[trial.run_dir],
            )
            for trial in trials
        ),
        most=most,
    )


def undecided(pooled: PooledFile) -> bool:
    """Return whether another run could change the verdict: nothing has failed, and a pooled check is open."""
    if pooled.lab_state == "DIRTY" or pooled.verdict in (Verdict.FAIL, Verdict.ERROR):
        return False
    return any(check.verdict is Verdict.INCONCLUSIVE for check in pooled.checks if "pooled" in check.rule)


def _enough_runs(trials: Sequence[Trial], kept: Sequence[Trial], noisy: int) -> Check:
    half_rounded_up = -(-len(trials) // 2)
    required = max(FIRST, half_rounded_up) if noisy else len(trials)
    is_enough = len(kept) >= required
    return Check(
        name="pooled_runs",
        verdict=Verdict.PASS if is_enough else Verdict.INCONCLUSIVE,
        observed=len(kept),
        bound=required,
        unit="count",
        rule="observed >= bound. Runs in the pooled decision. A run with an error of the harness, with a fault or "
        "routing scheme that is not proven, or with more load than the emulation forwards, is left out, with the "
        "reason",
        detail=f"of {len(trials)} runs",
    )


def _exact_checks(
    trials: Sequence[Trial],
    left_out: Mapping[str, str | None],
    by_interval: set[tuple[str, str, float | int | str | None]],
) -> tuple[Check, ...]:
    """Return the worst result of each check that no interval decides.

    Of a run that is left out, only FAIL and ERROR count.
    """
    by_place: dict[Place, list[tuple[Trial, Check]]] = {}
    for trial in trials:
        for place, check in places(trial.verdict.checks):
            is_wrong = check.verdict in (Verdict.FAIL, Verdict.ERROR)
            if (check.name, comparison_of(check), check.bound) in by_interval:
                continue
            if is_wrong or left_out[trial.run_dir] is None:
                by_place.setdefault(place, []).append((trial, check))
    checks = []
    for checks_of_runs in by_place.values():
        trial, check = next(
            pair for pair in checks_of_runs if pair[1].verdict is worst(check.verdict for _, check in checks_of_runs)
        )
        several = f"worst of {len(checks_of_runs)} runs, seed {trial.verdict.seed}"
        if len({check.bound for _, check in checks_of_runs}) > 1:
            several += ", each by its own bound"
        checks.append(msgspec.structs.replace(check, detail=f"{several}: {check.detail}" if check.detail else several))
    return tuple(checks)


def _require_same_experiment_and_bounds(trials: Sequence[Trial], expectations: Sequence[Expectation]) -> None:
    first = trials[0].verdict
    expected = {
        (expectation.metric.name, COMPARISONS[sign], bound)
        for expectation in expectations
        for sign, bound in bounds_of(expectation)
    }
    names = {name for name, _, _ in expected}
    for trial in trials:
        verdict = trial.verdict
        if (verdict.experiment, verdict.lab) != (first.experiment, first.lab):
            raise UsageError(
                f"{trial.run_dir}: of {verdict.experiment} on {verdict.lab}, not of {first.experiment} on {first.lab}; "
                "pool runs of one experiment on one lab"
            )
        for check in verdict.checks:
            if check.name in names and (check.name, comparison_of(check), check.bound) not in expected:
                raise UsageError(
                    f"{trial.run_dir}: {check.name} was judged by {comparison_of(check)} with the bound {check.bound}, "
                    "which the experiment does not have; pool runs that were judged by the same bounds"
                )


def _noisy_check(metric: Metric, sign: str, bound: float, kept: Sequence[Trial], noisy: int, most: int | None) -> Check:
    observations = [
        observation
        for trial in kept
        if (observation := trial.metrics.get(metric.name)) is not None and _is_number(observation.value)
    ]
    missing = len(kept) - len(observations)
    level = level_for(noisy)
    interval = _decided_by(metric, observations, most, tail_of(level)) if 2 * len(observations) >= len(kept) else None
    rule = COMPARISONS[sign]
    verdict, detail = Verdict.INCONCLUSIVE, f"{len(observations)} runs; {NO_INTERVAL}"
    if len(observations) < FIRST:
        detail = f"{len(observations)} runs have a value, of at least {FIRST}"
    elif interval is not None:
        verdict = decide("max" if sign == "max" else "min", bound, interval)
        detail = f"{100 * level:.5g} % interval {interval.low:.4g}..{interval.high:.4g} ({interval.method})"
        pooled = Observation(value=_middle(metric, observations), detail=detail, interval=interval)
        if (reason := faster_than_twin(metric.name, pooled)) is not None:
            verdict, detail = Verdict.INCONCLUSIVE, f"{detail}; {reason}"
    if missing:
        # A value may be missing because it would have been bad.
        verdict = Verdict.INCONCLUSIVE if verdict is Verdict.PASS else verdict
        detail = f"{detail}; {missing} runs have no value, so it is no PASS"
    analyses = f"; analysed after every run, at most {most} (alpha spending)" if most else ""
    return Check(
        name=metric.name,
        verdict=verdict,
        observed=_middle(metric, observations),
        bound=bound,
        unit=metric.unit,
        rule=f"{rule}, {_RULE.format(level=100 * level)}{risk(level, noisy)}{analyses}. {metric.meaning}",
        detail=detail,
    )


def _decided_by(metric: Metric, observations: Sequence[Observation], most: int | None, tail: float) -> Interval | None:
    """Return the interval that decides a metric, or None. With `most`, it is the intersection over all analyses."""
    if len(observations) < FIRST:
        return None
    if most is None:
        return _interval(metric, observations, tail)
    intervals = [
        interval
        for runs, spent in enumerate(tails(most, tail), start=FIRST)
        if runs <= len(observations) and spent > 0
        if (interval := _interval(metric, observations[:runs], spent)) is not None
    ]
    if not intervals:
        return None
    low, high = max(interval.low for interval in intervals), min(interval.high for interval in intervals)
    return None if low > high else Interval(low=low, high=high, method=intervals[-1].method)


def _interval(metric: Metric, observations: Sequence[Observation], tail: float) -> Interval | None:
    values = np.array([observation.value for observation in observations], dtype=np.float64)
    by_log = is_unbiased(metric) and bool((values > 0).all())
    scaled = np.log(values) if by_log else values
    reach = student(len(values) - 1, 1 - 2 * tail) * float(scaled.std(ddof=1)) / math.sqrt(len(values))
    low, high = float(scaled.mean()) - reach, float(scaled.mean()) + reach
    if is_unbiased(metric):
        low, high = (math.exp(low), math.exp(high)) if by_log else (max(0.0, low), high)
        return Interval(low=low, high=high, method=f"Student's t of {len(values)} runs")
    own = [observation.interval for observation in observations]
    # min and max would ignore an end that is NaN.
    known = [interval for interval in own if interval is not None and not math.isnan(interval.low + interval.high)]
    if len(known) < len(own):
        return None
    if min(interval.low for interval in known) >= 0:  # Student's t of few runs can reach below 0, where no ratio is
        low = max(low, 0.0)
    low = min(low, float(np.mean([interval.low for interval in known])))
    high = max(high, float(np.mean([interval.high for interval in known])))
    return Interval(
        low=low, high=high, method=f"Student's t of {len(values)} runs, and the mean of their own intervals"
    )


def is_unbiased(metric: Metric) -> bool:
    """Return whether the values of a metric scatter around the truth. The pool then needs no intervals of the runs."""
    return metric.name in UNBIASED or metric.name.startswith(_UNBIASED_PREFIX)


def _is_number(value: object) -> TypeGuard[float]:
    """Return whether a run has a value of a metric: a number, and a finite one."""
    return isinstance(value, int | float) and math.isfinite(value)


def pooled_observation(metric: Metric, observations: Sequence[Observation], *, level: float = LEVEL) -> Observation:
    """Return the value of several runs together, with its interval from the third run on."""
    values = [observation.value for observation in observations if _is_number(observation.value)]
    if not values or len(values) < len(observations):
        names = {observation.value for observation in observations}
        value = names.pop() if len(names) == 1 else None
        detail = f"the same in {len(observations)} runs" if value is not None else "not in every run, or not the same"
        return Observation(value=value, detail=detail)
    interval = _interval(metric, observations, tail_of(level)) if len(values) >= FIRST else None
    return Observation(
        value=_middle(metric, observations),
        detail=f"{len(values)} runs, {min(values):.4g} to {max(values):.4g}",
        censored=any(observation.censored for observation in observations),
        interval=interval,
    )


def why_left_out(verdict: VerdictFile) -> str | None:
    """Return why a run's values do not count; None: they do.

    They do not if the run has an error, an unproven fault or routing scheme, or more load than the emulation forwards:
    whatever else it shows, it does not show what the experiment is about.
    """
    for check in verdict.checks:
        if check.verdict is Verdict.ERROR:
            return f"{check.name}: {check.detail}"
    for check in unmet(verdict.checks):
        if check.name.startswith("fired."):
            return f"{check.name.removeprefix('fired.')} is not proven: {check.detail}"
        return f"{check.name} is {check.verdict}: {check.detail}"
    return None


def _middle(metric: Metric, observations: Sequence[Observation]) -> float | None:
    values = np.array([observation.value for observation in observations], dtype=np.float64)
    if not len(values):
        return None
    if is_unbiased(metric) and bool((values > 0).all()):
        return float(np.exp(np.log(values).mean()))
    return float(values.mean())
