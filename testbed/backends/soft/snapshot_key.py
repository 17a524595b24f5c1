"""The key of a soft lab and its snapshot: a snapshot fits a lab only if everything that it was made from is the same.

Not part of the key: the node code, which is updated in an existing snapshot, and everything for racks only.
"""

from __future__ import annotations

import hashlib

from testbed import provision, shipped
from testbed.backends.soft import accel, vm
from testbed.backends.soft.image import Image
from testbed.backends.soft.wiring import machines
from testbed.inventory.lab_inventory import Inventory

__all__ = ["key"]

_PRESET_SEED = 12345
"""ECMP hash seed of the inventories that come with faultbed. It is not hashed, so that older snapshots still fit."""


def key(inventory: Inventory, built: Image, accelerator: accel.Accelerator) -> str:
    """Return the key of an inventory, an image, the emulated machine and the playbooks."""
    machine = f"{vm.PROCESSORS[accelerator]} {vm.KERNEL_OPTIONS[accelerator]} {vm.qemu_version()}"
    rest = hashlib.sha256(f"{built.digest} {accelerator} {machine}".encode())
    playbooks = shipped.playbooks()
    for path in provision.files_of_soft_labs(playbooks):
        rest.update(str(path.relative_to(playbooks)).encode() + b"\0" + path.read_bytes())
    seed = inventory.ecmp_hash_seed
    parts = (
        inventory.topology,
        machines(inventory),
        inventory.mtu,
        *([inventory.shapes] if inventory.shapes else []),
        *([f"hash seed {seed}"] if seed != _PRESET_SEED else []),
        *(f"{switch} is {netns}" for switch, netns in inventory.netns.items() if netns != switch),
    )
    lab = hashlib.sha256(repr(parts).encode())
    return f"{lab.hexdigest()[:12]}-{rest.hexdigest()[:12]}"
