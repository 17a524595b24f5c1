"""One VM of a soft lab: its QEMU command line, start, and end.

The only network listener of a VM is its forwarded SSH port on 127.0.0.1. QEMU picks a free port number. QMP and the
wires are unix sockets in a folder that only this user can enter.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import signal
import socket
import subprocess
import tarfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from faultbed.testbed.backends.soft import serial_console as console
from faultbed.testbed.backends.soft import vm_process
from faultbed.testbed.backends.soft.accel import Accelerator
from faultbed.testbed.backends.soft.image import Image
from faultbed.testbed.backends.soft.lab_state import VmState
from faultbed.testbed.backends.soft.qmp_client import Qmp
from faultbed.testbed.backends.soft.wiring import Machine, Nic
from faultbed.testbed.errors import BootFailed, LabError

__all__ = [
    "DEVICES",
    "KERNEL_OPTIONS",
    "PROCESSORS",
    "Vm",
    "command_line",
    "end",
    "is_alive",
    "qemu_version",
    "seed_disk",
    "ssh_port",
    "start",
]

QMP_DEADLINE_S = 30.0
QUIT_DEADLINE_S = 10.0
KILL_DEADLINE_S = 60.0
"""A killed process ends only after its pending disk writes."""
_FORWARD = re.compile(r"TCP\[HOST_FORWARD\]\s+\d+\s+127\.0\.0\.1\s+(\d+)\s")

PROCESSORS = {
    "kvm": ("-accel", "kvm", "-cpu", "host"),
    # The oldest model that Debian's numpy fully supports; `max` boots slower.
    "tcg": ("-accel", "tcg,tb-size=256", "-cpu", "Westmere"),
}
KERNEL_OPTIONS = {
    "kvm": "",
    # QEMU 7.2 emulates two features badly that the kernel does not need; programs that need them (Open MPI) still see
    # them. After CMPXCHG16B EFLAGS are undefined until the next instruction that writes them, and an interrupt at that
    # moment is a double fault of the guest (kmem_cache_alloc, every few hundred runs). PCLMULQDQ is emulated bit by
    # bit: with tables, rxe's ICRC takes a third less time.
    "tcg": " clearcpuid=cx16,pclmulqdq",
}
DEVICES = (
    "virtio-rng-pci",
    # A snapshot restores the kernel's entropy pool, too. This device has another number in each QEMU process, and when
    # it changes the guest's kernel draws new random numbers from then on (Linux, drivers/virt/vmgenid.c).
    "vmgenid,guid=auto",
)
"""Devices of every VM. A snapshot can only be loaded into a VM that has the same ones."""
_NO_QEMU = f"{vm_process.QEMU} not found: `apt-get install qemu-system-x86` installs it, and so does `make demo`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vm:
    """The paths of one VM: `folder` for files, `sockets` for unix sockets."""

    machine: Machine
    folder: Path
    sockets: Path

    @property
    def disk(self) -> Path:
        """Overlay of the image's disk; snapshots are inside it."""
        return self.folder / "disk.qcow2"

    @property
    def seed(self) -> Path:
        """Tar archive on the second disk: identity, keys, names of NICs."""
        return self.folder / "seed.tar"

    @property
    def console(self) -> Path:
        """Output of the guest's kernel and systemd."""
        return self.folder / console.FILE

    @property
    def log(self) -> Path:
        """Output of QEMU."""
        return self.folder / "qemu.log"

    @property
    def qmp(self) -> Path:
        """The controller's QMP socket."""
        return self.sockets / f"{self.machine.name}.qmp"

    @property
    def qmp_holder(self) -> Path:
        """A second QMP socket, for fault holders."""
        return self.sockets / f"{self.machine.name}.holder"


def command_line(vm: Vm, image: Image, accelerator: Accelerator, *, snapshot: str | None, port: int = 0) -> list[str]:
    """Return the QEMU command line.

    With `snapshot`, the VM resumes from it and stays stopped until `cont`. `port` is the SSH port on 127.0.0.1; 0 lets
    QEMU pick one.
    """
    machine = vm.machine
    argv = [
        *(vm_process.QEMU, "-name", f"faultbed-{machine.name}", *PROCESSORS[accelerator]),
        *("-machine", "pc", "-m", str(machine.memory_mib), "-smp", str(machine.vcpus)),
        *("-nodefaults", "-no-user-config", "-display", "none"),
        *("-kernel", str(image.kernel), "-initrd", str(image.initrd)),
        *("-append", f"console=ttyS0 quiet net.ifnames=0 mitigations=off{KERNEL_OPTIONS[accelerator]}"),
        *("-serial", f"file:{vm.console}"),
        *("-drive", f"file={vm.disk},if=virtio,format=qcow2,discard=unmap"),
        *("-drive", f"file={vm.seed},if=virtio,format=raw,readonly=on"),
        *(word for device in DEVICES for word in ("-device", device)),
        *("-qmp", f"unix:{vm.qmp},server=on,wait=off"),
        *("-qmp", f"unix:{vm.qmp_holder},server=on,wait=off"),
    ]
    for nic in machine.nics:
        argv += ["-netdev", _netdev(vm, nic, port)]
        argv += ["-device", f"virtio-net-pci,netdev={nic.netdev},id=nic-{nic.netdev},mac={nic.mac},romfile="]
    if snapshot:
        argv += ["-loadvm", snapshot, "-S"]
    return argv


def _netdev(vm: Vm, nic: Nic, port: int) -> str:
    if nic.wire is None:
        return f"user,id={nic.netdev},restrict=on,hostfwd=tcp:127.0.0.1:{port}-:22"
    other = "carrier" if nic.end == "host" else "host"
    local, remote = (vm.sockets / f"{nic.wire}.{end}" for end in (nic.end, other))
    return f"dgram,id={nic.netdev},local.type=unix,local.path={local},remote.type=unix,remote.path={remote}"


def seed_disk(machine: Machine, *, host_key: str, authorized_key: str) -> bytes:
    """Return the tar archive with a VM's identity (`guest/nodeup` unpacks it over the root)."""
    files: Mapping[str, tuple[str, int]] = {
        "etc/hostname": (machine.name + "\n", 0o644),
        "etc/ssh/ssh_host_ed25519_key": (host_key, 0o600),
        "root/.ssh/authorized_keys": (authorized_key + "\n", 0o600),
        "run/faultbed/nics": ("".join(f"{nic.mac} {nic.netdev}\n" for nic in machine.nics), 0o644),
    }
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, (text, mode) in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(text.encode()), mode
            tar.addfile(member, io.BytesIO(text.encode()))
    # A block device has whole sectors.
    return archive.getvalue().ljust(-(-archive.tell() // 512) * 512, b"\0")


def start(vm: Vm, image: Image, accelerator: Accelerator, *, snapshot: str | None, port: int = 0) -> int:
    """Start QEMU in a session of its own, and return its process id.

    Raises:
        LabError: QEMU is missing, or ended at once; the message has its output.
    """
    argv = command_line(vm, image, accelerator, snapshot=snapshot, port=port)
    vm.qmp.unlink(missing_ok=True)
    vm.console.unlink(missing_ok=True)
    pid = _spawn(argv, vm.log)
    deadline = time.monotonic() + QMP_DEADLINE_S
    while not _listens(vm.qmp) and time.monotonic() < deadline:
        ended, code = os.waitpid(pid, os.WNOHANG)
        if ended:
            raise LabError(
                f"QEMU of {vm.machine.name} ended at once (code {os.waitstatus_to_exitcode(code)}): "
                f"{vm.log.read_text(errors='replace').strip()[-800:]}"
            )
        time.sleep(0.02)
    return pid


def _listens(path: Path) -> bool:
    """Return whether a socket accepts connections; its file exists a moment before its owner listens."""
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.connect(str(path))
        return True
    return False


def _spawn(argv: list[str], log: Path) -> int:
    """Start a process that outlives this one, in its own session; `subprocess` would wait for its end."""
    output = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), output, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
        # Descriptors left open by the caller (a lock, the pipe of a CI job) would stay open as long as the VM lives.
        *((os.POSIX_SPAWN_CLOSE, fd) for fd in _inheritable()),
    ]
    try:
        return os.posix_spawnp(argv[0], argv, os.environ, file_actions=actions, setsid=True)
    except FileNotFoundError as error:
        raise LabError(_NO_QEMU) from error


def _inheritable() -> list[int]:
    """Return the open descriptors, except the standard ones, that a new process would inherit."""
    descriptors = []
    for entry in Path("/proc/self/fd").iterdir():
        fd = int(entry.name)
        with contextlib.suppress(OSError):  # the listing includes its own descriptor, now closed
            if fd > 2 and os.get_inheritable(fd):  # noqa: PLR2004 (stderr)
                descriptors.append(fd)
    return descriptors


def qemu_version() -> str:
    """Return the first line of `qemu-system-x86_64 --version`.

    Raises:
        LabError: QEMU is not installed.
    """
    try:
        done = subprocess.run([vm_process.QEMU, "--version"], capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        raise LabError(_NO_QEMU) from error
    return done.stdout.splitlines()[0].strip()


def ssh_port(vm: Vm) -> int:
    """Return the port on 127.0.0.1 that is forwarded to the VM's SSH server."""
    with Qmp(vm.qmp, timeout_s=QMP_DEADLINE_S) as qmp:
        text = qmp.hmp("info usernet")
    match = _FORWARD.search(text)
    if not match:
        raise BootFailed(f"QEMU of {vm.machine.name} forwards no SSH port; `info usernet` printed: {text.strip()}")
    return int(match[1])


def is_alive(vm: Vm, known: VmState) -> bool:
    """Return whether the recorded QEMU process of a VM runs. A process that has reused its id does not count."""
    return vm_process.inspect(known, vm.disk) == "running"


def end(vm: Vm, known: VmState) -> bool:
    """End a VM's recorded process by SIGTERM, then SIGKILL. Return whether it was still there.

    On return the process is gone, and so is the lock of its disk. A process is signalled only through a file descriptor
    that was opened before its identity was checked.

    Raises:
        LabError: the process does not end, or belongs to another user.
    """
    try:
        handle = os.pidfd_open(known.pid)
    except ProcessLookupError:
        return False
    try:
        steps: list[tuple[signal.Signals | None, float]]
        match vm_process.inspect(known, vm.disk):
            case "running":
                steps = [(signal.SIGTERM, QUIT_DEADLINE_S), (signal.SIGKILL, KILL_DEADLINE_S)]
            case "dying":
                steps = [(None, KILL_DEADLINE_S)]
            case _:
                return False
        for number, patience_s in steps:
            if number is not None:
                _signal(vm, known, handle, number)
            if select.select([handle], [], [], patience_s)[0]:
                return True
        raise LabError(
            f"QEMU of {vm.machine.name} (process {known.pid}) does not end, not even after SIGKILL; check whether the "
            f"disk of {vm.folder} hangs"
        )
    finally:
        os.close(handle)
        _reap(known.pid)


def _signal(vm: Vm, known: VmState, handle: int, number: signal.Signals) -> None:
    try:
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        pass
    except PermissionError:
        owner = Path(f"/proc/{known.pid}").stat().st_uid
        raise LabError(
            f"QEMU of {vm.machine.name} (process {known.pid}) belongs to user {owner}; "
            "run the command as that user, or by sudo with the same FAULTBED_HOME"
        ) from None


def _reap(pid: int) -> None:
    """Collect the exit status of a child of this process; init collects those of other parents."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
