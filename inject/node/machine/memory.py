"""Memory pressure: a process allocates almost all available memory and keeps using it, so that others wait for pages.

The kernel kills this process first if memory runs out (proc_pid_oom_score_adj(5)), so that no other process dies.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import Any

from faultbed.inject.node.actuator import Actuator, Refused
from faultbed.inject.node.child import Child

__all__ = ["MemoryActuator"]

_PRESSURE, _MEMINFO = "/proc/pressure/memory", "/proc/meminfo"
_CHUNK = 4 << 20
_PAUSE_S = 0.02
# The kernel populates whole chunks: a page fault for each page takes seconds under emulation.
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE


class MemoryActuator(Actuator):
    """Runs a process that allocates memory until `left_mib` are available."""

    poll_s = 0.05

    def __init__(self, *, left_mib: int) -> None:
        self._left_mib = left_mib
        self._child = Child()
        self._before: int | None = None

    def prepare(self) -> dict[str, Any]:
        """Refuse a kernel without pressure accounting, and a host that has no more memory than `left_mib`."""
        try:
            _stalled_us()
        except OSError as error:
            raise Refused(f"{_PRESSURE}: {error.strerror}: the kernel lacks CONFIG_PSI") from None
        if _available_mib() <= self._left_mib:
            raise Refused(f"only {_available_mib()} MiB are available here; set left to less")
        return self.read()

    def revert_script(self) -> str:
        return "true"

    def on(self) -> None:
        if self._before is None:
            self._before = _stalled_us()
        self._child.start(self._hold)

    def off(self) -> None:
        self._child.stop()

    def read(self) -> dict[str, Any]:
        """Report whether the memory is held, and how much is available."""
        return {
            "applied": self._child.is_running(),
            "left_mib": self._left_mib,
            "taken_mib": self._child.count * 4,
            "available_mib": _available_mib(),
        }

    def hits(self) -> int:
        """Return the microseconds in which at least one process waited for memory since the first `on`."""
        return 0 if self._before is None else _stalled_us() - self._before

    def _hold(self) -> None:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:  # noqa: PTH123 - start-up time
            score.write("1000")
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        chunks: list[mmap.mmap] = []
        while self._child.is_wanted():
            if _available_mib() > self._left_mib:
                chunks.append(mmap.mmap(-1, _CHUNK, flags=_FLAGS))
                self._child.add()
                continue
            time.sleep(_PAUSE_S)
            # The kernel reclaims unused pages first, so use all of them.
            for chunk in chunks:
                chunk[:: mmap.PAGESIZE] = b"." * (_CHUNK // mmap.PAGESIZE)


def _stalled_us() -> int:
    """Return N of "some avg10=… total=N" (Documentation/accounting/psi.rst)."""
    with open(_PRESSURE, encoding="ascii") as file:  # noqa: PTH123 - start-up time
        return int(file.readline().rpartition("total=")[2])


def _available_mib() -> int:
    with open(_MEMINFO, encoding="ascii") as file:  # noqa: PTH123 - start-up time
        return next(int(line.split()[1]) // 1024 for line in file if line.startswith("MemAvailable:"))
