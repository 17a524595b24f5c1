"""Who did what to a lab, when, and how it is undone: an append-only file of JSON lines in the lab's state directory.

    {"at": "2026-11-21T15:04:05.123456Z", "who": "ann@laptop", "event": "armed", "kind": "link.flap", ...}

What is done to a lab is told before (`arming`, `healing`, `provisioning`) and after, however it ends, and so is what
the lab's owner or a target refuses. Lines are only ever added, each one synced before the caller goes
on; a line that a kill has torn is passed over when the file is read. It tells of this controller only: another user's
is in that user's home.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from testbed.tenancy.lab_lease import who

__all__ = ["LastFault", "append", "entries", "last_fault", "path_of", "told", "try_to_append"]


_UNSEEN_S = 10.0
"""How long after its window a fault whose end is not recorded may have been on: the lease of a controller that died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastFault:
    """The fault that ended last, or will end last of those that are on. `ago_s` is negative for an end to come."""

    kind: str
    target: str
    ago_s: float


def last_fault(state_dir: Path) -> LastFault | None:
    """Return the fault of any command of this controller that ended last; None: none is recorded.

    A clock that was set back puts ends into the future: such a fault has ended just now.
    """
    now_s = datetime.now(UTC).timestamp()
    ends: dict[str, tuple[float, bool, dict[str, Any]]] = {}
    for entry in entries(state_dir):
        try:
            name, at_s = str(entry["id"]), datetime.fromisoformat(entry["at"]).timestamp()
            if entry["event"] == "arming":
                ends[name] = (at_s + float(entry.get("for_s") or 0.0) + _UNSEEN_S, False, entry)
            elif name in ends and not ends[name][1] and entry["event"] in ("cleared", "not cleared"):
                ends[name] = (min(at_s, now_s), True, entry)
        except (KeyError, TypeError, ValueError):
            continue
    if not ends:
        return None
    end_s, _, entry = max(ends.values(), key=lambda each: each[0])
    return LastFault(kind=str(entry.get("kind")), target=str(entry.get("target")), ago_s=now_s - end_s)


def path_of(state_dir: Path) -> Path:
    """The file of a lab."""
    return state_dir / "audit.jsonl"


def append(state_dir: Path, event: str, **what: Any) -> None:
    """Add one line.

    Raises:
        OSError: it cannot be written; what it announces must not be done then.
    """
    state_dir.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"at": datetime.now(UTC).isoformat(), "who": who(), "event": event, **what}, sort_keys=False)
    file = os.open(path_of(state_dir), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
    try:
        # After a torn line, a new one must begin on its own.
        size = os.fstat(file).st_size
        torn = size > 0 and _last_byte(path_of(state_dir), size) != b"\n"
        rest = (b"\n" if torn else b"") + line.encode() + b"\n"
        while rest:  # a disk that fills up takes a part without an error
            rest = rest[os.write(file, rest) :]
        os.fsync(file)
    finally:
        os.close(file)


def try_to_append(state_dir: Path, event: str, **what: Any) -> None:
    """Add one line about something that has happened; a full disk must not stop what comes after it."""
    with contextlib.suppress(OSError):
        append(state_dir, event, **what)


def entries(state_dir: Path) -> Iterator[dict[str, Any]]:
    """Every whole line, oldest first."""
    path = path_of(state_dir)
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found


def told(error: BaseException) -> str:
    """Why something did not end well, in words: Ctrl-C has none of its own."""
    return str(error) or type(error).__name__


def _last_byte(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(size - 1)
        return file.read(1)
