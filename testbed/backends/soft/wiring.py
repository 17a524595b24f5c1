"""The VMs of a soft lab, their NICs, and the wires between these. Pure.

A wire is a pair of unix datagram sockets (QEMU `-netdev dgram`): one between each NIC of a host and its port on the
carrier VM. Uplinks between switches are veth pairs inside the carrier and need no wire.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from faultbed.testbed.errors import ConfigError
from faultbed.testbed.inventory.lab_inventory import Carrier, Inventory

__all__ = ["Machine", "Nic", "machines"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """A NIC of a VM. `wire` is None for the management NIC; both ends of a wire carry the same name."""

    netdev: str
    mac: str
    wire: str | None
    end: str = "host"
    """`host` or `carrier`: which end of the wire this is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A VM of the lab."""

    name: str
    memory_mib: int
    vcpus: int
    nics: tuple[Nic, ...]


def machines(inventory: Inventory) -> tuple[Machine, ...]:
    """Return the VMs of a soft lab. The carrier is first: it must read from the wires before hosts send."""
    return (*(_carrier(inventory, carrier) for carrier in inventory.carriers), *_hosts(inventory))


def _carrier(inventory: Inventory, carrier: Carrier) -> Machine:
    ports = [
        Nic(netdev=link.a.netdev, mac=link.a.mac, wire=f"{link.b.node}-{link.b.netdev}", end="carrier")
        for link in inventory.topology.links
        if not link.is_uplink and link.a.node in carrier.switches
    ]
    front_end = [
        Nic(
            netdev=port.netdev,
            mac=port.mac,
            wire=f"{port.peer}-{inventory.topology.host_by_name[port.peer].front_end_netdev}",
            end="carrier",
        )
        for port in carrier.front_end_ports
    ]
    return _machine(inventory, carrier.name, [*ports, *front_end])


def _hosts(inventory: Inventory) -> Iterator[Machine]:
    for host in inventory.topology.hosts:
        netdevs = [
            (host.front_end_netdev, host.front_end_mac),
            *((rnic.netdev, rnic.mac) for rnic in host.rnics),
        ]
        nics = [Nic(netdev=netdev, mac=mac, wire=f"{host.name}-{netdev}") for netdev, mac in netdevs]
        yield _machine(inventory, host.name, nics)


def _machine(inventory: Inventory, name: str, nics: list[Nic]) -> Machine:
    management, vm = inventory.management[name], inventory.vms.get(name)
    if vm is None or management.netdev is None or management.mac is None:
        raise ConfigError(
            f"{inventory.path}: {name}: a machine of a soft lab needs faultbed_vm (memory_mib, vcpus) and "
            "faultbed_management (netdev, mac)"
        )
    first = Nic(netdev=management.netdev, mac=management.mac, wire=None)
    return Machine(name=name, memory_mib=vm.memory_mib, vcpus=vm.vcpus, nics=(first, *nics))
