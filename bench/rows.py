"""A row of the bench's tables: what, its median, its spread, its goal, and whether that is reached or not decided."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.confidence import Interval

__all__ = ["MISSED", "OPEN", "REACHED", "Row", "decided", "mark", "ratio"]

Row = tuple[str, ...]
REACHED, MISSED, OPEN = "reached", "missed", "undecided"


def mark(*, reached: bool) -> str:
    """The last cell."""
    return REACHED if reached else MISSED


def decided(interval: Interval, *, least: float = -math.inf, most: float = math.inf) -> str:
    """The last cell of a row with an interval: it decides only when all of it is on one side of the goal."""
    if least <= interval.low and interval.high <= most:
        return REACHED
    return MISSED if interval.high < least or interval.low > most else OPEN


def ratio(what: str, ratios: Sequence[float], least: float) -> Row:
    """A row of ratios whose median is to be `least` or more."""
    middle = sorted(ratios)[len(ratios) // 2]
    return (
        what,
        f"{middle:.2f}",
        f"{min(ratios):.2f}..{max(ratios):.2f}, n={len(ratios)}",
        f">= {least:g}",
        mark(reached=middle >= least),
    )
