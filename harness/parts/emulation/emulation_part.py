"""The emulation can forward what the workload offers. Otherwise the run measures the machine.

The load is in the plan, and with it the claim. The capacity is measured before the first pass.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from faultbed.harness.analysis.links import emulation_headroom
from faultbed.harness.ledger.claims import Claim
from faultbed.harness.ledger.settle import Finding
from faultbed.harness.live import emulation_limit
from faultbed.harness.parts.part import Fitting, Part, Planned, Row, View
from faultbed.harness.parts.passes import Calibration
from faultbed.harness.record.evidence.emulation_evidence import EmulationEvidence

__all__ = ["PART", "OfferedLoad"]

_NAME = "emulation"
_HEADROOM = "headroom"


class OfferedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What the workload, and what is beside it, may send at the rates of the lab's links (bits/s)."""

    offered_bps: float


def _fit(fitting: Fitting) -> OfferedLoad | None:
    """Return the load; None: the lab shapes no link of it, so nothing limits it."""
    inventory = fitting.inventory
    if inventory.rate_scale is None or not inventory.shapes:
        return None
    sources = [source for one in fitting.sending for source in one.sources]
    sinks = [sink for one in fitting.sending for sink in one.sinks]
    limit_bps = emulation_headroom.link_limit_bps(sources, sinks, inventory.topology, inventory.rate_scale)
    if limit_bps is None:
        return None
    rates = [one.paced_bps for one in fitting.sending]
    return OfferedLoad(offered_bps=min(limit_bps, sum(rates)) if all(rates) else limit_bps)


def _calibrate(lab: Calibration) -> EmulationEvidence:
    """Return load and capacity. If the capacity cannot be measured, it stays unknown."""
    setting = lab.setting
    planned = setting.plan.fitted(_NAME, OfferedLoad)
    if planned is None:
        return EmulationEvidence()
    offered_bps = planned.offered_bps
    try:
        with setting.journal.doing(_NAME, offered_bps=offered_bps):
            capacity = emulation_limit.capacity_of(setting.lab, offered_bps, lab.to_known_state, setting.progress)
    except emulation_limit.NotMeasured as error:
        setting.progress(str(error))
        return EmulationEvidence(offered_bps=offered_bps)
    return EmulationEvidence(offered_bps=offered_bps, carried_bps=capacity.carried_bps)


def _claims(planned: Planned) -> Iterator[Claim]:
    """Yield the claim if the links of the lab have rates: only then can a workload overload the emulation."""
    if planned.plan.fitted(_NAME, OfferedLoad) is not None:
        yield Claim(name=_NAME, says=emulation_headroom.MEANING, conditions=(_HEADROOM,))


def _row(_claim: Claim, view: View) -> Row | None:
    """Return the offered load beside what the emulation carries."""
    planned = view.planned.plan.fitted(_NAME, OfferedLoad)
    evidence = view.run.emulation
    if planned is None or evidence is None:
        return None
    offered_bps, carried_bps = planned.offered_bps, evidence.carried_bps
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


PART = Part(name=_NAME, evidence=EmulationEvidence, fit=_fit, calibrate=_calibrate, claims=_claims, row=_row)
