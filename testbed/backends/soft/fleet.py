"""The VMs of one lab together: their disks, their start, the wait for SSH, their snapshot, their end."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from testbed.backends.soft import accel, vm, vm_process
from testbed.backends.soft.image import Image
from testbed.backends.soft.lab_state import LabState, VmState
from testbed.backends.soft.qmp_client import Qmp
from testbed.backends.soft.vm import Vm
from testbed.errors import BootFailed, LabError

__all__ = [
    "BOOT_DEADLINE_S",
    "SNAPSHOT",
    "each",
    "end",
    "go_on",
    "greets",
    "make_overlay",
    "save_snapshot",
    "start",
    "unrecorded",
    "wait_for_ssh",
]

SNAPSHOT = "provisioned"
BOOT_DEADLINE_S = {"kvm": 90.0, "tcg": 300.0}
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
    """Start all VMs, each on the SSH port that it had in `ports`.

    `record` is told of each at once: a controller that is killed meanwhile leaves word of what to end.
    """
    started: dict[str, VmState] = {}
    for machine in all_vms:
        known = ports.get(machine.machine.name)
        pid = vm.start(machine, built, accelerator, snapshot=snapshot, port=known.ssh_port if known else 0)
        started[machine.machine.name] = VmState(
            pid=pid, ssh_port=0, start_ticks=vm_process.start_ticks(pid), boot_id=vm_process.boot_id()
        )
        record(started)
    forwards = each(all_vms, vm.ssh_port)
    for machine, port in zip(all_vms, forwards, strict=True):
        name = machine.machine.name
        started[name] = msgspec.structs.replace(started[name], ssh_port=port)
    return started


def wait_for_ssh(all_vms: Sequence[Vm], state: LabState, progress: Callable[[str], None]) -> None:
    """Until the SSH server of each VM greets.

    Raises:
        BootFailed: one died, or some did not answer in time.
    """
    deadline_s = BOOT_DEADLINE_S[state.accelerator]
    deadline = time.monotonic() + deadline_s
    waiting = {machine.machine.name: machine for machine in all_vms}
    while waiting:
        for name, machine in list(waiting.items()):
            if not vm.is_alive(machine, state.vms[name]):
                raise BootFailed(f"the VM {name} died while booting; {_last_words(machine)}")
            if greets(state.vms[name].ssh_port, timeout_s=1.0):
                del waiting[name]
                progress(f"{name} answers ({len(state.vms) - len(waiting)} of {len(state.vms)})")
        if waiting and time.monotonic() > deadline:
            first = next(iter(waiting.values()))
            raise BootFailed(
                f"{', '.join(waiting)} did not answer SSH in {deadline_s:.0f} s; {_last_words(first)}. "
                "If this machine is very slow or busy, try again when it is idle"
            )


def _last_words(machine: Vm) -> str:
    said = []
    for path in (machine.log, machine.console):
        with contextlib.suppress(OSError):
            lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
            said += lines[-5:]
    return f"the last it said ({machine.console}): " + (" | ".join(said)[-600:] or "nothing")


def greets(port: int, *, timeout_s: float) -> bool:
    """Whether an SSH server greets on a forwarded port. QEMU accepts long before the guest listens, so read."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
            connection.settimeout(timeout_s)
            return connection.recv(4).startswith(b"SSH-")
    except OSError:
        return False


def make_overlay(built: Image, machine: Vm) -> None:
    """The disk of a VM: what it changes of the image.

    Raises:
        LabError: qemu-img is missing, or said no.
    """
    argv = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", str(built.disk), "-F", "raw", str(machine.disk)]
    try:
        subprocess.run(argv, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise LabError(
            "qemu-img not found: install it with `apt-get install qemu-utils`, or run `make demo`, which does"
        ) from error
    except subprocess.CalledProcessError as error:
        raise LabError(f"cannot make {machine.disk}: {error.stderr.strip()}") from error


def save_snapshot(machine: Vm) -> None:
    """Keep a VM as it is now, in its disk.

    Raises:
        LabError: QEMU said no.
    """
    with Qmp(machine.qmp) as qmp:
        if said := qmp.hmp(f"savevm {SNAPSHOT}").strip():
            raise LabError(f"cannot take the snapshot of {machine.machine.name}: {said}")


def go_on(all_vms: Sequence[Vm]) -> None:
    """VMs that were loaded from their snapshot run from now on."""

    def one(machine: Vm) -> None:
        with Qmp(machine.qmp) as qmp:
            qmp.command("cont")

    each(all_vms, one)


def each(things: Sequence[_S], work: Callable[[_S], _T]) -> list[_T]:
    """The same work on all, at once; results in their order."""
    with ThreadPoolExecutor(max_workers=max(1, len(things))) as pool:
        return list(pool.map(work, things))


def end(all_vms: Sequence[Vm], state: LabState | None) -> int:
    """End the processes of all VMs, recorded or not, and return how many there were.

    A controller that is killed between starting a VM and recording it leaves one that only its disk identifies.
    """

    def one(machine: Vm) -> int:
        known = state.vms.get(machine.machine.name) if state else None
        ended = vm.end(machine, known) if known else False
        return ended + sum(vm.end(machine, lost) for lost in unrecorded(machine))

    return sum(each(all_vms, one))


def unrecorded(machine: Vm) -> list[VmState]:
    """QEMU processes of this user that run on a VM's disk, whatever the record says."""
    found = [(pid, vm_process.start_ticks(pid)) for pid in vm_process.find(machine.disk)]
    return [
        VmState(pid=pid, ssh_port=0, start_ticks=ticks, boot_id=vm_process.boot_id()) for pid, ticks in found if ticks
    ]
