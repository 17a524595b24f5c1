"""Compare what a workload may send on a soft lab with what the emulation can forward. Pure.

While the load is at most half of the emulation's capacity, the shapers decide each flow's rate. Above that, the
machine's CPUs do.
"""

from __future__ import annotations

from collections.abc import Iterable

from faultbed.testbed.model.topology import Topology

__all__ = ["MAX_LOAD_FRACTION", "MEANING", "describe_headroom", "exceeds_headroom", "link_limit_bps"]

MAX_LOAD_FRACTION = 0.5
MEANING = (
    "What the workload's RNICs may send at the rates of their links, against half of what the "
    "emulation forwards without shapers"
)


def exceeds_headroom(offered_bps: float, capacity_bps: float | None) -> bool:
    """Return whether a workload may send more than `MAX_LOAD_FRACTION` of the emulation's capacity (bits/s).

    An unknown capacity (None) counts as exceeded.
    """
    return capacity_bps is None or not 0 <= offered_bps <= MAX_LOAD_FRACTION * capacity_bps  # NaN counts as exceeded


def describe_headroom(offered_bps: float, capacity_bps: float | None) -> str:
    """Return a sentence with the load and the capacity, and what to do if the load is too high.

    Args:
        offered_bps: what the workload may send, in bits/s.
        capacity_bps: what the emulation forwards in total, in bits/s; None: it could not be measured.
    """
    load = f"the workload may send {offered_bps / 1e6:.3g} Mb/s"
    if capacity_bps is None:
        return f"{load}, but the emulation's capacity could not be measured; repeat the run on an idle machine"
    comparison = f"{load}; the emulation forwards {capacity_bps / 1e6:.3g} Mb/s in total"
    if not exceeds_headroom(offered_bps, capacity_bps):
        return comparison
    return (
        f"{comparison}. Above half of that, the machine and not the links limits each flow; use fewer RNICs, a larger "
        "faultbed_rate_scale, or a machine with more CPUs"
    )


def link_limit_bps(sources: Iterable[str], sinks: Iterable[str], topology: Topology, rate_scale: float) -> float | None:
    """Return the smaller of two sums: the rates of all sending RNICs' links, and of all receiving RNICs' links. Pure.

    None: one of these links has no rate.
    """
    sums = []
    for rnics in (set(sources), set(sinks)):
        links = [topology.rnic_link(*rnic.split(":")) for rnic in sorted(rnics)]
        speeds = [link.a.speed_gbps for link in links]
        if not speeds or None in speeds:
            return None
        sums.append(sum(speed or 0.0 for speed in speeds) * 1e9 / rate_scale)
    return min(sums)
