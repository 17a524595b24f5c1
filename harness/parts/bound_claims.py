"""Bounds of the experiment: one claim for each, decided by the rule of its metric."""

from __future__ import annotations

from collections.abc import Iterator

from faultbed.harness.analysis.noise import tolerance_of
from faultbed.harness.analysis.observations import Observation
from faultbed.harness.bounds import Bound, bounds_of, check_bound, sampled_bounds
from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.ledger.claims import Claim
from faultbed.harness.ledger.settle import Finding
from faultbed.harness.ledger.statistics.decision import tail_for
from faultbed.harness.parts.part import Part, Planned, Row, View
from faultbed.harness.verdict import Verdict

__all__ = ["PART"]


def _claims(planned: Planned) -> Iterator[Claim]:
    """Yield a claim for each bound, with the faults, the scheme and the twin without which it means nothing."""
    for name, (expectation, _) in _bounds(planned).items():
        depends = planned.supports(expectation)
        yield Claim(name=name, says=name, members=_members(expectation, planned), depends=depends)


def _row(claim: Claim, view: View) -> Row | None:
    """Return the metric's value compared with its bound."""
    _, bound = _bounds(view.planned)[claim.name]
    observation = view.observed.metrics.get(bound.metric.name)
    tail = tail_for(sampled_bounds(view.planned.expectations))
    check = check_bound(bound, observation, (), tolerance=tolerance_of(view.run, view.floor), tail=tail)
    members = {name: _why_no_value(name, observation) for name in claim.members}
    unseen = [f"{name}: {why}" for name, reasons in members.items() for why in reasons]
    is_held_up = check.verdict is Verdict.PASS and unseen
    advice = f"{'; '.join(unseen)}; bound it in an experiment in which every fault has a value" if is_held_up else ""
    return Row(
        finding=Finding(
            members=members,
            refuted=check.detail if check.verdict is Verdict.FAIL else None,
            undecided=check.detail if check.verdict is Verdict.INCONCLUSIVE else None,
        ),
        name=check.name,
        meaning=check.meaning,
        comparison=check.comparison,
        estimand=check.estimand,
        rule=check.rule,
        why=check.why,
        observed=check.observed,
        bound=check.bound,
        unit=check.unit,
        detail="; ".join(filter(None, (check.detail, advice))),
    )


def _bounds(planned: Planned) -> dict[str, tuple[Expectation, Bound]]:
    """Return every bound with its sign, by the name of its claim. Equal bounds are one claim."""
    return {
        f"{bound.metric.name} {bound.sign} {bound.value}": (expectation, bound)
        for expectation in planned.expectations
        for bound in bounds_of(expectation)
    }


def _members(expectation: Expectation, planned: Planned) -> tuple[str, ...]:
    """Return the faults of which each needs a value."""
    has_value = expectation.metric.each_fault
    return tuple(fault.id for fault in planned.plan.faults if has_value is not None and has_value(fault.kind))


def _why_no_value(fault_id: str, observation: Observation | None) -> tuple[str, ...]:
    if observation is None or observation.value is None:
        return ("the metric has no value in this run",)
    return (observation.unseen[fault_id],) if fault_id in observation.unseen else ()


PART = Part(name="bounds", claims=_claims, row=_row)
