"""A child process of the holder, for work that cannot wait for the holder's loop; it ends with the holder."""

from __future__ import annotations

import mmap
import os
import signal
import struct
from collections.abc import Callable

__all__ = ["Child"]

_COUNT = struct.Struct("=Q")


class Child:
    """A child process, and a counter that it shares with the holder.

    It is forked and not started as a new program, because an interpreter needs a second to start under emulation.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._pid = 0
        self._holder = 0

    def start(self, work: Callable[[], None]) -> None:
        """Run `work` in a child at the holder's priority; it must return once `is_wanted` is false."""
        self._holder = os.getpid()
        # A holder's children lose its priority (`Watchdog.raise_priority`); this one needs it.
        policy, priority = os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK, os.sched_getparam(0)
        self._pid = os.fork()
        if not self._pid:
            try:
                os.sched_setscheduler(0, policy, priority)
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    signal.signal(number, signal.SIG_DFL)
                work()
            finally:
                os._exit(1)

    def stop(self) -> None:
        """Kill the child, and wait until it is gone."""
        pid, self._pid = self._pid, 0
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def is_running(self) -> bool:
        """Return whether the child runs: it has neither ended nor been stopped (SIGSTOP, proc_pid_stat(5))."""
        if self._pid and os.waitpid(self._pid, os.WNOHANG) != (0, 0):
            self._pid = 0
        if not self._pid:
            return False
        with open(f"/proc/{self._pid}/stat", encoding="utf-8", errors="replace") as stat:  # noqa: PTH123 - start-up time
            return stat.read().rpartition(")")[2].split()[0] not in "Tt"

    @property
    def count(self) -> int:
        """Number of calls of `add` so far. If the child was killed, its last call may be missing."""
        count: int = _COUNT.unpack_from(self._memory)[0]
        return count

    # In the child.

    def is_wanted(self) -> bool:
        """Return whether the holder still exists; called by the child."""
        return os.getppid() == self._holder

    def add(self) -> None:
        """Add one to `count`; called by the child."""
        _COUNT.pack_into(self._memory, 0, self.count + 1)
