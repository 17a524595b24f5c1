"""The emulation can forward what the workload offers. Otherwise the run measures the machine."""

from __future__ import annotations

from collections.abc import Iterator

from faultbed.harness.analysis.links import emulation_headroom
from faultbed.harness.ledger.claims import Claim
from faultbed.harness.ledger.settle import Finding
from faultbed.harness.parts.part import Part, Row, View
from faultbed.harness.record.evidence.emulation_evidence import EmulationEvidence

__all__ = ["PART"]

_HEADROOM = "headroom"


def _found(view: View) -> Iterator[Claim]:
    """Yield the claim if the links of the lab have rates: only then can a workload overload the emulation."""
    if view.run.emulation.offered_bps is not None:
        yield Claim(name="emulation", says=emulation_headroom.MEANING, conditions=(_HEADROOM,))


def _row(_claim: Claim, view: View) -> Row | None:
    """Return the offered load beside what the emulation carries."""
    offered_bps, carried_bps = view.run.emulation.offered_bps, view.run.emulation.carried_bps
    if offered_bps is None:
        return None
    detail = emulation_headroom.describe_headroom(offered_bps, carried_bps)
    beyond = emulation_headroom.exceeds_headroom(offered_bps, carried_bps)
    bound_bps = None if carried_bps is None else emulation_headroom.MAX_LOAD_FRACTION * carried_bps
    return Row(
        finding=Finding(conditions={_HEADROOM: (detail,) if beyond else ()}),
        observed=round(offered_bps / 1e6, 3),
        bound=None if bound_bps is None else round(bound_bps / 1e6, 3),
        comparison="max",
        unit="Mb/s",
        detail=detail,
    )


PART = Part(name="emulation", evidence=EmulationEvidence, found=_found, row=_row)
