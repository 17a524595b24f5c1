"""Several runs of one experiment, decided together. Pure.

    run --repeat N                 decides once, after N runs
    run --until-decided --most N   decides at looks that are fixed before the first run
                                   (`faultbed.harness.ledger.statistics.sequential_looks`)

A property of the setting is decided by one value from each run: `jct_ratio`, which has a twin, by sign flips
(`paired_runs`), every other metric by a sign test (`unpaired_runs`). If every run decides it alone, beyond the level
tolerance of the machine, that is the decision, too, however few runs there are. Every other check counts in each run
with the bound that it has in that run, and the worst run decides.

A run is left out, with the reason, if the harness had an error, if a fault or the routing scheme is not proven, or if
its load was more than the emulation forwards. It counts against whichever verdict would be given (`missing_runs`): such
a run may be the slow one. Only a load that the emulation cannot forward is known before the workload begins, so that
its run counts as not made. An exact check is no PASS if a run that is left out may have failed it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeGuard

import msgspec
import numpy as np

from faultbed.harness.analysis.observations import Observation
from faultbed.harness.bounds import TWIN_RATIO, Bound, bound_check, bounds_of
from faultbed.harness.check_places import Place, places
from faultbed.harness.conditions import unmet
from faultbed.harness.confidence import LEVEL, Interval, tail_of
from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.experiment.metrics import Metric
from faultbed.harness.json_text import json_text
from faultbed.harness.ledger.statistics.decision import Decision, Look, Outcome, Sign, tail_for, undecided
from faultbed.harness.ledger.statistics.missing_runs import known_values
from faultbed.harness.ledger.statistics.paired_runs import decide_pairs, factor_range
from faultbed.harness.ledger.statistics.sequential_looks import look_at, looks
from faultbed.harness.ledger.statistics.unpaired_runs import WORTH, decide_runs, independent_runs, median_range
from faultbed.harness.verdict import Check, LabState, Verdict, VerdictFile, worst
from faultbed.testbed.errors import UsageError

__all__ = [
    "PooledFile",
    "PooledRun",
    "Trial",
    "check_several",
    "decide_values",
    "decode",
    "encode",
    "is_open",
    "planned_looks",
    "pool",
    "pooled_observation",
    "why_left_out",
]

_BEFORE_T0 = "emulation"
"""The condition that is known before the workload begins, so that a run without it may be replaced."""
_Bounded = tuple[str, Sign | None, float | int | str | None]
"""A check by what it compares: name, comparison and bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of the pool. `metrics` are its observations."""

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
    """`pooled.json`. `most` is the maximum number of runs if the pool was decided at several looks; None: only once."""

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

    `most` is the maximum number of runs if the pool is decided at several looks; None: it is decided only once.

    Raises:
        UsageError: a run is of another experiment or lab, or was judged by a bound that `expectations` do not have.
    """
    _require_same_experiment_and_bounds(trials, expectations)
    left_out = {trial.run_dir: why_left_out(trial.verdict) for trial in trials}
    counted = [trial for trial in trials if not _is_replaceable(trial.verdict)]
    sampled = [bound for expectation in expectations for bound in bounds_of(expectation) if bound.is_sampled]
    tail = tail_for(len(sampled))
    checks = [_sampled_check(bound, counted, left_out, tail, planned_looks(bound, most, tail)) for bound in sampled]
    by_values: set[_Bounded] = {(check.name, check.comparison, check.bound) for check in checks}
    expected = {bound.metric.name for expectation in expectations for bound in bounds_of(expectation)}
    checks = [
        _runs_that_count(trials, left_out, is_sampled=bool(sampled)),
        *_exact_checks(trials, left_out, by_values, expected),
        *checks,
    ]
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


def planned_looks(bound: Bound, most: int | None, tail: float) -> tuple[Look, ...] | None:
    """Return the looks at a bound in a pool of at most so many runs; None: one look at the end."""
    if most is None:
        return None
    return looks(most, tail, worth=1.0 if bound.metric.name == TWIN_RATIO else WORTH)


def is_open(pooled: PooledFile) -> bool:
    """Return whether another run could change the verdict: nothing has failed, and a check of several runs is open."""
    if pooled.lab_state == "DIRTY" or pooled.verdict in (Verdict.FAIL, Verdict.ERROR):
        return False
    return any(
        check.verdict is Verdict.INCONCLUSIVE and check.estimand in ("setting", "contrast") for check in pooled.checks
    )


def _is_replaceable(verdict: VerdictFile) -> bool:
    """Return whether a run may be replaced: all that is wrong with it was known before its workload began."""
    missing = unmet(verdict.checks)
    return bool(missing) and all(check.name == _BEFORE_T0 for check in missing)


def _runs_that_count(trials: Sequence[Trial], left_out: Mapping[str, str | None], *, is_sampled: bool) -> Check:
    kept = sum(left_out[trial.run_dir] is None for trial in trials)
    required = 1 if is_sampled else len(trials)
    return Check(
        name="pooled_runs",
        verdict=Verdict.PASS if kept >= required else Verdict.INCONCLUSIVE,
        observed=kept,
        bound=required,
        unit="count",
        comparison="min",
        meaning="Runs whose values count. A run with an error of the harness, with a fault or routing scheme that is "
        "not proven, or with more load than the emulation forwards, is left out, with the reason; it counts against "
        "every verdict of several runs",
        detail=f"of {len(trials)} runs",
    )


def _exact_checks(
    trials: Sequence[Trial], left_out: Mapping[str, str | None], by_values: set[_Bounded], expected: set[str]
) -> tuple[Check, ...]:
    """Return the worst result of each check that each run decides by itself.

    Of a run that is left out, only FAIL and ERROR count. A bound of the experiment that no run fails is no PASS without
    them, because they may have failed it.
    """
    by_place: dict[Place, list[tuple[Trial, Check]]] = {}
    for trial in trials:
        for place, check in places(trial.verdict.checks):
            is_wrong = check.verdict in (Verdict.FAIL, Verdict.ERROR)
            if (check.name, check.comparison, check.bound) in by_values:
                continue
            if is_wrong or left_out[trial.run_dir] is None:
                by_place.setdefault(place, []).append((trial, check))
    unknown = [trial for trial in trials if left_out[trial.run_dir] is not None and not _is_replaceable(trial.verdict)]
    checks = []
    for checks_of_runs in by_place.values():
        trial, check = next(
            pair for pair in checks_of_runs if pair[1].verdict is worst(check.verdict for _, check in checks_of_runs)
        )
        several = f"worst of {len(checks_of_runs)} runs, seed {trial.verdict.seed}"
        if len({check.bound for _, check in checks_of_runs}) > 1:
            several += ", each by its own bound"
        detail = f"{several}: {check.detail}" if check.detail else several
        if unknown and check.name in expected and check.verdict is Verdict.PASS:
            detail = f"unknown in {len(unknown)} runs that are left out, seed {unknown[0].verdict.seed}; {detail}"
            check = msgspec.structs.replace(check, verdict=Verdict.INCONCLUSIVE, why="missing-runs")
        checks.append(msgspec.structs.replace(check, detail=detail))
    return tuple(checks)


def _require_same_experiment_and_bounds(trials: Sequence[Trial], expectations: Sequence[Expectation]) -> None:
    first = trials[0].verdict
    expected: set[_Bounded] = {
        (bound.metric.name, bound.sign, bound.value) for expectation in expectations for bound in bounds_of(expectation)
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
            if check.name in names and (check.name, check.comparison, check.bound) not in expected:
                raise UsageError(
                    f"{trial.run_dir}: {check.name} was judged by the {check.comparison} {check.bound}, "
                    "which the experiment does not have; pool runs that were judged by the same bounds"
                )


def _sampled_check(
    bound: Bound,
    counted: Sequence[Trial],
    left_out: Mapping[str, str | None],
    tail: float,
    planned: Sequence[Look] | None,
) -> Check:
    """Return the check of a bound that one value from each run decides."""
    kept = [trial if left_out[trial.run_dir] is None else None for trial in counted]
    values = [None if trial is None else _value(trial, bound) for trial in kept]
    alone = [None if trial is None else _check_alone(trial, bound) for trial in kept]
    return check_several(bound, values, alone, tail=tail, planned=planned)


def check_several(
    bound: Bound,
    values: Sequence[float | None],
    alone: Sequence[Check | None],
    *,
    tail: float,
    planned: Sequence[Look] | None = None,
) -> Check:
    """Return the check of a bound over several runs, decided by their values or by all of them alike.

    Args:
        bound: the bound.
        values: one of each run, in their order; None: the run has none, or is left out.
        alone: the check of the bound in each run by itself; None: the run has none, or is left out.
        tail: probability of an error on one side, if the true value is the bound.
        planned: the looks that were fixed before the first run; None: one look, now.
    """
    known, missing = known_values(values)
    decision = decide_values(bound, values, tail=tail, planned=planned)
    detail = f"{len(known)} runs" + (f", {min(known):.4g} to {max(known):.4g}" if known else "")
    if decision.interval is not None and decision.rule.tail is not None:
        level = 100 * (1 - 2 * decision.rule.tail)
        detail += f"; {level:.5g} % range {decision.interval[0]:.4g}..{decision.interval[1]:.4g}"
    if missing:
        detail += f"; {missing} runs have no value"
    check = bound_check(bound, decision, detail)
    agreed = {None if one is None else one.verdict for one in alone}
    if decision.why is None or agreed not in ({Verdict.PASS}, {Verdict.FAIL}):
        return check
    first = next(one for one in alone if one is not None)
    words = f"each of {len(alone)} runs decides it alone; {detail}" if len(alone) > 1 else first.detail
    return msgspec.structs.replace(first, observed=check.observed, detail=words)


def decide_values(
    bound: Bound, values: Sequence[float | None], *, tail: float, planned: Sequence[Look] | None = None
) -> Decision:
    """Decide a bound on a property of the setting by one value from each run.

    Args:
        bound: the bound; that of `jct_ratio` is decided by sign flips, any other one by a sign test.
        values: in the order of the runs; None: a run that has none.
        tail: probability of an error on one side, if the true value is the bound.
        planned: the looks that were fixed before the first run; None: one look, now.
    """
    if isinstance(bound.value, str):
        raise TypeError(f"{bound.metric.name}: {bound.value} is a name, which no pool decides")
    due = (Look(runs=len(values), tail=tail),) if planned is None else look_at(planned, len(values))
    decide = decide_pairs if bound.metric.name == TWIN_RATIO else decide_runs
    decision = decide(bound.sign, bound.value, values, looks=due, planned=planned or due)
    if decision.outcome is Outcome.HOLDS and bound.metric.name == TWIN_RATIO:
        # No fault makes a job faster: the machine was disturbed while the twins ran.
        faster = decide_pairs("max", 1.0, values, looks=due)
        if faster.outcome is Outcome.HOLDS:
            return undecided(decision.observed, decision.rule, "faster-than-twin")
    return decision


def _value(trial: Trial, bound: Bound) -> float | None:
    """Return the value of one run; None: it has none, or only a lower bound of it."""
    observation = trial.metrics.get(bound.metric.name)
    if observation is None or observation.censored or not _is_number(observation.value):
        return None
    return float(observation.value)


def _check_alone(trial: Trial, bound: Bound) -> Check | None:
    """Return the check of a bound in one run; None: the run has none."""
    return next(
        (
            check
            for check in trial.verdict.checks
            if (check.name, check.comparison, check.bound) == (bound.metric.name, bound.sign, bound.value)
        ),
        None,
    )


def _is_number(value: object) -> TypeGuard[float]:
    """Return whether a run has a value of a metric: a number, and a finite one."""
    return isinstance(value, int | float) and math.isfinite(value)


def pooled_observation(metric: Metric, observations: Sequence[Observation], *, level: float = LEVEL) -> Observation:
    """Return the value of several runs together, with the interval by which a bound on it is decided.

    Fewer than about eight runs have none.
    """
    values = [float(observation.value) for observation in observations if _is_number(observation.value)]
    if not values or len(values) < len(observations):
        names = {observation.value for observation in observations}
        value = names.pop() if len(names) == 1 else None
        detail = f"the same in {len(observations)} runs" if value is not None else "not in every run, or not the same"
        return Observation(value=value, detail=detail)
    is_paired = metric.name == TWIN_RATIO and min(values) > 0
    if is_paired:
        low, high = factor_range(values, 0, tail_of(level))
    else:
        low, high = median_range(values, 0, independent_runs(values), tail_of(level))
    method = f"sign flips of {len(values)} pairs" if is_paired else f"sign test of {len(values)} runs"
    is_known = math.isfinite(low) and math.isfinite(high)
    return Observation(
        value=math.exp(math.fsum(map(math.log, values)) / len(values)) if is_paired else float(np.median(values)),
        detail=f"{len(values)} runs, {min(values):.4g} to {max(values):.4g}",
        censored=any(observation.censored for observation in observations),
        interval=Interval(low=low, high=high, method=method, level=level) if is_known else None,
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
