"""Derive the cables between hosts and switches from what the machines report. Pure.

There are four sources, from the most to the least trusted:

    lldp        LLDP on the port reports the name and port of the other end (IEEE 802.1AB)
    neighbour   the port's ARP or neighbour table has the MAC of the other end (BGP unnumbered fills that table)
    address     exactly one other port has an address in the port's subnet
    bgp         the port's BGP peer has the router ID of a switch that has exactly one session back

SONiC gives all ports of a switch the same MAC, so a switch's MAC does not identify a port. Cables to hosts are still
known, by the hosts' MACs. A cable between two such switches needs LLDP, an address or BGP; `unknown_ends` returns ports
that have none of them.
"""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from faultbed.testbed.discover.facts import Interface, LldpPeer, Machine, Namespace

__all__ = ["Cable", "End", "Node", "cables", "nodes_of", "unknown_ends"]

_DEFAULT_HOSTNAMES = frozenset({"localhost", "sonic", "cumulus", "debian", "ubuntu"})
"""Hostnames of freshly installed systems. Several machines may have one of these, so it identifies none of them."""

End = tuple[str, str]
"""One end of a cable: the node and its interface."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A host or a switch, with the ports that may be cabled to the fabric.

    `names` are the names that LLDP may announce for the machine; `aliases` maps SONiC's alias of a port to the port.
    """

    name: str
    is_switch: bool
    namespace: Namespace
    ports: Mapping[str, Interface]
    lldp: Mapping[str, LldpPeer]
    names: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cable:
    """The far end of a port, and its source (`by`)."""

    far: End
    by: str


def nodes_of(machines: Iterable[Machine]) -> dict[str, Node]:
    """Return hosts with their RNICs' interfaces, and switches with all ports except the one that SSH uses."""
    by_name = {}
    for machine in machines:
        if machine.is_host:
            ports = {dev: machine.own.interfaces[dev] for _, dev in machine.rdma if dev in machine.own.interfaces}
            by_name[machine.name] = _node(machine, ports, is_switch=False)
        elif machine.is_switch:
            ports = {dev: port for dev, port in machine.own.interfaces.items() if dev != machine.ssh_netdev}
            by_name[machine.name] = _node(machine, ports, is_switch=True)
        for name, namespace in machine.namespaces.items():
            if namespace.asn is not None:
                by_name[name] = Node(
                    name=name, is_switch=True, namespace=namespace, ports=namespace.interfaces, lldp={}
                )
    return by_name


def _node(machine: Machine, ports: Mapping[str, Interface], *, is_switch: bool) -> Node:
    hostname = _short(machine.hostname or "")
    names = {_short(machine.name), *([hostname] if hostname and hostname not in _DEFAULT_HOSTNAMES else [])}
    return Node(
        name=machine.name,
        is_switch=is_switch,
        namespace=machine.own,
        ports=ports,
        lldp=machine.lldp,
        names=frozenset(names),
        aliases=machine.aliases,
    )


def _short(name: str) -> str:
    """Return a hostname without its domain, in lower case: LLDP, DNS and users write the same host differently."""
    return name.partition(".")[0].lower()


def cables(nodes: Mapping[str, Node]) -> tuple[dict[End, Cable], list[tuple[End, str]]]:
    """Return the cables between `nodes`, each under both of its ends, and the ports with contradictory reports."""
    known: dict[End, Cable] = {}
    sources: tuple[tuple[str, Callable[[Mapping[str, Node]], dict[End, End]]], ...] = (
        ("lldp", _by_lldp),
        ("neighbour", _by_neighbour),
        ("address", _by_address),
        ("bgp", _by_bgp),
    )
    for by, source in sources:
        far_of = source(nodes)
        for near, far in [*far_of.items(), *((far, near) for near, far in far_of.items())]:
            known.setdefault(near, Cable(far=far, by=by))
    contradictions = [
        (near, f"reports {':'.join(cable.far)} (by {cable.by}), which reports {':'.join(back.far)} (by {back.by})")
        for near, cable in known.items()
        if (back := known[cable.far]).far != near
    ]
    contradictory = {near for near, _ in contradictions}
    return {near: cable for near, cable in known.items() if near not in contradictory}, contradictions


def unknown_ends(nodes: Mapping[str, Node], known: Mapping[End, Cable]) -> list[tuple[End, str]]:
    """Return ports without a cable in `known` whose neighbour has a MAC that several ports of a switch share."""
    of_mac = _ends_of_macs(nodes)
    shared = []
    for (name, dev), _ in _ports(nodes):
        for mac in sorted(nodes[name].namespace.neighbours.get(dev, ())):
            other_nodes = {node for node, _ in of_mac.get(mac, ()) if node != name}
            if (name, dev) not in known and len(of_mac.get(mac, ())) > 1 and other_nodes:
                shared.append(
                    (
                        (name, dev),
                        f"has the neighbour {mac}, which several ports of {', '.join(sorted(other_nodes))} share",
                    )
                )
    return shared


def _ports(nodes: Mapping[str, Node]) -> Iterable[tuple[End, Interface]]:
    return (((name, dev), port) for name, node in nodes.items() for dev, port in node.ports.items())


def _by_lldp(nodes: Mapping[str, Node]) -> dict[End, End]:
    by_hostname: dict[str, list[Node]] = defaultdict(list)
    for node in nodes.values():
        for name in node.names:
            by_hostname[name].append(node)
    far_of = {}
    for name, node in nodes.items():
        for dev, peer in node.lldp.items():
            matches = by_hostname[_short(peer.system)]
            port = _port_named(matches[0], peer.ports) if len(matches) == 1 else None
            if dev in node.ports and port is not None:
                far_of[name, dev] = (matches[0].name, port)
    return far_of


def _port_named(node: Node, names: Iterable[str]) -> str | None:
    """Return the port with one of these names: the interface, SONiC's alias of it, or a MAC that only it has.

    SONiC (lldpmgrd) announces the alias as the port's ID. As the port's description it announces the description from
    ConfigDB, or the interface's name if ConfigDB has none.
    """
    for name in sorted(names):
        if name in node.ports:
            return name
        if (interface := node.aliases.get(name)) in node.ports:
            return interface
        owners = [dev for dev, port in node.ports.items() if port.mac == name.lower()]
        if len(owners) == 1:
            return owners[0]
    return None


def _by_neighbour(nodes: Mapping[str, Node]) -> dict[End, End]:
    of_mac = {mac: ends[0] for mac, ends in _ends_of_macs(nodes).items() if len(ends) == 1}
    far_of = {}
    for (name, dev), _ in _ports(nodes):
        far_ends = {of_mac[mac] for mac in nodes[name].namespace.neighbours.get(dev, ()) if mac in of_mac} - {
            (name, dev)
        }
        if len(far_ends) == 1:
            far_of[name, dev] = far_ends.pop()
    return far_of


def _ends_of_macs(nodes: Mapping[str, Node]) -> dict[str, list[End]]:
    ends: dict[str, list[End]] = defaultdict(list)
    for end, port in _ports(nodes):
        ends[port.mac].append(end)
    return ends


def _by_address(nodes: Mapping[str, Node]) -> dict[End, End]:
    in_subnet: dict[ipaddress.IPv4Network, list[End]] = defaultdict(list)
    for end, port in _ports(nodes):
        for address in port.addresses:
            in_subnet[ipaddress.IPv4Interface(address).network].append(end)
    far_of = {}
    for network, ends in in_subnet.items():
        if len(ends) == 2 and network.prefixlen > 8 and nodes[ends[0][0]] is not nodes[ends[1][0]]:  # noqa: PLR2004
            far_of[ends[0]] = ends[1]
    return far_of


def _by_bgp(nodes: Mapping[str, Node]) -> dict[End, End]:
    of_router_id = defaultdict(list)
    for node in nodes.values():
        if node.namespace.router_id is not None:
            of_router_id[node.namespace.router_id].append(node)
    far_of = {}
    for node in nodes.values():
        for dev, router_id in node.namespace.peers.items():
            far = of_router_id[router_id]
            back = (
                [dev for dev, other in far[0].namespace.peers.items() if other == node.namespace.router_id]
                if far
                else []
            )
            if len(far) == 1 and len(back) == 1 and dev in node.ports and back[0] in far[0].ports:
                far_of[node.name, dev] = (far[0].name, back[0])
    return far_of
