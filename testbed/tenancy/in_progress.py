"""Marks of commands that are changing a lab: one file each, written before the first change and removed at the end.

    working/PID-TOKEN.json   the command, the lab's state before it, and how long its faults' leases last
    working/lock             held while a command begins or ends, so that two commands see each other

The owner holds a flock(2) on its mark. The kernel releases it however the process ends, across reboots too, and in
another PID namespace: the process of a mark that can be locked is dead. A mark has the fields of `dirty.json`, so that
a rename turns it into the mark of a DIRTY lab, which works even on a full disk.
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

from faultbed.testbed.errors import LabError
from faultbed.testbed.node.holders import identity
from faultbed.testbed.observe.fingerprint import Fingerprint
from faultbed.testbed.tenancy.durable import sync_folder
from faultbed.testbed.tenancy.reservation import WHOLE_LAB

__all__ = ["Mark", "OwnMark", "ancestors", "before_of", "dead", "decoded", "live", "locked", "write"]

LOCK_S = 180.0
"""Longer than another command may take to compare a lab."""
_MOST_ANCESTORS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One command's mark on disk. `before` is None if the mark cannot be read.

    `started` is the start time of process `pid` in clock ticks; None: the mark does not contain it.
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
        """The part of the lab that the command changes."""
        return self.before.covers if self.before else (WHOLE_LAB,)

    @property
    def name(self) -> str:
        """The command and its process, for messages."""
        return f"`{self.why}` (process {self.pid})"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnMark:
    """The mark of a command of this process. The open file holds its lock."""

    path: Path
    _file: io.FileIO

    def remove(self) -> None:
        """Remove the mark: the lab was compared, or is marked DIRTY, or another command's mark covers it."""
        self.path.unlink(missing_ok=True)
        self.abandon()

    def abandon(self) -> None:
        """Leave the mark to the next command, which then compares the lab as if this process had died."""
        self._file.close()


def write(folder: Path, *, why: str, before: Fingerprint, lease_s: float) -> OwnMark:
    """Write a mark into a lab's state directory: this process is about to change the lab.

    Args:
        folder: the lab's state directory.
        why: the command, as messages show it.
        before: the lab's state without any running command.
        lease_s: how long after this process's death its faults may still be in place.

    Raises:
        OSError: the mark cannot be written, so the lab must not be changed.
    """
    # A process id alone is not unique: processes of several containers may share this folder.
    path = _folder(folder) / f"{os.getpid()}-{secrets.token_hex(4)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {
        "since": time.time(),
        "reasons": [f"`{why}` (process {os.getpid()}) did not finish, and may have left changes"],
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
        view = memoryview(json.dumps(fields).encode())
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException:
        file.close()
        for written in (temporary, path):
            written.unlink(missing_ok=True)
        raise
    return OwnMark(path=path, _file=file)


def live(folder: Path, *, others_only: bool = False) -> tuple[Mark, ...]:
    """Return the marks of commands that are running now.

    `others_only` excludes those of this process and its ancestors: a test session waits for the commands it starts.
    """
    own = ancestors() if others_only else {}
    return tuple(mark for mark in _marks(folder) if mark.is_live and not _is_of(mark, own))


def dead(folder: Path) -> tuple[Mark, ...]:
    """Return the marks of commands whose process ended without comparing the lab, oldest first."""
    return tuple(mark for mark in _marks(folder) if not mark.is_live)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock under which a command begins or ends.

    Raises:
        LabError: another command held it until the deadline.
        OSError: the lock file cannot be created.
    """
    path = _folder(folder) / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + LOCK_S
    # Read-only: an existing file can then be opened on a full disk, too.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)) as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LabError(
                        f"{path}: locked by another command for {LOCK_S:.0f} s; wait until it has compared the lab"
                    ) from None
            time.sleep(0.1)
        yield


def _marks(folder: Path) -> list[Mark]:
    dated = ((_since(path), _read(path)) for path in _folder(folder).glob("*.json"))
    return [mark for _, mark in sorted(dated, key=lambda item: item[0]) if mark is not None]


def _since(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


def _read(path: Path) -> Mark | None:
    """Return one mark; None: it was removed meanwhile."""
    try:
        with path.open("rb") as file:
            fields, is_live = decoded(file.read()), _is_locked(file.fileno())
    except FileNotFoundError:
        return None
    pid, started, lease_s = (fields.get(name) for name in ("pid", "started", "lease_s"))
    return Mark(
        path=path,
        why=str(fields.get("why", "a command")),
        pid=pid if isinstance(pid, int) else 0,
        started=started if isinstance(started, int) else None,
        before=before_of(fields),
        lease_s=float(lease_s) if isinstance(lease_s, (int, float)) else 0.0,
        is_live=is_live,
    )


def before_of(fields: Mapping[str, Any]) -> Fingerprint | None:
    """Return the lab's state before the command of a mark; None: the mark has no state, or one of another format."""
    nodes, covers = fields.get("before"), fields.get("covers", (WHOLE_LAB,))
    if not isinstance(nodes, dict) or not isinstance(covers, (list, tuple)):
        return None
    if not all(isinstance(name, str) for name in covers):
        return None
    for facts in nodes.values():
        if not isinstance(facts, dict) or not all(isinstance(text, str) for text in facts.values()):
            return None
    return Fingerprint(nodes=nodes, covers=tuple(covers))


def decoded(content: bytes) -> dict[str, Any]:
    """Return the fields of a mark; empty if the content is damaged."""
    with contextlib.suppress(ValueError):
        fields = json.loads(content)
        if isinstance(fields, dict):
            return fields
    return {}


def _is_locked(fd: int) -> bool:
    """Return whether the owner holds its lock. Checks with a shared lock, so that two commands can check at once."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _is_of(mark: Mark, processes: Mapping[int, int]) -> bool:
    """Return whether a mark belongs to one of these processes, not to one with the same pid in another container."""
    return mark.pid in processes and mark.started in (None, processes[mark.pid])


def ancestors() -> dict[int, int]:
    """Return the ids of this process and its ancestors, with their start times in clock ticks."""
    starts: dict[int, int] = {}
    pid = os.getpid()
    while pid > 0 and len(starts) < _MOST_ANCESTORS:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            break
        fields = stat.rpartition(")")[2].split()  # from field 3, the state (proc(5))
        starts[pid] = int(fields[19])
        pid = int(fields[1])
    return starts


def _folder(folder: Path) -> Path:
    return folder / "working"
