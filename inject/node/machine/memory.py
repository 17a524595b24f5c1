"""Memory taken away: a process holds all of it but a rest, and keeps it warm, so that others have to wait for pages.

It offers itself to the kernel to be killed first (proc_pid_oom_score_adj(5)): what is taken is never taken from others'
lives.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import Any

from inject.node.actuator import Refused
from inject.node.child import Child

__all__ = ["MemoryActuator"]

_PRESSURE, _MEMINFO = "/proc/pressure/memory", "/proc/meminfo"
_CHUNK = 4 << 20
_PAUSE_S = 0.02
# Pages at once, by the kernel: one fault for each of them takes seconds under emulation.
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE


class MemoryActuator:
    """Holds all memory that is available but `left_mib`."""

    poll_s = 0.05

    def __init__(self, *, left_mib: int) -> None:
        self._left_mib = left_mib
        self._child = Child()
        self._before: int | None = None

    def prepare(self) -> dict[str, Any]:
        """Refuse a kernel that cannot tell who waits for memory, and a host that has no more than that anyway."""
        try:
            _stalled_us()
        except OSError as error:
            raise Refused(f"{_PRESSURE}: {error.strerror}: this kernel does not account for pressure") from None
        if _available_mib() <= self._left_mib:
            raise Refused(f"no more than {_available_mib()} MiB are available here: there is nothing to take")
        return self.read()

    def revert_script(self) -> str:
        """Nothing: the child ends with the holder, by itself and with the unit."""
        return "true"

    def on(self) -> None:
        """Begin to take."""
        if self._before is None:
            self._before = _stalled_us()
        self._child.start(self._take)

    def off(self) -> None:
        """Give it back."""
        self._child.stop()

    def read(self) -> dict[str, Any]:
        """Whether it is held, and what is left."""
        return {
            "applied": self._child.is_there(),
            "left_mib": self._left_mib,
            "taken_mib": self._child.count * 4,
            "available_mib": _available_mib(),
        }

    def hits(self) -> int:
        """Microseconds in which at least one process waited for memory since the first `on`."""
        return 0 if self._before is None else _stalled_us() - self._before

    def close(self) -> None:
        """Nothing is held open."""

    def _take(self) -> None:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:  # noqa: PTH123 - start-up time
            score.write("1000")
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        held: list[mmap.mmap] = []
        while self._child.wanted():
            if _available_mib() > self._left_mib:
                held.append(mmap.mmap(-1, _CHUNK, flags=_FLAGS))
                self._child.add()
                continue
            time.sleep(_PAUSE_S)
            # What is not used is what the kernel takes back first.
            for chunk in held:
                chunk[:: mmap.PAGESIZE] = b"." * (_CHUNK // mmap.PAGESIZE)


def _stalled_us() -> int:
    """Of "some avg10=… total=N" (Documentation/accounting/psi.rst)."""
    with open(_PRESSURE, encoding="ascii") as file:  # noqa: PTH123 - start-up time
        return int(file.readline().rpartition("total=")[2])


def _available_mib() -> int:
    with open(_MEMINFO, encoding="ascii") as file:  # noqa: PTH123 - start-up time
        return next(int(line.split()[1]) // 1024 for line in file if line.startswith("MemAvailable:"))
