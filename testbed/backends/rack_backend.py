"""The back end of rack labs: machines that run already, reached by SSH with the user's own settings."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from faultbed.testbed.backends.lab_backend import NOT_A_VM, Access, DoctorFinding, Environment, LabBackend, Progress
from faultbed.testbed.backends.rack import rack_status
from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.lab import Lab, machine_addresses, open_keeper
from faultbed.testbed.observe import versions
from faultbed.testbed.tenancy.reservation_store import ReservationStore, node_store

__all__ = ["BACKEND"]


class _Rack:
    def up(self, inventory: Inventory, progress: Progress, *, fresh: bool = False) -> str:
        _refuse(inventory)

    def make_ready(self, inventory: Inventory, progress: Progress) -> str:
        return "already up"

    def reset(self, inventory: Inventory, progress: Progress, *, lab: Lab | None = None) -> bool:
        return False

    def down(self, inventory: Inventory) -> bool:
        _refuse(inventory)

    def purge(self, inventory: Inventory) -> None:
        _refuse(inventory)

    def check_can_start(self, inventory: Inventory) -> None:
        _refuse(inventory)

    def access(self, inventory: Inventory) -> Access:
        return Access(addresses=machine_addresses(inventory.management), accelerator=None)

    def ssh_command(self, inventory: Inventory, machine: str) -> list[str]:
        raise UsageError(f"{inventory.name} is a rack lab: use your own ssh, its machines are in your known_hosts")

    def ansible_addresses(self, folder: Path) -> Path | None:
        return None

    def qmp_socket(self, inventory: Inventory, machine: str) -> Path:
        raise UsageError(f"{machine} is {NOT_A_VM}")

    def vm_pid(self, inventory: Inventory, machine: str) -> int:
        raise UsageError(f"{machine} is {NOT_A_VM}")

    def store(self, inventory: Inventory) -> ReservationStore:
        return node_store(open_keeper(inventory), lab=inventory.name)

    def health(self, inventory: Inventory) -> list[str]:
        return []

    def environment(self, lab: Lab) -> Environment:
        return Environment(versions=versions.read(lab))

    def needed_mib(self, inventory: Inventory) -> int:
        return 0

    def is_up(self, inventory: Inventory) -> bool:
        return rack_status.status(inventory).state == "up"

    def examine(self, inventory: Inventory) -> list[DoctorFinding]:
        return []


def _refuse(inventory: Inventory) -> NoReturn:
    raise UsageError(
        f"{inventory.path} is a rack lab: its machines are not ours to start; up, reset and down are for soft labs"
    )


BACKEND: LabBackend = _Rack()
