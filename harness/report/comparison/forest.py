"""Lay out a forest plot: ratios with their intervals around a line at 1, in percent of its width. Pure.

The scale is logarithmic and symmetric, so that half and double are equally far from 1. Values beyond the scale end in
an arrow: one extreme ratio must not compress all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from faultbed.harness.report.comparison.compare import Row

__all__ = ["Forest", "Mark", "Tick", "forest"]

_LEAST, _MOST = 1.02, 4.0
"""Minimum and maximum ratio at the end of the scale."""
_ROOM = 1.06
"""Factor by which the scale is wider than its widest value, so that nothing ends exactly at the edge."""
_TICKS = (1.01, 1.02, 1.05, 1.1, 1.25, 1.5, 2.0, 3.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A ratio on the axis."""

    left: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Marks of one row on the scale.

    `dot` is the ratio, `left` and `width` the deciding interval, `own_left` and `own_width` the runs' own interval
    within it. `left` or `own_left` None: there is no such interval. `below` and `above`: a value lies beyond that end
    of the scale.
    """

    row: Row
    dot: float
    left: float | None
    width: float
    own_left: float | None
    own_width: float
    below: bool
    above: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """The marks and their common axis."""

    marks: tuple[Mark, ...]
    ticks: tuple[Tick, ...]


def forest(rows: Sequence[Row]) -> Forest:
    """Return marks of the rows that have a ratio, in order. A ratio of 0 lies beyond any scale."""
    shown = [(row, row.ratio) for row in rows if row.ratio is not None]
    reach = _reach([row for row, _ in shown])

    def place(ratio: float) -> float:
        if ratio <= 0 or math.isinf(ratio):
            return 0.0 if ratio <= 0 else 100.0
        return min(max(50 + 50 * math.log(ratio) / reach, 0.0), 100.0)

    marks = []
    for row, ratio in shown:
        ends = [
            end for interval in (row.interval, row.own) if interval is not None for end in (interval.low, interval.high)
        ]
        ends.append(ratio)
        own, wide = row.own, row.interval
        marks.append(
            Mark(
                row=row,
                dot=place(ratio),
                left=None if wide is None else place(wide.low),
                width=0.0 if wide is None else place(wide.high) - place(wide.low),
                own_left=None if own is None else place(own.low),
                own_width=0.0 if own is None else place(own.high) - place(own.low),
                below=min(ends) < math.exp(-reach),
                above=max(ends) > math.exp(reach),
            )
        )
    return Forest(marks=tuple(marks), ticks=_ticks(reach, place))


def _reach(rows: Sequence[Row]) -> float:
    """Return the logarithm at both ends of the scale."""
    values = [row.ratio for row in rows if row.ratio is not None]
    values += [end for row in rows if row.interval for end in (row.interval.low, row.interval.high)]
    logs = [abs(math.log(value)) for value in values if 0 < value < math.inf]
    return min(max([_ROOM * log for log in logs] + [math.log(_LEAST)]), math.log(_MOST))


def _ticks(reach: float, place: Callable[[float], float]) -> tuple[Tick, ...]:
    """Return ticks at 1 and, on both sides, at the largest round ratio that fits and at one near half of that."""
    fitting = [tick for tick in _TICKS if math.log(tick) <= reach * 0.92]
    near_half = [tick for tick in fitting if math.log(tick) <= reach * 0.55]
    chosen = {1.0, *fitting[-1:], *near_half[-1:]}
    ratios = sorted({*chosen, *(1 / ratio for ratio in chosen)})
    return tuple(Tick(left=place(ratio), text=f"{ratio:.2f}".rstrip("0").rstrip(".")) for ratio in ratios)
