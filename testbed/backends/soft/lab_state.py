"""The recorded state of a soft lab: its running VMs, and the inputs of its snapshot."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from faultbed.testbed.directories import socket_dir
from faultbed.testbed.errors import LabError

__all__ = ["LabState", "Snapshot", "VmState", "locked", "read_snapshot", "read_state", "sockets_of", "write"]

SCHEMA = 1
_T = TypeVar("_T", bound=msgspec.Struct)


class VmState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A running VM: identity of its QEMU process (`testbed/backends/soft/vm_process.py`) and its SSH port on 127.0.0.1.

    `start_ticks` is 0 if an older version of faultbed, which did not record it, wrote the file.
    """

    pid: int
    ssh_port: int
    start_ticks: int = 0
    boot_id: str = ""


class LabState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A running lab (`state.json`). `ready` is false during its start, `sockets` is the folder of its sockets."""

    schema: int = SCHEMA
    inventory: str
    key: str
    accelerator: Literal["kvm", "tcg"]
    image: str
    vms: dict[str, VmState]
    ready: bool
    sockets: str = ""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A snapshot inside the VMs' disks (`snapshot.json`), valid for `key` only.

    `host_keys` are public key lines by machine; `complete` is true once every VM has saved its snapshot; `node_code` is
    the digest of the node code that the nodes were provisioned with.
    """

    schema: int = SCHEMA
    key: str
    host_keys: dict[str, str]
    complete: bool
    node_code: str = ""


def read_state(lab: Path) -> LabState | None:
    """Return the running lab in this folder, or None."""
    return _read(lab / "state.json", LabState)


def read_snapshot(lab: Path) -> Snapshot | None:
    """Return the lab's snapshot, or None."""
    return _read(lab / "snapshot.json", Snapshot)


def sockets_of(lab: Path) -> Path:
    """Return the folder of a lab's unix sockets: as recorded when it was started, else the default."""
    state = read_state(lab)
    return Path(state.sockets) if state and state.sockets else socket_dir(lab)


def write(path: Path, value: msgspec.Struct) -> None:
    """Write a state file atomically."""
    temporary = path.with_suffix(".new")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(value)))
    temporary.replace(path)


def _read(path: Path, kind: type[_T]) -> _T | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise LabError(
            f"{path} cannot be read ({error}): it is damaged, or another version wrote it; remove it with "
            "`faultbed down --purge`"
        ) from error


@contextlib.contextmanager
def locked(lab: Path) -> Iterator[None]:
    """Hold the lab's lock: one up, reset or down at a time.

    Raises:
        LabError: another faultbed holds it; the message names its process.
    """
    lab.mkdir(parents=True, exist_ok=True)
    with (lab / "lock").open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            raise LabError(
                f"another faultbed (process {handle.read().strip() or 'unknown'}) is starting, resetting or stopping "
                f"this lab; wait for it (the lock is {handle.name})"
            ) from None
        if not (lab / "lock").exists() or not os.path.samestat((lab / "lock").stat(), os.fstat(handle.fileno())):
            raise LabError(f"{lab} was removed (`faultbed down --purge`) while this command began; run it again")
        with contextlib.suppress(OSError):  # ignore a full disk: the number is for messages only
            handle.truncate(0)
            os.write(handle.fileno(), str(os.getpid()).encode())
        yield
