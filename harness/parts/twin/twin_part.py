"""The fault-free twin ran to its end as the run did, without a restart and with right data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.ledger.claims import Claim
from faultbed.harness.ledger.sealed import Phase
from faultbed.harness.ledger.settle import Finding
from faultbed.harness.parts.part import Part, Planned, Row, View
from faultbed.harness.parts.passes import Active, Pass, PassRefuted
from faultbed.testbed.errors import LabError

__all__ = ["PART"]

_NAME: Phase = "twin"
_ENDED = "ran to its end"
_CLAIM = Claim(
    name=_NAME,
    says="The fault-free twin ran to its end, and no element of its results is wrong",
    conditions=(_ENDED,),
)


class _Twin(Active):
    """The pass `twin`: what does not end as a fault-free run does is nothing to compare with."""

    def __init__(self, run: Pass) -> None:
        self._run = run

    def end(self) -> None:
        """Refuse a twin that failed or was restarted.

        Raises:
            PassRefuted: its data were wrong, without any fault.
            LabError: it failed or was restarted, so that there is nothing to compare with.
        """
        result = self._run.work.result
        if result is None:
            return
        if result.outcome == "failed" and getattr(result, "wrong_elements", 0) > 0:
            raise PassRefuted(f"the fault-free twin: {result.where}")
        if result.outcome == "failed":
            raise LabError(f"the fault-free twin failed, so there is nothing to compare with: {result.where}")
        if restarts := getattr(result, "restarts", ()):
            why = f"there is nothing fault-free to compare with: {restarts[0].reason}"
            raise LabError(f"the fault-free twin was restarted, so {why}")


def _active(run: Pass) -> Active | None:
    return _Twin(run) if run.phase == _NAME else None


def _is_planned(planned: Planned) -> bool:
    """Return whether a bound compares with a twin, or a control run does."""
    return planned.plan.is_control or any(expectation.metric.needs_twin for expectation in planned.expectations)


def _passes(planned: Planned) -> Mapping[Phase, str]:
    return {_NAME: "fault-free twin: the same workload from the same snapshot"} if _is_planned(planned) else {}


def _claims(planned: Planned) -> Iterator[Claim]:
    if _is_planned(planned):
        yield _CLAIM


def _supports(_planned: Planned, expectation: Expectation) -> Iterator[str]:
    if expectation.metric.needs_twin:
        yield _NAME


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


PART = Part(name=_NAME, claims=_claims, supports=_supports, found=_found, row=_row, passes=_passes, active=_active)
