r"""Pings of librdmacm's `rping -v`: one line each, at the client and at the server.

    ping data: rdma-ping-17: RSTUVWXYZ[\]^_`abcdefghijklmnopq
    server ping data: rdma-ping-17: RSTUVWXYZ[\]^_`abcdefghijklmnopq

With `-V` the client compares what came back, and prints `data mismatch!` (rdma-core, `librdmacm/examples/rping.c`).
"""

from __future__ import annotations

from faultbed.traffic.node.programs.readers.progress_step import Step

__all__ = ["ProgressReader"]

_PINGS = ("ping data: rdma-ping-", "server ping data: rdma-ping-")
_MISMATCH = "data mismatch!"


class ProgressReader:
    """Counts pings. The time of one is that since the one before."""

    def __init__(self) -> None:
        self._ping_ns: int | None = None

    def line(self, text: str, now_ns: int) -> list[Step]:
        """Return the ping of a line."""
        if text.startswith(_MISMATCH):
            return [Step(self._ping_ns or now_ns, now_ns, 0, is_iteration=True, wrong=1)]
        if not text.startswith(_PINGS):
            return []
        began_ns, self._ping_ns = self._ping_ns, now_ns
        return [Step(now_ns, now_ns, 0) if began_ns is None else Step(began_ns, now_ns, 0, is_iteration=True)]

    def end(self, now_ns: int) -> list[Step]:
        """Return nothing: every ping has its line."""
        return []
