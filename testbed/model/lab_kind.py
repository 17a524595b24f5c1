"""Facts about each kind of lab; what commands do with one is in its back end (`testbed/backends/lab_backend.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["LAB_KINDS", "LabKind", "LabTraits", "traits_of"]

LabKind = Literal["soft", "rack"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabTraits:
    """Facts about a kind of lab; `noun` names such a lab in sentences."""

    noun: str
    is_emulated: bool
    """Machines are VMs on the controller's machine, and RNICs, links and GPUs are software, so that absolute rates are
    meaningless."""
    has_snapshot: bool
    """The lab is restored from one snapshot and belongs to one user. Runs reserve, restore and compare all of it."""
    applies_routing: bool
    """Routing schemes can be applied to its switches."""
    clock_bound_s: float
    """How far a machine's clock may be from the controller's. A soft guest's clock is set once after a resume, by a
    command that may take seconds; racks run PTP or chrony."""
    outlier_ratio: float
    """The burn-in reports a pair of RNICs as an outlier if it is this many times worse than the best quarter of the
    pairs. Emulated pairs share a few cores and differ by a third on a quiet machine, and a faulty link is tens of times
    slower. Hardware pairs of one kind differ by a few percent (not yet run on hardware)."""


LAB_KINDS: Mapping[LabKind, LabTraits] = {
    "soft": LabTraits(
        noun="soft lab",
        is_emulated=True,
        has_snapshot=True,
        applies_routing=True,
        clock_bound_s=30.0,
        outlier_ratio=4.0,
    ),
    "rack": LabTraits(
        noun="rack lab",
        is_emulated=False,
        has_snapshot=False,
        applies_routing=False,
        clock_bound_s=0.001,
        outlier_ratio=1.15,
    ),
}


def traits_of(kind: LabKind) -> LabTraits:
    """Return the facts about a kind of lab."""
    return LAB_KINDS[kind]
