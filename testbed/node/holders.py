"""Fault holders on this machine, identified by the claims that they have locked (`faultbed.inject.node.claim`).

    FOLDER/INSTANCE.revert   the stored revert, which exists exactly while the target is changed; it names its holder
    FOLDER/INSTANCE.claim    JSON: who claims what, and the process that holds it

A holder locks its claim (flock(2)) as long as it lives, so that the kernel releases it however the process ends. A
process that runs a stored revert locks the claim first: reverts of one fault never run at the same time.
"""

# Start-up time decides a holder's speed: no pathlib.

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import select
import signal
import time

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

__all__ = ["HELD_BY", "boot_id", "claim_file", "discard_all", "end_holder", "identity", "lock", "locked", "read_claim"]

HELD_BY = "# held by "
"""Beginning of a stored revert's last line; the identity of the holder follows, as JSON."""
_END_S = 5.0
_TRY_EVERY_S = 0.02
_REVERT_S = 3.0


def claim_file(revert_file: str) -> str:
    """Return the path of the claim beside a stored revert."""
    return f"{revert_file.removesuffix('.revert')}.claim"


def read_claim(path: str) -> dict[str, Any]:
    """Return the content of a claim file; empty if it is gone or damaged."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _named_by(revert_file: str) -> dict[str, Any]:
    """Return the identity of the holder that a stored revert names; empty if it names none."""
    with contextlib.suppress(OSError, ValueError), open(revert_file, encoding="utf-8") as file:
        last = file.read().splitlines()[-1:]
        if last and last[0].startswith(HELD_BY):
            content = json.loads(last[0].removeprefix(HELD_BY))
            return content if isinstance(content, dict) else {}
    return {}


@contextlib.contextmanager
def locked(path: str, *, within_s: float) -> Iterator[None]:
    """Hold the lock of a claim file. Without a file there is no lock: its fault is over, or was never claimed.

    Raises:
        TimeoutError: another process held it all that time.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield
        return
    try:
        lock(fd, path, within_s)
        yield
    finally:
        os.close(fd)


def end_holder(path: str) -> bool:
    """Kill the process that holds a claim, and wait until it is gone; return whether there was one.

    The process is identified by pid, start time and boot, and signalled through a pidfd, so that a reused pid is never
    killed. If the claim does not name it, the stored revert beside it does.

    Raises:
        OSError: it may not be killed, or still runs.
    """
    content = read_claim(path) or _named_by(f"{path.removesuffix('.claim')}.revert")
    pid = content.get("pid", 0)
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if identity(pid) != {name: content.get(name) for name in ("pid", "started", "boot")}:
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        if not select.select([handle], [], [], _END_S)[0]:
            raise OSError(f"process {pid} still runs {_END_S:g} s after SIGKILL")
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def discard_all(folder: str) -> None:
    """End every holder with a claim in a folder, and discard all stored reverts, because their targets are gone.

    A guardian that runs a revert at this moment finds its target gone or replaced; it is waited for only briefly.

    Raises:
        OSError: a holder may not be killed, or still runs.
    """
    inside = glob.escape(folder)
    # A holder that has prepared its fault has a claim and no stored revert yet.
    stems = {path.rpartition(".")[0] for suffix in ("claim", "revert") for path in glob.glob(f"{inside}/*.{suffix}")}
    for path in sorted(f"{stem}.claim" for stem in stems):
        end_holder(path)
        with contextlib.suppress(TimeoutError), locked(path, within_s=_REVERT_S):
            pass
    for path in (*glob.glob(f"{inside}/*.revert"), *glob.glob(f"{inside}/*.claim")):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def lock(fd: int, path: str, within_s: float) -> None:
    """Lock an open file.

    Raises:
        TimeoutError: another process held its lock all that time.
    """
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


def identity(pid: int) -> dict[str, Any]:
    """Return pid, start time in ticks since boot (proc_pid_stat(5); None if it has ended) and boot."""
    started = None
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        words = file.read().rpartition(")")[2].split()
        started = int(words[19]) if words[0] not in "ZX" else None
    return {"pid": pid, "started": started, "boot": boot_id()}


def boot_id() -> str:
    """Return the kernel's id of this boot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
