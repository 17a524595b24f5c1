"""Data whose sum is known in closed form, so that every element of every all-reduce can be checked.

Rank r's element j in iteration i is (7k + 13r + 31i) mod 251 with k = j mod 4099. Values are small integers: their fp32
sum is exact up to 66 000 ranks, in any order. 4099 is prime and no segment size is a multiple of it, so a segment that
lands in the wrong place, or one left over from the iteration before, does not fit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["PERIOD", "count_wrong", "expected", "fill", "values"]

PERIOD = 4099
_BASE = (np.arange(PERIOD, dtype=np.int64) * 7) % 251


def values(rank: int, iteration: int) -> npt.NDArray[np.float32]:
    """One period of a rank's input, fp32 of shape (4099,)."""
    return ((_BASE + 13 * rank + 31 * iteration) % 251).astype(np.float32)


def expected(ranks: int, iteration: int) -> npt.NDArray[np.float32]:
    """One period of the sum over all ranks, fp32 of shape (4099,)."""
    total = np.zeros(PERIOD, dtype=np.float32)
    for rank in range(ranks):
        total += values(rank, iteration)
    return total


def fill(array: npt.NDArray[np.float32], period: npt.NDArray[np.float32]) -> None:
    """Repeat one period over a 1-d array of any length."""
    whole = len(array) // PERIOD * PERIOD
    array[:whole].reshape(-1, PERIOD)[:] = period
    array[whole:] = period[: len(array) - whole]


def count_wrong(array: npt.NDArray[np.float32], period: npt.NDArray[np.float32]) -> int:
    """How many elements differ from the repeated period (NaN differs from everything)."""
    whole = len(array) // PERIOD * PERIOD
    wrong = np.count_nonzero(array[:whole].reshape(-1, PERIOD) != period)
    return int(wrong + np.count_nonzero(array[whole:] != period[: len(array) - whole]))
