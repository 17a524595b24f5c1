"""The bounds of an experiment on its metrics, and the check of each: which decision its estimand has. Pure.

    fact       the value of this run, with its error of measurement
    event      the time of an event in this run, with the errors of clocks and resolution
    contrast   each fault against the run before and after it, with the level tolerance of the machine
    setting    from one run: only beyond the level tolerance; from several: `faultbed.harness.run.repeats.pooled`

`[[expect]] of` chooses between `run` (a fact) and `setting` where a metric allows both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from faultbed.harness.analysis.observations import Observation
from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.experiment.metrics import Metric
from faultbed.harness.ledger.statistics.contrasts import Member, decide_contrast
from faultbed.harness.ledger.statistics.decision import (
    Decision,
    Estimand,
    Outcome,
    Reason,
    Rule,
    Sign,
    Tolerance,
    describe,
    tail_for,
    undecided,
)
from faultbed.harness.ledger.statistics.event_times import decide_event_time
from faultbed.harness.ledger.statistics.level_tolerance import decide_from_one_run
from faultbed.harness.ledger.statistics.run_facts import decide_fact
from faultbed.harness.verdict import Check, Verdict

__all__ = [
    "TWIN_RATIO",
    "VERDICTS",
    "Bound",
    "bound_check",
    "bounds_of",
    "check_bound",
    "check_expectation",
    "rule_words",
    "sampled_bounds",
]

VERDICTS: Mapping[Outcome, Verdict] = {
    Outcome.HOLDS: Verdict.PASS,
    Outcome.BROKEN: Verdict.FAIL,
    Outcome.UNDECIDED: Verdict.INCONCLUSIVE,
}
TWIN_RATIO = "jct_ratio"
"""The metric that compares a run with its fault-free twin."""

_REMEDIES: Mapping[Reason, str] = {
    "within-error": "the bound lies within the error of measurement",
    "censored": "only a lower bound of the value is known",
    "no-interval": "too few independent values, or values whose level moves, to know how much of it is noise; use a "
    "longer run on a quiet machine, or several runs (run --repeat, run --until-decided)",
    "no-control": "the run has no fault-free time on both sides of the fault; begin the fault later, or "
    "let the workload run on after it",
    "controls-disagree": "the bound holds against one of the fault-free times before and after the fault, and not "
    "against the other: the level of the machine moved; use a quiet machine",
    "within-tolerance": "one run cannot tell this from the level of the machine; repeat it (run --until-decided), or "
    "measure the tolerance of this lab (faultbed noise)",
    "too-few-runs": "too few runs to decide; repeat it (run --until-decided)",
    "not-significant": "the runs differ too much to decide; use more runs",
    "missing-runs": "runs without a value count against every verdict; repeat the experiment",
    "faster-than-twin": "the machine was disturbed: the run was faster than its fault-free twin by more than the level "
    "tolerance, which no fault does; run it again on a quiet machine",
}
"""What a reason means for the reader, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """One bound of an expectation, in the metric's unit, and what the number stands for."""

    metric: Metric
    sign: Sign
    value: float | int | str
    estimand: Estimand

    @property
    def is_sampled(self) -> bool:
        """Whether chance can make the check wrong, so that it shares the risk of the experiment."""
        return self.estimand in ("setting", "contrast") and not isinstance(self.value, str)


def bounds_of(expectation: Expectation) -> list[Bound]:
    """Return the bounds of an expectation.

    A share whose minimum is its largest possible value says that nothing may be missing in this run, which is a fact.
    """
    metric, made = expectation.metric, []
    given: Sequence[tuple[Sign, float | str | None]] = (
        ("min", expectation.minimum),
        ("max", expectation.maximum),
        ("equals", expectation.equals),
    )
    for sign, value in given:
        if value is None:
            continue
        estimand = metric.estimand_of(expectation.of)
        if sign == "min" and metric.most is not None and value == metric.most and metric.either:
            estimand = "fact"
        made.append(Bound(metric=metric, sign=sign, value=value, estimand=estimand))
    return made


def sampled_bounds(expectations: Sequence[Expectation]) -> int:
    """Return how many bounds chance can make wrong. They share the risk of the experiment (`decision.tail_for`)."""
    return sum(bound.is_sampled for expectation in expectations for bound in bounds_of(expectation))


def check_expectation(
    expectation: Expectation,
    observation: Observation | None,
    problems: Sequence[str],
    *,
    tolerance: Tolerance,
    sampled: int = 1,
) -> tuple[Check, ...]:
    """Return a check for each bound of an expectation in one run.

    `problems` say why the faults it is about are not proven; they matter only for metrics about faults. `tolerance` is
    that of the machine. `sampled` is the number of bounds that share the risk (`sampled_bounds`).
    """
    return tuple(
        check_bound(bound, observation, problems, tolerance=tolerance, tail=tail_for(sampled))
        for bound in bounds_of(expectation)
    )


def check_bound(
    bound: Bound, observation: Observation | None, problems: Sequence[str], *, tolerance: Tolerance, tail: float
) -> Check:
    """Return the check of one bound in one run: its decision, unless something makes the value no evidence."""
    decision = _decide(bound, observation, tolerance, tail)
    detail = "not measured in this run" if observation is None else observation.detail
    if observation is not None and decision.why == "no-value" and observation.value is not None:
        detail = f"{observation.value} is no value; {detail}"
    elif observation is not None and decision.observed is not None:
        shown = observation.sampling if bound.estimand == "setting" else observation.interval
        detail = detail if shown is None else f"{detail}; {shown}"
    check = bound_check(bound, decision, detail)
    if bound.metric.about_faults and problems:
        return _without_evidence(check, f"says nothing, because {problems[0]}")
    return check


def bound_check(bound: Bound, decision: Decision, detail: str) -> Check:
    """Return the check that shows a decision. `detail` says what was seen; the reason and a remedy are added."""
    parts = [detail]
    if decision.why is not None and decision.why in _REMEDIES:
        subject = f"{decision.subject}: " if decision.subject else ""
        parts.append(f"{subject}{_REMEDIES[decision.why]}")
    return Check(
        name=bound.metric.name,
        verdict=VERDICTS[decision.outcome],
        observed=decision.observed,
        bound=bound.value,
        unit=bound.metric.unit,
        comparison=bound.sign,
        estimand=bound.estimand,
        rule=decision.rule,
        why=decision.why,
        meaning=bound.metric.meaning,
        detail="; ".join(part for part in parts if part),
    )


def rule_words(check: Check) -> str:
    """Return in words how a check was decided, and what it is about."""
    return ". ".join(part for part in (describe(check.rule), check.meaning) if part)


def _without_evidence(check: Check, reason: str) -> Check:
    return Check(
        name=check.name,
        verdict=Verdict.INCONCLUSIVE,
        observed=check.observed,
        bound=check.bound,
        unit=check.unit,
        comparison=check.comparison,
        estimand=check.estimand,
        rule=check.rule,
        why=None,
        meaning=check.meaning,
        detail=f"{check.detail}; {reason}",
    )


def _decide(bound: Bound, observation: Observation | None, tolerance: Tolerance, tail: float) -> Decision:
    """Decide one bound by its estimand."""
    if observation is None:
        return undecided(None, Rule(kind="value"), "no-value")
    value = observation.value
    if bound.estimand == "fact" or isinstance(value, str) or isinstance(bound.value, str):
        return _decide_fact(bound, value, observation)
    if bound.estimand == "event":
        between = None if observation.interval is None else (observation.interval.low, observation.interval.high)
        return decide_event_time(bound.sign, bound.value, value, between=between, censored=observation.censored)
    if bound.estimand == "contrast":
        return _decide_contrast(bound, bound.value, observation, tolerance, tail)
    return _decide_setting(bound, bound.value, value, observation, tolerance, tail)


def _decide_fact(bound: Bound, value: float | str | None, observation: Observation) -> Decision:
    """Decide what happened in this run; a ratio over a control that the run itself has needs the range of that."""
    between = observation.between
    if bound.metric.has_controls:
        if observation.interval is None:
            return undecided(value, Rule(kind="range"), "no-value" if value is None else "no-control")
        between = observation.interval.low, observation.interval.high
    return decide_fact(bound.sign, bound.value, value, between=between, censored=observation.censored)


def _decide_contrast(
    bound: Bound, value: float, observation: Observation, tolerance: Tolerance, tail: float
) -> Decision:
    """Decide a ratio of each fault. A share that was lost is decided by the ratio that was left."""
    if not bound.metric.is_share_lost:
        return decide_contrast(bound.sign, value, _members(observation), tolerance=tolerance, tail=tail)
    opposite: Sign = "min" if bound.sign == "max" else "max"
    left = decide_contrast(opposite, 1 - value, _members(observation), tolerance=tolerance, tail=tail)
    observed = left.observed
    return Decision(
        outcome=left.outcome,
        observed=1 - observed if isinstance(observed, int | float) else observed,
        interval=None if left.interval is None else (1 - left.interval[1], 1 - left.interval[0]),
        rule=left.rule,
        why=left.why,
        subject=left.subject,
    )


def _members(observation: Observation) -> tuple[Member, ...]:
    return () if observation.value is None else observation.members


def _decide_setting(
    bound: Bound,
    limit: float,
    value: float | None,
    observation: Observation,
    tolerance: Tolerance,
    tail: float,
) -> Decision:
    """Decide a property of the setting from one run."""
    if value is not None and not bound.metric.has_level:
        return undecided(value, Rule(kind="signs", tail=tail, runs=1), "too-few-runs")
    known = observation.sampling
    interval = None if known is None else (known.low, known.high)
    if observation.censored and interval is not None:
        interval = (interval[0], math.inf)
    if bound.metric.name == TWIN_RATIO and interval is not None and interval[1] * tolerance.factor < 1:
        rule = Rule(kind="tolerance", tail=tail, tolerance=tolerance)
        return undecided(value, rule, "faster-than-twin")
    return decide_from_one_run(bound.sign, limit, value, interval=interval, tolerance=tolerance, tail=tail)
