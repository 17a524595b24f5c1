"""CPU taken away by others: busy processes beside, or inside the cgroup of, what is robbed.

Each has a name of its own (proc_pid_comm(5)), by which others than the holder can count it, and ends with the holder.
"""

from __future__ import annotations

import functools
import glob
import os
import time
from typing import Any

from inject.node.actuator import Refused
from inject.node.child import Child

__all__ = ["NAME", "HogActuator", "end_all", "named"]

NAME = "faultbed-hog"
_SLICE_S = 0.01
_PATIENCE_S = 2.0
_BY_NAME = f"grep -lsx {NAME} /proc/[0-9]*/comm | cut -d/ -f3"
"""Shell: the processes that have it."""


class HogActuator:
    """Has `count` processes busy for `share` of the time: in `cgroup`, or, `realtime`, ahead of all others."""

    poll_s = None

    def __init__(self, *, count: int, share: float, cgroup: str | None = None, realtime: bool = False) -> None:
        self._share, self._cgroup, self._realtime = share, cgroup, realtime
        self._hogs = [Child() for _ in range(count)]

    def prepare(self) -> dict[str, Any]:
        """Refuse a group that has no process to be robbed, and hogs of somebody else."""
        if self._cgroup is not None and not _members(self._cgroup):
            raise Refused(f"no process is in {self._cgroup}: is the soft GPU running?")
        if left := named():
            raise Refused(f"{len(left)} busy processes of an earlier fault are there: run `faultbed heal`")
        return self.read()

    def revert_script(self) -> str:
        """End every hog; they also end by themselves when the holder is gone."""
        return end_all()

    def on(self) -> None:
        """Start them, and see that they are in their place."""
        ready = [hog.count + 1 for hog in self._hogs]
        for hog in self._hogs:
            hog.start(functools.partial(self._rob, hog))
        deadline = time.monotonic() + _PATIENCE_S
        while [hog.count for hog in self._hogs] != ready and time.monotonic() < deadline:
            time.sleep(0.001)

    def off(self) -> None:
        """End them."""
        for hog in self._hogs:
            hog.stop()

    def read(self) -> dict[str, Any]:
        """How many are there, by /proc, and how many of them in the cgroup."""
        there = named()
        inside = there & _members(self._cgroup) if self._cgroup else there
        return {"applied": bool(inside), "hogs": len(there), "inside": len(inside), "cgroup": self._cgroup}

    def hits(self) -> None:
        """Edges are the count."""

    def close(self) -> None:
        """Nothing is held open."""

    def _rob(self, hog: Child) -> None:
        with open("/proc/self/comm", "w", encoding="ascii") as comm:  # noqa: PTH123 - start-up time
            comm.write(NAME)
        if self._cgroup is not None:
            with open(f"{self._cgroup}/cgroup.procs", "w", encoding="ascii") as procs:  # noqa: PTH123
                procs.write(str(os.getpid()))
        hog.add()
        # Behind the holder (10), ahead of everything normal; or as normal as what they compete with.
        policy, priority = (os.SCHED_FIFO, 5) if self._realtime else (os.SCHED_OTHER, 0)
        os.sched_setscheduler(0, policy, os.sched_param(priority))
        while hog.wanted():
            end = time.monotonic() + self._share * _SLICE_S
            while time.monotonic() < end:
                pass
            if self._share < 1:
                time.sleep((1 - self._share) * _SLICE_S)


def _members(cgroup: str) -> set[int]:
    try:
        with open(f"{cgroup}/cgroup.procs", encoding="ascii") as procs:  # noqa: PTH123 - start-up time
            return {int(line) for line in procs}
    except OSError:
        return set()


def end_all() -> str:
    """Shell that ends every busy process of ours on this machine."""
    return f'for p in $({_BY_NAME}); do kill -KILL $p 2>/dev/null; done; sleep 0.1; [ -z "$({_BY_NAME})" ]'


def named() -> set[int]:
    """The busy processes of ours."""
    return {int(path.split("/")[2]) for path in glob.glob("/proc/[0-9]*/comm") if _name(path) == NAME}  # noqa: PTH207


def _name(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as comm:  # noqa: PTH123 - start-up time
            return comm.read().strip()
    except OSError:  # it has ended
        return ""
