"""CPU contention: busy processes next to, or inside, the victim's cgroup.

Each process is renamed to `faultbed-hog` (proc_pid_comm(5)), so that witnesses and `heal` can find it. It ends with the
holder.
"""

from __future__ import annotations

import functools
import glob
import os
import time
from typing import Any

from faultbed.inject.node.actuator import Actuator, Refused
from faultbed.inject.node.child import Child

__all__ = ["NAME", "HogActuator", "busy_processes", "kill_script"]

NAME = "faultbed-hog"
_SLICE_S = 0.01
_START_TIMEOUT_S = 2.0
_BY_NAME = f"grep -lsx {NAME} /proc/[0-9]*/comm | cut -d/ -f3"
"""Shell command that prints the ids of the busy processes."""


class HogActuator(Actuator):
    """Runs `count` processes that are busy for `share` of the time.

    They run in `cgroup` if it is given. With `realtime`, they have precedence over all normal processes.
    """

    def __init__(self, *, count: int, share: float, cgroup: str | None = None, realtime: bool = False) -> None:
        self._share, self._cgroup, self._realtime = share, cgroup, realtime
        self._hogs = [Child() for _ in range(count)]

    def prepare(self) -> dict[str, Any]:
        """Refuse a cgroup without a process to compete with, and busy processes of an earlier fault."""
        if self._cgroup is not None and not _processes_in(self._cgroup):
            raise Refused(f"no process is in {self._cgroup}; start the soft GPU")
        if left := busy_processes():
            raise Refused(f"{len(left)} busy processes of an earlier fault still run; run `faultbed heal`")
        return self.read()

    def revert_script(self) -> str:
        return kill_script()

    def on(self) -> None:
        """Start the processes, and wait until each is in its cgroup."""
        counts_when_ready = [hog.count + 1 for hog in self._hogs]
        for hog in self._hogs:
            hog.start(functools.partial(self._stay_busy, hog))
        deadline = time.monotonic() + _START_TIMEOUT_S
        while [hog.count for hog in self._hogs] != counts_when_ready and time.monotonic() < deadline:
            time.sleep(0.001)

    def off(self) -> None:
        for hog in self._hogs:
            hog.stop()

    def read(self) -> dict[str, Any]:
        """Return how many of the processes run, and how many of these are in the cgroup."""
        running = busy_processes()
        inside = running & _processes_in(self._cgroup) if self._cgroup else running
        return {"applied": bool(inside), "hogs": len(running), "inside": len(inside), "cgroup": self._cgroup}

    def is_lost(self) -> bool:
        """Return whether any of the processes has ended, was stopped, or left the cgroup."""
        return int(self.read()["inside"]) < len(self._hogs) or not all(hog.is_running() for hog in self._hogs)

    def _stay_busy(self, hog: Child) -> None:
        with open("/proc/self/comm", "w", encoding="ascii") as comm:  # noqa: PTH123 - start-up time
            comm.write(NAME)
        if self._cgroup is not None:
            with open(f"{self._cgroup}/cgroup.procs", "w", encoding="ascii") as procs:  # noqa: PTH123
                procs.write(str(os.getpid()))
        hog.add()  # reports to `on` that this process is in its cgroup
        # A real-time process has a lower priority than the holder (10), which must be able to end it.
        policy, priority = (os.SCHED_FIFO, 5) if self._realtime else (os.SCHED_OTHER, 0)
        os.sched_setscheduler(0, policy, os.sched_param(priority))
        while hog.is_wanted():
            end = time.monotonic() + self._share * _SLICE_S
            while time.monotonic() < end:
                pass
            if self._share < 1:
                time.sleep((1 - self._share) * _SLICE_S)


def _processes_in(cgroup: str) -> set[int]:
    try:
        with open(f"{cgroup}/cgroup.procs", encoding="ascii") as procs:  # noqa: PTH123 - start-up time
            return {int(line) for line in procs}
    except OSError:
        return set()


def kill_script() -> str:
    """Return a shell script that kills every busy process of a fault on this machine."""
    return f'for p in $({_BY_NAME}); do kill -KILL $p 2>/dev/null; done; sleep 0.1; [ -z "$({_BY_NAME})" ]'


def busy_processes() -> set[int]:
    """Return the ids of the busy processes of faults on this machine."""
    return {int(path.split("/")[2]) for path in glob.glob("/proc/[0-9]*/comm") if _name(path) == NAME}  # noqa: PTH207


def _name(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as comm:  # noqa: PTH123 - start-up time
            return comm.read().strip()
    except OSError:  # it has ended
        return ""
