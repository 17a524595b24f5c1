"""Claims of faults on their target: a controller whose fault would change what another one's fault holds is refused.

The claim of a fault stands beside its stored revert and is locked by its holder (`testbed.node.holders`). One that is
not locked counts only while the stored revert is there. One that cannot be read, or is missing beside a stored revert,
counts as a claim of everything. While claims are compared the folder itself is locked.
"""

# A holder's start-up time is what its speed is made of: no pathlib.
# ruff: noqa: PTH103, PTH108, PTH110, PTH112, PTH116, PTH118, PTH120, PTH122, PTH208

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from typing import Any

from inject.node.actuator import Refused
from testbed.node.holders import claim_file, identity, lock, read_claim

__all__ = ["Claim", "conflict", "held_by", "refuse_conflicts"]

_COMPARING_S = 10.0


class Claim:
    """A claim that this process holds. Made by `take`."""

    def __init__(self, path: str, fd: int) -> None:
        self._path, self._fd = path, fd

    @classmethod
    def take(cls, revert_file: str, told: dict[str, Any]) -> Claim:
        """Claim what a fault changes.

        Args:
            revert_file: where the fault's revert will be stored.
            told: `paths` (each a `path` from a whole thing to a part, and what a person calls that `thing`), `session`
                (faults of one session are planned together, and do not conflict), and for messages `kind`, `target`,
                `fault`, `controller` and `since`.

        Raises:
            Refused: another session holds it, or its fault has not been reverted.
            OSError: the folder cannot be written.
        """
        path = claim_file(revert_file)
        folder = os.path.dirname(path)
        os.makedirs(folder, exist_ok=True)
        with _comparing(folder):
            _refuse_conflicts(folder, told)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(fd, 0)
                rest = f"{json.dumps({**told, **identity(os.getpid())})}\n".encode()
                while rest:  # a disk that fills up takes a part without an error
                    rest = rest[os.write(fd, rest) :]
            except BlockingIOError:
                os.close(fd)
                raise Refused(f"{path} is locked by another process: run `faultbed heal`") from None
            except BaseException:
                os.close(fd)
                raise
        return cls(path, fd)

    def check(self) -> None:
        """Refuse to go on without it.

        Raises:
            Refused: its file has been removed or replaced: others cannot see any more what the fault changes.
        """
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path), os.fstat(self._fd)):
                return
        raise Refused(f"{self._path} has been removed: its fault must not begin any more")

    def release(self) -> None:
        """Release it: nothing of the fault is left. Safe to call twice."""
        if self._fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            os.close(self._fd)
            self._fd = -1


def refuse_conflicts(folder: str, told: dict[str, Any]) -> None:
    """Refuse what a claim in a folder has already; remove claims of faults that are over.

    Raises:
        Refused: another session holds it, or its fault has not been reverted.
    """
    if os.path.isdir(folder):
        with _comparing(folder):
            _refuse_conflicts(folder, told)


def conflict(said: dict[str, Any], told: dict[str, Any]) -> str | None:
    """What two claims both have, in words; None: they go together."""
    for mine in told.get("paths", ()):
        for theirs in said.get("paths", ()):
            shorter = min(len(mine["path"]), len(theirs["path"]))
            if mine["path"][:shorter] == theirs["path"][:shorter]:
                return str(max(mine, theirs, key=lambda each: len(each["path"]))["thing"])
    return None


def held_by(said: dict[str, Any]) -> str:
    """Say which fault holds something, and what to do about it."""
    return f"is held by {_fault(said)}; end that fault first, or run `faultbed heal`"


def _refuse_conflicts(folder: str, told: dict[str, Any]) -> None:
    names = {os.path.splitext(name) for name in os.listdir(folder)}
    for name in sorted(stem for stem, what in names if what in (".claim", ".revert")):
        _refuse_conflict(os.path.join(folder, f"{name}.claim"), told)


def _refuse_conflict(path: str, told: dict[str, Any]) -> None:
    said = read_claim(path)  # first: the end of a fault removes the revert before the claim
    is_held, is_left = _is_locked(path), os.path.exists(f"{path.removesuffix('.claim')}.revert")
    if not is_held and not is_left:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return
    if not said:
        raise Refused(f"{path} does not tell what its fault holds: run `faultbed heal`")
    if is_held and said.get("session") == told.get("session"):
        return
    if thing := conflict(said, told):
        left = (
            f"is as {_fault(said)} left it: its holder has ended and its revert has not succeeded; run `faultbed heal`"
        )
        raise Refused(f"{thing} {held_by(said) if is_held else left}")


def _fault(said: dict[str, Any]) -> str:
    fault = f"{said.get('kind')} on {said.get('target')} (fault {said.get('fault')}"
    return f"{fault}, by {said.get('controller')}, since {said.get('since')})"


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
def _comparing(folder: str) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        lock(fd, folder, _COMPARING_S)
        yield
    finally:
        os.close(fd)
