"""Record when the controller itself reads from the lab: its load must not be taken for an effect of a fault."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

__all__ = ["recorded"]

_UNENDED_NS = 1 << 62
"""End of a read that is not over. On a busy machine a read takes seconds, and goodput is judged meanwhile, too."""


@contextlib.contextmanager
def recorded(reads: list[tuple[int, int]]) -> Iterator[None]:
    """Keep begin and end (controller ns) of the block in `reads`, also after an error. Until its end, it never ends."""
    unended = (time.monotonic_ns(), _UNENDED_NS)
    reads.append(unended)
    try:
        yield
    finally:
        reads[reads.index(unended)] = (unended[0], time.monotonic_ns())
