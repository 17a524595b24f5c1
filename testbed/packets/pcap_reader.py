"""Read pcap files (draft-ietf-opsawg-pcap) in bulk."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from faultbed.testbed.packets.frames import LARGEST_FRAME, Frames, damage_at, records_at
from faultbed.testbed.packets.record_chain import Guesses, windows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Indices = NDArray[np.int64]

__all__ = ["parse_pcap"]

_MAGIC = {0xA1B2C3D4: 1_000, 0xA1B23C4D: 1}
"""Nanoseconds of the second number of a time, by the file's first four bytes."""
_FILE_HEADER, _HEADER = 24, 16
_NS_PER_S = 1_000_000_000


def parse_pcap(data: NDArray[np.uint8], end: int) -> Frames | None:
    """Return the frames of the first `end` bytes; None if they are no pcap file."""
    for order in "<>":
        magic = int.from_bytes(data[:4].tobytes(), "little" if order == "<" else "big")
        if magic in _MAGIC and end >= _FILE_HEADER:
            return _parse(data, end, order, _MAGIC[magic])
    return None


def _parse(data: NDArray[np.uint8], end: int, order: str, unit_ns: int) -> Frames:
    (link,) = struct.unpack_from(f"{order}I", data.data, 20)
    most_parts = _NS_PER_S // unit_ns
    kept = [np.zeros((5, 0), dtype=np.int64)]
    at, damage = _FILE_HEADER, ""
    for begin, until in windows(at, end):
        if at >= until:
            continue
        records = _guess(data, begin, until, at, order)
        records = records[:, _is_valid(records, most_parts) & (_end_of(records) <= end)]
        guesses = Guesses.of(records[0], _end_of(records))
        while at < until and not damage:
            stretch = guesses.stretch(at)
            record = _headers(data, np.array([at], dtype=np.int64), order) if stretch is None else records[:, stretch]
            damage = "" if stretch is not None else _damage(record, end, most_parts)
            if not damage:
                kept.append(record)
                at = int(_end_of(record)[-1])
        if damage:
            break
    start, seconds, parts, captured, length = np.concatenate(kept, axis=1)
    return Frames(
        data=data,
        start=start + _HEADER,
        captured=captured,
        length=length,
        time_ns=seconds * _NS_PER_S + parts * unit_ns,
        interface=np.zeros(len(start), dtype=np.int16),
        outbound=np.full(len(start), -1, dtype=np.int8),
        interfaces=("",),
        link_types=np.array([link & 0xFFFF], dtype=np.int64),
        damage=damage,
    )


def _guess(data: NDArray[np.uint8], begin: int, until: int, at: int, order: str) -> Indices:
    """Return the headers at all places whose time has the upper 16 bits of that of the record at byte `at`.

    Records of 18 hours have them in common.
    """
    place = 2 if order == "<" else 0
    first, second = data[at + place : at + place + 2].tolist()
    marked = data[begin + place : until + place] == first
    marked &= data[begin + place + 1 : until + place + 1] == second
    return _headers(data, np.flatnonzero(marked) + begin, order)


def _headers(data: NDArray[np.uint8], at: Indices, order: str) -> Indices:
    """Return offset, seconds, part of the second, captured and original length of records: an array of five rows."""
    words = records_at(data, at, np.dtype((f"{order}u4", 4)))
    return np.vstack([at, words.T.astype(np.int64)])


def _end_of(records: Indices) -> Indices:
    end: Indices = records[0] + _HEADER + records[3]
    return end


def _is_valid(records: Indices, most_parts: int) -> NDArray[np.bool_]:
    _, _, parts, captured, length = records
    valid: NDArray[np.bool_] = (captured <= LARGEST_FRAME) & (captured <= length) & (length > 0) & (parts < most_parts)
    return valid


def _damage(record: Indices, end: int, most_parts: int) -> str:
    """Return why one record cannot be read; "" if it can be."""
    at, _, part, captured, length = record[:, 0].tolist()
    if at + _HEADER <= end and not _is_valid(record, most_parts)[0]:
        problem = f"an invalid record header (captured {captured:,} of {length:,} bytes, {part:,} of a second)"
        return damage_at(at, end, problem)
    return damage_at(at, end, "the file ends within a record") if at + _HEADER + captured > end else ""
