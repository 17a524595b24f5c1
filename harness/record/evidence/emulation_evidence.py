"""How much the emulation carries, and how much the workload may offer: `evidence/calibrate/emulation.json`."""

from __future__ import annotations

import msgspec

__all__ = ["EmulationEvidence"]


class EmulationEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """The load of a soft lab whose links have rates. Rates are in bits/s.

    `offered_bps` is how much the workload may send; None: no link has a rate. `carried_bps` is the emulation's capacity
    without shapers; None: not measured.
    """

    offered_bps: float | None = None
    carried_bps: float | None = None
