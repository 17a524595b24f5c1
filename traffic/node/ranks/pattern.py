"""Input data for which every result is known in closed form, so that each element of a collective can be verified.

Element k of rank r's input in iteration i is a hash of (k mod 4099, r, i), modulo a number so small that the sum over
all ranks is exact in the element type, in any order. 4099 is prime and no segment size is a multiple of it. A segment
in the wrong place, of another rank or of an earlier iteration therefore does not match.

The expected values are computed in whole numbers (`exactly`), independently of the arithmetic that produces the results
(`traffic.node.ranks.elements`), so that both cannot share a defect. Results are compared bit by bit. For moved data
that is the definition of equality. It is right for reductions too, because no zero in the data has a sign.
"""

from __future__ import annotations

import numpy as np

from traffic.node.ranks.elements import EXACT, STORED

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from typing import Any

    import numpy.typing as npt

    Array = npt.NDArray[Any]

__all__ = ["PERIOD", "Pattern", "count_wrong", "fill"]

PERIOD = 4099
MOST = 251
_PLACES = np.tile(np.arange(PERIOD, dtype=np.uint32) * np.uint32(0x9E3779B1), 2)
"""The hashed positions of two periods: a slice of it is a part of the pattern that begins anywhere in the period."""


class Pattern:
    """The pattern of a collective over `ranks` ranks, for one element type and reduction."""

    def __init__(self, ranks: int, dtype: str, redop: str) -> None:
        self.ranks = ranks
        self.dtype = dtype
        self.redop = redop
        self.modulus = max(2, min(MOST, EXACT[dtype] // ranks + 1))
        self._tables: dict[int, Array] = {}

    def _whole(self, rank: int, iteration: int, index: int, count: int) -> Array:
        start = index % PERIOD
        places = _PLACES[start : start + min(count, PERIOD)]
        mixed = places + np.uint32((rank * 0x85EBCA6B + iteration * 0xC2B2AE35) & 0xFFFFFFFF)
        mixed ^= mixed >> np.uint32(15)
        mixed *= np.uint32(0x2C1B3C6D)
        mixed ^= mixed >> np.uint32(13)
        return (mixed % np.uint32(self.modulus)).astype(np.int64)

    def period(self, rank: int, iteration: int, index: int = 0, count: int = PERIOD) -> Array:
        """Return one period, of shape (4099,), of a rank's input, or its first `count` elements if those are fewer.

        The period begins at element `index` of the input.
        """
        return self._looked_up(self._whole(rank, iteration, index, count), 1)

    def reduced(self, members: list[int], iteration: int, index: int = 0, count: int = PERIOD) -> Array:
        """Return one period of the reduction of some ranks' inputs, with the shape and the beginning of `period`."""
        total = self._whole(members[0], iteration, index, count)
        for rank in members[1:]:
            other = self._whole(rank, iteration, index, count)
            total = np.maximum(total, other) if self.redop == "max" else total + other
        return self._looked_up(total, len(members) if self.redop == "avg" else 1)

    def _looked_up(self, numbers: Array, divisor: int) -> Array:
        """Return `exactly` of each number. Few distinct numbers occur, so each is divided once in a run."""
        table = self._tables.get(divisor)
        if table is None:
            largest = self.ranks * (self.modulus - 1)
            table = self._tables[divisor] = exactly(np.arange(largest + 1), divisor, self.dtype)
        return table[numbers]


def exactly(numbers: Array, divisor: int, dtype: str) -> Array:
    """Divide non-negative whole numbers by a divisor, rounded as in IEEE 754 (nearest, ties to even; int32 truncates).

    Only integer arithmetic is used. The significand is the quotient of a shifted number, rounded by its remainder; the
    bits of the type are assembled from it and the exponent. Quotients below the smallest normal number do not occur,
    because no group has that many ranks.
    """
    if dtype == "int32":
        return (numbers // divisor).astype(np.int32)
    precision, bias = _FORMATS[dtype]
    # frexp gives the length in bits: 2**(power - 1) < quotient < 2**(power + 1) before the one correction.
    power = np.frexp(numbers.astype(np.float64))[1] - divisor.bit_length()
    power -= (numbers << np.maximum(-power, 0)) < (divisor << np.maximum(power, 0))
    shift = precision - 1 - power
    unit = divisor << np.maximum(-shift, 0)
    significand, rest = np.divmod(numbers << np.maximum(shift, 0), unit)
    significand += (2 * rest > unit) | ((2 * rest == unit) & (significand % 2 == 1))
    # Rounding up to the next power of two carries into the exponent without further work.
    bits = np.where(numbers == 0, 0, (power + bias - 1 << precision - 1) + significand)
    return bits.astype(np.uint32 if dtype == "fp32" else np.uint16).view(STORED[dtype])


_FORMATS = {"fp32": (24, 127), "fp16": (11, 15), "bf16": (8, 127)}
"""Bits of the significand including the leading one, and the exponent's bias."""


def fill(array: Array, period: Array, index: int = 0) -> None:
    """Fill a 1-d array with the repeated period, from element `index` on.

    A shorter part of a period is enough for an array that is no longer.
    """
    period = np.roll(period, -index) if index else period
    whole = len(array) // PERIOD * PERIOD
    if whole:
        array[:whole].reshape(-1, PERIOD)[:] = period
    array[whole:] = period[: len(array) - whole]


def count_wrong(array: Array, period: Array, index: int = 0) -> int:
    """Count the elements that differ in any bit from the repeated period, from element `index` on (as in `fill`)."""
    bits = f"u{array.itemsize}"
    array, period = array.view(bits), (np.roll(period, -index) if index else period).view(bits)
    whole = len(array) // PERIOD * PERIOD
    wrong = np.count_nonzero(array[:whole].reshape(-1, PERIOD) != period) if whole else 0
    return int(wrong + np.count_nonzero(array[whole:] != period[: len(array) - whole]))
