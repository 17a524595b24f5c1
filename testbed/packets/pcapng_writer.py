"""Write pcapng files (draft-ietf-opsawg-pcapng) in bulk."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from faultbed.testbed.packets.frames import Frames

    Indices = NDArray[np.int64]

__all__ = ["write_pcapng"]

_SHB, _IDB, _ISB, _EPB = 0x0A0D0D0A, 1, 5, 6
_COMMENT, _IF_DROPPED = 1, 5
"""Options: opt_comment, and isb_ifdrop of a statistics block."""
_LEAST_EPB, _MOST_TEXT = 32, 65_000
_AT_ONCE = 50_000
"""Frames that are written in one batch."""

_EPB_HEAD = np.dtype([(name, "<u4") for name in ("kind", "total", "interface", "high", "low", "captured", "length")])


def write_pcapng(
    path: Path,
    frames: Frames,
    *,
    comment: str = "",
    comments: Mapping[int, str] | None = None,
    order: Indices | None = None,
) -> None:
    """Write frames with nanosecond times, interface names and directions, and how many were dropped.

    A file of damaged frames ends within a block, so that its readers know, too.

    Args:
        path: the file.
        frames: what is written.
        comment: the comment of the file.
        comments: those of frames, by their number from 1.
        order: positions of the frames that are written, in their order; None: all.

    Raises:
        OSError: the file cannot be written.
        ValueError: a frame's time is before 1970, which the format cannot hold.
    """
    chosen = np.arange(len(frames), dtype=np.int64) if order is None else order
    if len(chosen) and int(frames.time_ns[chosen].min()) < 0:
        raise ValueError("a frame has a time before 1970")
    commented = np.array(sorted(comments or ()), dtype=np.int64) - 1
    with path.open("wb") as file:
        file.write(_section_header(comment))
        for name, link in zip(frames.interfaces, frames.link_types, strict=True):
            file.write(_interface_block(name, int(link)))
        for begin in range(0, len(chosen), _AT_ONCE):
            batch, written = chosen[begin : begin + _AT_ONCE], 0
            for at in np.flatnonzero(np.isin(batch, commented)).tolist():
                file.write(_packet_blocks(frames, batch[written:at]))
                text = (comments or {})[int(batch[at]) + 1]
                file.write(_with_comment(_packet_blocks(frames, batch[at : at + 1]), text))
                written = at + 1
            file.write(_packet_blocks(frames, batch[written:]))
        if frames.dropped:
            dropped = _option(_IF_DROPPED, struct.pack("<Q", frames.dropped)) + _option(0, b"")
            file.write(_block(_ISB, struct.pack("<III", 0, 0, 0) + dropped))
        if frames.damage:
            file.write(struct.pack("<II", _EPB, _LEAST_EPB))


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


def _with_comment(block: bytes, text: str) -> bytes:
    """Insert a comment behind the options of a packet block, before the end of options and the block's length."""
    body = block[8:-8] + _option(_COMMENT, _text(text)) + _option(0, b"")
    return _block(_EPB, body)


def _text(text: str) -> bytes:
    """Return the bytes of a comment; an option has at most 65,535."""
    content = text.encode()
    if len(content) <= _MOST_TEXT:
        return content
    return content[:_MOST_TEXT].decode(errors="ignore").encode() + b" ..."


def _option(code: int, value: bytes) -> bytes:
    return struct.pack("<HH", code, len(value)) + value + bytes(-len(value) % 4)


def _block(kind: int, body: bytes) -> bytes:
    total = len(body) + 12
    return struct.pack("<II", kind, total) + body + struct.pack("<I", total)


def _section_header(comment: str) -> bytes:
    options = (_option(_COMMENT, _text(comment)) if comment else b"") + _option(4, b"faultbed") + _option(0, b"")
    return _block(_SHB, struct.pack("<IHHq", 0x1A2B3C4D, 1, 0, -1) + options)


def _interface_block(name: str, link: int) -> bytes:
    options = _option(2, name.encode()) + _option(9, b"\x09") + _option(0, b"")
    return _block(_IDB, struct.pack("<HHI", link, 0, 0) + options)
