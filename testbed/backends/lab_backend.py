"""The operations of commands on a lab, as one protocol, and the back end of each kind of lab.

A new kind of lab is a module `KIND_backend` here with a `BACKEND`, its facts (`faultbed.testbed.model.lab_kind`) and
its fault mechanisms (`faultbed.inject.mechanisms`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from faultbed.testbed.model.lab_kind import LabKind

if TYPE_CHECKING:
    from faultbed.testbed.inventory.lab_inventory import Inventory
    from faultbed.testbed.lab import Lab
    from faultbed.testbed.remote.ssh import Address
    from faultbed.testbed.tenancy.reservation_store import ReservationStore

__all__ = ["NOT_A_VM", "Access", "DoctorFinding", "Environment", "LabBackend", "Progress", "backend_of"]

Progress = Callable[[str], None]
NOT_A_VM = "not a VM of a soft lab, so that QEMU cannot act on it; choose another target"


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The addresses of an open lab's machines. `accelerator` is that of its VMs; None: the lab has no VMs."""

    addresses: Mapping[str, Address]
    accelerator: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Versions of the machines' software, for a run's record; None: does not apply to this kind of lab.

    `versions` are those of a rack's machines, by machine and part (`faultbed.testbed.observe.versions`).
    """

    qemu: str | None = None
    guest_kernel: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFinding:
    """One check of this machine: `ok`, `note` (works, with a remark) or `bad` (will not work), with what to do."""

    what: str
    state: Literal["ok", "note", "bad"]
    found: str
    advice: str = ""


class LabBackend(Protocol):
    """A kind of lab."""

    def up(self, inventory: Inventory, progress: Progress, *, fresh: bool = False) -> str:
        """Start a lab, and return in words how it was started.

        Raises:
            UsageError: its machines are not started by faultbed.
            LabError: it did not come up.
        """

    def make_ready(self, inventory: Inventory, progress: Progress) -> str:
        """Start a lab if faultbed starts its machines; return in words how, or `already up`.

        Raises:
            LabError: it did not come up.
        """

    def reset(self, inventory: Inventory, progress: Progress, *, lab: Lab | None = None) -> bool:
        """Restore a lab from its snapshot; return False if this kind has none, and nothing was done.

        The connections of an open `lab`, which the reset ends, are replaced.

        Raises:
            LabError: it is not up, or does not come back.
        """

    def down(self, inventory: Inventory) -> bool:
        """Stop a lab, and return whether it was running.

        Raises:
            UsageError: its machines are not started by faultbed.
        """

    def purge(self, inventory: Inventory) -> None:
        """Stop a lab and remove all of its files, including its snapshot.

        Raises:
            UsageError: its machines are not started by faultbed.
        """

    def check_can_start(self, inventory: Inventory) -> None:
        """Reject a lab whose machines are not started by faultbed.

        Raises:
            UsageError: the lab's machines run already.
        """

    def access(self, inventory: Inventory) -> Access:
        """Return how to reach the machines.

        Raises:
            LabError: the lab is not up.
            Unreachable: a host key is not pinned.
        """

    def ssh_command(self, inventory: Inventory, machine: str) -> list[str]:
        """Return the `ssh` command for a machine, without its last argument: the caller appends the host's address.

        Raises:
            UsageError: users log in by themselves.
        """

    def ansible_addresses(self, folder: Path) -> Path | None:
        """Return a second inventory with the addresses of running machines; None: the lab's own inventory has them."""

    def qmp_socket(self, inventory: Inventory, machine: str) -> Path:
        """Return the socket at which fault holders command the QEMU of a machine.

        Raises:
            UsageError: the machine is not a VM of this lab.
        """

    def vm_pid(self, inventory: Inventory, machine: str) -> int:
        """Return the process id of the QEMU of a machine.

        Raises:
            UsageError: the machine is not a VM of this lab.
            LabError: the lab is no longer up.
        """

    def store(self, inventory: Inventory) -> ReservationStore:
        """Return the lab's reservation store.

        Raises:
            Unreachable: the machine that keeps it has no pinned host key.
        """

    def health(self, inventory: Inventory) -> list[str]:
        """Return a sentence for each machine whose kernel has died."""

    def environment(self, lab: Lab) -> Environment:
        """Return what a run's record says about the machines."""

    def needed_mib(self, inventory: Inventory) -> int:
        """Return the memory that the lab takes on this machine while it is up."""

    def is_up(self, inventory: Inventory) -> bool:
        """Return whether every machine answers."""

    def examine(self, inventory: Inventory) -> list[DoctorFinding]:
        """Check what the lab needs on this machine besides memory, and whether the lab works."""


def backend_of(kind: LabKind) -> LabBackend:
    """Return the back end of a kind of lab."""
    backend: LabBackend = importlib.import_module(f"faultbed.testbed.backends.{kind}_backend").BACKEND
    return backend
