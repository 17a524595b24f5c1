"""What a soft lab's emulation carries, against what the rates of its links let a workload send. Pure.

Up to half of what the emulation carries, the shapers decide what a flow gets. Beyond it, the machine does.
"""

from __future__ import annotations

__all__ = ["RULE", "SHARE", "is_beyond", "sentence"]

SHARE = 0.5
RULE = (
    "observed <= bound. What the workload's RNICs may send by the rates of their links, against half of what the "
    "emulation carries without shapers"
)


def is_beyond(offered_bps: float, carried_bps: float) -> bool:
    """Return whether a workload may send more than the share of what the emulation carries."""
    return offered_bps > SHARE * carried_bps


def sentence(offered_bps: float, carried_bps: float | None) -> str:
    """Return both numbers in words, and what to do if the first one is too large or the second one is not known."""
    if carried_bps is None:
        return (
            f"{offered_bps / 1e6:.3g} Mb/s may be sent, and what the emulation carries could not be measured; run it "
            "again on a quiet machine"
        )
    said = f"{offered_bps / 1e6:.3g} Mb/s may be sent, and the emulation carries {carried_bps / 1e6:.3g} Mb/s in all"
    if not is_beyond(offered_bps, carried_bps):
        return said
    return (
        f"{said}: beyond half of that, the machine and not the links decides what a flow gets; use fewer RNICs, a "
        "larger faultbed_rate_scale, or a machine with more CPUs"
    )
