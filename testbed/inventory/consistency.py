"""Check that the nodes of an inventory fit together, and build the topology.

Every reference must name something in the inventory, no two nodes may have the same name, address or MAC, and both ends
of a link must agree. Each interface has its own MAC, except on a switch that is a machine: SONiC gives all ports of a
switch the same MAC.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from faultbed.testbed.inventory.rates import check_queue
from faultbed.testbed.inventory.schema import (
    CarrierVars,
    HostVars,
    JumpVars,
    Mistakes,
    PortVars,
    RnicVars,
    SwitchVars,
    mistake,
    near,
)
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.testbed.model.topology import Gpu, Host, Link, Port, Rnic, Switch, SwitchRole, Topology

__all__ = ["Entries", "build_topology"]

_LEVEL: dict[SwitchRole, int] = {"rtsw": 0, "ctsw": 1, "atsw": 2}
_MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")
_NAME = re.compile(r"[a-z][a-z0-9-]*")
# The kernel allows almost any character (dev_valid_name() in net/core/dev.c), but these names stand in shell commands.
_NETDEV = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,14}")
_DEVICE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}")  # IB_DEVICE_NAME_MAX - 1
_NETNS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}")  # also a file name and a word in root's shell
_PCIE = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_PAIR_BITS = (30, 31)
_MTU_MIN, _MTU_MAX = 1280, 65535
_ASN_MIN, _ASN_MAX = 1, 2**32 - 2  # 0 is reserved by RFC 7607, the last number by RFC 7300


@dataclass(frozen=True, kw_only=True)
class Entries:
    """The decoded variables of every node of the inventory `file`; switches with their role."""

    file: Path
    hosts: dict[str, HostVars]
    switches: dict[str, tuple[SwitchRole, SwitchVars]]
    carriers: dict[str, CarrierVars]
    jumps: dict[str, JumpVars] = field(default_factory=dict)

    def placed(self) -> Iterator[tuple[str, HostVars | SwitchVars | CarrierVars]]:
        """Yield hosts, switches and carriers with their places in the file; jump hosts are not part of the lab."""
        yield from ((f"hosts.{name}", host) for name, host in self.hosts.items())
        yield from ((f"{role}.{name}", switch) for name, (role, switch) in self.switches.items())
        yield from ((f"carriers.{name}", carrier) for name, carrier in self.carriers.items())


class _UniqueValues:
    """Values that may occur at one place only, or at several places of one owner."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._by: dict[tuple[str, str], tuple[str, str]] = {}

    def claim(self, kind: str, value: str, place: str, *, owner: str | None = None) -> None:
        """Record that a value is used at a place; raise a mistake if another owner (default: another place) uses it."""
        first, whose = self._by.setdefault((kind, value), (place, owner or place))
        if whose != (owner or place):
            raise mistake(self.file, place, f"{kind} {value} is already used at {first}; give another one")


def build_topology(entries: Entries, mistakes: Mistakes | None = None) -> Topology:
    """Return the topology of checked entries. Host links come before uplinks.

    Raises:
        ConfigError: something does not fit; the message names the place. If `mistakes` collects, nothing is raised,
            and the topology lacks the links that do not fit.
    """
    mistakes = mistakes or Mistakes()
    _check_values(entries, mistakes)
    _check_soft(entries, mistakes)
    host_links: list[Link] = []
    uplinks: list[Link] = []
    for name, (_, switch) in entries.switches.items():
        for index, port in enumerate(switch.ports):
            if port.rnic is not None:
                with mistakes.part():
                    host_links.append(_host_link(entries, name, index, port))
    _check_rnics(entries, host_links, mistakes)
    for name, (_, switch) in entries.switches.items():
        for index, port in enumerate(switch.ports):
            if port.rnic is None:
                with mistakes.part():
                    uplinks += _uplink(entries, name, index, port)
    return Topology(
        hosts=tuple(_host(name, host) for name, host in entries.hosts.items()),
        switches=tuple(
            Switch(
                name=name,
                role=role,
                zone=switch.zone,
                rack=switch.rack,
                asn=switch.asn,
                loopback=switch.loopback,
                carrier=switch.carrier,
                nos=switch.nos,
            )
            for name, (role, switch) in entries.switches.items()
        ),
        links=(*host_links, *uplinks),
    )


def _host(name: str, host: HostVars) -> Host:
    return Host(
        name=name,
        zone=host.zone,
        rack=host.rack,
        rnics=tuple(
            Rnic(
                name=rnic.name,
                netdev=rnic.netdev,
                mac=rnic.mac,
                address=rnic.address,
                pcie=rnic.pcie,
                gpu=rnic.gpu,
                driver=rnic.driver,
            )
            for rnic in host.rnics
        ),
        gpus=tuple(Gpu(name=gpu.name, kind=gpu.kind, pcie=gpu.pcie) for gpu in host.gpus),
        front_end_netdev=host.front_end.netdev,
        front_end_mac=host.front_end.mac,
        front_end_address=host.front_end.address,
    )


def _check_values(entries: Entries, mistakes: Mistakes) -> None:
    """Check each value, and that no value is used twice."""
    file, unique_values = entries.file, _UniqueValues(entries.file)
    for place, node in entries.placed():
        name = place.partition(".")[2]
        with mistakes.part():
            if not _NAME.fullmatch(name):
                raise mistake(
                    file, place, "a name must consist of small letters, digits and dashes, and start with a letter"
                )
            _check_numbers(file, place, mtu=node.mtu)
            if node.management is not None:
                at, management, shared = f"{place}.management", node.management, _shares_mac(node)
                _claim_netdev(file, unique_values, at, name, management.netdev, management.mac, shared=shared)
        if isinstance(node, HostVars):
            _check_host_values(unique_values, mistakes, place, name, node)
        elif isinstance(node, SwitchVars):
            _check_switch_values(unique_values, mistakes, place, name, node)
        else:
            _check_carrier_values(entries, unique_values, mistakes, place, node)


def _check_host_values(unique_values: _UniqueValues, mistakes: Mistakes, place: str, name: str, host: HostVars) -> None:
    file = unique_values.file
    with mistakes.part():
        at = f"{place}.front_end"
        _claim_netdev(file, unique_values, at, name, host.front_end.netdev, host.front_end.mac)
        _claim_address(file, unique_values, f"{at}.address", host.front_end.address)
    for index, rnic in enumerate(host.rnics):
        at = f"{place}.rnics[{index}]"
        with mistakes.part():
            _claim_device(unique_values, at, name, rnic.name, rnic.pcie)
            _check_numbers(file, at, mtu=rnic.mtu, speed_gbps=rnic.speed_gbps)
            _claim_netdev(file, unique_values, at, name, rnic.netdev, rnic.mac)
            _claim_address(file, unique_values, f"{at}.address", rnic.address)
    for index, gpu in enumerate(host.gpus):
        with mistakes.part():
            _claim_device(unique_values, f"{place}.gpus[{index}]", name, gpu.name, gpu.pcie)


def _check_switch_values(
    unique_values: _UniqueValues, mistakes: Mistakes, place: str, name: str, switch: SwitchVars
) -> None:
    file = unique_values.file
    with mistakes.part():
        if not _ASN_MIN <= switch.asn <= _ASN_MAX:
            raise mistake(file, f"{place}.asn", f"must be {_ASN_MIN} to {_ASN_MAX}, not {switch.asn}")
        # Spines of a zone may share an ASN: a spine then rejects paths through another spine (RFC 7938, 5.2.1).
        role = place.partition(".")[0]
        sharers = None if role == "rtsw" else f"{role} of {switch.zone}"
        unique_values.claim("ASN", str(switch.asn), f"{place}.asn", owner=sharers)
        if switch.netns is not None:
            if not _NETNS.fullmatch(switch.netns):
                words = f'"{switch.netns}" is not a namespace name; use at most 63 letters, digits, and - _ .'
                raise mistake(file, f"{place}.netns", words)
            unique_values.claim(f"namespace on {switch.carrier}", switch.netns, f"{place}.netns")
        _claim_address(file, unique_values, f"{place}.loopback", switch.loopback)
    for index, port in enumerate(switch.ports):
        at = f"{place}.ports[{index}]"
        with mistakes.part():
            _check_numbers(file, at, mtu=port.mtu, speed_gbps=port.speed_gbps)
            check_queue(file, at, queue_kib=port.queue_kib, delay_us=port.delay_us)
            _claim_netdev(file, unique_values, at, name, port.netdev, port.mac, shared=_shares_mac(switch))
            if port.rnic is not None and port.address is None:
                raise mistake(file, at, "rnic is given without an address; a host port needs both")
            if port.address is not None:
                _claim_address(file, unique_values, f"{at}.address", port.address)


def _check_carrier_values(
    entries: Entries, unique_values: _UniqueValues, mistakes: Mistakes, place: str, carrier: CarrierVars
) -> None:
    name, hosts = place.partition(".")[2], list(entries.hosts)
    for index, port in enumerate(carrier.front_end_ports):
        at = f"{place}.front_end_ports[{index}]"
        with mistakes.part():
            _claim_netdev(entries.file, unique_values, at, name, port.netdev, port.mac)
            if port.peer not in entries.hosts:
                raise mistake(entries.file, f"{at}.peer", f'no host "{port.peer}"{near(port.peer, hosts)}')
            unique_values.claim("the front end of", port.peer, f"{at}.peer")


def _check_numbers(file: Path, place: str, *, mtu: int | None, speed_gbps: int | None = None) -> None:
    if mtu is not None and not _MTU_MIN <= mtu <= _MTU_MAX:
        raise mistake(file, f"{place}.mtu", f"must be {_MTU_MIN} to {_MTU_MAX}, not {mtu}")
    if speed_gbps is not None and speed_gbps < 1:
        raise mistake(file, f"{place}.speed_gbps", f"must be above 0, not {speed_gbps}")


def _shares_mac(node: HostVars | SwitchVars | CarrierVars) -> bool:
    """Return whether the interfaces of a node may share a MAC address: those of a switch that is a machine."""
    return isinstance(node, SwitchVars) and not traits_of(node.kind).is_emulated


def _claim_device(unique_values: _UniqueValues, place: str, host: str, name: str, pcie: str | None) -> None:
    """Reject device names and PCIe addresses that are unsafe in shell commands, or belong to another device already."""
    file = unique_values.file
    if not _DEVICE.fullmatch(name):
        raise mistake(
            file, f"{place}.name", f'"{name}" is not a device name; use letters, digits, dots, dashes, underscores'
        )
    unique_values.claim(f"the name {host}:", name, place)
    if pcie is None:
        return
    if not _PCIE.fullmatch(pcie):
        problem = f'"{pcie}" is not a PCIe address; write it as the kernel does, in small letters: 0000:18:00.0'
        raise mistake(file, f"{place}.pcie", problem)
    # Faults and counters find a device by this address.
    unique_values.claim(f"the PCIe address {host}:", pcie, f"{place}.pcie")


def _claim_netdev(
    file: Path, unique_values: _UniqueValues, place: str, node: str, netdev: str, mac: str, *, shared: bool = False
) -> None:
    if not _NETDEV.fullmatch(netdev):
        raise mistake(file, f"{place}.netdev", f'"{netdev}" is not an interface name of 1 to 15 characters')
    unique_values.claim(f"the interface {node}", netdev, f"{place}.netdev")
    if not _MAC.fullmatch(mac) or int(mac[:2], 16) & 1:
        raise mistake(file, f"{place}.mac", f'"{mac}" is not a unicast MAC in small letters')
    unique_values.claim("MAC", mac, f"{place}.mac", owner=node if shared else None)


def _claim_address(file: Path, unique_values: _UniqueValues, place: str, address: str) -> None:
    try:
        interface = ipaddress.IPv4Interface(address)
    except ValueError:
        raise mistake(file, place, f'"{address}" is not an interface address; write one such as 10.0.0.1/31') from None
    if "/" not in address:
        raise mistake(file, place, f'the prefix length is missing; write it, as in "{address}/31"')
    unique_values.claim("address", str(interface.ip), place)


def _check_soft(entries: Entries, mistakes: Mistakes) -> None:
    """Check what only a soft lab needs: VMs, and a carrier and a namespace for each switch."""
    for place, node in entries.placed():
        if traits_of(node.kind).is_emulated:
            with mistakes.part():
                _check_soft_node(entries, place, node)


def _check_soft_node(entries: Entries, place: str, node: HostVars | SwitchVars | CarrierVars) -> None:
    file = entries.file
    if isinstance(node, HostVars) and node.vm is None:
        raise mistake(file, place, "faultbed_vm is missing; a soft lab needs its memory_mib and vcpus")
    if isinstance(node, SwitchVars):
        if node.carrier is None or node.netns is None:
            name = "carrier" if node.carrier is None else "netns"
            raise mistake(
                file,
                place,
                f"faultbed_{name} is missing; a soft switch is a namespace on a carrier VM, so it needs both",
            )
        if node.carrier not in entries.carriers:
            tail = near(node.carrier, list(entries.carriers))
            raise mistake(file, f"{place}.carrier", f'no carrier "{node.carrier}"{tail}')
    elif node.management is None:
        raise mistake(file, place, "faultbed_management is missing; give the netdev and MAC that SSH uses")


def _host_link(entries: Entries, switch: str, index: int, port: PortVars) -> Link:
    """Return the link of a switch's host port, after comparing it with the RNIC at the other end."""
    file = entries.file
    role, _ = entries.switches[switch]
    place = f"{role}.{switch}.ports[{index}]"
    if port.peer not in entries.hosts:
        raise mistake(file, f"{place}.peer", f'no host "{port.peer}"{near(port.peer, list(entries.hosts))}')
    rnics = entries.hosts[port.peer].rnics
    far = next((i for i, rnic in enumerate(rnics) if rnic.name == port.rnic), None)
    if far is None:
        tail = near(str(port.rnic), [rnic.name for rnic in rnics])
        raise mistake(file, f"{place}.rnic", f'no RNIC "{port.rnic}" on {port.peer}{tail}')
    _check_ends(file, place, port, f"hosts.{port.peer}.rnics[{far}]", rnics[far], switch)
    rnic, mtu = rnics[far], entries.hosts[port.peer].mtu
    speed = rnic.speed_gbps or port.speed_gbps
    return Link(
        a=_port(switch, port, mtu, speed),
        b=Port(
            node=port.peer,
            netdev=rnic.netdev,
            mac=rnic.mac,
            address=rnic.address,
            mtu=rnic.mtu or mtu,
            speed_gbps=speed,
        ),
        rnic=port.rnic,
    )


def _port(switch: str, port: PortVars, mtu: int, speed_gbps: int | None) -> Port:
    """Return a switch's end of a link. Values that its variables lack come from the lab or from the other end."""
    return Port(
        node=switch,
        netdev=port.netdev,
        mac=port.mac,
        address=port.address,
        mtu=port.mtu or mtu,
        speed_gbps=port.speed_gbps or speed_gbps,
        lanes=tuple(port.lanes) if port.lanes is not None else None,
        breakout=port.breakout,
        fec=port.fec,
        autoneg=port.autoneg,
        cable_m=port.cable_m,
        queue_kib=port.queue_kib,
        delay_us=port.delay_us,
    )


def _check_ends(file: Path, near_place: str, port: PortVars, far_place: str, rnic: RnicVars, switch: str) -> None:
    if rnic.switch != switch:
        problem = f"the peer is {far_place}, but that RNIC names {rnic.switch} as its switch; correct one of them"
        raise mistake(file, near_place, problem)
    near, far = ipaddress.IPv4Interface(str(port.address)), ipaddress.IPv4Interface(rnic.address)
    if near.network != far.network:
        raise mistake(
            file,
            f"{far_place}.address",
            f"{rnic.address} is not in {near.network}, the subnet of {near_place}",
        )
    if rnic.gateway != str(near.ip):
        problem = f'"{rnic.gateway}", but {near_place}.address is {near.ip}; both must be the same'
        raise mistake(file, f"{far_place}.gateway", problem)


def _check_rnics(entries: Entries, host_links: list[Link], mistakes: Mistakes) -> None:
    """Check that every RNIC is at the end of exactly one cable."""
    ends = [(link.b.node, link.rnic) for link in host_links]
    for name, host in entries.hosts.items():
        for index, rnic in enumerate(host.rnics):
            place = f"hosts.{name}.rnics[{index}]"
            count = ends.count((name, rnic.name))
            with mistakes.part():
                if rnic.switch not in entries.switches:
                    tail = near(rnic.switch, list(entries.switches))
                    raise mistake(entries.file, f"{place}.switch", f'no switch "{rnic.switch}"{tail}')
                if count != 1:
                    raise mistake(
                        entries.file,
                        place,
                        f"{count} ports of {rnic.switch} name this RNIC as their peer; exactly one must",
                    )


def _check_session(file: Path, place: str, port: PortVars, far_place: str, back: PortVars) -> None:
    """Reject an uplink whose BGP session is numbered at one end only, or whose ends are in different subnets."""
    if (port.address is None) != (back.address is None):
        with_address, without = (place, far_place) if port.address else (far_place, place)
        problem = f"{with_address} has an address, but {without} has none; give both (a numbered session) or neither"
        raise mistake(file, place, problem)
    if port.address is None or back.address is None:
        return
    network = ipaddress.IPv4Interface(port.address).network
    if network != ipaddress.IPv4Interface(back.address).network or network.prefixlen not in _PAIR_BITS:
        problem = f"{port.address} and {back.address} of {far_place} are not the two addresses of a /31 or /30"
        raise mistake(file, f"{place}.address", problem)


def _uplink(entries: Entries, name: str, index: int, port: PortVars) -> list[Link]:
    """Return the link of an uplink port; None for the port at its upper end, so that each link occurs once."""
    file = entries.file
    role, switch = entries.switches[name]
    place = f"{role}.{name}.ports[{index}]"
    if port.peer not in entries.switches or port.peer == name:
        other_switches = [other for other in entries.switches if other != name]
        raise mistake(file, f"{place}.peer", f'no other switch "{port.peer}"{near(port.peer, other_switches)}')
    if sum(other.peer == port.peer for other in switch.ports) > 1:
        raise mistake(
            file, place, f"{name} has two uplinks to {port.peer}, which would have the same link name; remove one"
        )
    peer_role, peer = entries.switches[port.peer]
    back = next((other for other in peer.ports if other.peer == name and other.rnic is None), None)
    if back is None:
        raise mistake(file, place, f"the peer is {port.peer}, but that switch has no port with peer {name}; add it")
    if peer.asn == switch.asn:
        raise mistake(file, place, f"{name} and {port.peer} both have ASN {peer.asn}; eBGP needs different ones")
    _check_session(file, place, port, f"{peer_role}.{port.peer}", back)
    order = list(entries.switches)
    if (_LEVEL[role], order.index(name)) > (_LEVEL[peer_role], order.index(port.peer)):
        return []
    speed = port.speed_gbps or back.speed_gbps
    return [Link(a=_port(name, port, switch.mtu, speed), b=_port(port.peer, back, switch.mtu, speed), rnic=None)]
