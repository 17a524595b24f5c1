"""The workload ran to its end, and moved data."""

from __future__ import annotations

from collections.abc import Iterator

from faultbed.harness.ledger.claims import Claim
from faultbed.harness.ledger.settle import Finding
from faultbed.harness.parts.part import Part, Planned, Row, View
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.record.evidence.workload_evidence import WorkloadEvidence

__all__ = ["PART"]

_MOVED = "moved data"
_ENDED = "ran to its end"


def _claims(_planned: Planned) -> Iterator[Claim]:
    """Yield the claim of the workload."""
    yield Claim(name="workload", says="The workload ran to its end and moved data", conditions=(_ENDED, _MOVED))


def _row(_claim: Claim, view: View) -> Row | None:
    """Return how the workload ended. A job that failed refutes the claim; it is no error of the harness.

    A workload that moved no data does not show what the faults do to it, although a bound on errors would hold. Of
    several flows, each has to move some.
    """
    run = view.run
    if run.workload.failure is not None:
        return Row(
            finding=Finding(refuted=f"it failed: {run.workload.failure}"), detail=f"it failed: {run.workload.failure}"
        )
    if run.lab.errors:
        return Row(finding=Finding(conditions={_ENDED: run.lab.errors[:1]}), detail=run.lab.errors[0])
    silent = _why_silent(run)
    return Row(finding=Finding(conditions={_ENDED: (), _MOVED: silent}), detail="; ".join(silent) or "it did")


def _why_silent(run: RunEvidence) -> tuple[str, ...]:
    if run.workload.serving is not None:  # its requests are its data, and an unanswered one is an error of its own
        return ()
    if not any(any(sample.bytes for sample in series.samples) or series.iterations for series in run.workload.series):
        return ("no data arrived and no iteration finished, so the effect of the faults is unknown",)
    if "flow" in run.workload.planned and run.workload.silent_flows is None:
        return ("no record says whether each flow carried data",)
    if silent := sorted(run.workload.silent_flows or ()):
        silent_flow = f"nothing arrived on {silent[0]} from beginning to end ({len(silent)} such flows)"
        return (f"{silent_flow}, so the effect of the faults on it is unknown",)
    return ()


PART = Part(name="workload", evidence=WorkloadEvidence, claims=_claims, row=_row)
