"""A job with `[workload.resilience]` caught up after each restart, and its final state is right."""

from __future__ import annotations

from collections.abc import Iterator

from faultbed.harness.analysis.restarts import TimedRestart, why_state_unknown
from faultbed.harness.ledger.claims import Claim
from faultbed.harness.ledger.settle import Finding
from faultbed.harness.parts.part import Planned, Row, View

__all__ = ["claims", "found", "row"]

_PREFIX, _STATE = "restart.", "state"
_CAUGHT_UP, _KNOWN = "caught up", "the state of every rank is known"
_STATE_CLAIM = Claim(
    name=_STATE,
    says="Elements of the final state that differ from those of an uninterrupted job",
    conditions=(_KNOWN,),
)


def claims(planned: Planned) -> Iterator[Claim]:
    """Yield the claim about the final state of a job with restarts."""
    if planned.plan.workload.get("resilience"):
        yield _STATE_CLAIM


def found(view: View) -> Iterator[Claim]:
    """Yield a claim for each restart, and that of the final state if only the record has one."""
    for timed in view.observed.restarts:
        says = "The job caught up after this restart, or another loss interrupted it"
        yield Claim(name=f"{_PREFIX}{timed.restart.number}", says=says, conditions=(_CAUGHT_UP,))
    if view.run.resilience is not None and not view.planned.plan.workload.get("resilience"):
        yield _STATE_CLAIM


def row(claim: Claim, view: View) -> Row | None:
    """Return how a restart went, or how many elements of the final state are wrong."""
    if claim.name == _STATE:
        return _state(view)
    timed = next(item for item in view.observed.restarts if claim.name == f"{_PREFIX}{item.restart.number}")
    return Row(
        finding=_caught_up(timed, is_last=timed is view.observed.restarts[-1], failed=view.run.failure is not None),
        observed=None if timed.restart.caught_up_ns is None else timed.length_ns / 1e9,
        unit="s",
        detail=timed.describe(),
    )


def _caught_up(timed: TimedRestart, *, is_last: bool, failed: bool) -> Finding:
    """A restart that another one follows was interrupted, which is no defect of it."""
    if is_last and failed:
        return Finding(refuted=f"the job failed: {timed.describe()}")
    unfinished = is_last and timed.restart.caught_up_ns is None
    return Finding(conditions={_CAUGHT_UP: (timed.describe(),) if unfinished else ()})


def _state(view: View) -> Row | None:
    """Wrong elements refute the claim, however many ranks reported none."""
    resilience = view.run.resilience
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
