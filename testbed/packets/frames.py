"""Frames of a capture as arrays, and how numbers are read at any place of a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Indices = NDArray[np.int64]

__all__ = ["LARGEST_FRAME", "PADDING", "Frames", "column", "damage_at", "heads_at", "records_at"]

LARGEST_FRAME = 262_144
"""The largest snap length that libpcap accepts (MAXIMUM_SNAPLEN); a longer record is a damaged length."""
PADDING = 128
"""Zero bytes behind a file's data, so that a read beyond a truncated frame returns zeros instead of an error."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frames:
    """Frames of one capture, in file order: where each begins in `data`, and the file's metadata.

    `captured` and `length` are bytes in the file and on the wire. `outbound` is 1, 0, or -1 if the file does not say.
    `interfaces` are names (or "" if the file has none); `link_types` has one number for each (`link_types`). `damage`
    says at which byte a damaged file stops being readable; "": all of the file was read. `dropped` are frames that were
    not written, by the statistics in the file.
    """

    data: NDArray[np.uint8]
    start: Indices
    captured: Indices
    length: Indices
    time_ns: Indices
    interface: NDArray[np.int16]
    outbound: NDArray[np.int8]
    interfaces: tuple[str, ...]
    link_types: NDArray[np.int64]
    damage: str = ""
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.start)

    def part(self, rows: slice) -> Frames:
        """Return consecutive frames of the capture, which lie in the same data."""
        return Frames(
            data=self.data,
            start=self.start[rows],
            captured=self.captured[rows],
            length=self.length[rows],
            time_ns=self.time_ns[rows],
            interface=self.interface[rows],
            outbound=self.outbound[rows],
            interfaces=self.interfaces,
            link_types=self.link_types,
            damage=self.damage,
            dropped=self.dropped,
        )


def records_at(data: NDArray[np.uint8], at: Indices, layout: np.dtype[Any]) -> NDArray[Any]:
    """Gather a number or record of `layout` at each byte offset."""
    every = np.ndarray((len(data) - layout.itemsize + 1,), dtype=layout, buffer=data.data, strides=(1,))
    records: NDArray[Any] = every[at]
    return records


def heads_at(data: NDArray[np.uint8], at: Indices, size: int) -> NDArray[np.uint8]:
    """Gather the `size` bytes from each offset on, as rows. That takes as long as to gather one byte of each."""
    return records_at(data, at, np.dtype((np.void, size))).view(np.uint8).reshape(len(at), size)


def column(heads: NDArray[np.uint8], at: int, layout: str) -> NDArray[Any]:
    """Return the number (of a numpy type such as `>u2`) at byte `at` of each row, without a copy."""
    return heads[:, at : at + np.dtype(layout).itemsize].view(layout)[:, 0]


def damage_at(at: int, end: int, problem: str) -> str:
    """Return the sentence of `Frames.damage`: where a file of `end` bytes stops being readable, and why."""
    return f"byte {at:,}: {problem}; {end - at:,} bytes from there on are not read"
