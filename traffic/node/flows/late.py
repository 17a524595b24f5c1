"""Receives that are posted late: what a program that was not ready leaves its RNIC with.

While the file `PATH` is there, a task keeps each receive that was taken for as many milliseconds as the file says (0:
for as long as it is there) before it posts it again. Whoever sends meanwhile runs into a receiver that is not ready:
its RNIC is told so (RNR NAK, InfiniBand Architecture Specification 9.7.5.2.8) and tries again, `rnr_retry` times. The
file is looked for at every tick of the engine; the fault `congestion.late-receives` puts it there. It is below /run, so
that no boot ever finds it.
"""

from __future__ import annotations

import os
import time
from collections import deque

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from typing import Any

    from traffic.node.task import Conn

__all__ = ["PATH", "Late"]

PATH = "/run/faultbed/late-receives"
_FOR_EVER_NS = 1 << 62


class Late:
    """Of one engine, or of a receiver that is asked to be slow. `ns`: how late; 0: at once."""

    def __init__(self, ns: int = 0) -> None:
        self.ns = ns
        self.held: deque[tuple[int, Conn, int, Any]] = deque()

    def look(self) -> None:
        """Whether the fault is there; what it held back is posted when it goes."""
        before, self.ns = self.ns, _asked_ns()
        if before and not self.ns:
            self._post(_FOR_EVER_NS)

    def post(self, conn: Conn, receive: Any) -> None:
        """A receive that was taken: now, or later."""
        if self.ns:
            self.held.append((time.monotonic_ns() + self.ns, conn, conn.generation, receive))
        else:
            conn.rc.post_recv(receive)

    @property
    def due_ns(self) -> int | None:
        """When `wake` has something to post, if at all."""
        return self.held[0][0] if self.held else None

    def wake(self, now_ns: int) -> None:
        """Post what is due."""
        if self.held and self.held[0][0] <= now_ns:
            self._post(now_ns)

    def forget(self) -> None:
        """Their connections are gone."""
        self.held.clear()

    def _post(self, until_ns: int) -> None:
        while self.held and self.held[0][0] <= until_ns:
            _, conn, generation, receive = self.held.popleft()
            # A connection that was rebuilt meanwhile got all its receives anew.
            if generation == conn.generation and conn.state in ("joined", "up"):
                conn.rc.post_recv(receive)


def _asked_ns() -> int:
    if not os.access(PATH, os.F_OK):  # nearly always: an exception costs more than a look
        return 0
    try:
        with open(PATH, encoding="ascii") as file:
            return int(file.read()) * 1_000_000 or _FOR_EVER_NS // 2
    except (OSError, ValueError):  # gone since, or not yet written
        return 0
