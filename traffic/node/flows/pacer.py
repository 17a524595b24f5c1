"""Decide when a flow may post next: by a rate, by on/off bursts, by both or by neither.

Pure: the time is an argument.
"""

from __future__ import annotations

__all__ = ["Pacer"]

CATCH_UP_NS = 5_000_000
"""Maximum delay that later posts make up for, because timers and virtual CPUs are often late."""


class Pacer:
    """Limits bytes to `rate_bps` (0: unlimited), in the first `on_ns` of every `on_ns + off_ns` (0: always)."""

    def __init__(self, *, rate_bps: float, on_ns: int, off_ns: int) -> None:
        self.rate_bps = rate_bps
        self.on_ns = on_ns
        self.off_ns = off_ns
        self.wake_ns: int | None = None
        """When to try again after a refusal."""
        self._start_ns = 0
        self._next_ns = 0.0

    def start(self, now_ns: int) -> None:
        """Start the first burst now."""
        self._start_ns = now_ns
        self._next_ns = now_ns

    def take(self, now_ns: int, size_bytes: int) -> bool:
        """Return whether `size_bytes` may be posted now; if so, count them."""
        self.wake_ns = None
        if self.on_ns:
            burst, place_ns = divmod(now_ns - self._start_ns, self.on_ns + self.off_ns)
            if place_ns >= self.on_ns:
                self.wake_ns = self._start_ns + (burst + 1) * (self.on_ns + self.off_ns)
                self._next_ns = max(self._next_ns, self.wake_ns)
                return False
        if self.rate_bps:
            if now_ns < self._next_ns:
                self.wake_ns = int(self._next_ns) + 1
                return False
            self._next_ns = max(self._next_ns, now_ns - CATCH_UP_NS) + size_bytes * 8e9 / self.rate_bps
        return True
