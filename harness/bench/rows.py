"""A row of the bench's tables: what, its median, its spread, its goal, and whether that is reached."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["MISSED", "REACHED", "Row", "mark", "ratio"]

Row = tuple[str, ...]
REACHED, MISSED = "reached", "missed"


def mark(*, reached: bool) -> str:
    """The last cell."""
    return REACHED if reached else MISSED


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
