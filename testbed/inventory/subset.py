"""The inventory of a lab without some of its hosts. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from faultbed.testbed.inventory.lab_inventory import Inventory

__all__ = ["without_hosts"]


def without_hosts(inventory: Inventory, names: Collection[str]) -> Inventory:
    """Return the inventory without some hosts, their links and their access paths. Switches stay.

    Never start or reset a soft lab with the result: its VMs and the key of its snapshot depend on all hosts.
    """
    if not names:
        return inventory
    topology = inventory.topology
    return replace(
        inventory,
        topology=replace(
            topology,
            hosts=tuple(host for host in topology.hosts if host.name not in names),
            links=tuple(link for link in topology.links if link.b.node not in names),
        ),
        management={name: path for name, path in inventory.management.items() if name not in names},
        vms={name: size for name, size in inventory.vms.items() if name not in names},
        bmcs={name: bmc for name, bmc in inventory.bmcs.items() if name not in names},
    )
