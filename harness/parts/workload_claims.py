"""The workload ran to its end, and moved data."""

from __future__ import annotations

from collections.abc import Iterator

from faultbed.harness.ledger.claims import Claim
from faultbed.harness.ledger.settle import Finding
from faultbed.harness.parts.part import Part, Planned, Row, View
from faultbed.harness.record.measurements import Measurements

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
    if run.failure is not None:
        return Row(finding=Finding(refuted=f"it failed: {run.failure}"), detail=f"it failed: {run.failure}")
    if run.errors:
        return Row(finding=Finding(conditions={_ENDED: run.errors[:1]}), detail=run.errors[0])
    silent = _why_silent(run)
    return Row(finding=Finding(conditions={_ENDED: (), _MOVED: silent}), detail="; ".join(silent) or "it did")


def _why_silent(run: Measurements) -> tuple[str, ...]:
    if run.serving is not None:  # its requests are its data, and an unanswered one is an error of its own
        return ()
    if not any(any(sample.bytes for sample in series.samples) or series.iterations for series in run.series):
        return ("no data arrived and no iteration finished, so the effect of the faults is unknown",)
    if "flow" in run.workload and run.silent_flows is None:
        return ("no record says whether each flow carried data",)
    if silent := sorted(run.silent_flows or ()):
        silent_flow = f"nothing arrived on {silent[0]} from beginning to end ({len(silent)} such flows)"
        return (f"{silent_flow}, so the effect of the faults on it is unknown",)
    return ()


PART = Part(name="workload", claims=_claims, row=_row)
