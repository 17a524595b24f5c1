"""Place flows over the links that are up, from what BGP says on each switch. Pure.

A switch whose link died, and a switch at the other end that withdrew everything, look alike: BGP has no next hop by
that link. So links count as live if BGP uses them at both ends, and nothing else has to be read or remembered.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from faultbed.testbed.model.topology import Topology
from faultbed.testbed.routing.placement_of_flows import Key, Placement, place
from faultbed.testbed.routing.valley_free import ValleyFreePaths

__all__ = ["LivePlacement", "every_key", "failed_links", "place_on_live_links"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePlacement:
    """Where each key goes over the links that are live.

    Attributes:
        placement: of the keys that have a path.
        failed: names of the links between switches that carry nothing.
        without_path: keys that no live path carries, in order; they have no rule.
    """

    placement: Placement
    failed: frozenset[str] = frozenset()
    without_path: tuple[Key, ...] = ()


def failed_links(topology: Topology, next_hops: Mapping[str, Mapping[str, Sequence[str]]]) -> frozenset[str]:
    """Return the links between switches by which BGP has no next hop to any host, at one of their ends.

    Args:
        topology: the lab.
        next_hops: ports of each prefix in the main table of each switch.

    Raises:
        KeyError: a switch is missing.
    """
    prefixes = {str(ipaddress.ip_interface(rnic.address).network) for host in topology.hosts for rnic in host.rnics}
    used = {
        switch.name: {port for prefix, ports in next_hops[switch.name].items() if prefix in prefixes for port in ports}
        for switch in topology.switches
    }
    live = {
        link.name for link in topology.uplinks if all(end.netdev in used[end.node] for end in (link.a, link.b))
    }  # links in parallel share a name, and one of them is enough
    return frozenset(link.name for link in topology.uplinks) - live


def place_on_live_links(topology: Topology, demands: Mapping[Key, float], failed: frozenset[str]) -> LivePlacement:
    """Return the placement of all keys that have a path without the `failed` links.

    Raises:
        UsageError: a demand is not finite or negative, or a key names something that the lab does not have.
    """
    paths = ValleyFreePaths(topology, failed=failed)
    rack_of = {f"{link.b.node}:{link.rnic}": link.a.node for link in topology.links if not link.is_uplink}
    racks_of_host: dict[str, set[str]] = {}
    for rnic, rack in rack_of.items():
        racks_of_host.setdefault(rnic.partition(":")[0], set()).add(rack)

    def has_path(key: Key) -> bool:
        source, host = key
        if source not in rack_of or host not in racks_of_host:
            return True  # `place` says what is wrong with it
        # One uplink carries all prefixes of a host: a spine has to reach each of its racks.
        rack = rack_of[source]
        targets = racks_of_host[host] - {rack}
        by_target = [{link.other(rack).node for link in paths.next_hops(rack, target)} for target in targets]
        return not targets or bool(set.intersection(*by_target))

    reachable = {key: size_bytes for key, size_bytes in demands.items() if has_path(key)}
    return LivePlacement(
        placement=place(topology, reachable, failed=failed),
        failed=failed,
        without_path=tuple(sorted(demands.keys() - reachable.keys())),
    )


def every_key(topology: Topology) -> dict[Key, float]:
    """Return equal demands from each RNIC to each other host, for when nothing is known about the traffic."""
    return {
        (f"{source.name}:{rnic.name}", destination.name): 1.0
        for source in topology.hosts
        for rnic in source.rnics
        for destination in topology.hosts
        if destination.name != source.name
    }
