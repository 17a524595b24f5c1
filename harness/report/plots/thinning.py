"""Thin long data for a chart: no more than its pixels can show, without losing extremes. Pure."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["extremes", "longest", "spans"]

_WIDE, _NARROW = 480, 200


def spans(*, narrow: bool) -> int:
    """Return into how many equal spans a chart's time is divided; each is about two pixels."""
    return _NARROW if narrow else _WIDE


def extremes(values: NDArray[np.float64], most: int) -> NDArray[np.intp]:
    """Return the indices to draw: the minimum and maximum of each of `most` spans, and both ends.

    A dip of one value keeps its depth, which a mean would hide. All indices if there are few values.
    """
    if len(values) <= 2 * most:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), most + 1).astype(np.intp)
    kept = [0, len(values) - 1]
    for start, end in itertools.pairwise(edges):
        kept += [start + np.argmin(values[start:end]), start + np.argmax(values[start:end])]
    return np.unique(kept)


def longest(starts: NDArray[np.float64], lengths: NDArray[np.float64], width: float) -> NDArray[np.intp]:
    """Return the indices to draw: the longest of all values that begin in the same span of `width`.

    Args:
        starts: increasing; as long as `lengths`.
        lengths: the values to compare; not below zero.
        width: length of a span, in the unit of `starts`; above zero.
    """
    if not len(starts):
        return np.arange(0)
    span = np.floor((starts - starts[0]) / width)
    by_length = np.lexsort((lengths, span))
    last_of_its_span = np.append(np.diff(span[by_length]) > 0, True)
    return np.sort(by_length[last_of_its_span])
