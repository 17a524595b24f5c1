"""The flight recorder of a rank: what happened last, segment by segment, in a ring of fixed size.

An entry is (time in ns, what, iteration, step, peer, QP number, segment, PSN). What: `begin` and `end` of an iteration,
`post` and `ack` of a segment that is sent, `arrive` and `apply` of one that is received, `credit` (segment: how many
the peer is told were applied), `lost` and `up` of a connection. Segments count from 0 within their iteration; the PSN
is that of a segment's first packet, counted as the RNIC counts (a packet a path MTU), and -1 where there is none.
"""

from __future__ import annotations

import time

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    Entry = tuple[int, str, int, int, int, int, int, int]

__all__ = ["FIELDS", "Recorder"]

FIELDS = ("at_ns", "what", "iteration", "step", "peer", "qpn", "segment", "psn")


class Recorder:
    """Keeps the last `size` entries; adding one costs a tuple."""

    def __init__(self, size: int = 1024) -> None:
        self.size = size
        self.count = 0
        self._entries: list[Entry | None] = [None] * size

    def add(
        self,
        what: str,
        *,
        iteration: int,
        step: int = -1,
        peer: int = -1,
        qpn: int = 0,
        segment: int = -1,
        psn: int = -1,
    ) -> None:
        """Write an entry, stamped now, over the oldest one."""
        now_ns = time.monotonic_ns()
        self._entries[self.count % self.size] = (now_ns, what, iteration, step, peer, qpn, segment, psn)
        self.count += 1

    def entries(self) -> list[Entry]:
        """What there is, oldest first."""
        at = self.count % self.size
        return [entry for entry in self._entries[at:] + self._entries[:at] if entry is not None]
