"""Alpha spending: boundaries for repeated decisions that together err as rarely as a single one.

The data so far are analysed after each run. The literature on group sequential tests calls these interim analyses, or
interim looks. The risk that is spent until analysis k of K grows as in O'Brien and Fleming's test (Lan and DeMets 1983,
Biometrika 70:659): little of it early, most of it at the end. Boundaries follow by recursive integration over the paths
that have not crossed yet (Armitage, McPherson and Rowe 1969, J. R. Stat. Soc. A 132:235). The deviation between runs is
not known. Each boundary is therefore used as the quantile of Student's t with the same tail probability (Jennison and
Turnbull 2000, section 4.4); `python -m bench calibration` measures what that does to the risk.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from scipy import special

__all__ = ["FIRST", "MOST", "tails"]

FIRST = 3
"""Runs before the first analysis: the deviation of two runs says too little."""
MOST = 100
_MARGIN = 0.85
"""Share of the risk that is spent: quantiles of t instead of exact boundaries add up to 15 % to it."""
_STEP = 0.02
"""Width of the grid on which densities are integrated, in standard deviations of one run."""
_FAR = 8.0
"""Half of the grid's extent, in standard deviations: the probability beyond it is about 1e-15."""
_LEAST_RISK = 1e-9
"""An analysis with less risk than this decides nothing."""


@functools.cache
def tails(most: int, tail: float) -> tuple[float, ...]:
    """Return the tail probability of each analysis, the first one after `FIRST` runs; 0: the analysis decides nothing.

    Args:
        most: runs at the last analysis, up to `MOST`.
        tail: probability that any of the analyses errs on one side, if the true value is the bound.
    """
    if not FIRST <= most <= MOST:
        raise ValueError(f"{most} runs: analyses are made after {FIRST} to {MOST} runs")
    reach = _FAR * math.sqrt(most)
    grid = np.arange(-reach, reach + _STEP, _STEP)
    density = np.exp(-(grid**2) / (2 * FIRST)) / math.sqrt(2 * math.pi * FIRST)
    kernel = np.exp(-(np.arange(-_FAR, _FAR + _STEP, _STEP) ** 2) / 2) / math.sqrt(2 * math.pi)
    tails_by_analysis, spent, unspent = [], 0.0, 0.0
    for runs in range(FIRST, most + 1):
        until = 2 * float(special.ndtr(special.ndtri(_MARGIN * tail / 2) / math.sqrt(runs / most)))
        unspent += until - spent
        spent = until
        if unspent < _LEAST_RISK:
            tails_by_analysis.append(0.0)
        else:
            beyond = np.cumsum(density[::-1]) * _STEP
            at = len(grid) - int(np.searchsorted(beyond, unspent))
            boundary = grid[min(at, len(grid) - 1)]
            tails_by_analysis.append(float(special.ndtr(-boundary / math.sqrt(runs))))
            unspent -= float(density[grid >= boundary].sum()) * _STEP
            density[grid >= boundary] = 0.0
        density = np.convolve(density, kernel, mode="same") * _STEP
    return tuple(tails_by_analysis)
