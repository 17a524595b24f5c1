"""Colour and shaded window of each fault of a run, the same on every page. Pure."""

from __future__ import annotations

from faultbed.harness.record.evidence.fault_evidence import FaultRun
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.report.plots.charts import Band
from faultbed.inject.kinds.catalogue import CATALOGUE

__all__ = ["band", "colour"]

_PALETTE = ("#d1495b", "#edae49", "#8f5aa8", "#00798c", "#5a7d2a", "#8c564b")
"""Colours for faults of an unknown kind; neighbours also differ in lightness."""


def colour(fault: FaultRun, index: int) -> str:
    """Return the colour (`#rrggbb`) of the fault at `index` (from 0) in its run."""
    kind = CATALOGUE.get(fault.plan.kind)
    return _PALETTE[index % len(_PALETTE)] if kind is None else kind.colour


def band(run: RunEvidence, fault: FaultRun, index: int) -> Band | None:
    """Return the shaded window: from the first firing (else arming) to the removal, by the receipt.

    A fault whose removal is not proven may have lasted until the end of the run.
    """
    receipt = fault.receipt
    if receipt is None:
        return None
    start = receipt.fired.first_ns or receipt.armed.at_ns
    if not isinstance(start, int):
        return None
    end = receipt.cleared.at_ns if receipt.cleared.ok and receipt.cleared.at_ns is not None else run.workload.end_ns
    return Band(
        start_s=(start - run.workload.t0_ns) / 1e9,
        end_s=(max(start, end) - run.workload.t0_ns) / 1e9,
        number=index + 1,
        colour=colour(fault, index),
    )
