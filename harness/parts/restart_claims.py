"""A job with `[workload.resilience]` caught up after each restart, and its final state is right."""

from __future__ import annotations

from collections.abc import Iterator

from faultbed.harness.analysis.restarts import TimedRestart, why_state_unknown
from faultbed.harness.ledger.claims import Claim
from faultbed.harness.ledger.settle import Finding
from faultbed.harness.parts.part import Part, Planned, Row, View

__all__ = ["PART"]

_RESTARTS, _STATE = "restarts", "state"
_KNOWN = "the state of every rank is known"
_RESTARTS_CLAIM = Claim(name=_RESTARTS, says="The job caught up after each restart, or another loss interrupted it")
_STATE_CLAIM = Claim(
    name=_STATE,
    says="Elements of the final state that differ from those of an uninterrupted job",
    conditions=(_KNOWN,),
)


def _claims(planned: Planned) -> Iterator[Claim]:
    """Yield the claims about the restarts of a job, and about its final state."""
    if planned.plan.workload.get("resilience"):
        yield from (_RESTARTS_CLAIM, _STATE_CLAIM)


def _found(view: View) -> Iterator[Claim]:
    """Yield the same claims if only the record has restarts."""
    if view.run.workload.resilience is not None and not view.planned.plan.workload.get("resilience"):
        yield from (_RESTARTS_CLAIM, _STATE_CLAIM)


def _row(claim: Claim, view: View) -> Row | None:
    """Return how many restarts there were and how each went, or how many elements of the final state are wrong."""
    return _state(view) if claim.name == _STATE else _restarts(view)


def _restarts(view: View) -> Row | None:
    """Each restart is a member. One that another restart follows was interrupted, which is no defect of it."""
    if view.run.workload.resilience is None:
        return None
    restarts, failed = view.observed.restarts, view.run.workload.failure is not None
    unfinished = {one.restart.number for one in restarts[-1:] if one.restart.caught_up_ns is None}
    return Row(
        finding=Finding(
            members={_name(one): (one.describe(),) if one.restart.number in unfinished else () for one in restarts},
            refuted=f"the job failed: {restarts[-1].describe()}" if restarts and failed else None,
        ),
        observed=len(restarts),
        unit="count",
        detail="; ".join(f"{_name(one)}: {one.describe()}" for one in restarts) or "no restart",
    )


def _name(timed: TimedRestart) -> str:
    return f"restart {timed.restart.number}"


def _state(view: View) -> Row | None:
    """Wrong elements refute the claim, however many ranks reported none."""
    resilience = view.run.workload.resilience
    if resilience is None:
        return None
    wrong, why = sum(state.wrong for state in resilience.states), why_state_unknown(view.run)
    detail = f"{sum(state.elements for state in resilience.states)} elements on {len(resilience.states)} ranks compared"
    return Row(
        finding=Finding(
            conditions={_KNOWN: (why,) if why else ()},
            refuted=f"{wrong} elements of the final state were wrong" if wrong else None,
        ),
        observed=wrong if resilience.states else None,
        bound=0,
        comparison="equals",
        unit="count",
        detail=f"{detail}; {why}" if why else detail,
    )


PART = Part(name="restarts", claims=_claims, found=_found, row=_row)
