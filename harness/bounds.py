"""Bounds of an experiment, decided for one run: by the interval of a noisy value, by the value otherwise. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from faultbed.harness.analysis.observations import Observation, Value, faster_than_twin
from faultbed.harness.confidence import Interval, decide, tail_of
from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.experiment.metrics import Metric
from faultbed.harness.verdict import Check, Verdict

__all__ = [
    "COMPARISONS",
    "NO_INTERVAL",
    "bounds_of",
    "check_bound",
    "check_expectation",
    "is_noisy",
    "noisy_checks",
    "risk",
]

NO_INTERVAL = (
    "too few independent values, or values whose level moves, to know how much of it is noise: a longer run on a quiet "
    "machine has an interval, and so have several runs (run --repeat, run --until-decided)"
)


def noisy_checks(expectations: Sequence[Expectation]) -> int:
    """Return how many checks of a run are decided by an interval, so that chance alone can make each of them wrong.

    `faultbed.harness.confidence.level_for` turns it into the level that each interval needs.
    """
    return sum(
        is_noisy(expectation.metric, sign, bound)
        for expectation in expectations
        for sign, bound in bounds_of(expectation)
    )


def is_noisy(metric: Metric, sign: str, bound: float | str) -> bool:
    """Return whether a check is decided by an interval; a share whose minimum is its largest possible value is not."""
    return metric.is_noisy and not (sign == "min" and metric.most is not None and bound == metric.most)


def check_expectation(
    expectation: Expectation, observation: Observation | None, problems: Sequence[str], *, noisy: int = 1
) -> tuple[Check, ...]:
    """Return a check for each bound of an expectation.

    `problems` say why the faults it is about are not proven; they matter only for metrics about faults. `noisy` is how
    many noisy checks the run has in all.
    """
    return tuple(
        check_bound(expectation.metric, sign, bound, observation, problems, noisy)
        for sign, bound in bounds_of(expectation)
    )


def bounds_of(expectation: Expectation) -> list[tuple[str, float | int | str]]:
    """Return the bounds of an expectation, each with its sign: min, max or equals."""
    bounds = ("min", expectation.minimum), ("max", expectation.maximum), ("equals", expectation.equals)
    return [(sign, bound) for sign, bound in bounds if bound is not None]


COMPARISONS = {"min": "observed >= bound", "max": "observed <= bound", "equals": "observed = bound"}


def check_bound(
    metric: Metric,
    sign: str,
    bound: float | str,
    observation: Observation | None,
    problems: Sequence[str],
    noisy: int,
) -> Check:
    """Return the check of one bound: the comparison, unless something makes the value no evidence."""
    comparison = _compare_bound(metric, sign, bound, observation, noisy)
    verdict, detail = comparison.verdict, comparison.detail
    if observation is not None and (reason := faster_than_twin(metric.name, observation)) is not None:
        verdict = Verdict.INCONCLUSIVE
        detail = f"{detail}; {reason}"
    if metric.about_faults and problems:
        verdict = Verdict.INCONCLUSIVE
        detail = f"{detail}; says nothing, because {problems[0]}"
    return Check(
        name=metric.name,
        verdict=verdict,
        observed=comparison.value,
        bound=bound,
        unit=metric.unit,
        rule=f"{comparison.rule}. {metric.meaning}",
        detail=detail,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """A value compared with a bound. `value` None: there is no value to compare."""

    value: Value | None
    verdict: Verdict
    rule: str
    detail: str


def _compare_bound(
    metric: Metric, sign: str, bound: float | str, observation: Observation | None, noisy: int
) -> _Comparison:
    """Compare an observation with a bound: by its interval if it is noisy, otherwise by its value."""
    rule = COMPARISONS[sign]
    if observation is None or observation.value is None:
        detail = "not measured in this run" if observation is None else observation.detail
        return _Comparison(value=None, verdict=Verdict.INCONCLUSIVE, rule=rule, detail=detail)
    value, detail = observation.value, observation.detail
    if isinstance(value, float) and not math.isfinite(value):
        detail = f"{value} is no value; {detail}"
        return _Comparison(value=None, verdict=Verdict.INCONCLUSIVE, rule=rule, detail=detail)
    if metric.is_noisy and not is_noisy(metric, sign, bound):
        verdict = _compare_ends(sign, value, bound, observation)
    elif (interval := _deciding(sign, observation)) is not None and not isinstance(bound, str):
        verdict = decide("max" if sign == "max" else "min", bound, interval)
        rule, detail = f"{rule}, {interval.rule}{risk(interval.level, noisy)}", f"{detail}; {interval}"
    elif metric.is_noisy and observation.interval is None:
        verdict = Verdict.INCONCLUSIVE
        detail = f"{detail}; {NO_INTERVAL}"
    else:
        verdict = _compare_ends(sign, value, bound, observation)
        if observation.censored and verdict is Verdict.FAIL and _is_within(bound, observation.interval):
            verdict = Verdict.INCONCLUSIVE
            detail = f"{detail}; some of it may be by chance: {observation.interval}"
    return _Comparison(value=value, verdict=verdict, rule=rule, detail=detail)


def risk(level: float, noisy: int) -> str:
    """Return what a rule says about its risk, which all noisy checks of a run share; empty if `level` is 1."""
    if level == 1:
        return ""
    tail = 100 * tail_of(level)
    of_all = f"{tail:.3g} % for each of {noisy} noisy checks" if noisy > 1 else f"{tail:.3g} %"
    return f"; wrong FAIL at most {of_all}"


def _deciding(sign: str, observation: Observation) -> Interval | None:
    """Return the interval that decides; None: the value is exact, a name, or censored at its upper end."""
    return None if sign == "equals" or observation.censored else observation.interval


def _is_within(bound: float | str, interval: Interval | None) -> bool:
    """Return whether a censored value may be below its maximum: the lower end of its interval is."""
    return interval is not None and not isinstance(bound, str) and interval.low <= bound


def _compare_ends(sign: str, value: float | str, bound: float | str, observation: Observation) -> Verdict:
    """Compare every value that errors of measurement leave open; INCONCLUSIVE where they disagree."""
    ends = observation.between or (value,)
    verdicts = {_compare(sign, end, bound, censored=observation.censored) for end in ends}
    return verdicts.pop() if len(verdicts) == 1 else Verdict.INCONCLUSIVE


def _compare(sign: str, value: float | str, bound: float | str, *, censored: bool) -> Verdict:
    if sign == "equals":
        good = value == bound
        return Verdict.INCONCLUSIVE if censored else Verdict.PASS if good else Verdict.FAIL
    if isinstance(value, str) or isinstance(bound, str):
        return Verdict.INCONCLUSIVE
    if sign == "max":
        if value > bound:
            return Verdict.FAIL
        return Verdict.INCONCLUSIVE if censored else Verdict.PASS
    if value >= bound:
        return Verdict.PASS
    return Verdict.INCONCLUSIVE if censored else Verdict.FAIL
