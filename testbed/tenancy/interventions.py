"""Interventions: commands that end all faults of a lab (heal, reset, down) while an older command is running.

    interventions.json   {"id", "number", "entries": [ENTRY, ...]}
    ENTRY                {"number", "what", "who", "pid", "at", "covers", "machine", "processes"}

A command notes the record when it begins (`watch`), and reads it again before each fault (`refuse`). The operator who
ran `faultbed heal` in another shell expects a lab without faults, so an older command must not begin another fault.
A command's own interventions do not count, and neither do those of programs that it started: an entry lists the
ancestors of the command, and this process is one of them.

The record belongs to this controller and is in the lab's state directory. It is not on a target, because a reset would
restore an older version. `id` is drawn when the record is created, so that a removed or replaced record is noticed
(`faultbed down --purge`).
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from faultbed.testbed.errors import LabError
from faultbed.testbed.tenancy import durable
from faultbed.testbed.tenancy.in_progress import ancestors
from faultbed.testbed.tenancy.reservation import WHOLE_LAB, overlap

__all__ = ["Intervened", "forget", "path_of", "record", "refuse", "since_begin", "watch", "who"]

_MOST_ENTRIES = 256
"""Entries that are kept. A command that has missed more than that cannot know which commands wrote them."""
_LOCK_S = 5.0


class Intervened(LabError):
    """Another command has ended the faults of this lab since this one began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """The record on disk; `id` is empty if there is none."""

    id: str
    number: int
    entries: tuple[dict[str, Any], ...]


_NONE = _Record(id="", number=0, entries=())
_begun: dict[Path, _Record] = {}
"""The record when this process began, by state directory."""
_lock = threading.Lock()


def path_of(state_dir: Path) -> Path:
    """Return the path of a lab's record."""
    return state_dir / "interventions.json"


def watch(state_dir: Path) -> None:
    """Note the record as this process begins to work on a lab: earlier entries do not concern it. Raises nothing.

    Only the first call counts. A missing record is created, so that its later loss is noticed.
    """
    with _lock:
        if _key(state_dir) in _begun:
            return
        current = _read(state_dir)
        if not current.id:
            with contextlib.suppress(OSError), _locked(state_dir):
                current = _read(state_dir)
                if not current.id:
                    current = _write(state_dir, _Record(id=secrets.token_hex(8), number=0, entries=()))
        _begun[_key(state_dir)] = current


def record(state_dir: Path, command: str, covers: Sequence[str] = (WHOLE_LAB,)) -> None:
    """Record that a command is about to end the faults of a lab, or of the part `covers`. Raises nothing.

    A full disk must not keep a fault in place. If the record cannot be written it is removed, which stops every older
    command as well.
    """
    try:
        with _locked(state_dir):
            current = _read(state_dir)
            entry = {
                "number": current.number + 1,
                "what": command,
                "who": who(),
                "pid": os.getpid(),
                "at": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
                "covers": list(covers),
                "machine": boot_and_pid_namespace(),
                "processes": [list(ancestor) for ancestor in ancestors().items()],
            }
            entries = (*current.entries, entry)[-_MOST_ENTRIES:]
            _write(
                state_dir,
                _Record(id=current.id or secrets.token_hex(8), number=current.number + 1, entries=entries),
            )
    except OSError:
        is_current = since_begin(state_dir) is None
        with contextlib.suppress(OSError):
            path_of(state_dir).unlink(missing_ok=True)
        if is_current:
            forget(state_dir)


def since_begin(state_dir: Path, covers: Sequence[str] = (WHOLE_LAB,)) -> str | None:
    """Return which other command has ended the faults of the part `covers` since this one began; None: none has.

    The beginning of a process is its first call, or its call of `watch`.
    """
    watch(state_dir)
    begun, now = _begun[_key(state_dir)], _read(state_dir)
    if not now.id and not begun.id:
        return None
    if not now.id or (begun.id and now.id != begun.id):
        return (
            f"{path_of(state_dir)} was removed since this command began, by `faultbed down --purge`, or by a `heal` or "
            "`reset` that could not write it"
        )
    own = (os.getpid(), ancestors().get(os.getpid()))
    known = range(now.number - len(now.entries) + 1, now.number + 1)
    if begun.number + 1 < known.start:
        return f"more than {len(now.entries)} commands have ended this lab's faults since this one began"
    for entry in now.entries:
        if entry["number"] > begun.number and not _is_below(entry, own) and _overlaps(entry, covers):
            return (
                f"`faultbed {entry.get('what')}` ({entry.get('who')}, process {entry.get('pid')}) ended the faults of "
                f"this lab at {entry.get('at')}, while this command was running"
            )
    return None


def refuse(state_dir: Path, name: str, covers: Sequence[str] = (WHOLE_LAB,)) -> None:
    """Refuse to begin a fault after another command has ended the faults of the lab.

    Raises:
        Intervened: another command has; the message names it and the time.
    """
    if (reason := since_begin(state_dir, covers)) is not None:
        raise Intervened(f"{name}: {reason}; this command begins no more faults, run it again")


def forget(state_dir: Path) -> None:
    """Discard what `watch` noted, because this process itself has removed the lab's state directory."""
    with _lock:
        _begun.pop(_key(state_dir), None)


def _is_below(entry: dict[str, Any], process: tuple[int, int | None]) -> bool:
    """Return whether the command of an entry was run by this process, or by one that it started."""
    return entry.get("machine") == boot_and_pid_namespace() and list(process) in entry.get("processes", [])


def _overlaps(entry: dict[str, Any], covers: Sequence[str]) -> bool:
    entry_covers = entry.get("covers")
    return not isinstance(entry_covers, list) or overlap(tuple(entry_covers), tuple(covers))


def _read(state_dir: Path) -> _Record:
    try:
        fields = json.loads(path_of(state_dir).read_bytes())
        entries = tuple(dict(entry) for entry in fields["entries"])
        numbers = [int(entry["number"]) for entry in entries]
        current = _Record(id=str(fields["id"]), number=int(fields["number"]), entries=entries)
    except (OSError, ValueError, KeyError, TypeError):
        return _NONE
    return current if numbers == list(range(current.number - len(numbers) + 1, current.number + 1)) else _NONE


def _write(state_dir: Path, current: _Record) -> _Record:
    fields = {"id": current.id, "number": current.number, "entries": current.entries}
    durable.replace(path_of(state_dir), json.dumps(fields).encode())
    return current


@contextlib.contextmanager
def _locked(state_dir: Path) -> Iterator[None]:
    """Hold the lock of the record during one write.

    Raises:
        OSError: the folder cannot be created, or another process held the lock until the deadline.
    """
    state_dir.mkdir(parents=True, exist_ok=True)
    fd = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + _LOCK_S
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def _key(state_dir: Path) -> Path:
    return state_dir.absolute()


def boot_and_pid_namespace() -> str:
    """Return an id of this boot and of the namespace of process ids: within both, a process id is unambiguous."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}:{os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 (a text, not a path)


def who() -> str:
    """Return `USER@MACHINE` for other users to read; a user without a name (in a container) is given by number."""
    with contextlib.suppress(KeyError, OSError):
        return f"{getpass.getuser()}@{socket.gethostname()}"
    return f"user {os.getuid()}@{socket.gethostname()}"
