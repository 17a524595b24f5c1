"""Who is cabled to whom, from what both ends say. Pure.

Four ways to know, in the order in which they are believed:

    lldp        the port hears the other end's name and port (IEEE 802.1AB)
    neighbour   the port hears the other end's MAC, by ARP or neighbour discovery: BGP unnumbered lives by these
    address     the other end is the only other port in the port's subnet
    bgp         the port's BGP peer has an AS number that one switch has, which has one session back

A MAC that several ports have tells nobody's port: SONiC gives all ports of a switch the same one. The switch still
tells its hosts by theirs; between two such switches the other ways have to, and `untold` names where none did.
"""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from testbed.discover.facts import Interface, LldpPeer, Machine, Space

__all__ = ["Cable", "End", "Node", "cables", "nodes_of", "untold"]

_OF_NOBODY = frozenset({"localhost", "sonic", "cumulus", "debian", "ubuntu"})
"""What a machine is called that nobody has given a name: all such switches of a lab have the same one."""

End = tuple[str, str]
"""One end of a cable: the node and its interface."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A host or a switch as far as cables go: the ports that may be cabled to the fabric.

    `names` are all that the machine may be called by LLDP, `aliases` the port that an alias of SONiC means.
    """

    name: str
    is_switch: bool
    space: Space
    ports: Mapping[str, Interface]
    lldp: Mapping[str, LldpPeer]
    names: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cable:
    """The far end of a port, and by what it is known."""

    far: End
    by: str


def nodes_of(machines: Iterable[Machine]) -> dict[str, Node]:
    """Hosts with the interfaces of their RNICs, switches with all their ports but the one that SSH comes in by."""
    found = {}
    for machine in machines:
        if machine.is_host:
            ports = {dev: machine.own.interfaces[dev] for _, dev in machine.rdma if dev in machine.own.interfaces}
            found[machine.name] = _machine(machine, ports, is_switch=False)
        elif machine.is_switch:
            ports = {dev: one for dev, one in machine.own.interfaces.items() if dev != machine.came_in_by}
            found[machine.name] = _machine(machine, ports, is_switch=True)
        for name, space in machine.spaces.items():
            if space.asn is not None:
                found[name] = Node(name=name, is_switch=True, space=space, ports=space.interfaces, lldp={})
    return found


def _machine(machine: Machine, ports: Mapping[str, Interface], *, is_switch: bool) -> Node:
    own = _short(machine.hostname or "")
    names = {_short(machine.name), *([own] if own and own not in _OF_NOBODY else [])}
    return Node(
        name=machine.name,
        is_switch=is_switch,
        space=machine.own,
        ports=ports,
        lldp=machine.lldp,
        names=frozenset(names),
        aliases=machine.aliases,
    )


def _short(name: str) -> str:
    """A host's name without its domain, in small letters: as far as LLDP, DNS and people agree."""
    return name.partition(".")[0].lower()


def cables(nodes: Mapping[str, Node]) -> tuple[dict[End, Cable], list[tuple[End, str]]]:
    """The cable of every port whose other end is among `nodes`, by each end; and ports that contradict each other."""
    told: dict[End, Cable] = {}
    ways: tuple[tuple[str, Callable[[Mapping[str, Node]], dict[End, End]]], ...] = (
        ("lldp", _by_lldp),
        ("neighbour", _by_neighbour),
        ("address", _by_address),
        ("bgp", _by_bgp),
    )
    for by, way in ways:
        found = way(nodes)
        for near, far in [*found.items(), *((far, near) for near, far in found.items())]:
            told.setdefault(near, Cable(far=far, by=by))
    torn = [
        (near, f"says {':'.join(cable.far)} (by {cable.by}), which says {':'.join(back.far)} (by {back.by})")
        for near, cable in told.items()
        if (back := told[cable.far]).far != near
    ]
    bad = {near for near, _ in torn}
    return {near: cable for near, cable in told.items() if near not in bad}, torn


def untold(nodes: Mapping[str, Node], told: Mapping[End, Cable]) -> list[tuple[End, str]]:
    """Ports that hear a MAC of several ports of a switch, and have no cable in `told`: which port, nobody can say."""
    of_mac = _ends_of_macs(nodes)
    found = []
    for (name, dev), _ in _ports(nodes):
        for mac in sorted(nodes[name].space.neighbours.get(dev, ())):
            others = {node for node, _ in of_mac.get(mac, ()) if node != name}
            if (name, dev) not in told and len(of_mac.get(mac, ())) > 1 and others:
                found.append(((name, dev), f"hears {mac}, which several ports of {', '.join(sorted(others))} have"))
    return found


def _ports(nodes: Mapping[str, Node]) -> Iterable[tuple[End, Interface]]:
    return (((name, dev), port) for name, node in nodes.items() for dev, port in node.ports.items())


def _by_lldp(nodes: Mapping[str, Node]) -> dict[End, End]:
    called: dict[str, list[Node]] = defaultdict(list)
    for node in nodes.values():
        for name in node.names:
            called[name].append(node)
    found = {}
    for name, node in nodes.items():
        for dev, heard in node.lldp.items():
            meant = called[_short(heard.system)]
            port = _port_called(meant[0], heard.ports) if len(meant) == 1 else None
            if dev in node.ports and port is not None:
                found[name, dev] = (meant[0].name, port)
    return found


def _port_called(node: Node, names: Iterable[str]) -> str | None:
    """The port that goes by one of these names: its interface's, SONiC's alias of it, or a MAC that it alone has.

    SONiC (lldpmgrd) tells the alias as the port's id, and as its description what ConfigDB has, or else the interface.
    """
    for said in sorted(names):
        if said in node.ports:
            return said
        if (meant := node.aliases.get(said)) in node.ports:
            return meant
        owners = [dev for dev, port in node.ports.items() if port.mac == said.lower()]
        if len(owners) == 1:
            return owners[0]
    return None


def _by_neighbour(nodes: Mapping[str, Node]) -> dict[End, End]:
    of_mac = {mac: ends[0] for mac, ends in _ends_of_macs(nodes).items() if len(ends) == 1}
    found = {}
    for (name, dev), _ in _ports(nodes):
        heard = {of_mac[mac] for mac in nodes[name].space.neighbours.get(dev, ()) if mac in of_mac} - {(name, dev)}
        if len(heard) == 1:
            found[name, dev] = heard.pop()
    return found


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
    found = {}
    for network, ends in in_subnet.items():
        if len(ends) == 2 and network.prefixlen > 8 and nodes[ends[0][0]] is not nodes[ends[1][0]]:  # noqa: PLR2004
            found[ends[0]] = ends[1]
    return found


def _by_bgp(nodes: Mapping[str, Node]) -> dict[End, End]:
    of_asn = defaultdict(list)
    for node in nodes.values():
        if node.space.asn is not None:
            of_asn[node.space.asn].append(node)
    found = {}
    for node in nodes.values():
        for dev, asn in node.space.peer_asns.items():
            peers = of_asn[asn]
            back = [far for far, other in peers[0].space.peer_asns.items() if other == node.space.asn] if peers else []
            if len(peers) == 1 and len(back) == 1 and dev in node.ports and back[0] in peers[0].ports:
                found[node.name, dev] = (peers[0].name, back[0])
    return found
