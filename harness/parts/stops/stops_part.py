"""No stop condition held, and each was watched closely enough to know that."""

from __future__ import annotations

from collections.abc import Iterator

from faultbed.harness.experiment.stop import Condition
from faultbed.harness.ledger.claims import Claim
from faultbed.harness.ledger.settle import Finding
from faultbed.harness.parts.part import Part, Planned, Row, View
from faultbed.harness.parts.stops.stop_evidence import StopsEvidence, Watched
from faultbed.harness.parts.stops.stops_pass import active_of
from faultbed.harness.verdict import Verdict

__all__ = ["PART"]

_HEALTHY = "healthy_start"
_REFUTED, _START = "never held while faults were on", "the workload was healthy"


def _claims(planned: Planned) -> Iterator[Claim]:
    """Yield a claim for each condition. Equal conditions are one claim."""
    for name, condition in _conditions(planned).items():
        says = f"If it is beyond the bound{_lasting(condition)}, the run is ended. {condition.metric.meaning}"
        yield Claim(name=name, says=says, conditions=(_REFUTED,))


def _found(view: View) -> Iterator[Claim]:
    """Yield the claim that the workload was healthy before the first fault, if it was not."""
    evidence = view.sealed.of(StopsEvidence)
    if evidence is not None and evidence.refused is not None:
        says = "The workload is healthy before the first fault, or no fault is armed"
        yield Claim(name=_HEALTHY, says=says, conditions=(_START,))


def _row(claim: Claim, view: View) -> Row | None:
    """Return the last value of a condition, and why it is not known that it never held."""
    evidence = view.sealed.of(StopsEvidence)
    if evidence is None:
        return None
    if claim.name == _HEALTHY:
        detail = f"no fault was armed: {evidence.refused}"
        return Row(finding=Finding(conditions={_START: (detail,)}), detail=detail)
    condition = _conditions(view.planned)[claim.name]
    wanted = condition.metric.name, condition.bound, condition.for_ns
    watched = next((one for one in evidence.conditions if (one.metric, one.bound, one.for_ns) == wanted), None)
    return None if watched is None else _row_of(condition, watched, evidence.t0_ns)


def _row_of(condition: Condition, watched: Watched, t0_ns: int) -> Row:
    why, detail = _why_unknown(condition, watched, t0_ns), ""
    if watched.held is not None:
        since_s, at_s = (watched.held.since_ns - t0_ns) / 1e9, (watched.held.at_ns - t0_ns) / 1e9
        detail = (
            f"beyond the bound from {since_s:.1f} s on; at {at_s:.1f} s all faults were cleared and the run was ended"
        )
    elif not why:
        detail = (
            f"never beyond the bound{_lasting(condition)} while faults were on; observed is the last value (longest "
            f"gap between two values {watched.largest_gap_ns / 1e9:.1f} s)"
        )
    is_broken = watched.held is not None and condition.verdict is Verdict.FAIL
    shown = () if not why and watched.held is None else (why or detail,)
    return Row(
        finding=Finding(conditions={_REFUTED: shown}, refuted=detail if is_broken else None),
        name=f"stop.{condition.metric.name}",
        observed=watched.last_value if watched.held is None else watched.held.value,
        bound=condition.bound,
        comparison=condition.metric.bound,
        unit=condition.metric.unit,
        detail=detail or why,
    )


def _why_unknown(condition: Condition, watched: Watched, t0_ns: int) -> str:
    """Return why a condition that did not end the run may have held; empty: it did not."""
    if watched.held is not None:
        return ""
    if watched.missing_ns is not None:
        since_s, at_s = ((at_ns - t0_ns) / 1e9 for at_ns in watched.missing_ns)
        missing = f"no data of the metric from {since_s:.1f} s on"
        return f"{missing}; at {at_s:.1f} s all faults were cleared and the run was ended"
    if watched.last_value is None or watched.known_ns is None:
        return "never known while faults were on"
    known_ns = watched.known_ns[1] - watched.known_ns[0]
    if known_ns < condition.for_ns:
        return f"known for {known_ns / 1e9:.1f} s only, but the condition must hold{_lasting(condition)}"
    if watched.may_have_held_ns is not None:
        since_s, at_s = ((at_ns - t0_ns) / 1e9 for at_ns in watched.may_have_held_ns)
        return (
            f"not refuted from {since_s:.1f} s to {at_s:.1f} s, and not known all the time in between (longest gap "
            f"between two values {watched.largest_gap_ns / 1e9:.1f} s)"
        )
    return ""


def _conditions(planned: Planned) -> dict[str, Condition]:
    return {
        f"stop.{condition.metric.name} {condition.metric.bound} {condition.bound:g}{_lasting(condition)}": condition
        for condition in planned.stops
    }


def _lasting(condition: Condition) -> str:
    return f" for {condition.for_ns / 1e9:g} s" if condition.for_ns else ""


PART = Part(name="stops", claims=_claims, found=_found, row=_row, evidence=StopsEvidence, active=active_of)
