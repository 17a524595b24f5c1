"""Metrics of the links between switches: how evenly a run used them, and their utilisation. Pure.

    mmr.TIER, mmr.SWITCH      maximum over mean of the bytes that the uplinks of a tier, or of one switch, sent up
    jfi                       Jain's index of the bytes that the uplinks of all rack switches sent up
    link_utilisation.LINK     bytes of a link's busier direction over its capacity; .max and .mean of all links between
                              switches
    link_bytes.error          largest difference between a link's bytes and those expected from schedule, placement and
                              ECMP
    bisection                 bytes that the uplinks of the highest tier sent up over their capacity

The capacity of a link is its speed in the inventory times the workload's time, divided by the lab's rate_scale if its
ports are shaped.
Definitions: IETF BMWG drafts on AI fabrics (draft-calabria-bmwg-ai-fabric-training-bench), Jain's DEC-TR-301.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from faultbed.harness.analysis.links.expected_load import carried, expected_loads, worst_difference
from faultbed.harness.analysis.links.link_load import Direction, LinkLoad, jain, link_loads
from faultbed.harness.analysis.observations import Observation
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.testbed.model.topology import SwitchRole, Topology
from faultbed.testbed.routing.offered_load import max_over_mean

__all__ = ["capacity_bytes", "link_metrics", "names", "uplink_use"]

_TIERS: tuple[SwitchRole, ...] = ("rtsw", "ctsw")


def names(topology: Topology) -> tuple[str, ...]:
    """Return the names of link metrics that depend on the topology of the lab."""
    uplinks = [link.a.node for link in topology.uplinks]
    roles = [topology.switch_by_name[name].role for name in uplinks]
    return (
        *(f"mmr.{tier}" for tier in _TIERS if roles.count(tier) > 1),
        *(f"mmr.{name}" for name in dict.fromkeys(uplinks) if uplinks.count(name) > 1),
        "link_utilisation.max",
        "link_utilisation.mean",
        *(f"link_utilisation.{link.name}" for link in topology.uplinks),
    )


def capacity_bytes(run: RunEvidence) -> Mapping[str, float]:
    """Return the bytes that each link between switches can carry during the workload, if its speed is known.

    The time includes the warm-up, because the ports count its bytes, too.
    """
    seconds, scale = (
        max(0, run.workload.end_ns - (run.workload.began_ns or run.workload.t0_ns)) / 1e9,
        run.lab.rate_scale or 1.0,
    )
    if traits_of(run.lab.kind).is_emulated and run.lab.rate_scale is None:
        return {}  # without shaped ports, an emulated link does not have the speed of the inventory
    return {
        link.name: link.a.speed_gbps * 1e9 / scale / 8 * seconds
        for link in run.lab.topology.uplinks
        if link.a.speed_gbps and seconds
    }


def link_metrics(run: RunEvidence, beside: Collection[str] = ()) -> dict[str, Observation]:
    """Return all metrics of links. `beside` names what else than the workload sent over them."""
    tiers = _by_tier(run)
    loads = [load for of_tier in tiers.values() for load in of_tier]
    capacity = capacity_bytes(run)
    by_place: dict[str, list[LinkLoad]] = {str(tier): of_tier for tier, of_tier in tiers.items()}
    metrics = {
        "link_bytes.error": _error(run, loads, beside),
        "jfi": _spread("jfi", tiers["rtsw"]),
        "bisection": uplink_use(run),
    }
    for name in names(run.lab.topology):
        kind, _, place = name.partition(".")
        if kind == "mmr":
            metrics[name] = _spread(kind, by_place.get(place) or [load for load in loads if load.up.src == place])
        else:
            metrics[name] = _utilisation(place, loads, capacity)
    return metrics


def _by_tier(run: RunEvidence) -> dict[SwitchRole, list[LinkLoad]]:
    """Return the uplinks of each tier of switches that has a tier above it."""
    roles = {switch.name: switch.role for switch in run.lab.topology.switches}
    loads = [load for load in link_loads(run) if load.is_uplink]
    return {tier: [load for load in loads if roles[load.up.src] == tier] for tier in _TIERS}


def _error(run: RunEvidence, loads: Sequence[LinkLoad], beside: Collection[str]) -> Observation:
    expected = expected_loads(run, beside)
    if not expected.bytes_by_direction:
        return Observation(value=None, detail=expected.why)
    directions = [
        direction
        for load in loads
        for direction in (load.up, load.down)
        if (direction.src, direction.dst) in expected.bytes_by_direction
    ]
    if why := _why_unknown(directions):
        return Observation(value=None, detail=why)
    worst = worst_difference(expected, carried(loads))
    if worst is None:
        return Observation(value=None, detail="no link's bytes were read")
    return Observation(value=worst[0], detail=f"{worst[1]}, as a share of the fullest direction's expected bytes")


def _why_unknown(directions: Sequence[Direction]) -> str:
    """Return why the bytes of some of these directions are unknown; empty if all are known.

    A metric needs all of them: the unknown direction may be the busiest one, or the only idle one.
    """
    unread = [direction for direction in directions if direction.size_bytes is None]
    if unread:
        return (
            f"the bytes from {unread[0].src} to {unread[0].dst} were not read, but all {len(directions)} directions "
            "are compared"
        )
    reset = next((direction for direction in directions if direction.at_least), None)
    return f"the counter of {reset.src}:{reset.dst} was reset during the run" if reset else ""


def _spread(kind: str, loads: Sequence[LinkLoad]) -> Observation:
    if len(loads) < 2:  # noqa: PLR2004 - one link is always even
        return Observation(value=None, detail=f"number of uplinks: {len(loads)}; at least two are needed")
    if why := _why_unknown([load.up for load in loads]):
        return Observation(value=None, detail=why)
    sizes = [load.up.size_bytes or 0 for load in loads]
    value = max_over_mean(sizes) if kind == "mmr" else jain(sizes)
    if value is None:
        return Observation(value=None, detail="no uplink sent a byte up")
    largest = max(loads, key=lambda load: load.up.size_bytes or 0)
    return Observation(value=value, detail=f"of {len(sizes)} uplinks; most on {largest.name}, {_bytes(largest.up)}")


def _bytes(direction: Direction) -> str:
    return f"{direction.size_bytes or 0:,} bytes"


def _busier(load: LinkLoad) -> int:
    return max(load.up.size_bytes or 0, load.down.size_bytes or 0)


def _utilisation(place: str, loads: Sequence[LinkLoad], capacity: Mapping[str, float]) -> Observation:
    selected = [load for load in loads if place in ("max", "mean", load.name)]
    if why := _why_no_capacity(selected, capacity):
        return Observation(value=None, detail=why)
    if why := _why_unknown([direction for load in selected for direction in (load.up, load.down)]):
        return Observation(value=None, detail=why)
    shares = {load.name: _busier(load) / capacity[load.name] for load in selected}
    if place == "mean":
        return Observation(
            value=sum(shares.values()) / len(shares), detail=f"over {len(shares)} links between switches"
        )
    busiest = max(shares, key=lambda name: shares[name])
    return Observation(value=shares[busiest], detail=f"{busiest}, its busier direction")


def uplink_use(run: RunEvidence, tier: SwitchRole | None = None) -> Observation:
    """Return the bytes that the uplinks of a tier of switches sent up over their capacity; None: the highest tier."""
    of_tier = _by_tier(run)
    tier = tier or next((name for name in reversed(_TIERS) if of_tier[name]), None)
    if tier is None:
        return Observation(value=None, detail="there are no links between switches")
    capacity = capacity_bytes(run)
    loads = of_tier[tier]
    if why := _why_no_capacity(loads, capacity):
        return Observation(value=None, detail=why)
    if why := _why_unknown([load.up for load in loads]):
        return Observation(value=None, detail=why)
    sent = sum(load.up.size_bytes or 0 for load in loads)
    value = sent / sum(capacity[load.name] for load in loads)
    return Observation(value=value, detail=f"{sent:,} bytes up over {len(loads)} uplinks of the {tier} tier")


def _why_no_capacity(loads: Sequence[LinkLoad], capacity: Mapping[str, float]) -> str:
    """Return why the capacity of some of these links is unknown; empty if it is known of all.

    A metric needs all of them: the link without a speed may be the fullest one.
    """
    without = [load.name for load in loads if load.name not in capacity]
    if not loads or len(without) == len(loads):
        return _NO_SPEED
    return f"the speed of {without[0]} is not known, but all {len(loads)} links are compared" if without else ""


_NO_SPEED = "the inventory gives the links between switches no rate (faultbed_tiers, faultbed_rate_scale)"
