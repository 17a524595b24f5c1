"""Runs that have no value: they count against whichever verdict would be given. Pure.

A run may be missing because it was bad (unproven, ended early, no value), so that nothing about it may be assumed. The
verdict has to hold for the least favourable value of each (Horowitz and Manski 2000, J. Am. Stat. Assoc. 95:77). A run
may be replaced only for a reason that was known before its workload began.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

__all__ = ["known_values", "with_missing"]


def known_values(values: Iterable[float | None]) -> tuple[tuple[float, ...], int]:
    """Return the finite values, and how many are missing or no finite number."""
    given = tuple(values)
    known = tuple(value for value in given if value is not None and math.isfinite(value))
    return known, len(given) - len(known)


def with_missing(known: Sequence[float], missing: int, *, worst: float) -> tuple[float, ...]:
    """Return the known values, and for each missing one the value that is least favourable for a verdict."""
    return (*known, *([worst] * missing))
