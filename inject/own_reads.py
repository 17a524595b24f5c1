"""Record when the controller itself reads from the lab: its load must not be taken for an effect of a fault."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

__all__ = ["recorded"]


@contextlib.contextmanager
def recorded(reads: list[tuple[int, int]]) -> Iterator[None]:
    """Append begin and end (controller ns) of the block to `reads`, also after an error."""
    begin_ns = time.monotonic_ns()
    try:
        yield
    finally:
        reads.append((begin_ns, time.monotonic_ns()))
