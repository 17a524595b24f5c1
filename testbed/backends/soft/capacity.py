"""What a soft lab takes of its machine, and whether that is there: memory, and disk."""

from __future__ import annotations

import shutil
from pathlib import Path

from testbed.backends.soft.wiring import machines
from testbed.errors import LabError
from testbed.inventory.lab_inventory import Inventory

__all__ = ["available_mib", "check_disk", "check_memory", "needed_mib"]

DISK_MIB = 300
"""Of a VM: what it writes, and its memory as the snapshot keeps it; 160 to 240 were seen."""
HEADROOM_MIB = 60
"""What QEMU itself takes beside the guest's memory."""


def needed_mib(inventory: Inventory) -> int:
    """Memory that the lab's VMs take, in MiB."""
    return sum(machine.memory_mib + HEADROOM_MIB for machine in machines(inventory))


def available_mib() -> int:
    """Memory that programs can still have, in MiB (`MemAvailable`, proc(5))."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) // 1024


def check_memory(inventory: Inventory) -> None:
    """Refuse a lab that is larger than what is free.

    Raises:
        LabError: how much is missing, and what to do.
    """
    needed, available = needed_mib(inventory), available_mib()
    if available < needed:
        raise LabError(
            f"{inventory.name} needs {needed} MiB of memory, {available} MiB are available: close something, "
            "or take a smaller lab (`--lab soft-mini`)"
        )


def check_disk(inventory: Inventory, folder: Path) -> None:
    """Refuse to boot into a folder that has no room for disks and snapshots.

    Raises:
        LabError: as `check_memory`.
    """
    needed, free = DISK_MIB * len(machines(inventory)), shutil.disk_usage(folder).free // 2**20
    if free < needed:
        raise LabError(
            f"{inventory.name} needs {needed} MiB of disk for its VMs and their snapshot, {free} MiB are free in "
            f"{folder}: make room, set FAULTBED_HOME to a larger disk, or take a smaller lab (`--lab soft-mini`)"
        )
