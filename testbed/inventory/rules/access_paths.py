"""Checks of the access paths to a lab's machines: SSH, BMCs, PDUs and their outlets. Pure.

Every command, fault and power cycle uses an access path, so each path must lead to the intended machine only. Two
machines may share an SSH address if their ports differ (a jump host that forwards). A machine's management address may
be that of its own front end or loopback.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from faultbed.testbed.inventory.audit_finding import InventoryFinding, repeated_values
from faultbed.testbed.inventory.consistency import Entries
from faultbed.testbed.inventory.schema import HostVars, LabVars, OutletVars, SwitchVars
from faultbed.testbed.model.lab_kind import traits_of

__all__ = ["check_access_paths"]

_SSH_PORT = 22
_PORTS = range(1, 65536)


@dataclass(frozen=True, slots=True, kw_only=True)
class _AccessPath:
    """An address with its place in the inventory, its kind, and its owner."""

    place: str
    kind: str
    owner: str
    address: str
    port: int | None = None


def check_access_paths(entries: Entries, variables: Mapping[str, Mapping[str, Any]]) -> Iterator[InventoryFinding]:
    """Yield the problems of a lab's access paths. `variables` has all variables of each node, Ansible's included."""
    _, lab = next(iter(entries.placed()))
    by_ssh: list[_AccessPath] = []
    if not traits_of(lab.kind).is_emulated:
        by_ssh += _machines(entries, variables)
        for name in _names(entries):
            yield from _ssh(name, variables.get(name, {}))
    yield from _in_plan(by_ssh, lab)
    yield from _shared([*_fabric(entries), *by_ssh, *_controllers(entries, lab)])
    yield from repeated_values(((f"all.pdus[{i}].name", x.name) for i, x in enumerate(lab.pdus)), "PDU", "each")
    yield from _outlets(entries, lab)


def _names(entries: Entries) -> list[str]:
    switches = [name for name, (_, switch) in entries.switches.items() if switch.carrier is None]
    return [*entries.hosts, *switches, *entries.carriers, *entries.jumps]


def _ssh(name: str, variables: Mapping[str, Any]) -> Iterator[InventoryFinding]:
    """Yield invalid values of `ansible_host` and `ansible_port`, which Ansible and our own SSH use literally."""
    host, port = variables.get("ansible_host"), variables.get("ansible_port")
    if host is not None and (not isinstance(host, str) or not host.strip() or set(host) & set("{} /")):
        do = "write an address or a name; templates are not filled in here"
        yield InventoryFinding(place=f"{name}.ansible_host", what=f'not an address "{host}"', do=do)
    if port is not None and (type(port) is not int or port not in _PORTS):
        yield InventoryFinding(
            place=f"{name}.ansible_port", what=f'not a port "{port}"', do="write 1 to 65535, without quotes"
        )


def _machines(entries: Entries, variables: Mapping[str, Mapping[str, Any]]) -> Iterator[_AccessPath]:
    for name in _names(entries):
        host_vars = variables.get(name, {})
        address, port = host_vars.get("ansible_host"), host_vars.get("ansible_port")
        yield _AccessPath(
            place=f"{name}.ansible_host",
            kind="SSH",
            owner=name,
            address=str(name if address is None else address),
            port=port if type(port) is int else _SSH_PORT,
        )


def _fabric(entries: Entries) -> Iterator[_AccessPath]:
    for name, host in entries.hosts.items():
        places = [(f"hosts.{name}.front_end.address", host.front_end.address)]
        places += [(f"hosts.{name}.rnics[{rnic.name}].address", rnic.address) for rnic in host.rnics]
        yield from (_AccessPath(place=place, kind="address", owner=name, address=_bare(x)) for place, x in places)
    for name, (role, switch) in entries.switches.items():
        places = [(f"{role}.{name}.loopback", switch.loopback)]
        places += [(f"{role}.{name}.ports[{i}].address", x.address) for i, x in enumerate(switch.ports) if x.address]
        yield from (_AccessPath(place=place, kind="address", owner=name, address=_bare(x)) for place, x in places)


def _controllers(entries: Entries, lab: LabVars) -> Iterator[_AccessPath]:
    for name, host in entries.hosts.items():
        if host.bmc is not None:
            yield _AccessPath(
                place=f"hosts.{name}.bmc.address", kind="BMC", owner=f"bmc {name}", address=host.bmc.address
            )
    for index, pdu in enumerate(lab.pdus):
        yield _AccessPath(place=f"all.pdus[{index}].address", kind="PDU", owner=f"pdu {index}", address=pdu.address)


def _bare(address: str) -> str:
    return address.partition("/")[0]


def _in_plan(by_ssh: list[_AccessPath], lab: LabVars) -> Iterator[InventoryFinding]:
    """Yield SSH addresses outside of the management networks of the IP plan. Names are not resolved."""
    plan = [network for network in map(_network, (x.prefix for x in lab.networks if x.use == "management")) if network]
    for path in by_ssh:
        address = _ipv4(path.address)
        if plan and address is not None and not any(address in prefix for prefix in plan):
            yield InventoryFinding(
                place=path.place,
                what=f"{address} is in no management network of the IP plan ({', '.join(map(str, plan))})",
                do="correct the address, or the plan in faultbed_networks",
            )


def _shared(paths: list[_AccessPath]) -> Iterator[InventoryFinding]:
    """Yield addresses that two owners share, and addresses of BMCs and PDUs that have a prefix length."""
    first: dict[str, list[_AccessPath]] = {}
    for path in paths:
        if path.kind in ("BMC", "PDU") and "/" in path.address:
            yield InventoryFinding(
                place=path.place, what=f'not an address "{path.address}"', do="write it without prefix length"
            )
        clashes = [other for other in first.get(_bare(path.address), ()) if _clash(other, path)]
        if clashes:
            yield InventoryFinding(
                place=path.place,
                what=f"{path.kind} at {_bare(path.address)} is already used at {clashes[0].place}",
                do="give each its own address; otherwise commands for one reach the other",
            )
        first.setdefault(_bare(path.address), []).append(path)


def _clash(path: _AccessPath, other: _AccessPath) -> bool:
    """Return whether two access paths with the same address contradict each other.

    Two fabric addresses do not count here: the topology's own check reports them.
    """
    if path.owner == other.owner or path.kind == other.kind == "address":
        return False
    return path.port == other.port if path.kind == other.kind == "SSH" else True


def _outlets(entries: Entries, lab: LabVars) -> Iterator[InventoryFinding]:
    """Yield wrong or shared outlets, because a power cycle must reach the intended machine only."""
    outlets = {pdu.name: pdu.outlets for pdu in lab.pdus}
    fed = [
        (f"{place}.power[{index}]", outlet)
        for place, node in entries.placed()
        if isinstance(node, HostVars | SwitchVars)
        for index, outlet in enumerate(node.power)
    ]
    yield from repeated_values(
        ((place, f"{outlet.pdu}:{outlet.outlet}") for place, outlet in fed), "outlet", "each machine"
    )
    for place, outlet in fed:
        yield from _outlet(place, outlet, outlets)


def _outlet(place: str, outlet: OutletVars, outlets: Mapping[str, int]) -> Iterator[InventoryFinding]:
    if outlet.pdu not in outlets:
        do = f"add it to faultbed_pdus, which has {', '.join(outlets) or 'none'}"
        yield InventoryFinding(place=place, what=f'no PDU "{outlet.pdu}"', do=do)
    elif not 1 <= outlet.outlet <= outlets[outlet.pdu]:
        problem = f"{outlet.pdu} has outlets 1 to {outlets[outlet.pdu]}, not {outlet.outlet}"
        yield InventoryFinding(place=place, what=problem, do="read the number on the PDU")


def _ipv4(text: str) -> ipaddress.IPv4Address | None:
    try:
        return ipaddress.IPv4Address(text)
    except ValueError:
        return None


def _network(text: str) -> ipaddress.IPv4Network | None:
    try:
        return ipaddress.IPv4Network(text)
    except ValueError:
        return None  # reported with the plan
