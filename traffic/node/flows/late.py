"""Receives that are posted late, as by a program that is not ready when its RNIC needs the next receive.

While the file `PATH` exists, a task delays the reposting of each consumed receive. The file holds the delay in ms; 0
means until the file is removed. A sender then meets a receiver that is not ready: its RNIC gets an RNR NAK (InfiniBand
Architecture Specification 9.7.5.2.8) and retries, up to `rnr_retry` times. The engine checks for the file at every
tick. The fault `congestion.late-receives` creates it. It lies below /run, so that it never survives a reboot.
"""

from __future__ import annotations

import os
import time
from collections import deque

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from typing import Any

    from faultbed.traffic.node.task import Conn

__all__ = ["PATH", "LateReceives"]

PATH = "/run/faultbed/late-receives"
_FOR_EVER_NS = 1 << 62


class LateReceives:
    """Delayed receives of one engine, or of a receiver that is configured to be slow. `ns` is the delay (0: none)."""

    def __init__(self, ns: int = 0) -> None:
        self.ns = ns
        self.delayed: deque[tuple[int, Conn, int, Any]] = deque()

    def check_fault(self) -> None:
        """Read the delay that the fault sets. When the fault ends, post all delayed receives."""
        before, self.ns = self.ns, _fault_delay_ns()
        if before and not self.ns:
            self._post(_FOR_EVER_NS)

    def post(self, conn: Conn, receive: Any) -> None:
        """Post a consumed receive again, now or after the delay."""
        if self.ns:
            self.delayed.append((time.monotonic_ns() + self.ns, conn, conn.generation, receive))
        else:
            conn.qp.post_recv(receive)

    @property
    def due_ns(self) -> int | None:
        """When `wake` has something to post, or None."""
        return self.delayed[0][0] if self.delayed else None

    def wake(self, now_ns: int) -> None:
        """Post the receives that are due."""
        if self.delayed and self.delayed[0][0] <= now_ns:
            self._post(now_ns)

    def clear(self) -> None:
        """Drop all delayed receives, because their connections are gone."""
        self.delayed.clear()

    def _post(self, until_ns: int) -> None:
        while self.delayed and self.delayed[0][0] <= until_ns:
            _, conn, generation, receive = self.delayed.popleft()
            # A connection that was rebuilt since has new receives.
            if generation == conn.generation and conn.state in ("joined", "up"):
                conn.qp.post_recv(receive)


def _fault_delay_ns() -> int:
    if not os.access(PATH, os.F_OK):  # the usual case; an exception would cost more than this check
        return 0
    try:
        with open(PATH, encoding="ascii") as file:
            return int(file.read()) * 1_000_000 or _FOR_EVER_NS // 2
    except (OSError, ValueError):  # removed since, or not yet written
        return 0
