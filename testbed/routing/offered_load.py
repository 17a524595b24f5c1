"""The load that flows put on each link under a routing scheme, and how evenly a tier shares it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.topology import Link, Topology
from faultbed.testbed.routing.schemes import Choice, Flow, Routing, Scheme
from faultbed.testbed.routing.valley_free import ValleyFreePaths

__all__ = ["Direction", "Fabric", "direction_shares", "max_over_mean", "offered_load", "tier_mmr", "uplink_mmr"]

Direction = tuple[str, str]
"""A link's name and the switch that sends."""


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """A lab's switches with a routing scheme.

    `healthy` are the paths of the inventory, `paths` those that avoid the links that have `failed`.
    """

    topology: Topology
    scheme: Scheme
    routing: Routing
    healthy: ValleyFreePaths
    paths: ValleyFreePaths
    failed: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, topology: Topology, scheme: Scheme, routing: Routing | None = None, *, failed: frozenset[str] = frozenset()
    ) -> Fabric:
        """Make the fabric of a lab, without the links that have `failed`."""
        return cls(
            topology=topology,
            scheme=scheme,
            routing=routing or Routing(),
            healthy=ValleyFreePaths(topology),
            paths=ValleyFreePaths(topology, failed=failed),
            failed=failed,
        )


def offered_load(fabric: Fabric, flows: Iterable[Flow]) -> dict[Direction, float]:
    """Return the bytes that flows put on every link between switches, in each direction; 0 if nothing passes.

    Raises:
        UsageError: a flow has no path, because links have failed.
    """
    load = {(link.name, node): 0.0 for link in fabric.topology.uplinks for node in (link.a.node, link.b.node)}
    for flow in flows:
        for direction, share in direction_shares(fabric, flow).items():
            load[direction] += flow.size_bytes * share
    return load


def direction_shares(fabric: Fabric, flow: Flow) -> dict[Direction, float]:
    """Return the share of a flow's bytes on each link between switches that it crosses, by the sending switch.

    Raises:
        UsageError: the flow has no path, because links have failed.
    """
    source, target = (_rack_switch(fabric.topology, name) for name in (flow.src, flow.dst))
    shares: dict[Direction, float] = {}
    at = {source: 1.0}
    while at:
        following: dict[str, float] = {}
        for switch, arriving in at.items():
            if switch == target:
                continue
            for link, share in _shares(fabric, flow, switch, target):
                far = link.other(switch).node
                shares[link.name, switch] = shares.get((link.name, switch), 0.0) + arriving * share
                following[far] = following.get(far, 0.0) + arriving * share
        at = following
    return shares


def _shares(fabric: Fabric, flow: Flow, switch: str, target: str) -> tuple[tuple[Link, float], ...]:
    alive = fabric.paths.next_hops(switch, target)
    if not alive:
        raise UsageError(
            f"{flow.src} cannot reach {flow.dst}: all paths from {switch} to {target} use failed links; name fewer"
        )
    healthy = fabric.healthy.next_hops(switch, target)
    # If failures make the whole path longer, its next hops may be none of the healthy fabric's.
    hops = healthy if set(alive) <= set(healthy) else alive
    return fabric.scheme.choose(
        Choice(topology=fabric.topology, switch=switch, routing=fabric.routing, flow=flow, hops=hops, alive=alive)
    )


def _rack_switch(topology: Topology, rnic: str) -> str:
    host, _, name = rnic.partition(":")
    return topology.rnic_link(host, name).a.node


def max_over_mean(loads: Iterable[float]) -> float | None:
    """Return the ratio of maximum and mean (MMR): 1 if all are equal, n if one of n has everything.

    Returns None for fewer than two values, and if all are 0.
    """
    values = list(loads)
    if len(values) < 2 or not sum(values):  # noqa: PLR2004 - one link is always even
        return None
    return max(values) * len(values) / sum(values)


def uplink_mmr(topology: Topology, load: Mapping[Direction, float]) -> dict[str, float]:
    """Return the MMR of what each switch sends up, by its name, over all its uplinks (a failed one carries 0).

    Switches that send nothing up, or have one uplink, are left out.
    """
    mmr_by_name = {}
    for switch in topology.switches:
        up = [load[link.name, switch.name] for link in topology.uplinks if link.a.node == switch.name]
        mmr = max_over_mean(up)
        if mmr is not None:
            mmr_by_name[switch.name] = mmr
    return mmr_by_name


def tier_mmr(topology: Topology, load: Mapping[Direction, float]) -> dict[str, float]:
    """Return the MMR of the bytes that each switch of a spine tier receives from below, by tier (`ctsw`, `atsw`).

    The links to one spine are added up. The result is how many times its fair share the busiest spine carries.
    """
    mmr_by_name = {}
    for role in ("ctsw", "atsw"):
        received = {switch.name: 0.0 for switch in topology.switches if switch.role == role}
        for link in topology.uplinks:
            if link.b.node in received:
                received[link.b.node] += load[link.name, link.a.node]
        mmr = max_over_mean(received.values())
        if mmr is not None:
            mmr_by_name[role] = mmr
    return mmr_by_name
