"""Operations on all VMs of a lab: create disks, start, wait for SSH, save a snapshot, end."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from faultbed.testbed.backends.soft import accel, vm, vm_process
from faultbed.testbed.backends.soft.image import Image
from faultbed.testbed.backends.soft.lab_state import LabState, VmState
from faultbed.testbed.backends.soft.qmp_client import Qmp
from faultbed.testbed.backends.soft.vm import Vm
from faultbed.testbed.errors import BootFailed, LabError
from faultbed.testbed.side_by_side import on_each

__all__ = [
    "BOOT_DEADLINE_S",
    "SNAPSHOT",
    "end",
    "has_ssh_banner",
    "in_parallel",
    "is_copy",
    "make_overlay",
    "refuse_copy",
    "resume",
    "save_snapshot",
    "start",
    "unrecorded",
    "wait_for_ssh",
]

SNAPSHOT = "provisioned"
BOOT_DEADLINE_S = {"kvm": 90.0, "tcg": 300.0}
_ALL_VMS_S = 900.0
"""Deadline of one step on all VMs. Each VM has shorter ones of its own."""
_DISK_S = 60.0
_S = TypeVar("_S")
_T = TypeVar("_T")


def start(
    all_vms: Sequence[Vm],
    built: Image,
    accelerator: accel.Accelerator,
    *,
    snapshot: str | None,
    ports: Mapping[str, VmState],
    record: Callable[[Mapping[str, VmState]], object],
) -> dict[str, VmState]:
    """Start all VMs, each on its SSH port of `ports`.

    `record` is called as soon as a VM runs, so that a later command can end it if the controller is killed.
    """
    started: dict[str, VmState] = {}
    for machine in all_vms:
        known = ports.get(machine.machine.name)
        pid = vm.start(machine, built, accelerator, snapshot=snapshot, port=known.ssh_port if known else 0)
        started[machine.machine.name] = VmState(
            pid=pid, ssh_port=0, start_ticks=vm_process.start_ticks(pid), boot_id=vm_process.boot_id()
        )
        record(started)
    forwards = in_parallel(all_vms, vm.ssh_port)
    for machine, port in zip(all_vms, forwards, strict=True):
        name = machine.machine.name
        started[name] = msgspec.structs.replace(started[name], ssh_port=port)
    return started


def wait_for_ssh(all_vms: Sequence[Vm], state: LabState, progress: Callable[[str], None]) -> None:
    """Wait until the SSH server of each VM answers.

    Raises:
        BootFailed: a VM died, or some did not answer in time.
    """
    deadline_s = BOOT_DEADLINE_S[state.accelerator]
    deadline = time.monotonic() + deadline_s
    waiting = {machine.machine.name: machine for machine in all_vms}
    while waiting:
        for name, machine in list(waiting.items()):
            if not vm.is_alive(machine, state.vms[name]):
                raise BootFailed(f"the VM {name} died while booting; {_last_words(machine)}")
            if has_ssh_banner(state.vms[name].ssh_port, timeout_s=1.0):
                del waiting[name]
                progress(f"{name}: answers ({len(state.vms) - len(waiting)} of {len(state.vms)})")
        if waiting and time.monotonic() > deadline:
            first = next(iter(waiting.values()))
            raise BootFailed(
                f"{', '.join(waiting)} did not answer SSH in {deadline_s:.0f} s; {_last_words(first)}. "
                "If this machine is slow or busy, try again when it is idle"
            )


def _last_words(machine: Vm) -> str:
    lines: list[str] = []
    for path in (machine.log, machine.console):
        with contextlib.suppress(OSError):
            printed = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
            lines += printed[-5:]
    return f"its last output ({machine.console}): " + (" | ".join(lines)[-600:] or "nothing")


def has_ssh_banner(port: int, *, timeout_s: float) -> bool:
    """Return whether an SSH server sends its banner on a forwarded port. QEMU accepts connections before the server."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
            connection.settimeout(timeout_s)
            return connection.recv(4).startswith(b"SSH-")
    except OSError:
        return False


def make_overlay(built: Image, machine: Vm) -> None:
    """Create the disk of a VM, an overlay of the image.

    Raises:
        LabError: qemu-img is missing, or failed.
    """
    argv = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", str(built.disk), "-F", "raw", str(machine.disk)]
    try:
        subprocess.run(argv, check=True, capture_output=True, text=True, timeout=_DISK_S)
    except FileNotFoundError as error:
        raise LabError(
            "qemu-img not found: install it with `apt-get install qemu-utils`, or run `make demo`, which installs it"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise LabError(f"{machine.disk}: qemu-img did not end in {_DISK_S:g} s; check that disk") from error
    except subprocess.CalledProcessError as error:
        output = error.stderr.strip()
        raise LabError(f"cannot create {machine.disk}: {output}; check that there is disk space") from error


def save_snapshot(machine: Vm) -> None:
    """Save the present state of a VM in its disk.

    Raises:
        LabError: QEMU failed.
    """
    with Qmp(machine.qmp) as qmp:
        if output := qmp.hmp(f"savevm {SNAPSHOT}").strip():
            raise LabError(
                f"cannot take the snapshot of {machine.machine.name}: {output}; check that there is disk space for "
                f"{machine.folder}"
            )


def resume(all_vms: Sequence[Vm]) -> None:
    """Resume VMs that were loaded from their snapshot."""

    def resume_one(machine: Vm) -> None:
        with Qmp(machine.qmp) as qmp:
            qmp.command("cont")

    in_parallel(all_vms, resume_one)


def in_parallel(items: Sequence[_S], work: Callable[[_S], _T]) -> list[_T]:
    """Run the same work on all items at once; return the results in the order of the items."""
    return on_each(items, work, timeout_s=_ALL_VMS_S, name_of=_name_of)


def _name_of(item: object) -> str:
    return item.machine.name if isinstance(item, Vm) else str(getattr(item, "name", item))


def end(all_vms: Sequence[Vm], state: LabState | None) -> int:
    """End the processes of all VMs, in the record or not, and return how many there were.

    A controller that is killed between starting a VM and recording it leaves a VM that only its disk identifies.
    """

    def end_one(machine: Vm) -> int:
        known = state.vms.get(machine.machine.name) if state else None
        ended = vm.end(machine, known) if known else False
        return ended + sum(vm.end(machine, lost) for lost in unrecorded(machine))

    return sum(in_parallel(all_vms, end_one))


def is_copy(all_vms: Sequence[Vm], state: LabState) -> bool:
    """Return whether the record is a copy: a VM that it names runs on the disk of another state folder."""
    return any(
        vm_process.is_of_original(known, machine.disk)
        for machine in all_vms
        if (known := state.vms.get(machine.machine.name)) is not None
    )


def refuse_copy(all_vms: Sequence[Vm], state: LabState) -> None:
    """Reject the record of a copied state folder, because the VMs in it are those of the original.

    Raises:
        LabError: the record is such a copy.
    """
    if is_copy(all_vms, state):
        raise LabError(
            f"{all_vms[0].folder.parents[1]}: this state folder is a copy, and the VMs that it names are those of the "
            "original; `faultbed down` here removes the copied record, and `faultbed up` then starts VMs of its own"
        )


def unrecorded(machine: Vm) -> list[VmState]:
    """Return the QEMU processes of this user that run on a VM's disk, whatever the record says."""
    processes = [(pid, vm_process.start_ticks(pid)) for pid in vm_process.find(machine.disk)]
    return [
        VmState(pid=pid, ssh_port=0, start_ticks=ticks, boot_id=vm_process.boot_id())
        for pid, ticks in processes
        if ticks
    ]
