"""CPU taken away by others: busy processes beside, or inside the cgroup of, what is robbed.

As a program (`python3 -m inject.node.hog SHARE PARENT`) one such process: busy for that share of each 10 ms, until its
parent process is gone.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from typing import Any

from inject.node.actuator import Refused

__all__ = ["NAME", "HogActuator", "main"]

MODULE = "inject.node.hog"
NAME = "faultbed-hog"
SLICE_S = 0.01


class HogActuator:
    """Starts `count` processes, busy for `share` of the time: in `cgroup`, or, `realtime`, ahead of all others."""

    poll_s = None
    patience_s = 15.0

    def __init__(self, *, count: int, share: float, cgroup: str | None = None, realtime: bool = False) -> None:
        self._count, self._share, self._cgroup, self._realtime = count, share, cgroup, realtime
        self._hogs: list[subprocess.Popen[bytes]] = []

    def prepare(self) -> dict[str, Any]:
        """Refuse a group that has no process to be robbed, and hogs of somebody else."""
        if self._cgroup is not None and not _members(self._cgroup):
            raise Refused(f"no process is in {self._cgroup}: is the soft GPU running?")
        if left := _hogs():
            raise Refused(f"{len(left)} busy processes of an earlier fault are there: run `faultbed heal`")
        return self.read()

    def revert_script(self) -> str:
        """End every hog; they also end by themselves when the holder is gone."""
        find = f"grep -lsz -- '^{MODULE}$' /proc/[0-9]*/cmdline | cut -d/ -f3"
        return f'for p in $({find}); do kill -KILL $p 2>/dev/null; done; sleep 0.1; [ -z "$({find})" ]'

    def on(self) -> None:
        """Start them, in their place and class."""
        for _ in range(self._count):
            hog = subprocess.Popen(
                [sys.executable, "-m", MODULE, f"{self._share:g}", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            self._hogs.append(hog)
            # Behind the holder (10), ahead of everything normal; or as normal as what they compete with.
            policy, priority = (os.SCHED_FIFO, 5) if self._realtime else (os.SCHED_OTHER, 0)
            os.sched_setscheduler(hog.pid, policy, os.sched_param(priority))
            if self._cgroup is not None:
                with open(f"{self._cgroup}/cgroup.procs", "w", encoding="ascii") as procs:  # noqa: PTH123
                    procs.write(str(hog.pid))
        # Busy from when they have their name: an interpreter takes its time among those whom it robs.
        deadline = time.monotonic() + self.patience_s
        while sum(_name(hog.pid) == NAME for hog in self._hogs) < self._count and time.monotonic() < deadline:
            time.sleep(0.01)

    def off(self) -> None:
        """End them."""
        for hog in self._hogs:
            hog.kill()
        for hog in self._hogs:
            hog.wait(timeout=5)
        self._hogs.clear()

    def read(self) -> dict[str, Any]:
        """How many are there, by /proc, and how many of them in the cgroup."""
        there = _hogs()
        inside = there & _members(self._cgroup) if self._cgroup else there
        return {"applied": bool(inside), "hogs": len(there), "inside": len(inside), "cgroup": self._cgroup}

    def hits(self) -> None:
        """Edges are the count."""

    def close(self) -> None:
        """Nothing is held open."""


def _members(cgroup: str) -> set[int]:
    try:
        with open(f"{cgroup}/cgroup.procs", encoding="ascii") as procs:  # noqa: PTH123 - start-up time
            return {int(line) for line in procs}
    except OSError:
        return set()


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="ascii") as comm:  # noqa: PTH123 - start-up time
            return comm.read().strip()
    except OSError:
        return ""


def _hogs() -> set[int]:
    found = set()
    for entry in os.listdir("/proc"):  # noqa: PTH208 - start-up time
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/cmdline", "rb") as file:  # noqa: PTH123
                if MODULE.encode() in file.read().split(b"\0"):
                    found.add(int(entry))
    return found


def main() -> None:
    """Be busy until nobody wants it any more."""
    # Told, not asked: who dies before we have started would leave us to somebody else for ever.
    share, parent = float(sys.argv[1]), int(sys.argv[2])
    # A name of its own, by which others than the holder can count it (proc_pid_comm(5)).
    with open("/proc/self/comm", "w", encoding="ascii") as comm:  # noqa: PTH123 - start-up time
        comm.write(NAME)
    while os.getppid() == parent:
        end = time.monotonic() + share * SLICE_S
        while time.monotonic() < end:
            pass
        if share < 1:
            time.sleep((1 - share) * SLICE_S)


if __name__ == "__main__":
    main()
