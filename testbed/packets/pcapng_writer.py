"""Write pcapng files (draft-ietf-opsawg-pcapng) in bulk."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from faultbed.testbed.packets.frames import Frames

    Indices = NDArray[np.int64]

__all__ = ["write_pcapng"]

_SHB, _IDB, _EPB = 0x0A0D0D0A, 1, 6
_AT_ONCE = 50_000
"""Frames that are written in one batch."""

_EPB_HEAD = np.dtype([(name, "<u4") for name in ("kind", "total", "interface", "high", "low", "captured", "length")])


def write_pcapng(path: Path, frames: Frames, *, comment: str = "", order: Indices | None = None) -> None:
    """Write frames with nanosecond times, interface names and directions. `order` selects frames and their order."""
    chosen = np.arange(len(frames), dtype=np.int64) if order is None else order
    with path.open("wb") as file:
        file.write(_section_header(comment))
        for name, link in zip(frames.interfaces, frames.link_types, strict=True):
            file.write(_interface_block(name, int(link)))
        for begin in range(0, len(chosen), _AT_ONCE):
            file.write(_packet_blocks(frames, chosen[begin : begin + _AT_ONCE]))


def _packet_blocks(frames: Frames, chosen: Indices) -> bytes:
    """Build enhanced packet blocks as rows of the longest length, each cut to its own length."""
    captured, time_ns = frames.captured[chosen], frames.time_ns[chosen]
    padded = captured + 3 & ~3
    width, total = int(padded.max(initial=0)), 28 + padded + 16
    rows = np.zeros((len(chosen), 28 + width + 16), dtype=np.uint8)
    head = np.zeros(len(chosen), dtype=_EPB_HEAD)
    head["kind"], head["total"], head["interface"] = _EPB, total, frames.interface[chosen]
    head["high"], head["low"] = time_ns >> 32, time_ns & 0xFFFFFFFF
    head["captured"], head["length"] = captured, frames.length[chosen]
    rows[:, :28] = head.view(np.uint8).reshape(len(chosen), 28)
    reach = np.arange(width, dtype=np.int64)
    source = np.minimum(frames.start[chosen][:, None] + reach, len(frames.data) - 1)
    rows[:, 28 : 28 + width] = np.where(reach < captured[:, None], frames.data[source], 0)
    direction = frames.outbound[chosen]
    tail = np.zeros((len(chosen), 4), dtype="<u4")
    tail[:, 0], tail[:, 3] = 2 | 4 << 16, total
    tail[:, 1] = np.where(direction == 1, 2, np.where(direction == 0, 1, 0))
    place = 28 + padded[:, None] + np.arange(16)
    rows[np.arange(len(chosen))[:, None], place] = tail.view(np.uint8).reshape(len(chosen), 16)
    return rows[np.arange(rows.shape[1]) < total[:, None]].tobytes()


def _option(code: int, value: bytes) -> bytes:
    return struct.pack("<HH", code, len(value)) + value + bytes(-len(value) % 4)


def _block(kind: int, body: bytes) -> bytes:
    total = len(body) + 12
    return struct.pack("<II", kind, total) + body + struct.pack("<I", total)


def _section_header(comment: str) -> bytes:
    options = (_option(1, comment.encode()) if comment else b"") + _option(4, b"faultbed") + _option(0, b"")
    return _block(_SHB, struct.pack("<IHHq", 0x1A2B3C4D, 1, 0, -1) + options)


def _interface_block(name: str, link: int) -> bytes:
    options = _option(2, name.encode()) + _option(9, b"\x09") + _option(0, b"")
    return _block(_IDB, struct.pack("<HHI", link, 0, 0) + options)
