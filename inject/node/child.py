"""A process of the holder's own, for what cannot wait for the holder's turn: it counts, and ends with the holder."""

from __future__ import annotations

import mmap
import os
import signal
import struct
from collections.abc import Callable

__all__ = ["Child"]

_COUNT = struct.Struct("=Q")


class Child:
    """Forked, not started anew: an interpreter needs a second to start under emulation."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._pid = 0
        self._holder = 0

    def start(self, work: Callable[[], None]) -> None:
        """Run `work` in a process at the holder's priority; it is to return when it is not `wanted` any more."""
        self._holder = os.getpid()
        # What a holder starts has no precedence by itself (`holder.take_precedence`); this is its own hand.
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
        """End it, and wait until it is gone."""
        pid, self._pid = self._pid, 0
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def is_there(self) -> bool:
        """Whether it runs."""
        if self._pid and os.waitpid(self._pid, os.WNOHANG) != (0, 0):
            self._pid = 0
        return bool(self._pid)

    @property
    def count(self) -> int:
        """How often it has counted so far; what was done in its last moment may be missing."""
        found: int = _COUNT.unpack_from(self._memory)[0]
        return found

    # In the child.

    def wanted(self) -> bool:
        """Whether the holder is still there: asked by the child."""
        return os.getppid() == self._holder

    def add(self) -> None:
        """Count one more: done by the child."""
        _COUNT.pack_into(self._memory, 0, self.count + 1)
