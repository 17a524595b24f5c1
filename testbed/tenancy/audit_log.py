"""The audit log of a lab: each change with its user, time and how to revert it. JSON lines in its state directory.

    {"at": "2026-11-21T15:04:05.123456Z", "boot": "6c21…", "monotonic_s": 81.25, "who": "ann@laptop",
     "event": "armed", "kind": "link.flap", ...}

`boot` is the boot id of this machine and `monotonic_s` its CLOCK_MONOTONIC. That clock ignores steps of the wall clock
and stands still during suspend, as the VMs of a soft lab do. Older lines lack both.

A change is logged before it is made (`arming`, `healing`, `provisioning`) and again when it has ended, with success or
not. Changes that the lab's owner or a target refuses are logged, too. Each line is synced to disk before the call
returns. A line that a kill left incomplete is skipped when the file is read. Each user's controller has its own log.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from faultbed.testbed.errors import FaultError
from faultbed.testbed.node.holders import boot_id
from faultbed.testbed.tenancy.lab_lease import who

__all__ = [
    "UNSEEN_S",
    "LastFault",
    "LogReader",
    "age_s",
    "append",
    "append_before_change",
    "entries",
    "error_text",
    "last_fault",
    "path_of",
    "try_to_append",
]

UNSEEN_S = 10.0
"""How long a fault may be on after its window if its end is not recorded: the lease of a dead controller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastFault:
    """The fault that ended last, or will end last of those that are on. `ago_s` is negative for a future end."""

    kind: str
    target: str
    ago_s: float


def age_s(entry: Mapping[str, Any]) -> float:
    """Return how many seconds ago a line was written, by CLOCK_MONOTONIC if this boot wrote it, else by wall clock.

    Raises:
        KeyError, TypeError, ValueError: the line has no time.
    """
    if entry.get("boot") == boot_id() and isinstance(at_s := entry.get("monotonic_s"), int | float):
        return time.monotonic() - at_s
    return datetime.now(UTC).timestamp() - datetime.fromisoformat(entry["at"]).timestamp()


def last_fault(state_dir: Path) -> LastFault | None:
    """Return the fault that ended last, of all commands of this controller; None: none is recorded.

    If the wall clock was set back, ends of an earlier boot may lie in the future: such a fault counts as ended just
    now.
    """
    ends: dict[str, tuple[float, bool, dict[str, Any]]] = {}
    for entry in entries(state_dir):
        try:
            name, ago_s = str(entry["id"]), age_s(entry)
            if entry["event"] == "arming":
                ends[name] = (ago_s - float(entry.get("for_s") or 0.0) - UNSEEN_S, False, entry)
            elif name in ends and not ends[name][1] and entry["event"] in ("cleared", "not cleared"):
                ends[name] = (max(ago_s, 0.0), True, entry)
        except (KeyError, TypeError, ValueError):
            continue
    if not ends:
        return None
    ago_s, _, entry = min(ends.values(), key=lambda candidate: candidate[0])
    return LastFault(kind=str(entry.get("kind")), target=str(entry.get("target")), ago_s=ago_s)


def path_of(state_dir: Path) -> Path:
    """Return the path of a lab's log."""
    return state_dir / "audit.jsonl"


def append(state_dir: Path, event: str, **fields: Any) -> None:
    """Append one line.

    Raises:
        OSError: it cannot be written; the change that it announces must not be made.
    """
    state_dir.mkdir(parents=True, exist_ok=True)
    times = {"at": datetime.now(UTC).isoformat(), "boot": boot_id(), "monotonic_s": time.monotonic()}
    line = json.dumps({**times, "who": who(), "event": event, **fields}, sort_keys=False)
    file = os.open(path_of(state_dir), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
    try:
        # If a kill has torn the last line, begin a new one.
        size = os.fstat(file).st_size
        torn = size > 0 and _last_byte(path_of(state_dir), size) != b"\n"
        rest = (b"\n" if torn else b"") + line.encode() + b"\n"
        while rest:  # on a nearly full disk a write may be partial
            rest = rest[os.write(file, rest) :]
        os.fsync(file)
    finally:
        os.close(file)


def append_before_change(state_dir: Path, event: str, **fields: Any) -> None:
    """Append one line about a change that is about to be made.

    Raises:
        FaultError: it cannot be written, so the change must not be made.
    """
    try:
        append(state_dir, event, **fields)
    except OSError as error:
        raise FaultError(
            f"{path_of(state_dir)}: {error.strerror or error}; nothing is changed without a record: free disk space"
        ) from error


def try_to_append(state_dir: Path, event: str, **fields: Any) -> None:
    """Append one line about a past event; a full disk must not stop what follows."""
    with contextlib.suppress(OSError):
        append(state_dir, event, **fields)


def entries(state_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield every whole line, oldest first."""
    yield from LogReader(state_dir).new_entries()


class LogReader:
    """Reads each line of a lab's log once, from its beginning, however long the log is."""

    def __init__(self, state_dir: Path) -> None:
        self._path = path_of(state_dir)
        self._inode: int | None = None
        self._offset = 0

    def new_entries(self) -> Iterator[dict[str, Any]]:
        """Yield the whole lines that were added since the last call, oldest first. A replaced log is read again."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode, self._offset = status.st_ino, 0
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # incomplete: still being written, or torn by a kill (the next line then follows a newline)
                self._offset += len(line)
                with contextlib.suppress(ValueError):
                    entry = json.loads(line)
                    if isinstance(entry, dict):
                        yield entry


def error_text(error: BaseException) -> str:
    """Return an error's message, or its type if it has none (`KeyboardInterrupt`)."""
    return str(error) or type(error).__name__


def _last_byte(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(size - 1)
        return file.read(1)
