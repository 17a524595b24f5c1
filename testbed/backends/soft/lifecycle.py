"""Life cycle of a soft lab: up, down, reset, status.

The first `up` boots, provisions, verifies and takes a snapshot of all VMs; later ones resume from it. `reset` restores
a running lab from the snapshot. If `up` ends early (an error, Ctrl-C), it ends everything that it has started.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from faultbed.testbed import lab as lab_module
from faultbed.testbed import provision, shipped, stopping
from faultbed.testbed.backends.soft import accel, capacity, fleet, image, serial_console, snapshot_key, ssh_access, vm
from faultbed.testbed.backends.soft.ignored_signals import ignored_signals
from faultbed.testbed.backends.soft.image import Image
from faultbed.testbed.backends.soft.lab_state import (
    LabState,
    Snapshot,
    VmState,
    locked,
    read_snapshot,
    read_state,
    sockets_of,
    write,
)
from faultbed.testbed.backends.soft.vm import Vm
from faultbed.testbed.backends.soft.wiring import Machine, machines
from faultbed.testbed.directories import lab_dir, private_dir, short_dir, socket_dir
from faultbed.testbed.errors import DirtyLab, LabError, Unreachable, UsageError
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.node import holders
from faultbed.testbed.observe.fingerprint import stored_reverts
from faultbed.testbed.remote import node_archive, warm_start
from faultbed.testbed.remote.remote_node import Node
from faultbed.testbed.stopping import Deadline
from faultbed.testbed.tenancy import dirty, interventions

__all__ = [
    "Progress",
    "Status",
    "VmStatus",
    "down",
    "panics",
    "patient_status",
    "purge",
    "reset",
    "socket_paths",
    "status",
    "up",
    "vms",
    "warm_parents",
]

PATIENCE_S = 3.0
"""How long one status query waits for a VM's SSH banner. On a busy machine a VM may need longer (`patient_status`)."""
PATIENCE_BEFORE_BROKEN_S, PATIENCE_BEFORE_END_S = 15.0, 60.0
"""How long a VM may take to send its SSH banner before its lab is reported as broken, and before `up` replaces it."""

_WAKE_S = 90.0
"""How long a VM may take to accept an SSH connection after its snapshot was restored."""
_PURGED = ".purged-"
_UNUSABLE = re.compile(r"""[\s,%"'\\`{}]""")

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class VmStatus:
    """The status of one VM: `ssh` is whether its SSH server answers, `panic` the reason if its kernel has died."""

    name: str
    pid: int | None
    alive: bool
    ssh_port: int | None
    ssh: bool
    panic: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A soft lab. `state` is `up`, `broken` (a VM is dead or does not answer), `down` or `down, snapshot kept`."""

    name: str
    state: str
    accelerator: str | None
    snapshot: bool
    vms: tuple[VmStatus, ...]


def vms(inventory: Inventory) -> tuple[Vm, ...]:
    """Return the VMs of a lab, the carrier first. VMs of a running lab have the sockets that they were started with."""
    folder = lab_dir(inventory.name)
    try:
        sockets = sockets_of(folder)
    except LabError:  # the record is damaged, but `down` must still find the processes
        sockets = socket_dir(folder)
    return _vms(inventory, folder, sockets)


def _all_vms(inventory: Inventory, folder: Path) -> tuple[Vm, ...]:
    """Return the VMs of a lab, and those of earlier versions of its inventory, which still have folders."""
    now = vms(inventory)
    names = {current.machine.name for current in now}
    earlier = sorted(path for path in folder.glob("vms/*") if path.name not in names)
    return now + tuple(
        Vm(
            machine=Machine(name=path.name, memory_mib=0, vcpus=0, nics=()),
            folder=path,
            sockets=now[0].sockets,
        )
        for path in earlier
    )


def _vms(inventory: Inventory, folder: Path, sockets: Path) -> tuple[Vm, ...]:
    return tuple(
        Vm(machine=machine, folder=folder / "vms" / machine.name, sockets=sockets) for machine in machines(inventory)
    )


def up(inventory: Inventory, progress: Progress, *, fresh: bool = False) -> str:
    """Bring a lab up, and return how: `already up`, `resumed` or `provisioned`.

    Args:
        inventory: the lab.
        progress: called with a short text for each step.
        fresh: boot and provision even if there is a snapshot.

    Raises:
        LabError: something is missing, a VM did not come up, or provisioning failed. Every VM that it started is ended.
        UsageError: the lab is up from another inventory, or its state folder belongs to another user or has a path
            that QEMU or ssh cannot use.
    """
    folder = lab_dir(inventory.name)
    _check_owner(folder)
    _check_path(folder)
    private_dir(folder)
    with locked(folder):
        running = read_state(folder)
        if running is not None and not fresh and _is_same(running, inventory, progress):
            return "already up"
        if running is not None or any(fleet.unrecorded(machine) for machine in _all_vms(inventory, folder)):
            progress("ending the remains of an earlier lab")
            interventions.record(folder, "up")
            _end_all(inventory, folder)
        capacity.check_memory(inventory)
        built = image.build(progress)
        accelerator = accel.choose(built, progress)
        key = snapshot_key.key(inventory, built, accelerator)
        snapshot = read_snapshot(folder)
        if snapshot is None:
            capacity.check_disk(inventory, folder)
        try:
            if snapshot and snapshot.complete and snapshot.key == key and not fresh:
                progress("resuming from the snapshot")
                _resume(inventory, folder, built, accelerator, snapshot, progress)
                if snapshot.node_code != node_archive.archive().digest:
                    progress("the nodes were provisioned by another version of faultbed: provisioning again")
                    _provision(inventory, folder, snapshot.key, snapshot.host_keys, progress)
                dirty.clean(folder)
                return "resumed"
            _boot(inventory, folder, built, accelerator, key, progress)
            dirty.clean(folder)
        except BaseException:
            _end_all(inventory, folder)
            raise
        return "provisioned"


def down(inventory: Inventory) -> bool:
    """Stop a lab and keep its snapshot. Return whether it was up: whether it had a record or a running VM."""
    folder = lab_dir(inventory.name)
    if not folder.exists():
        return False
    with locked(folder):
        interventions.record(folder, "down")
        return _end_all(inventory, folder)


def purge(inventory: Inventory) -> bool:
    """Stop a lab and remove all of its files, including its snapshot; return whether there were any.

    The folder is renamed first, so that an `up` that begins meanwhile creates a new folder.
    """
    folder = lab_dir(inventory.name)
    existed = folder.exists()
    if existed:
        with locked(folder):
            interventions.record(folder, "down")
            _end_all(inventory, folder)
            folder.rename(folder.with_name(f".{folder.name}{_PURGED}{secrets.token_hex(4)}"))
    for old in folder.parent.glob(f".{folder.name}{_PURGED}*"):
        shutil.rmtree(old, ignore_errors=True)
    interventions.forget(folder)
    return existed


def reset(inventory: Inventory, progress: Progress, *, lab: lab_module.Lab | None = None) -> None:
    """Restore a running lab from its snapshot, even if VMs have died. SSH ports stay the same, SSH connections end.

    The connections of an open `lab` are opened again during the reset: key exchange costs an emulated machine as much
    CPU time as ten commands.

    Each VM gets a new QEMU process. Loading the snapshot into the running one would move the guest's clocks forward by
    the time since it was taken (QEMU's tick counter never goes back: softmmu/cpu-timers.c), and every timer in the
    guest would expire at once: BGP sessions and leases would end.

    Raises:
        LabError: the lab is not up, a fault's holder cannot be ended, or a VM does not come back.
        DirtyLab: the lab has no snapshot.
        UsageError: the state folder belongs to another user.
    """
    folder = lab_dir(inventory.name)
    _check_owner(folder)
    if not folder.exists():
        raise LabError(f"{inventory.name} is not up; start it with `faultbed up`")
    with locked(folder):
        state = read_state(folder)
        if state is None:
            raise LabError(f"{inventory.name} is not up; start it with `faultbed up`")
        fleet.refuse_copy(vms(inventory), state)
        snapshot = read_snapshot(folder)
        if snapshot is None or not snapshot.complete or snapshot.key != state.key:
            raise DirtyLab(
                f"{inventory.name} has no snapshot to restore; run `faultbed up --fresh` to build the lab again"
            )
        built = image.cached()
        if built is None:
            raise LabError(
                f"the VM image of {inventory.name} is gone from {image.images_dir()}; run `faultbed up --fresh`"
            )
        progress("restoring the snapshot")
        interventions.record(folder, "reset")
        try:
            holders.discard_all(str(stored_reverts(folder)))
        except OSError as error:
            raise LabError(
                f"{inventory.name}: a fault's holder cannot be ended: {error}; end it by hand, then reset again"
            ) from error
        fleet.end(vms(inventory), state)
        _remove_sockets(folder)
        try:
            _resume(inventory, folder, built, state.accelerator, snapshot, progress, ports=state.vms, lab=lab)
            dirty.clean(folder)
        except BaseException:
            _end_all(inventory, folder)
            raise


def status(inventory: Inventory, *, patience_s: float = PATIENCE_S) -> Status:
    """Query the current state of a lab. `ssh` is false for a VM that sends no SSH banner within `patience_s`."""
    folder = lab_dir(inventory.name)
    state = read_state(folder) if folder.exists() else None
    snapshot = read_snapshot(folder) if folder.exists() else None

    def status_of(machine: Vm) -> VmStatus:
        known = state.vms.get(machine.machine.name) if state else next(iter(fleet.unrecorded(machine)), None)
        alive = known is not None and vm.is_alive(machine, known)
        return VmStatus(
            name=machine.machine.name,
            pid=known.pid if known else None,
            alive=alive,
            ssh_port=known.ssh_port or None if known else None,
            ssh=alive and known is not None and fleet.has_ssh_banner(known.ssh_port, timeout_s=patience_s),
            panic=serial_console.panic(machine.console) if known else None,
        )

    statuses = fleet.in_parallel(vms(inventory), status_of)
    if state is None and any(machine_status.alive for machine_status in statuses):
        word = "broken"  # a VM without a record; `down` finds its process by its disk
    elif state is None:
        word = "down, snapshot kept" if snapshot else "down"
    else:
        is_up = state.ready and all(machine_status.ssh for machine_status in statuses)
        word = "up" if is_up else "broken"
    return Status(
        name=inventory.name,
        state=word,
        accelerator=state.accelerator if state else None,
        snapshot=snapshot is not None and snapshot.complete,
        vms=tuple(statuses),
    )


def patient_status(inventory: Inventory, progress: Progress, *, patience_s: float = PATIENCE_BEFORE_BROKEN_S) -> Status:
    """Query the state of a lab. Running VMs that do not answer are queried again, for up to `patience_s`."""
    now = status(inventory)
    silent = [machine.name for machine in now.vms if machine.alive and not machine.ssh and not machine.panic]
    if not silent:
        return now
    progress(f"{', '.join(silent)}: slow to answer; waiting up to {patience_s:.0f} s")
    return status(inventory, patience_s=patience_s)


def warm_parents(inventory: Inventory) -> dict[str, dict[str, Any] | None]:
    """Return what the warm parent of each machine reports, or None for a machine without one.

    Machines that do not answer are left out.
    """

    def of_machine(node: Node) -> tuple[str, dict[str, Any] | None] | None:
        with contextlib.suppress(Unreachable):
            return node.name, lab.warm_parent(node.name)
        return None

    with lab_module.open_lab(inventory) as lab:
        return dict(filter(None, fleet.in_parallel([lab.node(name) for name in lab.nodes()], of_machine)))


def panics(inventory: Inventory) -> list[str]:
    """Return a sentence for each VM of a running lab whose kernel has died, with its last message."""
    messages = {machine.machine.name: serial_console.panic_message(machine.console) for machine in vms(inventory)}
    return [f"{name}: {message}" for name, message in messages.items() if message]


def _boot(
    inventory: Inventory,
    folder: Path,
    built: Image,
    accelerator: accel.Accelerator,
    key: str,
    progress: Progress,
) -> None:
    """Boot, provision and verify a lab without using a snapshot, and take a new one."""
    (folder / "snapshot.json").unlink(missing_ok=True)
    shutil.rmtree(folder / "vms", ignore_errors=True)
    controller = ssh_access.generate()
    ssh_access.write_private(folder / "id_ed25519", controller.private)
    host_keys = {}
    for machine in vms(inventory):
        private_dir(machine.folder)
        pair = ssh_access.generate()
        host_keys[machine.machine.name] = pair.public
        ssh_access.write_private(machine.seed, "")
        machine.seed.write_bytes(vm.seed_disk(machine.machine, host_key=pair.private, authorized_key=controller.public))
        fleet.make_overlay(built, machine)
    write(folder / "snapshot.json", Snapshot(key=key, host_keys=host_keys, complete=False))
    started = time.monotonic()
    progress(f"booting {len(vms(inventory))} VMs ({accelerator})")
    state = _start_all(inventory, folder, built, accelerator, key, snapshot=None)
    fleet.wait_for_ssh(vms(inventory), state, progress)
    progress(f"all VMs answer after {time.monotonic() - started:.0f} s: provisioning")
    _write_runtime(inventory, folder, state, host_keys)
    write(folder / "state.json", msgspec.structs.replace(state, ready=True))
    _provision(inventory, folder, key, host_keys, progress)


def _provision(inventory: Inventory, folder: Path, key: str, host_keys: dict[str, str], progress: Progress) -> None:
    """Provision and verify the running VMs, and take the lab's snapshot."""
    with lab_module.open_lab(inventory) as lab:
        provision.bring_up(lab, progress)
        prepared = fleet.in_parallel([lab.node(name) for name in lab.nodes()], warm_start.prepare)
        memory_mib = max(report["rss_kib"] for report in prepared) / 1024
        progress(f"node programs start warm: one process of at most {memory_mib:.0f} MiB a VM has imported their code")
    kept = Snapshot(key=key, host_keys=host_keys, complete=False, node_code=node_archive.archive().digest)
    write(folder / "snapshot.json", kept)  # after a kill, some VMs have the old snapshot and some the new one
    progress("taking the snapshot")
    fleet.in_parallel(vms(inventory), fleet.save_snapshot)
    write(folder / "snapshot.json", msgspec.structs.replace(kept, complete=True))


def _resume(
    inventory: Inventory,
    folder: Path,
    built: Image,
    accelerator: accel.Accelerator,
    snapshot: Snapshot,
    progress: Progress,
    *,
    ports: Mapping[str, VmState] = MappingProxyType({}),
    lab: lab_module.Lab | None = None,
) -> None:
    state = _start_all(inventory, folder, built, accelerator, snapshot.key, snapshot=fleet.SNAPSHOT, ports=ports)
    fleet.resume(vms(inventory))
    _write_runtime(inventory, folder, state, snapshot.host_keys)
    write(folder / "state.json", msgspec.structs.replace(state, ready=True))
    _wake(inventory, progress, lab)


def _start_all(
    inventory: Inventory,
    folder: Path,
    built: Image,
    accelerator: accel.Accelerator,
    key: str,
    *,
    snapshot: str | None,
    ports: Mapping[str, VmState] = MappingProxyType({}),
) -> LabState:
    sockets = socket_dir(folder)
    for private in (sockets.parent, sockets):
        private_dir(private)
    machines_to_start = _vms(inventory, folder, sockets)

    def record(started: Mapping[str, VmState]) -> LabState:
        state = LabState(
            inventory=str(inventory.path.resolve()),
            key=key,
            accelerator=accelerator,
            image=built.digest,
            vms=dict(started),
            ready=False,
            sockets=str(sockets),
        )
        write(folder / "state.json", state)
        return state

    return record(fleet.start(machines_to_start, built, accelerator, snapshot=snapshot, ports=ports, record=record))


def _wake(inventory: Inventory, progress: Progress, lab: lab_module.Lab | None) -> None:
    """Wait for SSH after a snapshot was loaded, and set the guests' wall clocks, which stood still meanwhile."""
    with contextlib.ExitStack() as stack:
        if lab is None:
            lab = stack.enter_context(lab_module.open_lab(inventory))
        lab.forget_connections()
        nodes = [lab.node(name) for name in lab.nodes()]
        fleet.in_parallel(nodes, _set_clock)
    progress("all VMs answer")


def _set_clock(node: Node) -> None:
    """Set a guest's clock as soon as it answers.

    On a busy machine, the key exchange with an emulated guest that was just restored may take longer than the usual
    timeout of a connection.

    Raises:
        Unreachable: it does not answer within `_WAKE_S`.
    """
    deadline = Deadline(_WAKE_S)
    while True:
        try:
            node.run(["date", "-u", "-s", f"@{time.time():.3f}"], timeout_s=60)
        except Unreachable:
            if deadline.is_over:
                raise
            time.sleep(deadline.step_s)
        else:
            return


def _write_runtime(inventory: Inventory, folder: Path, state: LabState, host_keys: dict[str, str]) -> None:
    lines = [f"[127.0.0.1]:{state.vms[name].ssh_port} {key}\n" for name, key in host_keys.items()]
    (folder / "known_hosts").write_text("".join(lines))
    ssh_access.write_ansible_addresses(
        inventory, folder, {name: machine.ssh_port for name, machine in state.vms.items()}
    )


def _end_all(inventory: Inventory, folder: Path) -> bool:
    """End all processes of a lab, recorded or not, and remove its sockets and files except a complete snapshot.

    Returns whether there was a record or a VM.
    """
    stopping.allow(stopping.COMPARE_S)  # ending a VM that hangs takes 10 s
    with ignored_signals():
        try:
            state = read_state(folder)
        except LabError:  # damaged, or of another version: processes are found by their disks
            state = None
        if state is None or not fleet.is_copy(
            vms(inventory), state
        ):  # a copied record names a holder of the original lab
            with contextlib.suppress(OSError):  # another user's holder cannot be ended, but the VMs must be
                holders.discard_all(str(stored_reverts(folder)))
        ended = fleet.end(_all_vms(inventory, folder), state)
        _remove_sockets(folder)
        for name in ("state.json", "runtime.yml", "known_hosts"):
            (folder / name).unlink(missing_ok=True)
        for name in ("artifacts", "control", "faults"):
            shutil.rmtree(folder / name, ignore_errors=True)
        try:
            snapshot = read_snapshot(folder)
        except LabError:
            snapshot = None
        if snapshot is None or not snapshot.complete:
            (folder / "snapshot.json").unlink(missing_ok=True)
            (folder / "id_ed25519").unlink(missing_ok=True)
            shutil.rmtree(folder / "vms", ignore_errors=True)
        return state is not None or ended > 0


def _remove_sockets(folder: Path) -> None:
    """Remove the sockets of VMs that have ended. A folder that a record names is not removed: it may be any folder."""
    shutil.rmtree(folder / "sockets", ignore_errors=True)
    shutil.rmtree(short_dir(folder), ignore_errors=True)
    with contextlib.suppress(OSError):
        short_dir(folder).parent.rmdir()  # shared with other labs of this user


def _is_same(running: LabState, inventory: Inventory, progress: Progress) -> bool:
    """Return whether the lab is up and was made from this inventory and the current image, playbooks and node code.

    Raises:
        UsageError: it is up from another inventory of the same name.
    """
    if running.inventory != str(inventory.path.resolve()) and any(
        vm.is_alive(machine, running.vms[machine.machine.name])
        for machine in vms(inventory)
        if machine.machine.name in running.vms
    ):
        raise UsageError(
            f'a lab named "{inventory.name}" is up from {running.inventory}: '
            f"`faultbed --lab {shipped.inventory_word(Path(running.inventory))} down` ends it, or give "
            "this inventory another faultbed_name"
        )
    built = image.cached()
    if built is None or running.key != snapshot_key.key(inventory, built, running.accelerator):
        return False
    snapshot = read_snapshot(lab_dir(inventory.name))
    if snapshot is not None and snapshot.node_code != node_archive.archive().digest:
        return False
    return patient_status(inventory, progress, patience_s=PATIENCE_BEFORE_END_S).state == "up"


def _check_owner(folder: Path) -> None:
    """Refuse to start VMs in another user's lab: root would leave files there that its user cannot replace.

    Raises:
        UsageError: the state folder belongs to another user.
    """
    owner = folder.stat().st_uid if folder.exists() else os.getuid()
    if owner != os.getuid():
        raise UsageError(
            f"{folder}: the lab belongs to user {owner}, this is user {os.getuid()}; run the command as user {owner} "
            f"(`sudo -u '#{owner}'`)"
        )


def _check_path(folder: Path) -> None:
    """Refuse a state folder whose path QEMU's options, ssh's options or a shell would split or expand.

    Raises:
        UsageError: its path has such a character.
    """
    if match := _UNUSABLE.search(str(folder)):
        raise UsageError(
            f"{folder}: QEMU and ssh cannot use a path with {match[0]!r}; set FAULTBED_HOME to a folder without it"
        )


def socket_paths(inventory: Inventory) -> list[Path]:
    """Return the paths of all unix sockets of a lab."""
    sockets = sockets_of(lab_dir(inventory.name))
    paths = [path for machine in vms(inventory) for path in (machine.qmp, machine.qmp_holder)]
    paths += [
        sockets / f"{nic.wire}.{nic.end}" for machine in vms(inventory) for nic in machine.machine.nics if nic.wire
    ]
    return paths
