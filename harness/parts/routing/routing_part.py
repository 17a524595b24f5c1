"""The routing scheme that the experiment chose routed the workload, by kernels, marks and counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from faultbed.harness.analysis.links.flow_placements import placement_metrics
from faultbed.harness.analysis.observations import Observation
from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.ledger.claims import Claim
from faultbed.harness.ledger.sealed import Sealed
from faultbed.harness.ledger.settle import Finding
from faultbed.harness.parts.part import Part, Planned, Row, View
from faultbed.harness.parts.routing.routing_pass import active_of, bind, outlives_s, says
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.verdict import RoutingReceipt

__all__ = ["PART"]

_PREFIX = "routing."
_ROUTED = "routed the workload"
_SAYS = (
    "Applied, the switches' kernels decide as the scheme does, packets seen, not changed while the "
    "workload ran, removed"
)


def _claims(planned: Planned) -> Iterator[Claim]:
    """Yield the claim of the scheme, if the experiment chose one."""
    if planned.plan.fabric:
        yield Claim(name=f"{_PREFIX}{planned.plan.fabric.routing}", says=_SAYS, conditions=(_ROUTED,))


def _supports(planned: Planned, expectation: Expectation) -> Iterator[str]:
    """Yield the claim of the scheme. A count (of wrong elements, say) is what it is under any routing."""
    if planned.plan.fabric and expectation.metric.unit != "count":
        yield f"{_PREFIX}{planned.plan.fabric.routing}"


def _row(claim: Claim, view: View) -> Row | None:
    """Return what the receipt of the scheme says; nothing if there is none, or that of another scheme."""
    receipt = view.run.routing
    if receipt is None or claim.name != f"{_PREFIX}{receipt.scheme}":
        return Row(finding=Finding(conditions={_ROUTED: ("it was never applied",)}), detail="it was never applied")
    return Row(
        finding=Finding(conditions={_ROUTED: receipt.unproven}),
        observed=receipt.decisions.agreed,
        bound=receipt.decisions.queried,
        comparison="equals",
        unit="count",
        detail="; ".join(receipt.unproven or _evidence(receipt)),
    )


def _evidence(receipt: RoutingReceipt) -> Iterator[str]:
    marked = "" if receipt.marked is None else f", {sum(receipt.marked.values())} packets marked"
    copied = receipt.cleared.copied
    followed = f", {copied} next hops were changed after BGP" if copied else ""
    yield f"{receipt.carried_packets} packets left by ports among which the scheme chooses{marked}{followed}"
    for cause, words in (("bgp", "BGP lost next hops"), ("setting", "settings of ECMP differed")):
        explained = [deviation for deviation in receipt.deviations if deviation.cause == cause]
        if by := sorted({deviation.fault for deviation in explained if deviation.fault}):
            yield f"{words} because of {', '.join(by)}"


def _metrics(run: RunEvidence, _sealed: Sealed, _level: float) -> Mapping[str, Observation]:
    return placement_metrics(run)


PART = Part(
    name="routing",
    evidence=RoutingReceipt,
    bind=bind,
    says=says,
    claims=_claims,
    supports=_supports,
    row=_row,
    metrics=_metrics,
    active=active_of,
    outlives_s=outlives_s,
)
