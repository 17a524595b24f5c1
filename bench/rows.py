"""Rows of the bench's tables. Cells: name, median, spread, goal, whether the goal is reached or undecided."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from faultbed.harness.confidence import Interval

__all__ = ["MISSED", "OPEN", "REACHED", "Row", "decided", "mark", "ratio"]

Row = tuple[str, ...]
REACHED, MISSED, OPEN = "reached", "missed", "undecided"


def mark(*, reached: bool) -> str:
    """Return the last cell of a row without an interval: whether its goal is reached."""
    return REACHED if reached else MISSED


def decided(interval: Interval, *, least: float = -math.inf, most: float = math.inf) -> str:
    """Return the last cell of a row with an interval: undecided unless all of it is inside or outside the goal.

    The goal is from `least` to `most`.
    """
    if least <= interval.low and interval.high <= most:
        return REACHED
    return MISSED if interval.high < least or interval.low > most else OPEN


def ratio(title: str, ratios: Sequence[float], least: float) -> Row:
    """Return a row about ratios whose median must be `least` or more."""
    middle = statistics.median(ratios)
    return (
        title,
        f"{middle:.2f}",
        f"{min(ratios):.2f}..{max(ratios):.2f}, n={len(ratios)}",
        f">= {least:g}",
        mark(reached=middle >= least),
    )
