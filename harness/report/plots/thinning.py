"""What a chart draws of long data: not more than it has pixels for, and all that stands out. Pure."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["extremes", "longest", "spans"]

_WIDE, _NARROW = 480, 200


def spans(*, narrow: bool) -> int:
    """Into how many spans of equal length a chart's time is cut: each is two pixels or so."""
    return _NARROW if narrow else _WIDE


def extremes(values: NDArray[np.float64], most: int) -> NDArray[np.intp]:
    """Which values to draw, in their order: the lowest and the highest of each of `most` spans, and both ends.

    A dip of one value stays as deep as it is, which a mean would fill. All, where there are not more than that.
    """
    if len(values) <= 2 * most:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), most + 1).astype(np.intp)
    kept = [0, len(values) - 1]
    for start, end in itertools.pairwise(edges):
        kept += [start + np.argmin(values[start:end]), start + np.argmax(values[start:end])]
    return np.unique(kept)


def longest(starts: NDArray[np.float64], lengths: NDArray[np.float64], width: float) -> NDArray[np.intp]:
    """Which of these to draw, in their order: of all that begin in the same span of `width`, the longest.

    Args:
        starts: growing; as long as `lengths`.
        lengths: what is compared; not below zero.
        width: of a span, in the unit of `starts`; above zero.
    """
    if not len(starts):
        return np.arange(0)
    span = np.floor((starts - starts[0]) / width)
    by_length = np.lexsort((lengths, span))
    last_of_its_span = np.append(np.diff(span[by_length]) > 0, True)
    return np.sort(by_length[last_of_its_span])
