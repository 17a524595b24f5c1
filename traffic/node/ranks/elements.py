"""Element types and reductions on numpy arrays. numpy has no bf16, so it is stored as the upper half of an fp32.

All verified data consists of whole numbers so small that every sum of them is exact in the element type: fp16 holds
whole numbers up to 2^11 exactly, bf16 up to 2^8, fp32 up to 2^24.
"""

from __future__ import annotations

import numpy as np

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    import numpy.typing as npt

    Array = npt.NDArray[Any]

__all__ = ["EXACT", "STORED", "average", "reducer"]

STORED = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16, "int32": np.int32}
"""numpy type in which an element type is stored."""
EXACT = {"fp32": 1 << 24, "fp16": 1 << 11, "bf16": 1 << 8, "int32": (1 << 31) - 1}
"""Largest whole number up to which all whole numbers are exact."""


def _widened(array: Array) -> Array:
    """Convert bf16 to fp32, whose upper half is the bf16."""
    return (array.astype(np.uint32) << 16).view(np.float32)


def _narrowed(array: Array) -> Array:
    """Convert finite fp32 to bf16, rounded to nearest, ties to even."""
    bits = array.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def reducer(dtype: str, redop: str) -> Callable[[Array, Array], None]:
    """Return a function that reduces its second argument into its first one, in place."""
    function: Any = np.maximum if redop == "max" else np.add  # an average is a sum that is divided at the end

    def plain(target: Array, source: Array) -> None:
        function(target, source, out=target)

    def halves(target: Array, source: Array) -> None:
        target[:] = _narrowed(function(_widened(target), _widened(source)))

    return halves if dtype == "bf16" else plain


def average(array: Array, ranks: int, dtype: str) -> None:
    """Divide a sum by the number of ranks, in place. Integers are truncated, as in NCCL."""
    if dtype == "bf16":
        array[:] = _narrowed(_widened(array) / np.float32(ranks))
    elif dtype == "int32":
        array[:] = np.trunc(array / ranks).astype(np.int32)
    else:
        np.divide(array, array.dtype.type(ranks), out=array)
