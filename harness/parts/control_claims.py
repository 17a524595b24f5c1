"""A control run decides nothing about faults: each is prepared, armed and cleared, but its action is empty.

A control run does everything else that a run does: it starts holders, refreshes leases and reads counters. No packet is
lost and no link goes down. If its workload is slower than the fault-free twin, that is the cost of the harness itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from faultbed.harness.analysis.observations import Observation
from faultbed.harness.ledger.claims import Claim
from faultbed.harness.ledger.settle import Finding
from faultbed.harness.parts.part import Part, Planned, Row, View

__all__ = ["PART"]

_ACTED = "a fault acted"


def _claims(planned: Planned) -> Iterator[Claim]:
    """Yield a claim that is unknown by plan."""
    if planned.plan.is_control:
        says = "A control run decides nothing about faults: each was armed with zero intensity"
        yield Claim(name="control_run", says=says, conditions=(_ACTED,))


def _row(_claim: Claim, view: View) -> Row:
    """Return the job completion time divided by that of the fault-free twin."""
    jct_ratio = view.observed.metrics.get("jct_ratio")
    detail = f"armed, zero intensity: no fault did anything; {_cost_of_harness(jct_ratio)}"
    return Row(
        finding=Finding(conditions={_ACTED: (detail,)}),
        observed=None if jct_ratio is None else jct_ratio.value,
        unit="ratio",
        detail=detail,
    )


def _cost_of_harness(jct_ratio: Observation | None) -> str:
    if jct_ratio is None:
        return "its cost is unknown: not measured"
    if jct_ratio.value is None:
        return f"its cost is unknown: {jct_ratio.detail}"
    interval = f"; {jct_ratio.interval}" if jct_ratio.interval is not None else ", too few iterations for an interval"
    return (
        f"the harness alone cost {jct_ratio.value:.3f} of the fault-free twin's job time ({jct_ratio.detail}{interval})"
    )


PART = Part(name="control", claims=_claims, row=_row)
