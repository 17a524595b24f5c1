"""Identity of a VM's QEMU process: decides which process counts as alive, and which may be signalled.

A process id alone does not identify a process, because the kernel reuses ids. The id, the start time (proc(5),
`/proc/PID/stat` field 22) and the machine's boot id together do. They read the same in a login shell, cron, CI and
sudo.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from faultbed.testbed.backends.soft.lab_state import VmState

__all__ = ["QEMU", "boot_id", "cpu_s", "find", "inspect", "is_of_original", "start_ticks"]

QEMU = "qemu-system-x86_64"
_PROC = Path("/proc")

Condition = Literal["running", "dying", "foreign", "gone"]


def boot_id() -> str:
    """Return the identifier of this machine's current boot."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot; 0 if there is no such process."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process with all its threads, in s; 0 if there is no such process.

    For a QEMU process, this includes the CPU time of its guest.
    """
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def inspect(known: VmState, disk: Path) -> Condition:
    """Compare a recorded VM with the process that has its id now.

    Args:
        known: the record.
        disk: the VM's disk image. It identifies the process if the record has no start time, as written by versions up
            to 2026-11. If the process runs on another image, the state folder is a copy, and the process belongs to
            the original.

    Returns:
        `running`, `dying` (killed, but its files are still open), `foreign` (another process has the id) or `gone`.
    """
    fields = _stat(known.pid)
    if not fields:
        return "gone"
    if known.start_ticks:
        is_own = _is_recorded(known, fields) and _may_be_qemu(known.pid) and not _has_other_disk(known.pid, disk)
    else:
        is_own = _is_qemu(known.pid) and _has_disk(known.pid, disk)
    if is_own:
        return "dying" if fields[0] == "Z" or _has_no_memory(known.pid) else "running"
    dying = not known.start_ticks and _name(known.pid).startswith("qemu-system") and _has_no_memory(known.pid)
    return "dying" if dying else "foreign"


def is_of_original(known: VmState, disk: Path) -> bool:
    """Return whether a recorded process runs on another lab's disk, because this state folder is a copy.

    Args:
        known: the record.
        disk: the VM's disk image in this folder.
    """
    fields = _stat(known.pid)
    if not fields:
        return False
    is_recorded = _is_recorded(known, fields) if known.start_ticks else _is_qemu(known.pid)
    return is_recorded and _has_other_disk(known.pid, disk)


def _is_recorded(known: VmState, fields: list[str]) -> bool:
    """Return whether a process, by the fields of its stat, has the recorded start time, in the recorded boot."""
    return int(fields[19]) == known.start_ticks and known.boot_id == boot_id()


def find(disk: Path) -> Iterator[int]:
    """Yield our own QEMU processes that run on a VM's disk image, for a lab whose record is lost.

    The executable must be QEMU and the image must be the value of a `-drive` option: a process that only mentions the
    VM's files on its command line never matches.
    """
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and _is_qemu(int(entry.name)) and _has_disk(int(entry.name), disk):
            yield int(entry.name)


def _stat(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` from the state on; empty: there is no such process."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _name(pid: int) -> str:
    try:
        return (_PROC / str(pid) / "comm").read_text().strip()
    except OSError:
        return ""


def _executable(pid: int) -> str:
    """Return the file name of a process's executable. Only its own user and root may read it."""
    path = str((_PROC / str(pid) / "exe").readlink())
    return path.removesuffix(" (deleted)").rpartition("/")[2]  # " (deleted)": a package upgrade has replaced it


def _is_qemu(pid: int) -> bool:
    try:
        return _executable(pid) == QEMU
    except OSError:
        return False


def _may_be_qemu(pid: int) -> bool:
    """Return False only if the executable can be read and is not QEMU."""
    try:
        return _executable(pid) == QEMU
    except OSError:
        return True


def _has_no_memory(pid: int) -> bool:
    """Return whether a process has no address space any more, so that only its files are left to close."""
    try:
        return not (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return True


def _has_disk(pid: int, disk: Path) -> bool:
    return any(file.resolve() == disk.resolve() for file in _drives(pid))


def _has_other_disk(pid: int, disk: Path) -> bool:
    """Return whether a process runs on another file with this disk's name. A moved folder still has the same file."""
    namesakes = [file for file in _drives(pid) if file.name == disk.name and file.exists()]
    return disk.exists() and bool(namesakes) and not any(file.samefile(disk) for file in namesakes)


def _drives(pid: int) -> list[Path]:
    """Return the files of a process's `-drive` options."""
    try:
        argv = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
    values = [value for option, value in itertools.pairwise(argv) if option == "-drive"]
    return [Path(value.partition(",")[0].removeprefix("file=")) for value in values if value.startswith("file=")]
