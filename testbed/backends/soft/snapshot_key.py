"""The key of a soft lab's snapshot: a hash of its inputs. A lab can only use a snapshot that has the same key.

Two things are not in the key: the node code, which is updated in an existing snapshot, and values that only racks use.
"""

from __future__ import annotations

import hashlib

from faultbed.testbed import provision, shipped
from faultbed.testbed.backends.soft import accel, vm
from faultbed.testbed.backends.soft.image import Image
from faultbed.testbed.backends.soft.wiring import machines
from faultbed.testbed.inventory.lab_inventory import Inventory

__all__ = ["key"]

_PRESET_SEED = 12345
"""ECMP hash seed of the inventories that come with faultbed. It is not in the key, so that older snapshots fit."""


def key(inventory: Inventory, image: Image, accelerator: accel.Accelerator) -> str:
    """Return the key of a lab: a hash of its inventory, and one of its image, emulated machine and playbooks."""
    machine = f"{vm.PROCESSORS[accelerator]} {vm.KERNEL_OPTIONS[accelerator]} {vm.DEVICES} {vm.qemu_version()}"
    software_hash = hashlib.sha256(f"{image.digest} {accelerator} {machine}".encode())
    playbooks = shipped.playbooks()
    for path in provision.files_of_soft_labs(playbooks):
        software_hash.update(str(path.relative_to(playbooks)).encode() + b"\0" + path.read_bytes())
    seed = inventory.ecmp_hash_seed
    parts = (
        inventory.topology,
        machines(inventory),
        inventory.mtu,
        *([inventory.shapes] if inventory.shapes else []),
        *([f"hash seed {seed}"] if seed != _PRESET_SEED else []),
        *(f"{switch} is {netns}" for switch, netns in inventory.netns.items() if netns != switch),
    )
    inventory_hash = hashlib.sha256(repr(parts).encode())
    return f"{inventory_hash.hexdigest()[:12]}-{software_hash.hexdigest()[:12]}"
