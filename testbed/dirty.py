"""The mark of a DIRTY lab: it is not as it was, or nobody can tell, so that it refuses work until it is healed.

The mark holds what the lab looked like before, which is what healing has to bring back. `faultbed reset` takes it away
too: the snapshot is a known state.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed import fingerprint
from testbed.errors import DirtyLab
from testbed.fingerprint import Fingerprint
from testbed.reservation import WHOLE_LAB

if TYPE_CHECKING:
    from testbed.lab import Lab

__all__ = ["baseline", "clean", "is_marked", "mark", "reasons", "refuse", "settle"]

_UNKNOWN = "nobody can tell what it is like"


def mark(folder: Path, reasons: list[str], before: Fingerprint | None) -> None:
    """Mark a lab's state directory as DIRTY; a mark that is there keeps what the lab looked like first."""
    path = _path(folder)
    if path.exists():
        return
    said = {"since": time.time(), "reasons": reasons, "before": before.to_json() if before else None}
    said["covers"] = before.covers if before else (WHOLE_LAB,)
    folder.mkdir(parents=True, exist_ok=True)  # of a rack, nothing else may have been kept here
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(said, indent=1))
    temporary.replace(path)


def is_marked(folder: Path) -> bool:
    """Whether the lab is marked."""
    return _path(folder).exists()


def reasons(folder: Path) -> tuple[str, ...]:
    """Why the lab is marked; empty when it is not."""
    return tuple(_read(folder).get("reasons") or [_UNKNOWN]) if is_marked(folder) else ()


def refuse(folder: Path, name: str) -> None:
    """Refuse work on a marked lab.

    Raises:
        DirtyLab: it is marked; the sentence names the way out.
    """
    if known := reasons(folder):
        more = f" (and {len(known) - 1} more)" if len(known) > 1 else ""
        raise DirtyLab(
            f"{name} is DIRTY and refuses work: {known[0]}{more}; `faultbed heal` reverts what faults left behind, "
            "on a soft lab `faultbed reset` goes back to the snapshot"
        )


def baseline(folder: Path) -> Fingerprint | None:
    """What a marked lab looked like before the run that left it so; None: it is not marked, or nobody knows."""
    said = _read(folder)
    before, covers = said.get("before"), tuple(said.get("covers", (WHOLE_LAB,)))
    return None if before is None else Fingerprint(nodes=before, covers=covers)


def settle(lab: Lab) -> list[str]:
    """Compare a marked lab with what it was before; without a difference the mark goes.

    Returns:
        The differences that are left; empty when the lab is not marked (any more).
    """
    folder = lab.state_dir
    if not is_marked(folder):
        return []
    before = baseline(folder)
    if before is None:
        return ["nobody knows what it looked like before: only `faultbed reset` can tell"]
    left = fingerprint.settle(lab, before)
    if not left:
        clean(folder)
    return left


def clean(folder: Path) -> None:
    """Take the mark away: the lab is in a known state."""
    _path(folder).unlink(missing_ok=True)


def _read(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(_path(folder).read_text())
        if isinstance(found, dict):
            return found
    return {}


def _path(folder: Path) -> Path:
    return folder / "dirty.json"
