"""Analyses of a growing pool: fixed before the first run, with risks that add up to the tail. Pure.

A rank test of n runs has no smaller p-value than 2^-n, so that an analysis of few runs decides nothing however clear
the data are. The first analysis is the earliest one that can decide with `_FIRST_SHARE` of the tail; the following
ones come after a third more runs each, share the rest equally (Bonferroni; Jennison and Turnbull 2000), and the last
one is after the maximum of runs. Going on beyond that maximum would need an e-process (Ville 1939; Ramdas et al. 2023).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from faultbed.harness.ledger.statistics.decision import Look

__all__ = ["MOST", "fewest_runs", "look_at", "looks"]

MOST = 100
"""Maximum number of runs of a pool that is analysed more than once."""
_FIRST_SHARE = 0.4


def fewest_runs(tail: float, *, worth: float = 1.0) -> int:
    """Return the smallest number of runs whose signs can decide at this tail: 8 for 0.5 %.

    `worth` is how many independent runs one of them counts for.
    """
    return math.ceil(math.ceil(-math.log2(tail) - 1e-9) / worth)


def looks(most: int, tail: float, *, worth: float = 1.0) -> tuple[Look, ...]:
    """Return the analyses of a pool of at most so many runs, in order; none if so few runs never decide.

    9 (0.2 %) and 12 (0.3 %) for 12 runs and a tail of 0.5 %. `worth` is as in `fewest_runs`.

    Raises:
        ValueError: more than `MOST` runs.
    """
    if most > MOST:
        raise ValueError(f"{most} runs: a pool is analysed after at most {MOST}; give fewer")
    first = fewest_runs(_FIRST_SHARE * tail, worth=worth)
    if most <= first:
        return (Look(runs=most, tail=tail),) if most >= fewest_runs(tail, worth=worth) else ()
    later = [first]
    while later[-1] < most:
        later.append(min(most, math.ceil(later[-1] * 4 / 3)))
    rest = (1 - _FIRST_SHARE) * tail / (len(later) - 1)
    return tuple(Look(runs=runs, tail=_FIRST_SHARE * tail if runs == first else rest) for runs in later)


def look_at(planned: Sequence[Look], runs: int) -> tuple[Look, ...]:
    """Return the analyses that are due after so many runs."""
    return tuple(look for look in planned if look.runs <= runs)
