"""Follow the records of a capture file by array arithmetic.

A record says where the next one begins, so only a walk finds them all. But guesses are cheap: places that have a mark
which every record has. A whole stretch of guesses is right if its first one is, and each ends where the next begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Indices = NDArray[np.int64]

__all__ = ["Guesses", "windows"]

_FIRST_WINDOW, _LARGEST_WINDOW = 1 << 12, 1 << 21
"""Bytes that are searched at once. A file of many short sections must not be searched to its end for each of them."""


def windows(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield adjacent parts of the bytes from `begin` to `end`, the small ones first."""
    size = _FIRST_WINDOW
    while begin < end:
        yield begin, min(begin + size, end)
        begin, size = begin + size, min(2 * size, _LARGEST_WINDOW)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Guesses:
    """Places in order at which a consistent record may begin, where it would end, and the last guess of each stretch.

    `start` and `end` are byte offsets, `last` are positions in both.
    """

    start: Indices
    end: Indices
    last: Indices

    @classmethod
    def of(cls, start: Indices, end: Indices) -> Guesses:
        """Return the guesses with their stretches: in one, each record ends where the next one begins."""
        return cls(start=start, end=end, last=np.append(np.flatnonzero(end[:-1] != start[1:]), len(start) - 1))

    def stretch(self, at: int) -> slice | None:
        """Return the positions of the records that follow each other from byte `at` on; None if no guess is there."""
        first = int(np.searchsorted(self.start, at))
        if first == len(self.start) or self.start[first] != at:
            return None
        return slice(first, int(self.last[np.searchsorted(self.last, first)]) + 1)
