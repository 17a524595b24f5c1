"""Capture files: pcap and pcapng read in bulk, pcapng written in bulk.

Only the walk from record to record is a loop; what is in the records is found by array arithmetic afterwards. pcapng is
draft-ietf-opsawg-pcapng, pcap draft-ietf-opsawg-pcap.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from testbed.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    Indices = NDArray[np.int64]

__all__ = ["ETHERNET", "Frames", "read", "write_pcapng"]

ETHERNET, RAW_IP = 1, 101
_SHB, _IDB, _SPB, _EPB = 0x0A0D0D0A, 1, 3, 6
_PCAP_MAGIC = {0xA1B2C3D4: 1_000, 0xA1B23C4D: 1}
_NS_PER_S = 1_000_000_000
_AT_ONCE = 50_000
"""Frames that are laid out at a time when writing."""
_TAIL = 128
"""Zero bytes kept behind the data, so that a read beyond a cut frame finds nothing instead of an error."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frames:
    """Frames of one capture, in file order: where each begins in `data`, and what the file says about it.

    `captured` and `length` are bytes in the file and on the wire. `outbound` is 1, 0, or -1 where the file is silent.
    `interfaces` are names (or "" where a file has none); `link_types` has one number for each (1: Ethernet).
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

    def __len__(self) -> int:
        return len(self.start)


def read(path: Path) -> Frames:
    """Read a pcap or pcapng file, of either byte order. A record that the file's end cuts off is left out.

    Raises:
        UsageError: not readable, not a capture, or of a link type other than Ethernet and raw IP.
    """
    try:
        size = path.stat().st_size
        data = np.zeros(size + _TAIL + -size % 4, dtype=np.uint8)
        with path.open("rb") as file:
            size = file.readinto(data[:size].data)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}; name a capture file (pcap or pcapng)") from error
    try:
        frames = _parse(data, size)
    except (struct.error, ValueError, IndexError) as error:
        raise UsageError(f"{path}: damaged capture file: {error}") from error
    if frames is None:
        raise UsageError(f"{path}: neither pcap nor pcapng; compressed files are to be unpacked first")
    strange = sorted({int(each) for each in frames.link_types} - {ETHERNET, RAW_IP})
    if strange:
        raise UsageError(f"{path}: link type {strange[0]}; only Ethernet (1) and raw IP (101) are read")
    return frames


def _parse(data: NDArray[np.uint8], size: int) -> Frames | None:
    if data[:4].tobytes() == _SHB.to_bytes(4, "big"):
        return _parse_pcapng(data, size)
    for order in ("<", ">"):
        if size >= 24:  # noqa: PLR2004 - the file header
            (magic,) = struct.unpack_from(f"{order}I", data.data)
            if magic in _PCAP_MAGIC:
                return _parse_pcap(data, size, order, _PCAP_MAGIC[magic])
    return None


def _words(data: NDArray[np.uint8], at: Indices, order: str) -> Indices:
    """32-bit words at any byte offsets."""
    parts = [data[at + index].astype(np.int64) for index in range(4)]
    if order == ">":
        parts.reverse()
    return parts[0] | parts[1] << 8 | parts[2] << 16 | parts[3] << 24


def _aligned(data: NDArray[np.uint8], order: str) -> NDArray[np.uint32]:
    """All of a file as 32-bit words; without a copy when the byte order is this machine's."""
    return data.view(f"{order}u4").astype(np.uint32, copy=False)


def _parse_pcap(data: NDArray[np.uint8], end: int, order: str, unit_ns: int) -> Frames:
    content = data.data
    (link,) = struct.unpack_from(f"{order}I", content, 20)
    read_length = struct.Struct(f"{order}I").unpack_from
    starts, at = [], 24
    while at + 16 <= end:
        (captured,) = read_length(content, at + 8)
        if at + 16 + captured > end:
            break
        starts.append(at)
        at += 16 + captured
    records = np.array(starts, dtype=np.int64)
    return Frames(
        data=data,
        start=records + 16,
        captured=_words(data, records + 8, order),
        length=_words(data, records + 12, order),
        time_ns=_words(data, records, order) * _NS_PER_S + _words(data, records + 4, order) * unit_ns,
        interface=np.zeros(len(records), dtype=np.int16),
        outbound=np.full(len(records), -1, dtype=np.int8),
        interfaces=("",),
        link_types=np.array([link & 0xFFFF], dtype=np.int64),
    )


@dataclass(slots=True, kw_only=True)
class _Interface:
    name: str
    link: int
    per_s: int


def _parse_pcapng(data: NDArray[np.uint8], size: int) -> Frames:
    """All blocks of all sections; interfaces are numbered over the whole file."""
    interfaces: list[_Interface] = []
    parts: list[tuple[Indices, str, int]] = []
    at = 0
    while at + 28 <= size and data[at : at + 4].tobytes() == _SHB.to_bytes(4, "big"):
        order = "<" if data[at + 8 : at + 12].tobytes() == b"\x4d\x3c\x2b\x1a" else ">"
        first = len(interfaces)
        records, at = _walk_section(data, at, size, order, interfaces)
        parts.append((records, order, first))
    found = [_section(data, records, order, first, interfaces) for records, order, first in parts]
    columns: list[Indices] = [np.concatenate([each[index] for each in found]) for index in range(6)]
    start, captured, length, time_ns, interface, outbound = columns
    return Frames(
        data=data,
        start=start,
        captured=captured,
        length=length,
        time_ns=time_ns,
        interface=interface.astype(np.int16),
        outbound=outbound.astype(np.int8),
        interfaces=tuple(each.name for each in interfaces),
        link_types=np.array([each.link for each in interfaces], dtype=np.int64),
    )


def _walk_section(
    data: NDArray[np.uint8], at: int, end: int, order: str, interfaces: list[_Interface]
) -> tuple[Indices, int]:
    """Offsets of the enhanced packet blocks of the section that begins at `at`, and where it ends."""
    # Blocks are aligned to four bytes: plain words, read without a call for each.
    words = _aligned(data, order).data
    records: list[int] = []
    note, begin = records.append, at
    while at + 12 <= end:
        kind, length = words[at >> 2], words[(at >> 2) + 1]
        if length < 12 or length & 3:  # noqa: PLR2004 - the least a block can be
            raise ValueError(f"a block of {length} bytes at {at}")
        if at + length > end:
            return np.array(records, dtype=np.int64), end
        if kind == _EPB:
            note(at)
        elif kind == _SHB and at != begin:
            break
        elif kind == _IDB:
            interfaces.append(_read_interface(data[at + 8 : at + length - 4].tobytes(), order))
        elif kind == _SPB:
            raise ValueError("simple packet blocks carry no time")
        at += length
    return np.array(records, dtype=np.int64), at


def _read_interface(body: bytes, order: str) -> _Interface:
    (link,) = struct.unpack_from(f"{order}H", body)
    name, per_s, at = "", 1_000_000, 8
    while at + 4 <= len(body):
        code, size = struct.unpack_from(f"{order}HH", body, at)
        value = body[at + 4 : at + 4 + size]
        if code == 0:
            break
        if code == 2:  # noqa: PLR2004 - if_name
            name = value.decode(errors="replace")
        elif code == 9:  # noqa: PLR2004 - if_tsresol
            per_s = 2 ** (value[0] & 0x7F) if value[0] & 0x80 else 10 ** value[0]
        at += 4 + (size + 3 & ~3)
    return _Interface(name=name, link=link, per_s=per_s)


def _section(
    data: NDArray[np.uint8], records: Indices, order: str, first: int, interfaces: Sequence[_Interface]
) -> tuple[Indices, Indices, Indices, Indices, Indices, Indices]:
    words, at = _aligned(data, order), records >> 2

    def word(place: Indices) -> Indices:
        return words[place].astype(np.int64)

    interface = word(at + 2) + first
    if len(records) and int(interface.max()) >= len(interfaces):
        raise ValueError(f"a packet of interface {int(interface.max())}, which no block describes")
    ticks = word(at + 3) << 32 | word(at + 4)
    captured, start = word(at + 5), records + 28
    options = start + (captured + 3 & ~3) >> 2
    # epb_flags (code 2, 4 bytes) as the first option, where writers put it; its two low bits: 1 in, 2 out.
    has = options + 2 <= at + (word(at + 1) >> 2) - 1
    wanted = 2 | 4 << 16 if order == "<" else 2 << 16 | 4
    options = np.where(has, options, 0)
    flags = np.where(has & (words[options] == wanted), words[options + 1] & 3, 0)
    outbound = np.where(flags == 2, 1, np.where(flags == 1, 0, -1))  # noqa: PLR2004
    return start, captured, word(at + 6), _to_ns(ticks, interface, interfaces), interface, outbound


def _to_ns(ticks: Indices, interface: Indices, interfaces: Sequence[_Interface]) -> Indices:
    """Times of a section in ns, from its interfaces' units."""
    units = {each.per_s for each in interfaces}
    if units <= {_NS_PER_S}:
        return ticks
    per_s = np.array([each.per_s for each in interfaces], dtype=np.int64)[interface]
    # Seconds apart from the rest: ticks times 10**9 would overflow.
    return ticks // per_s * _NS_PER_S + (ticks % per_s) * _NS_PER_S // per_s


_EPB_HEAD = np.dtype([(name, "<u4") for name in ("kind", "total", "interface", "high", "low", "captured", "length")])


def write_pcapng(path: Path, frames: Frames, *, comment: str = "", order: Indices | None = None) -> None:
    """Write frames with nanosecond times, interface names and directions; `order` picks some, in its order."""
    chosen = np.arange(len(frames), dtype=np.int64) if order is None else order
    with path.open("wb") as file:
        file.write(_section_header(comment))
        for name, link in zip(frames.interfaces, frames.link_types, strict=True):
            file.write(_interface_block(name, int(link)))
        for begin in range(0, len(chosen), _AT_ONCE):
            file.write(_packet_blocks(frames, chosen[begin : begin + _AT_ONCE]))


def _packet_blocks(frames: Frames, chosen: Indices) -> bytes:
    """Enhanced packet blocks, laid out as rows of the longest one's length and cut to each one's own."""
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
