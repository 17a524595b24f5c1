"""Build a draft inventory from facts. Pure; the same facts give the same text.

Values that discovery could not determine are left out, not guessed. Each is a `Gap`, and the comment at the top of the
file lists all gaps. Racks and zones are derived from the cables: a rack is an RTSW and the hosts whose first RNIC is
cabled to it; a zone is a set of racks that CTSWs connect. A carrier is a machine that runs switches in network
namespaces, such as the fabric VM of a soft lab.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from faultbed.testbed.discover.affinity import gpu_beside
from faultbed.testbed.discover.cabling import Cable, End, Node, cables, nodes_of, unknown_ends
from faultbed.testbed.discover.facts import Interface, Machine
from faultbed.testbed.model.lab_kind import LabKind, traits_of

__all__ = ["Draft", "Gap", "draft", "text"]

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A part of the inventory that discovery could not determine: its place, what is missing, and what to do."""

    place: str
    what: str
    do: str


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A draft: the inventory as plain data, its gaps, and the number of cables by source (`cabling`)."""

    name: str
    tree: Mapping[str, Any]
    gaps: tuple[Gap, ...]
    cables: Mapping[str, int]


@dataclass(kw_only=True)
class _Lab:
    """State that the functions of this module share while they draft one lab."""

    kind: LabKind
    machines: Mapping[str, Machine]
    nodes: Mapping[str, Node]
    cables: Mapping[End, Cable]
    mtu: int
    access: Mapping[str, Mapping[str, Any]]
    gaps: list[Gap] = field(default_factory=list)

    def add_gap(self, place: str, problem: str, do: str) -> None:
        self.gaps.append(Gap(place=place, what=problem, do=do))


def draft(
    machines: Iterable[Machine],
    *,
    name: str,
    access: Mapping[str, Mapping[str, Any]] | None = None,
    unreachable: Mapping[str, str] | None = None,
) -> Draft:
    """Return the draft of a lab's inventory.

    Args:
        machines: the machines that answered.
        name: name of the lab.
        access: Ansible variables by which each machine is reached, such as `ansible_host`; they are copied.
        unreachable: machines that did not answer, with the reason; each becomes a gap.
    """
    by_name = {machine.name: machine for machine in sorted(machines, key=lambda machine: _natural(machine.name))}
    nodes = nodes_of(by_name.values())
    by_end, contradictions = cables(nodes)
    lab = _Lab(
        kind="soft" if any(machine.is_soft for machine in by_name.values()) else "rack",
        machines=by_name,
        nodes=nodes,
        cables=by_end,
        mtu=_most_common(
            (port.mtu for node in nodes.values() if not node.is_switch for port in node.ports.values()), 9000
        ),
        access=access or {},
    )
    _add_gaps_of_cables(lab, contradictions, unreachable or {})
    roles = _roles(lab)
    racks = _racks(lab, roles)
    zones = _zones(lab, roles)
    hosts = [machine for machine in by_name.values() if machine.is_host]
    carriers = [
        machine
        for machine in by_name.values()
        if any(namespace.asn is not None for namespace in machine.namespaces.values())
    ]
    for machine in by_name.values():
        if machine not in hosts and machine not in carriers and machine.name not in roles:
            lab.add_gap(machine.name, *_why_unclassified(machine))
    # The inventory has one seed for all RTSWs; switches of higher tiers may have others (`Inventory.hash_seed`).
    racked = [node for node in nodes.values() if node.is_switch and roles.get(node.name) == "rtsw"]
    seeds = [node.namespace.hash_seed for node in racked if node.namespace.hash_seed]
    switches = {role: _group(lab, role, roles, zones) for role in ("rtsw", "ctsw", "atsw") if role in roles.values()}
    tree: dict[str, Any] = {
        "all": {
            "vars": {
                "faultbed_schema": SCHEMA,
                "faultbed_name": name,
                "faultbed_kind": lab.kind,
                "faultbed_mtu": lab.mtu,
                "faultbed_ecmp_hash_seed": _most_common(seeds, 0),
            },
            "children": {
                "racks": {"children": {rack: _rack(rack, members, zones) for rack, members in racks.items()}},
                "hosts": {"hosts": {host.name: _host(lab, host) for host in hosts}},
                "switches": {"children": switches},
                **(
                    {"carriers": {"hosts": {machine.name: _carrier(lab, machine) for machine in carriers}}}
                    if carriers
                    else {}
                ),
            },
        }
    }
    counts = Counter(cable.by for near, cable in by_end.items() if near < cable.far)
    return Draft(name=name, tree=tree, gaps=tuple(lab.gaps), cables=dict(sorted(counts.items())))


def _add_gaps_of_cables(lab: _Lab, contradictions: Iterable[tuple[End, str]], unreachable: Mapping[str, str]) -> None:
    """Add gaps for machines that did not answer, and for unknown ends of cables."""
    for name, why in unreachable.items():
        lab.add_gap(name, f"was not queried: {why}", "it and its cables are left out; query it again when it answers")
    for (node, dev), problem in contradictions:
        lab.add_gap(f"{node}:{dev}", problem, "check both ends of the cable")
    for (node, dev), problem in unknown_ends(lab.nodes, lab.cables):
        lab.add_gap(f"{node}:{dev}", problem, "run lldpd on both ends and query again, or write the cable by hand")
    for node, machine in ((name, lab.machines[name]) for name in lab.nodes if name in lab.machines):
        for dev in sorted(machine.ambiguous_lldp.keys() & lab.nodes[node].ports.keys()):
            problem = f"receives LLDP of several neighbours: {'; '.join(machine.ambiguous_lldp[dev])}"
            lab.add_gap(f"{node}:{dev}", problem, "look for a device in between, such as a switch that forwards LLDP")


def _why_unclassified(machine: Machine) -> tuple[str, str]:
    """Return why a machine counts as neither host nor switch, and what to do about it."""
    if machine.rdma:
        problem = "has RNICs and speaks BGP, so it may be a host that routes or a Linux switch"
        return problem, "it is left out; write it by hand, as a host or as a switch"
    reasons = "; ".join(f"{rnic}: {why}" for rnic, why in machine.excluded_rnics.items())
    excluded = f": {reasons}" if reasons else ""
    return (
        f"is neither a host (no RNIC{excluded}) nor a switch (no BGP)",
        "it is left out; check its RNICs or its BGP daemon",
    )


def text(drafted: Draft) -> str:
    """Return the inventory file: comment lines that list the open points, then YAML."""
    counts = ", ".join(f"{count} by {source}" for source, count in drafted.cables.items()) or "none"
    lines = [
        f"# {drafted.name}: a draft, written by `faultbed inventory discover` from the answers of the machines.",
        f"# Cables found: {counts}. `faultbed --lab THIS_FILE inventory check` reports contradictions.",
    ]
    if drafted.gaps:
        lines.append("# OPEN, to be filled in by hand:")
        lines += [f"#   {item.place}: {item.what}; {item.do}" for item in drafted.gaps]
    # A name that a machine or its neighbour reports may contain a line break, which would end the comment.
    lines = [re.sub(r"[\n\v\f\r\x1c-\x1e\x85\u2028\u2029]+", " ", line) for line in lines]
    body = yaml.safe_dump(dict(drafted.tree), sort_keys=False, default_flow_style=None, width=200)
    return "\n".join(lines) + "\n" + body


def _host(lab: _Lab, host: Machine) -> dict[str, Any]:
    entry: dict[str, Any] = dict(lab.access.get(host.name, {}))
    if traits_of(lab.kind).is_emulated:
        entry["faultbed_vm"] = {"memory_mib": host.memory_mib, "vcpus": host.cpus}
        entry["faultbed_management"] = _management(lab, host)
    if host.bmc is not None:
        entry["faultbed_bmc"] = {"address": host.bmc}
    entry["faultbed_front_end"] = _front_end(lab, host)
    entry["faultbed_rnics"] = [_rnic(lab, host, rnic, dev) for rnic, dev in sorted(host.rdma, key=_natural_pair)]
    for rnic, why in host.excluded_rnics.items():
        lab.add_gap(
            f"hosts.{host.name}.rnics[{rnic}]", why, "it is left out; write it by hand if it belongs to the fabric"
        )
    entry["faultbed_gpus"] = [
        *({"name": gpu.name_on_host, "kind": gpu.kind, "pcie": gpu.pcie} for gpu in host.gpus),
        *({"name": name, "kind": "soft"} for name in host.soft_gpus),
    ]
    return {key: value for key, value in entry.items() if value is not None}


def _management(lab: _Lab, machine: Machine) -> dict[str, str] | None:
    port = machine.own.interfaces.get(machine.ssh_netdev or "")
    if port is None:
        lab.add_gap(f"{machine.name}.management", "no interface has the address that SSH uses", "write it by hand")
        return None
    return {"netdev": port.name, "mac": port.mac}


def _front_end(lab: _Lab, host: Machine) -> dict[str, str] | None:
    """Return the front end's interface: not an RNIC's, and if possible not the one that SSH uses."""
    rnics = {dev for _, dev in host.rdma}
    candidates = [x for x in host.own.interfaces.values() if x.addresses and x.name not in rnics and x.kind != "bridge"]
    chosen = [x for x in candidates if x.name != host.ssh_netdev] or candidates
    place = f"hosts.{host.name}.front_end"
    if len(chosen) != 1:
        names = ", ".join(x.name for x in chosen) or "none has an address"
        lab.add_gap(place, f"the front end's interface is unknown ({names})", "write netdev, mac and address by hand")
        return None
    if chosen[0].name == host.ssh_netdev and not traits_of(lab.kind).is_emulated:
        lab.add_gap(place, f"only {chosen[0].name} was found, which SSH uses too", "keep it if that is right")
    return {"netdev": chosen[0].name, "mac": chosen[0].mac, "address": chosen[0].addresses[0]}


def _rnic(lab: _Lab, host: Machine, rnic: str, dev: str) -> dict[str, Any]:
    place, port = f"hosts.{host.name}.rnics[{rnic}]", host.own.interfaces.get(dev)
    if port is None:
        problem = f"its interface {dev} is not an Ethernet interface of the machine's own network namespace"
        lab.add_gap(place, problem, "write it by hand")
        return {"name": rnic, "netdev": dev}
    entry: dict[str, Any] = {"name": rnic, "netdev": dev, "mac": port.mac}
    if len(port.addresses) == 1:
        entry["address"] = port.addresses[0]
    else:
        lab.add_gap(
            f"{place}.address",
            f"{dev} has {len(port.addresses)} IPv4 addresses",
            "give it exactly one, or write it by hand",
        )
    cable = lab.cables.get((host.name, dev))
    if cable is None or not lab.nodes[cable.far[0]].is_switch:
        lldp_peer = host.lldp.get(dev)
        problem = "none of the queried switches is known to be at the other end"
        problem += f"; LLDP reports {lldp_peer.description}" if lldp_peer else ""
        lab.add_gap(
            f"{place}.switch", problem, "query the switch too, run lldpd on both ends, or write switch and gateway"
        )
        return entry
    far = lab.nodes[cable.far[0]].ports[cable.far[1]]
    gateway = far.addresses[0].partition("/")[0] if far.addresses else host.own.gateways.get(dev)
    entry |= {"gateway": gateway, "switch": cable.far[0]} if gateway else {"switch": cable.far[0]}
    if gateway is None:
        lab.add_gap(f"{place}.gateway", f"{':'.join(cable.far)} has no address, and {dev} no route", "write it by hand")
    entry |= _port_extras(lab, host, port)
    if pcie := host.rnic_pcie.get(rnic):
        entry["pcie"] = pcie
        gpu = gpu_beside(host, pcie)
        if gpu is not None:
            entry["gpu"] = gpu.name_on_host
        elif host.gpus:
            lab.add_gap(
                f"{place}.gpu",
                "no single GPU is nearest below a common PCIe switch",
                "choose one; `lspci -tv` shows the tree",
            )
    return entry


def _port_extras(lab: _Lab, machine: Machine | None, port: Interface) -> dict[str, Any]:
    extras: dict[str, Any] = {} if port.mtu == lab.mtu else {"mtu": port.mtu}
    # The speed of a virtual interface is made up (drivers/net/veth.c says 10 Gb/s).
    if machine is not None and not traits_of(lab.kind).is_emulated and (speed := machine.speeds_gbps.get(port.name)):
        extras["speed_gbps"] = speed
    return extras


def _group(lab: _Lab, role: str, roles: Mapping[str, str], zones: Mapping[str, str]) -> dict[str, Any]:
    names = [name for name in sorted(roles, key=_natural) if roles[name] == role]
    # An RTSW's zone comes with its rack.
    return {"hosts": {name: _switch(lab, name, None if role == "rtsw" else zones[name]) for name in names}}


def _switch(lab: _Lab, name: str, zone: str | None) -> dict[str, Any]:
    node, machine = lab.nodes[name], lab.machines.get(name)
    entry: dict[str, Any] = dict(lab.access.get(name, {}))
    if zone is not None:
        entry["faultbed_zone"] = zone
    carrier = next(
        (carrier_name for carrier_name, candidate in lab.machines.items() if name in candidate.namespaces), None
    )
    if machine is None and carrier is not None:
        entry |= {"faultbed_carrier": carrier, "faultbed_netns": name}
    elif machine is not None:
        entry["faultbed_nos"] = machine.nos
    entry["faultbed_asn"] = node.namespace.asn
    loopbacks = node.namespace.loopbacks
    loopbacks += tuple(x for port in node.ports.values() if port.name.startswith("Loopback") for x in port.addresses)
    if len(loopbacks) == 1:
        entry["faultbed_loopback"] = loopbacks[0]
    else:
        place = f"{name}.loopback"
        problem = f"its loopback has {len(loopbacks)} addresses outside 127/8, not one"
        lab.add_gap(place, problem, "write the switch's router address by hand")
    entry["faultbed_ports"] = _switch_ports(lab, node, machine)
    return entry


def _switch_ports(lab: _Lab, node: Node, machine: Machine | None) -> list[dict[str, Any]]:
    to_hosts, to_switches = [], []
    for dev, port in node.ports.items():
        cable = lab.cables.get((node.name, dev))
        if cable is None:
            continue
        far = lab.nodes[cable.far[0]]
        entry: dict[str, Any] = {"netdev": dev, "mac": port.mac, "peer": far.name}
        if far.is_switch:
            far_port = far.ports[cable.far[1]]
            if _is_pair(port, far_port):
                entry["address"] = port.addresses[0]
            elif port.addresses:
                place, do = f"{node.name}:{dev}", "remove it there, or give both ends an address of one /31 or /30"
                lab.add_gap(place, f"the address {port.addresses[0]} of this uplink has no counterpart", do)
            to_switches.append(entry | _port_extras(lab, machine, port))
            continue
        host = lab.machines[far.name]
        entry["rnic"] = next(rnic for rnic, netdev in host.rdma if netdev == cable.far[1])
        if port.addresses:
            entry["address"] = port.addresses[0]
        else:
            lab.add_gap(f"{node.name}:{dev}", "this host port has no address", "write it by hand")
        to_hosts.append(entry | _port_extras(lab, machine, port))
    to_hosts.sort(key=lambda port: (_natural(port["peer"]), _natural(port["rnic"])))
    return to_hosts + sorted(to_switches, key=lambda port: _natural(port["peer"]))


def _is_pair(near: Interface, far: Interface) -> bool:
    """Return whether two ends of an uplink have the two addresses of a subnet: their BGP session can be numbered."""
    if len(near.addresses) != 1 or len(far.addresses) != 1:
        return False
    one, other = (ipaddress.IPv4Interface(port.addresses[0]) for port in (near, far))
    return one.network == other.network and one.network.prefixlen in (30, 31)


def _carrier(lab: _Lab, carrier: Machine) -> dict[str, Any]:
    front_ends = {
        port.mac: host.name
        for host in lab.machines.values()
        if host.is_host
        for port in host.own.interfaces.values()
        if port.name != host.ssh_netdev and port.name not in {dev for _, dev in host.rdma}
    }
    ports = []
    for namespace in carrier.namespaces.values():
        for port in namespace.interfaces.values():
            if namespace.asn is not None or port.master is None:
                continue
            peers = {front_ends[mac] for mac in namespace.learned.get(port.name, ()) if mac in front_ends}
            if len(peers) == 1:
                ports.append({"netdev": port.name, "mac": port.mac, "peer": peers.pop()})
            else:
                problem = "the bridge has learned no single host's front end at this port"
                lab.add_gap(f"carriers.{carrier.name}:{port.name}", problem, "write its peer by hand")
    entry: dict[str, Any] = dict(lab.access.get(carrier.name, {}))
    entry["faultbed_vm"] = {"memory_mib": carrier.memory_mib, "vcpus": carrier.cpus}
    entry["faultbed_management"] = _management(lab, carrier)
    entry["faultbed_front_end_ports"] = sorted(ports, key=lambda port: _natural(port["peer"]))
    return {key: value for key, value in entry.items() if value is not None}


def _roles(lab: _Lab) -> dict[str, str]:
    """Return the role of each switch: an RTSW is cabled to hosts, a CTSW to RTSWs, an ATSW only to CTSWs."""
    peers_of: dict[str, set[str]] = {name: set() for name, node in lab.nodes.items() if node.is_switch}
    for (name, _), cable in lab.cables.items():
        if name in peers_of:
            peers_of[name].add(cable.far[0])
    rtsws = {name for name, peers in peers_of.items() if any(not lab.nodes[peer].is_switch for peer in peers)}
    ctsws = {name for name, peers in peers_of.items() if name not in rtsws and peers & rtsws}
    roles = {}
    for name, peers in peers_of.items():
        roles[name] = "rtsw" if name in rtsws else "ctsw" if name in ctsws else "atsw"
        if not peers:
            lab.add_gap(
                name,
                "no cable of this switch was found",
                "query the switches at its other ends too, and run lldpd there",
            )
    return roles


def _racks(lab: _Lab, roles: Mapping[str, str]) -> dict[str, tuple[str, list[str]]]:
    """Return, by rack name, its RTSW and its hosts."""
    rtsws = sorted((name for name, role in roles.items() if role == "rtsw"), key=_natural)
    rack_of = _rack_names(rtsws)
    racks: dict[str, tuple[str, list[str]]] = {rack: (name, []) for name, rack in rack_of.items()}
    for host in (machine for machine in lab.machines.values() if machine.is_host):
        far_ends = [lab.cables[host.name, dev].far[0] for _, dev in host.rdma if (host.name, dev) in lab.cables]
        host_rtsws = [name for name in dict.fromkeys(far_ends) if name in rack_of]
        if host_rtsws:
            racks[rack_of[host_rtsws[0]]][1].append(host.name)
        if len(host_rtsws) != 1:
            names = ", ".join(host_rtsws) or "no RTSW"
            problem = f"its RNICs are cabled to {names}, so its rack is unknown from the cables"
            lab.add_gap(f"hosts.{host.name}.rack", problem, "put it into the group of its rack")
    return racks


def _rack_names(rtsws: Sequence[str]) -> dict[str, str]:
    """Return the rack name of each RTSW: rackN if only this RTSW's name ends in the number N, otherwise rack-NAME."""
    numbers = {name: match[0] if (match := re.search(r"[0-9]+$", name)) else "" for name in rtsws}
    count = Counter(numbers.values())
    return {
        name: f"rack{number}" if number and count[number] == 1 else f"rack-{name}" for name, number in numbers.items()
    }


def _rack(rack: str, members: tuple[str, list[str]], zones: Mapping[str, str]) -> dict[str, Any]:
    switch, hosts = members
    return {
        "vars": {"faultbed_zone": zones[switch], "faultbed_rack": rack},
        "hosts": {name: {} for name in (*hosts, switch)},
    }


def _zones(lab: _Lab, roles: Mapping[str, str]) -> dict[str, str]:
    """Return the zone of each switch: switches connected without ATSWs share a zone. ATSWs are put in the first one."""
    zones: dict[str, str] = {}
    below = [name for name in sorted(roles, key=_natural) if roles[name] != "atsw"]
    for first in below:
        if first in zones:
            continue
        zone, reached = f"zone{len(set(zones.values())) + 1}", [first]
        while reached:
            name = reached.pop()
            if name not in zones:
                zones[name] = zone
                reached += [far.far[0] for (near, _), far in lab.cables.items() if near == name and far.far[0] in below]
    return zones | {name: "zone1" for name, role in roles.items() if role == "atsw"}


def _most_common(values: Iterable[int], default: int) -> int:
    counted = Counter(values).most_common(1)
    return counted[0][0] if counted else default


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which host2 comes before host10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"[0-9]+|[^0-9]+", name)]


def _natural_pair(pair: tuple[str, str]) -> list[tuple[int, str]]:
    return _natural(pair[0])
