"""Claims of faults on their target: a second controller is refused, and `heal` finds the process that holds a fault.

    FOLDER/INSTANCE.revert   the stored revert, there exactly while the target is changed
    FOLDER/INSTANCE.claim    JSON: who claims what, and the process that holds it

A holder locks its claim (flock(2)) for as long as it lives, so that the kernel releases it however the process ends.
Whoever runs a stored revert locks the claim first: reverts of one fault never run side by side. A claim that is not
locked counts only while its stored revert is there. While claims are compared the folder itself is locked.
"""

# A holder's start-up time is what its speed is made of: no pathlib.
# ruff: noqa: PTH103, PTH108, PTH110, PTH118, PTH120, PTH123, PTH208

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import time
from collections.abc import Iterator
from typing import Any

from inject.node.actuator import Refused

__all__ = ["Claim", "claim_file", "end_holder", "locked", "read_claim"]

_COMPARING_S = 10.0
_END_S = 5.0
_TRY_EVERY_S = 0.02


def claim_file(revert_file: str) -> str:
    """Path of the claim beside a stored revert."""
    return f"{revert_file.removesuffix('.revert')}.claim"


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
            for name in sorted(os.listdir(folder)):
                other = os.path.join(folder, name)
                if name.endswith(".claim") and other != path:
                    _refuse_conflict(other, told)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(fd, 0)
                os.write(fd, json.dumps({**told, **_identity(os.getpid())}).encode())
            except BlockingIOError:
                os.close(fd)
                raise Refused(f"{path} is locked by another process: run `faultbed heal`") from None
            except BaseException:
                os.close(fd)
                raise
        return cls(path, fd)

    def release(self) -> None:
        """Release it: nothing of the fault is left. Safe to call twice."""
        if self._fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            os.close(self._fd)
            self._fd = -1


def read_claim(path: str) -> dict[str, Any]:
    """What a claim file says; empty when it is gone or broken."""
    try:
        with open(path, encoding="utf-8") as file:
            said = json.load(file)
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


@contextlib.contextmanager
def locked(path: str, *, within_s: float) -> Iterator[None]:
    """Hold the lock of a claim file; a file that is not there is not locked: its fault is over, or was never claimed.

    Raises:
        TimeoutError: another process holds it all that time.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield
        return
    try:
        _lock(fd, path, within_s)
        yield
    finally:
        os.close(fd)


def end_holder(path: str) -> bool:
    """Kill the process that holds a claim, and wait for its end; whether there was one.

    The process is known by its pid, its start time and its boot, and is signalled through a pidfd: a number that was
    given to another process is never killed.

    Raises:
        OSError: it may not be killed, or is still there.
    """
    said = read_claim(path)
    pid = int(said.get("pid", 0))
    if pid <= 0:
        return False
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if _identity(pid) != {name: said.get(name) for name in ("pid", "started", "boot")}:
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        if not select.select([handle], [], [], _END_S)[0]:
            raise OSError(f"process {pid} is still there {_END_S:g} s after SIGKILL")
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def _refuse_conflict(path: str, told: dict[str, Any]) -> None:
    """Refuse what another claim has; remove that of a fault that is over."""
    is_held, is_left = _is_locked(path), os.path.exists(f"{path.removesuffix('.claim')}.revert")
    said = read_claim(path)
    if not is_held and not is_left:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return
    if is_held and said.get("session") == told.get("session"):
        return
    for mine in told.get("paths", ()):
        for theirs in said.get("paths", ()):
            shorter = min(len(mine["path"]), len(theirs["path"]))
            if mine["path"][:shorter] == theirs["path"][:shorter]:
                thing = max(mine, theirs, key=lambda each: len(each["path"]))["thing"]
                raise Refused(f"{thing} {_held_by(said, is_held=is_held)}")


def _held_by(said: dict[str, Any], *, is_held: bool) -> str:
    fault = f"{said.get('kind')} on {said.get('target')} (fault {said.get('fault')}"
    fault += f", by {said.get('controller')}, since {said.get('since')})"
    if is_held:
        return f"is held by {fault}; end that fault first, or run `faultbed heal`"
    return f"is as {fault} left it: its holder has ended and its revert has not succeeded; run `faultbed heal`"


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
        _lock(fd, folder, _COMPARING_S)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, path: str, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} is locked by another process after {within_s:g} s") from None
            time.sleep(_TRY_EVERY_S)
        else:
            return


def _identity(pid: int) -> dict[str, Any]:
    """Pid, start time in ticks since boot (proc_pid_stat(5)) and boot; without a start time when it has ended."""
    started = None
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        words = file.read().rpartition(")")[2].split()
        started = int(words[19]) if words[0] not in "ZX" else None
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return {"pid": pid, "started": started, "boot": file.read().strip()}
