"""Every planned fault happened as planned, on something that the workload used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.experiment.metrics import PER_FAULT_PREFIXES
from faultbed.harness.ledger.claims import Claim
from faultbed.harness.ledger.settle import Finding
from faultbed.harness.parts.faults.faults_pass import active_of
from faultbed.harness.parts.part import Part, Planned, Row, View
from faultbed.harness.proof import why_not_exposed_in, why_not_happened_in
from faultbed.harness.record.evidence.fault_evidence import FaultsEvidence
from faultbed.inject.evidence import firing_times
from faultbed.inject.evidence.receipt import Receipt

__all__ = ["PART"]

_PREFIX = "fired."
_PROVEN, _EXPOSED = "happened as planned", "exposed"
_LATE_NS = 500_000_000
_SAYS = (
    "Armed, fired, seen by a counter or a reading, nothing moved that must not, cleared, "
    f"{firing_times.RULE}; on something that the workload used"
)


def _claims(planned: Planned) -> Iterator[Claim]:
    """Yield a claim for each planned fault."""
    yield from _claims_of(fault.id for fault in planned.plan.faults)


def _supports(planned: Planned, expectation: Expectation) -> Iterator[str]:
    """Yield the claims of the faults that a metric is about: one for `recovery.<id>`, else all."""
    if not expectation.metric.about_faults:
        return
    ids = [fault.id for fault in planned.plan.faults]
    for prefix in PER_FAULT_PREFIXES:
        fault_id = expectation.metric.name.removeprefix(prefix)
        if expectation.metric.name.startswith(prefix) and fault_id in ids:
            yield f"{_PREFIX}{fault_id}"
            return
    yield from (f"{_PREFIX}{fault_id}" for fault_id in ids)


def _found(view: View) -> Iterator[Claim]:
    """Yield a claim for each recorded fault that the plan does not have."""
    planned = {fault.id for fault in view.planned.plan.faults}
    yield from _claims_of(fault_id for fault_id in view.faults if fault_id not in planned)


def _claims_of(fault_ids: Iterable[str]) -> Iterator[Claim]:
    for fault_id in fault_ids:
        yield Claim(name=f"{_PREFIX}{fault_id}", says=_SAYS, conditions=(_PROVEN, _EXPOSED))


def _row(claim: Claim, view: View) -> Row | None:
    """Return what the receipt of a fault says; nothing if the run has no record of it."""
    fault = view.faults.get(claim.name.removeprefix(_PREFIX))
    if fault is None:
        return None
    problems, receipt = why_not_happened_in(view.run, fault), fault.receipt
    exposed = why_not_exposed_in(view.run, fault)
    evidence = [*problems, *exposed]
    if not evidence:
        evidence = [f"witness: {receipt.fired.witness if receipt else None}", *_on_for(receipt)]
    armed_ns = receipt.armed.at_ns if receipt else None
    late_ns = armed_ns - view.run.workload.t0_ns - fault.plan.at_ns if isinstance(armed_ns, int) else 0
    if late_ns > _LATE_NS:
        evidence.append(f"armed {late_ns / 1e9:.1f} s later than planned, because the lab was busy")
    return Row(
        finding=Finding(conditions={_PROVEN: problems, _EXPOSED: exposed}),
        observed=0 if receipt is None else receipt.fired.count,
        bound=1,
        comparison="min",
        unit="count",
        detail="; ".join(evidence),
    )


def _on_for(receipt: Receipt | None) -> list[str]:
    if receipt is None or (on_time := receipt.on_time) is None:
        return []
    if on_time.complete:
        return ["complete: it hit as often as planned"]
    on_s, planned_s, off_s = (ns / 1e9 for ns in (on_time.measured_ns, on_time.planned_ns, on_time.tolerance_ns))
    switching = f"switching took {on_time.changing_ns / 1e9:.2f} s"
    return [f"on for {on_s:.2f} s of {planned_s:.2f} s (tolerance {off_s:.2f} s), {switching}"]


PART = Part(
    name="faults",
    evidence=FaultsEvidence,
    claims=_claims,
    supports=_supports,
    found=_found,
    row=_row,
    active=active_of,
)
