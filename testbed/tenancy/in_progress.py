"""Marks of commands that are changing a lab: one file each, written before the first change, removed at the end.

    working/PID-TOKEN.json   what the command is, what the lab looked like before it, how long its faults' leases last
    working/lock             held while a command begins or ends, so that two of them cannot miss each other

The owner holds a flock(2) on its mark. The kernel releases it however the process ends, also across a reboot and in
another PID namespace: a mark that can be locked belongs to a process that is dead. A mark has the fields of
`dirty.json`, so that it can become the mark of a DIRTY lab by a rename, which a full disk still allows.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.errors import LabError
from testbed.node.holders import identity
from testbed.observe.fingerprint import Fingerprint
from testbed.tenancy.durable import sync_folder
from testbed.tenancy.reservation import WHOLE_LAB

__all__ = ["Mark", "Own", "ancestors", "before_of", "dead", "live", "locked", "write"]

LOCK_S = 180.0
"""Longer than any comparison of a lab that another command may be at."""
_MOST_ANCESTORS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One command's mark, as found on disk. `before` is None when the mark cannot be read.

    `started` is the start time of process `pid` in clock ticks; None: the mark does not say.
    """

    path: Path
    why: str
    pid: int
    started: int | None
    before: Fingerprint | None
    lease_s: float
    is_live: bool

    @property
    def covers(self) -> tuple[str, ...]:
        """What of the lab the command works on."""
        return self.before.covers if self.before else (WHOLE_LAB,)

    @property
    def name(self) -> str:
        """What messages call it: the command and its process."""
        return f"`{self.why}` (process {self.pid})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """The mark of a command of this process."""

    path: Path
    _file: io.FileIO

    def remove(self) -> None:
        """Remove the mark: the lab has been compared, or is marked DIRTY, or another command's mark covers it."""
        self.path.unlink(missing_ok=True)
        self.abandon()

    def abandon(self) -> None:
        """Leave the mark to the next command, as if this process had died: it compares the lab."""
        self._file.close()


def write(folder: Path, *, why: str, before: Fingerprint, lease_s: float) -> Own:
    """Mark a lab's state directory: this process is about to change the lab.

    Args:
        folder: the lab's state directory.
        why: the command, as messages show it.
        before: what the lab looks like when no command is at work.
        lease_s: how long after this process's death its faults may still be in place.

    Raises:
        OSError: the mark cannot be written; nothing may be changed then.
    """
    # A process id alone is not unique: processes of several containers may share this folder.
    path = _folder(folder) / f"{os.getpid()}-{secrets.token_hex(4)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    said = {
        "since": time.time(),
        "reasons": [f"`{why}` (process {os.getpid()}) did not get to the end: what it left is not known"],
        "before": before.to_json(),
        "covers": before.covers,
        "why": why,
        "pid": os.getpid(),
        "started": identity(os.getpid())["started"],
        "lease_s": lease_s,
    }
    temporary = path.with_suffix(".new")
    file = temporary.open("wb", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        view = memoryview(json.dumps(said).encode())
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException:
        file.close()
        for one in (temporary, path):
            one.unlink(missing_ok=True)
        raise
    return Own(path=path, _file=file)


def live(folder: Path, *, beside: bool = False) -> tuple[Mark, ...]:
    """Marks of commands that are at work now.

    With `beside`, without those of this process and of its ancestors: a test session oversees the commands it starts.
    """
    own = ancestors() if beside else {}
    return tuple(mark for mark in _marks(folder) if mark.is_live and not _is_of(mark, own))


def dead(folder: Path) -> tuple[Mark, ...]:
    """Marks of commands whose process ended without comparing the lab, oldest first."""
    return tuple(mark for mark in _marks(folder) if not mark.is_live)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock under which a command begins or ends.

    Raises:
        LabError: another command holds it for too long.
        OSError: the lock cannot be made.
    """
    path = _folder(folder) / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + LOCK_S
    # Not for writing: a file that is there can be opened on a full disk, too.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)) as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LabError(
                        f"{path}: another command has been comparing this lab for {LOCK_S:.0f} s; wait for it to end"
                    ) from None
            time.sleep(0.1)
        yield


def _marks(folder: Path) -> list[Mark]:
    found = ((_since(path), _read(path)) for path in _folder(folder).glob("*.json"))
    return [mark for _, mark in sorted(found, key=lambda item: item[0]) if mark is not None]


def _since(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


def _read(path: Path) -> Mark | None:
    """Return one mark; None: it was removed meanwhile."""
    try:
        with path.open("rb") as file:
            said, is_live = _decoded(file.read()), _is_locked(file.fileno())
    except FileNotFoundError:
        return None
    pid, started, lease_s = (said.get(name) for name in ("pid", "started", "lease_s"))
    return Mark(
        path=path,
        why=str(said.get("why", "a command")),
        pid=pid if isinstance(pid, int) else 0,
        started=started if isinstance(started, int) else None,
        before=before_of(said),
        lease_s=float(lease_s) if isinstance(lease_s, (int, float)) else 0.0,
        is_live=is_live,
    )


def before_of(said: Mapping[str, Any]) -> Fingerprint | None:
    """Return what a mark says that the lab looked like; None: it does not say, or not in a way that we understand."""
    nodes, covers = said.get("before"), said.get("covers", (WHOLE_LAB,))
    if not isinstance(nodes, dict) or not isinstance(covers, (list, tuple)):
        return None
    if not all(isinstance(name, str) for name in covers):
        return None
    for facts in nodes.values():
        if not isinstance(facts, dict) or not all(isinstance(text, str) for text in facts.values()):
            return None
    return Fingerprint(nodes=nodes, covers=tuple(covers))


def _decoded(content: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        said = json.loads(content)
        if isinstance(said, dict):
            return said
    return {}


def _is_locked(fd: int) -> bool:
    """Whether the owner holds its lock. Tried with a shared lock, so that two commands that try do not collide."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _is_of(mark: Mark, processes: Mapping[int, int]) -> bool:
    """Whether a mark is that of one of these processes, and not of one with the same number in another container."""
    return mark.pid in processes and mark.started in (None, processes[mark.pid])


def ancestors() -> dict[int, int]:
    """Ids of this process and of those above it, each with its start time in clock ticks."""
    found: dict[int, int] = {}
    pid = os.getpid()
    while pid > 0 and len(found) < _MOST_ANCESTORS:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            break
        fields = stat.rpartition(")")[2].split()  # from the state on, which is field 3 (proc(5))
        found[pid] = int(fields[19])
        pid = int(fields[1])
    return found


def _folder(folder: Path) -> Path:
    return folder / "working"
