"""The back end of soft labs: VMs on this machine, started, snapshotted and restored by faultbed."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from faultbed.testbed import shipped
from faultbed.testbed.backends.lab_backend import NOT_A_VM, Access, DoctorFinding, Environment, LabBackend, Progress
from faultbed.testbed.backends.soft import capacity, fleet, image, lifecycle, serial_console, ssh_access, vm
from faultbed.testbed.backends.soft.lab_state import read_snapshot, read_state, sockets_of
from faultbed.testbed.directories import SOCKET_PATH_MAX, lab_dir
from faultbed.testbed.errors import LabError, UsageError
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.lab import Lab
from faultbed.testbed.remote.ssh import Address
from faultbed.testbed.tenancy.reservation_store import ReservationStore, local_store

__all__ = ["BACKEND"]


class _Soft:
    def up(self, inventory: Inventory, progress: Progress, *, fresh: bool = False) -> str:
        return lifecycle.up(inventory, progress, fresh=fresh)

    def make_ready(self, inventory: Inventory, progress: Progress) -> str:
        return lifecycle.up(inventory, progress)

    def reset(self, inventory: Inventory, progress: Progress, *, lab: Lab | None = None) -> bool:
        lifecycle.reset(inventory, progress, lab=lab)
        return True

    def down(self, inventory: Inventory) -> bool:
        return lifecycle.down(inventory)

    def purge(self, inventory: Inventory) -> None:
        lifecycle.purge(inventory)

    def check_can_start(self, inventory: Inventory) -> None:
        return

    def access(self, inventory: Inventory) -> Access:
        folder = lab_dir(inventory.name)
        state = read_state(folder) if folder.exists() else None
        if state is None:
            raise LabError(
                f"{inventory.name} is not up: `faultbed --lab {shipped.inventory_word(inventory.path)} up` starts it"
            )
        fleet.refuse_copy(lifecycle.vms(inventory), state)
        snapshot = read_snapshot(folder)
        if snapshot is None:
            raise LabError(
                f"{folder} has no snapshot.json, so the host keys are not known: `faultbed down --purge`, then up"
            )
        addresses = {
            name: Address(
                host="127.0.0.1",
                port=state.vms[name].ssh_port,
                user=ssh_access.USER,
                identity=folder / "id_ed25519",
                host_key=snapshot.host_keys[name],
                remedy=functools.partial(_remedy, folder / "vms" / name / serial_console.FILE),
                cannot_answer=functools.partial(
                    serial_console.panic_message, folder / "vms" / name / serial_console.FILE
                ),
            )
            for name in inventory.machines
        }
        return Access(addresses=addresses, accelerator=state.accelerator)

    def ssh_command(self, inventory: Inventory, machine: str) -> list[str]:
        folder = lab_dir(inventory.name)
        ports = {machine_status.name: machine_status.ssh_port for machine_status in lifecycle.status(inventory).vms}
        options = (
            "StrictHostKeyChecking=yes",
            f"UserKnownHostsFile={folder / 'known_hosts'}",
            "GlobalKnownHostsFile=/dev/null",
            "IdentitiesOnly=yes",
        )
        argv = ["ssh", "-q", "-p", str(ports[machine]), "-i", str(folder / "id_ed25519"), "-l", ssh_access.USER]
        return [*argv, *(word for option in options for word in ("-o", option))]

    def ansible_addresses(self, folder: Path) -> Path | None:
        return ssh_access.ansible_addresses(folder)

    def qmp_socket(self, inventory: Inventory, machine: str) -> Path:
        if machine not in inventory.machines:
            raise UsageError(f"{machine} is {NOT_A_VM}")
        return sockets_of(lab_dir(inventory.name)) / f"{machine}.holder"

    def vm_pid(self, inventory: Inventory, machine: str) -> int:
        self.qmp_socket(inventory, machine)
        state = read_state(lab_dir(inventory.name))
        if state is None or machine not in state.vms:
            raise LabError(f"{inventory.name} is no longer up: no process runs {machine}; start it with `faultbed up`")
        return state.vms[machine].pid

    def store(self, inventory: Inventory) -> ReservationStore:
        return local_store(lab_dir(inventory.name), lab=inventory.name)

    def health(self, inventory: Inventory) -> list[str]:
        return lifecycle.panics(inventory)

    def environment(self, lab: Lab) -> Environment:
        built = image.cached()
        return Environment(qemu=vm.qemu_version(), guest_kernel=built.kernel_version if built else None)

    def needed_mib(self, inventory: Inventory) -> int:
        return capacity.needed_mib(inventory)

    def is_up(self, inventory: Inventory) -> bool:
        return lifecycle.patient_status(inventory, lambda _: None).state == "up"

    def examine(self, inventory: Inventory) -> list[DoctorFinding]:
        return [_sockets(inventory), _lab(inventory)]


def _remedy(console: Path) -> str:
    usual = "`faultbed status` shows whether its VM runs, `faultbed reset` starts it again"
    return serial_console.panic_message(console) or usual


def _sockets(inventory: Inventory) -> DoctorFinding:
    longest = max(len(os.fsencode(path)) for path in lifecycle.socket_paths(inventory))
    if longest <= SOCKET_PATH_MAX:
        return DoctorFinding(what="socket paths", state="ok", found=f"{longest} of {SOCKET_PATH_MAX} bytes")
    return DoctorFinding(
        what="socket paths",
        state="bad",
        found=f"{longest} bytes, the limit of unix sockets is {SOCKET_PATH_MAX}",
        advice="give the hosts and RNICs of the inventory shorter names",
    )


def _lab(inventory: Inventory) -> DoctorFinding:
    now = lifecycle.patient_status(inventory, lambda _: None)
    if now.state == "broken":
        dead = ", ".join(vm.name for vm in now.vms if not vm.ssh)
        return DoctorFinding(
            what=f"lab {now.name}",
            state="bad",
            found=f"broken: {dead} do not answer",
            advice="`faultbed down`, then `faultbed up`",
        )
    return DoctorFinding(what=f"lab {now.name}", state="ok", found=now.state)


BACKEND: LabBackend = _Soft()
