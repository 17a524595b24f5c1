"""Claims of faults on their target: a fault that would change what another session's fault changes is refused.

A fault's claim is a file beside its stored revert, locked by its holder (`faultbed.testbed.node.holders`). An unlocked
claim counts only while the stored revert exists. A claim that cannot be read, or is missing beside a stored revert,
counts as a claim of everything. The folder is locked while claims are compared.
"""

# Start-up time decides a holder's speed: no pathlib.
# ruff: noqa: PTH103, PTH108, PTH110, PTH112, PTH116, PTH118, PTH120, PTH122, PTH208

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from typing import Any

from faultbed.inject.node.actuator import Refused
from faultbed.testbed.node.holders import claim_file, identity, lock, read_claim

__all__ = ["Claim", "conflict", "holder_of", "refuse_conflicts"]

_LOCK_WAIT_S = 10.0


class Claim:
    """A claim that this process holds. Made by `acquire`."""

    def __init__(self, path: str, fd: int) -> None:
        self._path, self._fd = path, fd

    @classmethod
    def acquire(cls, revert_file: str, content: dict[str, Any]) -> Claim:
        """Claim what a fault changes.

        Args:
            revert_file: where the fault's revert will be stored.
            content: `paths` (each a `path` from a whole to a part, and `thing`, the resource's name for people),
                `session` (faults of one session are planned together and do not conflict), and for messages `kind`,
                `target`, `fault`, `controller` and `since`.

        Raises:
            Refused: another session holds the same resource, or its fault has not been reverted.
            OSError: the folder cannot be written.
        """
        path = claim_file(revert_file)
        folder = os.path.dirname(path)
        os.makedirs(folder, exist_ok=True)
        with _folder_locked(folder):
            _refuse_conflicts(folder, content)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(fd, 0)
                rest = f"{json.dumps({**content, **identity(os.getpid())})}\n".encode()
                while rest:  # a disk that is nearly full takes a part without an error
                    rest = rest[os.write(fd, rest) :]
            except BlockingIOError:
                os.close(fd)
                raise Refused(f"{path} is locked by another process; run `faultbed heal`") from None
            except BaseException:
                os.close(fd)
                raise
        return cls(path, fd)

    def check(self) -> None:
        """Verify that the claim is still in place.

        Raises:
            Refused: its file was removed or replaced, so that other sessions cannot see what the fault changes.
        """
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path), os.fstat(self._fd)):
                return
        raise Refused(
            f"{self._path}: this fault's claim was removed, so other sessions cannot see the fault; start it again"
        )

    def release(self) -> None:
        """Release the claim: nothing of the fault is left. Safe to call twice."""
        if self._fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            os.close(self._fd)
            self._fd = -1


def refuse_conflicts(folder: str, content: dict[str, Any]) -> None:
    """Refuse a claim that conflicts with one in a folder; remove claims of faults that are over.

    Raises:
        Refused: another session holds the same resource, or its fault has not been reverted.
    """
    if os.path.isdir(folder):
        with _folder_locked(folder):
            _refuse_conflicts(folder, content)


def conflict(other: dict[str, Any], content: dict[str, Any]) -> str | None:
    """Return the name of a resource that two claims have in common; None: they do not conflict."""
    for mine in content.get("paths", ()):
        for theirs in other.get("paths", ()):
            shorter = min(len(mine["path"]), len(theirs["path"]))
            if mine["path"][:shorter] == theirs["path"][:shorter]:
                return str(max(mine, theirs, key=lambda path_claim: len(path_claim["path"]))["thing"])
    return None


def holder_of(content: dict[str, Any]) -> str:
    """Return the end of a message that begins with a resource: which fault holds it, and what to do about it."""
    return f"is held by {_fault(content)}; end that fault first, or run `faultbed heal`"


def _refuse_conflicts(folder: str, content: dict[str, Any]) -> None:
    names = {os.path.splitext(name) for name in os.listdir(folder)}
    for name in sorted(stem for stem, suffix in names if suffix in (".claim", ".revert")):
        _refuse_conflict(os.path.join(folder, f"{name}.claim"), content)


def _refuse_conflict(path: str, content: dict[str, Any]) -> None:
    other = read_claim(path)  # first: the end of a fault removes the revert before the claim
    is_held, is_left = _is_locked(path), os.path.exists(f"{path.removesuffix('.claim')}.revert")
    if not is_held and not is_left:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return
    if not other:
        raise Refused(f"{path}: this claim does not name what its fault changes; run `faultbed heal`")
    if is_held and other.get("session") == content.get("session"):
        return
    if resource := conflict(other, content):
        left = f"was left changed by {_fault(other)}, whose holder ended without a revert; run `faultbed heal`"
        raise Refused(f"{resource} {holder_of(other) if is_held else left}")


def _fault(content: dict[str, Any]) -> str:
    fault = f"{content.get('kind')} on {content.get('target')} (fault {content.get('fault')}"
    return f"{fault}, by {content.get('controller')}, since {content.get('since')})"


def _is_locked(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@contextlib.contextmanager
def _folder_locked(folder: str) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        lock(fd, folder, _LOCK_WAIT_S)
        yield
    finally:
        os.close(fd)
