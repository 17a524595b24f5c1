"""The fault-free twin ran to its end as the run did, without a restart and with right data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.ledger.claims import Claim
from faultbed.harness.ledger.settle import Finding
from faultbed.harness.parts.part import Part, Planned, Row, View

__all__ = ["NAME", "PART", "wants_twin"]

NAME = "twin"
_ENDED = "ran to its end"
_CLAIM = Claim(
    name=NAME,
    says="The fault-free twin ran to its end, and no element of its results is wrong",
    conditions=(_ENDED,),
)


def wants_twin(expectations: Sequence[Expectation], *, control: bool) -> bool:
    """Return whether a run needs a fault-free twin: a bound compares with it, or a control run does."""
    return control or any(expectation.metric.needs_twin for expectation in expectations)


def _claims(planned: Planned) -> Iterator[Claim]:
    if wants_twin(planned.expectations, control=planned.plan.is_control):
        yield _CLAIM


def _found(view: View) -> Iterator[Claim]:
    """Yield the claim if a record has a twin that the plan does not have."""
    if view.run.twin is not None and not [*_claims(view.planned)]:
        yield _CLAIM


def _row(_claim: Claim, view: View) -> Row | None:
    """Return how many elements of the twin's results were wrong. No fault was there to cause them."""
    run, twin = view.run, view.run.twin
    if twin is None:
        return None
    if twin.failure is not None:
        why = f"it failed: {twin.failure}"
        finding = Finding(refuted=why) if twin.wrong_elements else Finding(conditions={_ENDED: (why,)})
        return Row(finding=finding, detail=why)
    wrong = sum(step.wrong for rank in twin.series for step in rank.iterations)
    recorded = {rank.rank for rank in twin.series if rank.samples or rank.iterations}
    missing = sorted({rank.rank for rank in run.workload.ranks} - recorded)
    silent = tuple(f"it has no record of rank {rank}" for rank in missing)
    if not recorded:
        silent = ("it has no record of any rank",)
    return Row(
        finding=Finding(
            conditions={_ENDED: silent}, refuted=f"{wrong} elements were wrong without any fault" if wrong else None
        ),
        observed=wrong,
        bound=0,
        comparison="equals",
        unit="count",
        detail="; ".join(silent[:1]) or "no fault was there to cause wrong elements",
    )


PART = Part(name="twin", claims=_claims, found=_found, row=_row)
