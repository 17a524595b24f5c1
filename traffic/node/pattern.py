"""Data whose every result is known in closed form, so that each element of each collective can be checked.

Element k of rank r's input in iteration i is a hash of (k mod 4099, r, i), modulo a number so small that the sum over
all ranks is exact in the element type, in any order. 4099 is prime and no segment size is a multiple of it, so a
segment that lands in the wrong place, one of another rank, or one left over from the iteration before does not fit.
"""

from __future__ import annotations

import numpy as np

from traffic.node.elements import EXACT, average, from_whole

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from typing import Any

    import numpy.typing as npt

    Array = npt.NDArray[Any]

__all__ = ["PERIOD", "Pattern", "count_wrong", "fill"]

PERIOD = 4099
MOST = 251
_PLACE = np.arange(PERIOD, dtype=np.uint32) * np.uint32(0x9E3779B1)


class Pattern:
    """The pattern of a collective of so many ranks, of one element type and reduction."""

    def __init__(self, ranks: int, dtype: str, redop: str) -> None:
        self.ranks = ranks
        self.dtype = dtype
        self.redop = redop
        self.modulus = max(2, min(MOST, EXACT[dtype] // ranks + 1))

    def _whole(self, rank: int, iteration: int) -> Array:
        mixed = _PLACE + np.uint32((rank * 0x85EBCA6B + iteration * 0xC2B2AE35) & 0xFFFFFFFF)
        mixed ^= mixed >> np.uint32(15)
        mixed *= np.uint32(0x2C1B3C6D)
        mixed ^= mixed >> np.uint32(13)
        return (mixed % np.uint32(self.modulus)).astype(np.int64)

    def period(self, rank: int, iteration: int) -> Array:
        """One period, of shape (4099,), of a rank's input."""
        return from_whole(self._whole(rank, iteration), self.dtype)

    def reduced(self, members: list[int], iteration: int) -> Array:
        """One period, of shape (4099,), of the reduction of the inputs of some ranks."""
        total = self._whole(members[0], iteration)
        for rank in members[1:]:
            other = self._whole(rank, iteration)
            total = np.maximum(total, other) if self.redop == "max" else total + other
        reduced = from_whole(total, self.dtype)
        if self.redop == "avg":
            average(reduced, len(members), self.dtype)
        return reduced


def fill(array: Array, period: Array, index: int = 0) -> None:
    """Write elements `index` and following of the repeated period over a 1-d array."""
    period = np.roll(period, -index)
    whole = len(array) // PERIOD * PERIOD
    array[:whole].reshape(-1, PERIOD)[:] = period
    array[whole:] = period[: len(array) - whole]


def count_wrong(array: Array, period: Array, index: int = 0) -> int:
    """How many elements differ from elements `index` and following (NaN differs from everything)."""
    period = np.roll(period, -index)
    whole = len(array) // PERIOD * PERIOD
    wrong = np.count_nonzero(array[:whole].reshape(-1, PERIOD) != period)
    return int(wrong + np.count_nonzero(array[whole:] != period[: len(array) - whole]))
