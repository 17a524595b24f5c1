"""The lab is as it was before the run."""

from __future__ import annotations

from collections.abc import Iterator

from faultbed.harness.ledger.claims import Claim
from faultbed.harness.ledger.settle import Finding
from faultbed.harness.parts.part import Part, Planned, Row, View
from faultbed.harness.record.evidence.lab_evidence import LabEvidence

__all__ = ["PART"]

_SAME = "every machine is as before"


def _claims(_planned: Planned) -> Iterator[Claim]:
    """Yield the claim of the lab."""
    says = "Fingerprint of every node after the run against the one before"
    yield Claim(name="lab_restored", says=says, conditions=(_SAME,))


def _row(_claim: Claim, view: View) -> Row | None:
    """Return how the lab differs from its state before the run."""
    state, clean = view.run.lab.state, view.run.lab.state == "CLEAN"
    detail = "; ".join(view.run.lab.diff) or "the comparison with the state before the run failed"
    return Row(
        finding=Finding(conditions={_SAME: () if clean else (detail,)}),
        observed=state,
        bound="CLEAN",
        comparison="equals",
        detail="the same as before the run" if clean else detail,
    )


PART = Part(name="lab", evidence=LabEvidence, claims=_claims, row=_row)
