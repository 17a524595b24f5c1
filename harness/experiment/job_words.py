"""Parse the settings of a job as users write them.

A grid is `tp=2,dp=2`, a phase `dp:all-reduce:1MiB:ring`, a checkpoint `4MiB:10:async`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from faultbed.harness.quantities import parse_size_bytes
from faultbed.traffic.workloads.collective import AUTO
from faultbed.traffic.workloads.job import JobPhase
from faultbed.traffic.workloads.storage_service import MODES, Storage

__all__ = ["Reader", "parse_grid", "parse_phase", "storage_of"]

T = TypeVar("T")


def parse_grid(text: str) -> tuple[tuple[str, int], ...]:
    """Parse dimensions and their sizes, fastest first, such as `tp=2,dp=2`.

    Raises:
        ValueError: the text has another form.
    """
    dimensions = []
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name.strip() or not size.strip().isdecimal():
            raise ValueError(f'"{part}" is not a dimension and its size, as in tp=2')
        dimensions.append((name.strip(), int(size)))
    return tuple(dimensions)


def parse_phase(text: str) -> JobPhase:
    """Parse a collective along a dimension, such as `dp:all-reduce:1MiB`.

    Raises:
        ValueError: the text has another form, or its size is invalid.
    """
    along, _, rest = text.partition(":")
    name, _, rest = rest.partition(":")
    size, _, algorithm = rest.partition(":")
    if not (along and name and size):
        raise ValueError("write it as in dp:all-reduce:1MiB, or dp:all-reduce:1MiB:ring")
    return JobPhase(along=along, collective=name, size_bytes=parse_size_bytes(size), algorithm=algorithm or AUTO)


def _checkpoint(text: str) -> tuple[int, int, str]:
    """Parse size, interval in iterations and mode of checkpoints, such as `4MiB:10:async`.

    Raises:
        ValueError: the text has another form.
    """
    size, _, rest = text.partition(":")
    every, _, mode = rest.partition(":")
    if every and not every.isdecimal():
        raise ValueError(f'"{every}" is not a number of iterations; write it as in 4MiB, 4MiB:10 or 4MiB:10:async')
    return parse_size_bytes(size), int(every or 10), mode or "sync"


class Reader(Protocol):
    """Function that parses one setting, and names the setting in the error if its text is invalid."""

    def __call__(self, parser: Callable[[str], T], text: str, name: str) -> T:
        """Return the parsed text. `name` is the setting in an error message."""


def storage_of(host: str, ingest: str | None, checkpoint: str | None, read: Reader) -> Storage:
    """Return a job's storage on `host` with the settings `ingest` and `checkpoint`."""
    size_bytes, every, mode = read(_checkpoint, checkpoint, "checkpoint") if checkpoint else (0, 1, MODES[0])
    return Storage(
        host=host,
        ingest_bytes=read(parse_size_bytes, ingest, "ingest") if ingest else 0,
        checkpoint_bytes=size_bytes,
        every=every,
        mode=mode,
    )
