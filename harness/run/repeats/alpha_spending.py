"""Alpha spending: boundaries for repeated decisions that together err as rarely as a single one.

The risk that is spent until look k of K grows as O'Brien and Fleming's test does (Lan and DeMets 1983, Biometrika
70:659): next to nothing early, most of it at the end. Boundaries follow by recursive integration over the paths that
have not crossed yet (Armitage, McPherson and Rowe 1969, J. R. Stat. Soc. A 132:235). The deviation between runs is not
known, so that each boundary is used as the quantile of Student's t with the same tail probability (Jennison and
Turnbull 2000, section 4.4); `python -m bench calibration` measures what that does to the risk.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from scipy import special

__all__ = ["FIRST", "MOST", "tails"]

FIRST = 3
"""Runs before the first look: the deviation of two runs says too little."""
MOST = 100
_MARGIN = 0.85
"""Share of the risk that is spent: quantiles of t instead of exact boundaries add up to 15 % to it."""
_STEP = 0.02
_FAR = 8.0
_NOTHING = 1e-9
"""A look with less risk than this decides nothing."""


@functools.cache
def tails(most: int, tail: float) -> tuple[float, ...]:
    """Return the tail probability of each look, after `FIRST` runs and after every one until `most`; 0: none.

    Args:
        most: runs at the last look, up to `MOST`.
        tail: probability that all looks together err on one side, where the truth lies on the bound.
    """
    if not FIRST <= most <= MOST:
        raise ValueError(f"{most} runs: looks are made after {FIRST} to {MOST} runs")
    reach = _FAR * math.sqrt(most)
    grid = np.arange(-reach, reach + _STEP, _STEP)
    density = np.exp(-(grid**2) / (2 * FIRST)) / math.sqrt(2 * math.pi * FIRST)
    kernel = np.exp(-(np.arange(-_FAR, _FAR + _STEP, _STEP) ** 2) / 2) / math.sqrt(2 * math.pi)
    tails_of_looks, spent, owed = [], 0.0, 0.0
    for runs in range(FIRST, most + 1):
        until = 2 * float(special.ndtr(special.ndtri(_MARGIN * tail / 2) / math.sqrt(runs / most)))
        owed += until - spent
        spent = until
        if owed < _NOTHING:
            tails_of_looks.append(0.0)
        else:
            beyond = np.cumsum(density[::-1]) * _STEP
            at = len(grid) - int(np.searchsorted(beyond, owed))
            boundary = grid[min(at, len(grid) - 1)]
            tails_of_looks.append(float(special.ndtr(-boundary / math.sqrt(runs))))
            owed -= float(density[grid >= boundary].sum()) * _STEP
            density[grid >= boundary] = 0.0
        density = np.convolve(density, kernel, mode="same") * _STEP
    return tuple(tails_of_looks)
