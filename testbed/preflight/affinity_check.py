"""Check that the GPU that the inventory pairs with an RNIC is near it, by the host's PCI bus. Pure.

GPUDirect is fastest if both are below one PCIe switch (`nvidia-smi topo -m`: PIX or PXB). If packets pass the root
complex (NODE) or cross to another NUMA node (SYS), the pair is slower than its neighbours, and nothing else shows why.
Not yet run on hardware; the formats are those of Linux (sysfs-bus-pci).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from faultbed.testbed.discover.affinity import shared_bridges
from faultbed.testbed.discover.facts import pci_path
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.model.topology import Host, Rnic
from faultbed.testbed.preflight.collect import Facts

__all__ = ["problems", "undetermined"]

_EXPECTED = "below the same PCIe switch"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bus:
    """A host's PCI devices: each one's path from its root, and its NUMA node (missing: unknown)."""

    paths: Mapping[str, tuple[str, ...]]
    numa: Mapping[str, int]


def problems(inventory: Inventory, state: Mapping[str, Facts]) -> Iterator[tuple[str, str, str]]:
    """Yield (where, observed, expected) for pairs that are not near each other, and for unexpected PCIe addresses."""
    for host, rnic, bus, why_unchecked in _pairs(inventory, state):
        where, at = f"{host.name}:{rnic.name}", _address(rnic, state[host.name])
        if at is None or at not in bus.paths:
            continue
        if rnic.pcie is not None and rnic.pcie != at:
            yield where, f"is the PCI device {at}", f"{rnic.pcie}, by the inventory"
        gpu = next((gpu for gpu in host.gpus if gpu.name == rnic.gpu), None)
        if gpu is None or gpu.pcie is None or why_unchecked:
            continue
        if gpu.pcie not in bus.paths:
            yield f"{host.name}:{gpu.name}", f"no PCI device at {gpu.pcie}", "the inventory's address"
        elif shared_bridges(bus.paths[at], bus.paths[gpu.pcie]) < 2:  # noqa: PLR2004 - a root complex alone is no switch
            yield where, _apart(host, bus, at, gpu.name, gpu.pcie), f"{gpu.name} {_EXPECTED}"


def undetermined(inventory: Inventory, state: Mapping[str, Facts]) -> Iterator[tuple[str, str]]:
    """Yield (where, why) for the pairs that cannot be checked."""
    for host, rnic, _, why in _pairs(inventory, state):
        if why:
            yield f"{host.name}:{rnic.name}", why


def _pairs(inventory: Inventory, state: Mapping[str, Facts]) -> Iterator[tuple[Host, Rnic, _Bus, str]]:
    """Yield every RNIC with its host's bus, and why its pair cannot be checked (empty: it can)."""
    for host in inventory.topology.hosts:
        facts = state[host.name]
        bus = _bus(facts)
        pcie = {gpu.name: gpu.pcie for gpu in host.gpus}
        for rnic in host.rnics:
            at, why = _address(rnic, facts), ""
            if not bus.paths:
                why = "the host does not report its PCI bus"
            elif at is None or at not in bus.paths:
                why = f"/sys/bus/pci does not have {rnic.name}"
            elif rnic.gpu is None:
                why = "the inventory pairs it with no GPU (faultbed_rnics[].gpu)"
            elif rnic.gpu not in pcie:
                why = f"the inventory has no {rnic.gpu} on {host.name}"
            elif pcie[rnic.gpu] is None:
                why = f"the inventory does not say where {rnic.gpu} is (faultbed_gpus[].pcie)"
            yield host, rnic, bus, why


def _bus(facts: Facts) -> _Bus:
    paths = {parts[-1]: parts for parts in map(pci_path, facts.raw.get("pci", "").split()) if parts}
    numa = {}
    for line in facts.raw.get("numa", "").splitlines():
        path, _, node = line.rpartition(":")
        if node.strip().isdigit():  # -1: the firmware does not define it
            numa[path.split("/")[-2]] = int(node)
    return _Bus(paths=paths, numa=numa)


def _address(rnic: Rnic, facts: Facts) -> str | None:
    """Return the RNIC's PCIe address on the host, or the inventory's if the host does not report it."""
    parts = pci_path(facts.raw.get(f"device {rnic.name}", ""))
    return parts[-1] if parts else rnic.pcie


def _apart(host: Host, bus: _Bus, at: str, name: str, pcie: str) -> str:
    rnic_numa, gpu_numa = bus.numa.get(at), bus.numa.get(pcie)
    if rnic_numa is None or gpu_numa is None:
        far = f"{name} below another root port; its NUMA nodes are not reported"
    elif rnic_numa == gpu_numa:
        far = f"{name} below another root port of NUMA node {rnic_numa} (NODE)"
    else:
        far = f"{name} on NUMA node {gpu_numa}, the RNIC on {rnic_numa} (SYS)"
    beside = [gpu.name for gpu in host.gpus if shared_bridges(bus.paths[at], bus.paths.get(gpu.pcie or "", ())) > 1]
    return f"{far}; below the RNIC's own PCIe switch: {', '.join(beside) or 'no GPU of the inventory'}"
