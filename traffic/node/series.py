"""Bytes per 100 ms of CLOCK_MONOTONIC, counted cheaply and reported in batches."""

from __future__ import annotations

__all__ = ["BIN_NS", "Series"]

BIN_NS = 100_000_000


class Series:
    """Adds bytes to the current bin. `take` returns the completed bins, zeros included."""

    def __init__(self) -> None:
        self._bins: dict[int, int] = {}
        self._first: int | None = None

    def start(self, now_ns: int) -> None:
        """Begin at the bin of `now_ns`."""
        self._first = now_ns // BIN_NS

    def add(self, now_ns: int, size: int) -> None:
        """Count `size` bytes at `now_ns`."""
        index = now_ns // BIN_NS
        self._bins[index] = self._bins.get(index, 0) + size

    def take(self, now_ns: int, *, all_bins: bool = False) -> tuple[int, list[int]] | None:
        """Return (start of the first bin in ns, bytes per bin) since the last call, or None if no bin is complete."""
        if self._first is None:
            return None
        end = now_ns // BIN_NS + (1 if all_bins else 0)
        if end <= self._first:
            return None
        first, self._first = self._first, end
        return first * BIN_NS, [self._bins.pop(index, 0) for index in range(first, end)]
