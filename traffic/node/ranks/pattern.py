"""Input data for which every result is known in closed form, so that each element of a collective can be verified.

Element k of rank r's input in iteration i is a hash of (k mod 4099, r, i), scaled to numbers so small that the sum over
all ranks is exact in the element type, in any order. 4099 is prime and no segment size is a multiple of it. A segment
in the wrong place, of another rank or of an earlier iteration therefore does not match.

The expected values are computed in whole numbers (`exactly`), independently of the arithmetic that produces the results
(`faultbed.traffic.node.ranks.elements`), so that both cannot share a defect. Results are compared bit by bit. For
moved data that is the definition of equality. It is right for reductions too, because no zero in the data has a sign.
"""

from __future__ import annotations

import numpy as np

from faultbed.traffic.node.ranks.elements import EXACT, STORED

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    import numpy.typing as npt

    Array = npt.NDArray[Any]

__all__ = ["PERIOD", "Pattern", "Regions", "count_wrong", "fill"]

PERIOD = 4099
MOST = 251
"""Maximum number of different values in a pattern. 251 is prime."""
BATCH = 1 << 13
"""Maximum number of elements that are hashed at once, unless one region has more. Larger arrays do not stay in the
CPU's caches, and malloc maps new pages for each of them."""
_PLACES = np.tile(np.arange(PERIOD, dtype=np.uint32) * np.uint32(0x9E3779B1), 2)
"""The hashed positions of two periods. A slice of one period may therefore begin at any position of the first one."""
_RANK_FACTOR, _MIX_FACTOR = np.uint32(0x85EBCA6B), np.uint32(0x2C1B3C6D)
_SHIFTS, _HALF = (np.uint32(15), np.uint32(13)), np.uint32(16)


class Pattern:
    """The pattern of a collective over `ranks` ranks, for one element type and reduction."""

    def __init__(self, ranks: int, dtype: str, redop: str) -> None:
        self.ranks = ranks
        self.dtype = dtype
        self.redop = redop
        self.values = max(2, min(MOST, EXACT[dtype] // ranks + 1))  # how many different numbers occur, from 0 on
        self._scale = np.uint32(self.values)
        self._tables: dict[int, Array] = {}

    def hashed(self, members: Array, places: Array, iteration: int) -> Array:
        """Return the reduction of some ranks' inputs as whole numbers, of shape (regions, elements).

        `members` has the hashed ranks (`ranks_of`), and `places` the hashed positions (`places_of`) of each region.
        """
        mixed = places + (members + np.uint32(iteration * 0xC2B2AE35 & 0xFFFFFFFF))
        mixed ^= mixed >> _SHIFTS[0]
        mixed *= _MIX_FACTOR
        mixed ^= mixed >> _SHIFTS[1]
        # The upper half, scaled to less than `values`: an emulated CPU takes much longer for a division.
        mixed >>= _HALF
        mixed *= self._scale
        mixed >>= _HALF
        if members.shape[1] == 1:
            return mixed[:, 0]
        reduced: Array = mixed.max(axis=1) if self.redop == "max" else mixed.sum(axis=1, dtype=np.uint32)
        return reduced

    def period(self, rank: int, iteration: int, index: int = 0, count: int = PERIOD) -> Array:
        """Return one period, of shape (4099,), of a rank's input, or its first `count` elements if those are fewer.

        The period begins at element `index` of the input.
        """
        return self.reduced([rank], iteration, index, count)

    def reduced(self, members: list[int], iteration: int, index: int = 0, count: int = PERIOD) -> Array:
        """Return one period of the reduction of some ranks' inputs, with the shape and the beginning of `period`."""
        numbers = self.hashed(ranks_of([members]), places_of([index], count), iteration)
        return self.looked_up(numbers[0], len(members))

    def looked_up(self, numbers: Array, members: int) -> Array:
        """Convert whole numbers, each a reduction of `members` inputs, to elements of the type.

        Few distinct numbers occur, so a table holds the result of `exactly` for each of them.
        """
        divisor = members if self.redop == "avg" else 1
        table = self._tables.get(divisor)
        if table is None:
            largest = self.ranks * (self.values - 1)
            table = self._tables[divisor] = exactly(np.arange(largest + 1), divisor, self.dtype)
        looked_up: Array = table.take(numbers)
        return looked_up


class Regions:
    """Regions of a rank's memory whose contents are known.

    A region is (offset, count, ranks, index): the elements from `index` on of the reduction of the inputs of `ranks`.
    Regions of one length are computed together. For small regions the calls to numpy are the main cost, above all on
    an emulated CPU, and this makes them fewer.
    """

    def __init__(self, pattern: Pattern, regions: list[tuple[int, int, list[int], int]]) -> None:
        self.pattern = pattern
        by_shape: dict[tuple[int, int], list[tuple[int, int, list[int], int]]] = {}
        for region in regions:
            _, count, members, _ = region
            by_shape.setdefault((count, len(members)), []).append(region)
        self._batches = []
        for (count, member_count), alike in by_shape.items():
            most = max(1, BATCH // (min(count, PERIOD) * member_count))
            self._batches += [_Batch(alike[start : start + most]) for start in range(0, len(alike), most)]
        self._computed: tuple[int, list[Array]] = (-1, [])

    def _periods(self, iteration: int) -> list[Array]:
        """Return the periods of each batch. An iteration both writes and verifies them, so the last ones are kept."""
        if self._computed[0] != iteration:
            self._computed = iteration, [batch.periods(self.pattern, iteration) for batch in self._batches]
        return self._computed[1]

    def fill(self, array: Array, iteration: int) -> None:
        """Write the contents of an iteration."""
        for batch, periods in zip(self._batches, self._periods(iteration), strict=True):
            for target, period in batch.pairs(array, periods):
                fill(target, period)

    def count_wrong(self, array: Array, iteration: int) -> int:
        """Count the elements that differ in any bit from the contents of an iteration."""
        wrong = 0
        for batch, periods in zip(self._batches, self._periods(iteration), strict=True):
            for actual, period in batch.pairs(array, periods):
                wrong += count_wrong(actual, period)
        return wrong


class _Batch:
    """Regions of one length, reduced from equally many inputs."""

    def __init__(self, regions: list[tuple[int, int, list[int], int]]) -> None:
        self.offsets = [offset for offset, *_ in regions]
        self.count = regions[0][1]
        self.members = ranks_of([ranks for _, _, ranks, _ in regions])
        self.places = places_of([index for *_, index in regions], self.count)
        # Adjacent regions can be handled as one region, unless they are long enough to repeat their period.
        first = self.offsets[0]
        are_adjacent = self.offsets == list(range(first, first + len(regions) * self.count, self.count))
        self.is_one = self.count <= PERIOD and are_adjacent

    def periods(self, pattern: Pattern, iteration: int) -> Array:
        """Return the contents of each region, or its first period if it is longer. The shape is (regions, elements)."""
        return pattern.looked_up(pattern.hashed(self.members, self.places, iteration), self.members.shape[1])

    def pairs(self, array: Array, periods: Array) -> Iterator[tuple[Array, Array]]:
        """Yield each region of the memory with its period."""
        if self.is_one:
            yield array[self.offsets[0] : self.offsets[0] + periods.size], periods.reshape(-1)
        else:
            for offset, period in zip(self.offsets, periods, strict=True):
                yield array[offset : offset + self.count], period


def ranks_of(members: list[list[int]]) -> Array:
    """Return the hashed ranks of some regions, of shape (regions, members, 1)."""
    return (np.array(members, dtype=np.uint32) * _RANK_FACTOR)[:, :, np.newaxis]


def places_of(indices: list[int], count: int) -> Array:
    """Return the hashed positions of `count` elements from each index on, or of one period if those are more.

    The shape is (regions, 1, elements).
    """
    starts = [index % PERIOD for index in indices]
    return np.stack([_PLACES[start : start + min(count, PERIOD)] for start in starts])[:, np.newaxis]


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

    If the array is no longer than `period`, `period` may have any length: nothing is repeated.
    """
    period = np.roll(period, -index) if index else period
    whole = len(array) // PERIOD * PERIOD if len(array) > len(period) else 0
    if whole:
        array[:whole].reshape(-1, PERIOD)[:] = period
    array[whole:] = period[: len(array) - whole]


def count_wrong(array: Array, period: Array, index: int = 0) -> int:
    """Count the elements that differ in any bit from the repeated period, from element `index` on (as in `fill`)."""
    bits = f"u{array.itemsize}"
    array, period = array.view(bits), (np.roll(period, -index) if index else period).view(bits)
    whole = len(array) // PERIOD * PERIOD if len(array) > len(period) else 0
    wrong = np.count_nonzero(array[:whole].reshape(-1, PERIOD) != period) if whole else 0
    return int(wrong + np.count_nonzero(array[whole:] != period[: len(array) - whole]))
