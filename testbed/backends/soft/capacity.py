"""Check that this machine has the memory and disk space that a soft lab needs."""

from __future__ import annotations

import shutil
from pathlib import Path

from faultbed.testbed.backends.soft.wiring import machines
from faultbed.testbed.errors import LabError
from faultbed.testbed.inventory.lab_inventory import Inventory

__all__ = ["available_mib", "check_disk", "check_memory", "needed_mib"]

DISK_MIB = 300
"""Disk space of a VM: its writes, and its memory in the snapshot; 160 to 240 were measured."""
HEADROOM_MIB = 60
"""Memory of QEMU itself, in addition to the guest's."""


def needed_mib(inventory: Inventory) -> int:
    """Return the memory that the lab's VMs need, in MiB."""
    return sum(machine.memory_mib + HEADROOM_MIB for machine in machines(inventory))


def available_mib() -> int:
    """Return the memory available to programs, in MiB (`MemAvailable`, proc(5))."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) // 1024


def check_memory(inventory: Inventory) -> None:
    """Refuse a lab that needs more memory than is available.

    Raises:
        LabError: there is too little memory.
    """
    needed, available = needed_mib(inventory), available_mib()
    if available < needed:
        raise LabError(
            f"{inventory.name} needs {needed} MiB of memory, {available} MiB are available: close other programs, "
            "or use a smaller lab (`--lab soft-mini`)"
        )


def check_disk(inventory: Inventory, folder: Path) -> None:
    """Refuse a lab whose disks and snapshots need more disk space than is free.

    Raises:
        LabError: there is too little disk space.
    """
    needed, free = DISK_MIB * len(machines(inventory)), shutil.disk_usage(folder).free // 2**20
    if free < needed:
        raise LabError(
            f"{inventory.name} needs {needed} MiB of disk for its VMs and their snapshot, {free} MiB are free in "
            f"{folder}: free disk space, set FAULTBED_HOME to a larger disk, or use a smaller lab (`--lab soft-mini`)"
        )
