"""Times of a flow's messages in bounded memory."""

from __future__ import annotations

__all__ = ["Latencies"]

MAX_LATENCIES = 200_000


class Latencies:
    """Times of every n-th message (`values_ns`).

    n (`every`) doubles when memory is full, so that the whole run is covered.
    """

    def __init__(self, limit: int = MAX_LATENCIES) -> None:
        self.values_ns: list[int] = []
        self.every = 1
        self._limit, self._seen = limit, 0

    def add(self, took_ns: int) -> None:
        """Record the time of one message."""
        self._seen += 1
        if self._seen % self.every:
            return
        self.values_ns.append(took_ns)
        if len(self.values_ns) >= self._limit:
            del self.values_ns[::2]
            self.every *= 2
