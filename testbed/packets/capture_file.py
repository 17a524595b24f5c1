"""Capture files: pcap and pcapng read in bulk, pcapng written in bulk.

Only the walk from record to record is a loop; array arithmetic then decodes the records. pcapng is
draft-ietf-opsawg-pcapng, pcap is draft-ietf-opsawg-pcap.

A damaged length makes the rest of the file unreadable, because neither format has a mark to resume at. The frames
before the damage are returned, and `Frames.damage` says where it is and how many bytes are not read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from faultbed.testbed.errors import UsageError
from faultbed.testbed.packets.link_types import ETHERNET, READ, refusal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    Indices = NDArray[np.int64]

__all__ = ["ETHERNET", "Frames", "read", "write_pcapng"]

_SHB, _IDB, _SPB, _EPB = 0x0A0D0D0A, 1, 3, 6
_OBSOLETE_PACKET = 2
_PCAP_MAGIC = {0xA1B2C3D4: 1_000, 0xA1B23C4D: 1}
_LARGEST_FRAME = 262_144
"""The largest snap length that libpcap accepts (MAXIMUM_SNAPLEN); a longer record is a damaged length."""
_MOST_INTERFACES = 32_767
_ISB = 5
_NO_COUNT = (1 << 64) - 1
_NO_PACKETS = frozenset({_SHB, 4, _ISB, 9, 10, 0xBAD, 0x40000BAD})
"""Blocks without packets: names, statistics, journal, secrets, custom ones (IANA's pcapng registry)."""
_ORDER_OF_MAGIC = {b"\x4d\x3c\x2b\x1a": "<", b"\x1a\x2b\x3c\x4d": ">"}
_EPB_BYTES = 32
"""Bytes of an enhanced packet block without its packet and options."""
_NS_PER_S = 1_000_000_000
_AT_ONCE = 50_000
"""Frames that are written in one batch."""
_TAIL = 128
"""Zero bytes after the data, so that a read beyond a truncated frame returns zeros instead of an error."""


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


def read(path: Path) -> Frames:
    """Read a pcap or pcapng file of either byte order, up to its end or to the first damage (`Frames.damage`).

    Raises:
        UsageError: the file is not readable, is not a capture, or no interface has a link type that is read. Frames of
            one such interface among others are kept, but nothing decodes them.
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
        raise UsageError(f"{path}: damaged capture file: {error}; capture again") from error
    if frames is None:
        raise UsageError(f"{path}: neither pcap nor pcapng; unpack a compressed file first")
    used = frames.link_types[np.unique(frames.interface)] if len(frames) else frames.link_types
    strange = [int(link_type) for link_type in used if link_type not in READ]
    if strange and len(strange) == len(used):
        raise UsageError(f"{path}: {refusal(strange[0])}")
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
    """Return 32-bit words at any byte offsets."""
    parts = [data[at + index].astype(np.int64) for index in range(4)]
    if order == ">":
        parts.reverse()
    return parts[0] | parts[1] << 8 | parts[2] << 16 | parts[3] << 24


def _aligned(data: NDArray[np.uint8], order: str) -> NDArray[np.uint32]:
    """Return all of a file as 32-bit words, without a copy if the byte order is this machine's."""
    return data.view(f"{order}u4").astype(np.uint32, copy=False)


def _unread(at: int, end: int, problem: str) -> str:
    return f"byte {at:,}: {problem}; {end - at:,} bytes from there on are not read"


def _parse_pcap(data: NDArray[np.uint8], end: int, order: str, unit_ns: int) -> Frames:
    content = data.data
    (link,) = struct.unpack_from(f"{order}I", content, 20)
    read_head = struct.Struct(f"{order}4I").unpack_from
    most_parts = _NS_PER_S // unit_ns
    starts, at, damage = [], 24, ""
    while at + 16 <= end:
        _, part, captured, length = read_head(content, at)
        if captured > _LARGEST_FRAME or captured > length or not length or part >= most_parts:
            problem = f"an invalid record header (captured {captured:,} of {length:,} bytes, {part:,} of a second)"
            damage = _unread(at, end, problem)
            break
        if at + 16 + captured > end:
            break
        starts.append(at)
        at += 16 + captured
    if not damage and at < end:
        damage = _unread(at, end, "the file ends within a record")
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
        damage=damage,
    )


@dataclass(slots=True, kw_only=True)
class _Interface:
    """An interface: ticks per second (if_tsresol), and an offset added to each time (if_tsoffset)."""

    name: str
    link: int
    per_s: int
    offset_s: int


@dataclass(slots=True, kw_only=True)
class _Section:
    """A pcapng section: byte order, interfaces, dropped frames, offsets of the packet blocks, end offset, damage."""

    order: str
    interfaces: list[_Interface] = field(default_factory=list)
    dropped: int = 0
    records: Indices
    end: int
    damage: str = ""


def _parse_pcapng(data: NDArray[np.uint8], size: int) -> Frames:
    """Parse all blocks of all sections. Interfaces are numbered across the whole file."""
    sections: list[_Section] = []
    at = 0
    while at + 28 <= size and not (sections and sections[-1].damage):
        sections.append(_walk_section(data, at, size))
        at = sections[-1].end
    if not sections:
        raise ValueError("the file ends within its section header")
    damage = sections[-1].damage
    if not damage and at < size:
        damage = _unread(at, size, "the file ends within a section header")
    interfaces = [item for section in sections for item in section.interfaces]
    if len(interfaces) > _MOST_INTERFACES:
        raise ValueError(f"{len(interfaces):,} interfaces; at most {_MOST_INTERFACES:,} are read")
    firsts = np.cumsum([0, *(len(section.interfaces) for section in sections)]).tolist()
    parts = [_columns(data, section, first) for section, first in zip(sections, firsts, strict=False)]
    columns: list[Indices] = [np.concatenate([item[index] for item in parts]) for index in range(6)]
    start, captured, length, time_ns, interface, outbound = columns
    return Frames(
        data=data,
        start=start,
        captured=captured,
        length=length,
        time_ns=time_ns,
        interface=interface.astype(np.int16),
        outbound=outbound.astype(np.int8),
        interfaces=tuple(item.name for item in interfaces),
        link_types=np.array([item.link for item in interfaces], dtype=np.int64),
        damage=damage,
        dropped=sum(section.dropped for section in sections),
    )


def _walk_section(data: NDArray[np.uint8], begin: int, end: int) -> _Section:
    """Walk the blocks of the section that begins at `begin`, up to the next section or to the first damage."""
    order = _ORDER_OF_MAGIC.get(data[begin + 8 : begin + 12].tobytes())
    if order is None:
        damage = _unread(begin, end, "a section header without its byte-order magic")
        return _Section(order="<", records=np.zeros(0, dtype=np.int64), end=end, damage=damage)
    # Blocks are aligned to four bytes, so plain words can be read without a call for each.
    words = _aligned(data, order).data
    records: list[int] = []
    interfaces: list[_Interface] = []
    dropped: dict[int, int] = {}
    note, at, problem = records.append, begin, ""
    while at + 12 <= end:
        kind, length = words[at >> 2], words[(at >> 2) + 1]
        if kind == _EPB:
            if length < 12 or length & 3 or at + length > end:  # noqa: PLR2004 - minimum block length
                problem = _problem_of(length)
                break
            note(at)
        elif length < 12 or length & 3 or at + length > end or words[(at + length >> 2) - 1] != length:  # noqa: PLR2004
            problem = _problem_of(length)
            break
        elif kind == _SHB and at != begin:
            break
        else:
            _read_block(data, at, kind, length, interfaces, dropped, order)
        at += length
    if not problem and end - 12 < at < end:
        problem = "the file ends within a block"
    intact, damage = _whole(words, np.array(records, dtype=np.int64), end)
    if not damage and problem:
        damage = _unread(at, end, problem)
    return _Section(
        order=order,
        interfaces=interfaces,
        dropped=sum(dropped.values()),
        records=intact,
        end=end if damage else at,
        damage=damage,
    )


def _problem_of(length: int) -> str:
    return f"a block of {length:,} bytes that is truncated or does not end with its length"


def _read_block(
    data: NDArray[np.uint8],
    at: int,
    kind: int,
    length: int,
    interfaces: list[_Interface],
    dropped: dict[int, int],
    order: str,
) -> None:
    """Read a block that is not an enhanced packet block. Statistics are totals, so an interface's last block counts."""
    if kind == _IDB:
        interfaces.append(_read_interface(data[at + 8 : at + length - 4].tobytes(), order))
    elif kind == _ISB and length >= 24:  # noqa: PLR2004 - interface and time
        (number,) = struct.unpack_from(f"{order}I", data.data, at + 8)
        dropped[number] = _dropped(data[at + 20 : at + length - 4].tobytes(), order)
    elif kind in (_SPB, _OBSOLETE_PACKET):
        raise ValueError(
            f"byte {at:,}: a packet block of type {kind} is not supported; convert the file with `editcap -F pcapng`"
        )
    elif kind not in _NO_PACKETS:
        raise ValueError(f"byte {at:,}: an unknown block of type {kind}, which may hold a packet")


def _dropped(options: bytes, order: str) -> int:
    """Return the frames that an interface and its system dropped, from the options of a statistics block."""
    at = total = 0
    while at + 4 <= len(options):
        code, size = struct.unpack_from(f"{order}HH", options, at)
        if code == 0:
            break
        if code in (5, 7) and size == 8 and at + 12 <= len(options):  # noqa: PLR2004 - isb_ifdrop, isb_osdrop
            (count,) = struct.unpack_from(f"{order}Q", options, at + 4)
            total += 0 if count == _NO_COUNT else count
        at += 4 + (size + 3 & ~3)
    return total


def _whole(words: memoryview, records: Indices, end: int) -> tuple[Indices, str]:
    """Return the packet blocks before the first inconsistent one, and the damage."""
    all_words, at = np.frombuffer(words, dtype=np.uint32), records >> 2
    length = all_words[at + 1].astype(np.int64)
    fits = length >= _EPB_BYTES
    captured = all_words[np.where(fits, at + 5, 0)].astype(np.int64)
    fits &= (captured + 3 & ~3) <= length - _EPB_BYTES
    wrong = np.flatnonzero(~fits | (all_words[at + (length >> 2) - 1] != length))
    if not len(wrong):
        return records, ""
    first = int(wrong[0])
    problem = f"a packet block of {int(length[first]):,} bytes whose lengths contradict each other"
    return records[:first], _unread(int(records[first]), end, problem)


def _read_interface(body: bytes, order: str) -> _Interface:
    (link,) = struct.unpack_from(f"{order}H", body)
    parsed, at = _Interface(name="", link=link, per_s=1_000_000, offset_s=0), 8
    while at + 4 <= len(body):
        code, size = struct.unpack_from(f"{order}HH", body, at)
        value = body[at + 4 : at + 4 + size]
        if code == 0:
            break
        if code == 2:  # noqa: PLR2004 - if_name
            parsed.name = value.decode(errors="replace")
        elif code == 9:  # noqa: PLR2004 - if_tsresol
            if len(value) != 1:
                raise ValueError(f"interface {parsed.name!r}: if_tsresol has {len(value)} bytes instead of 1")
            parsed.per_s = 2 ** (value[0] & 0x7F) if value[0] & 0x80 else 10 ** value[0]
        elif code == 14:  # noqa: PLR2004 - if_tsoffset
            (parsed.offset_s,) = struct.unpack(f"{order}q", value)
        at += 4 + (size + 3 & ~3)
    return parsed


def _columns(
    data: NDArray[np.uint8], section: _Section, first: int
) -> tuple[Indices, Indices, Indices, Indices, Indices, Indices]:
    words, at = _aligned(data, section.order), section.records >> 2

    def word(place: Indices) -> Indices:
        return words[place].astype(np.int64)

    interface = word(at + 2)
    if len(at) and int(interface.max()) >= len(section.interfaces):
        raise ValueError(f"a packet of interface {int(interface.max())}, which has no interface block")
    captured, start = word(at + 5), section.records + 28
    options = start + (captured + 3 & ~3) >> 2
    # epb_flags (code 2, 4 bytes) as the first option, where writers put it. Its two low bits: 1 inbound, 2 outbound.
    has = options + 2 <= at + (word(at + 1) >> 2) - 1
    flags_option = 2 | 4 << 16 if section.order == "<" else 2 << 16 | 4
    options = np.where(has, options, 0)
    flags = np.where(has & (words[options] == flags_option), words[options + 1] & 3, 0)
    outbound = np.where(flags == 2, 1, np.where(flags == 1, 0, -1))  # noqa: PLR2004
    time_ns = _times_ns(word(at + 3), word(at + 4), interface, section.interfaces)
    return start, captured, word(at + 6), time_ns, interface + first, outbound


def _times_ns(high: Indices, low: Indices, interface: Indices, interfaces: Sequence[_Interface]) -> Indices:
    """Return the times of a section in ns, from the tick counts and the interfaces' units and offsets.

    Raises:
        ValueError: a time does not fit into 63 bits of ns.
    """
    if all(unit.per_s == _NS_PER_S and not unit.offset_s for unit in interfaces):
        _check_range(int(high.max(initial=0)) << 32)
        return high << 32 | low
    times_ns = np.zeros(len(high), dtype=np.int64)
    for number, unit in enumerate(interfaces):
        chosen = interface == number
        if chosen.any():
            times_ns[chosen] = _one_unit_ns(high[chosen], low[chosen], unit)
    return times_ns


def _one_unit_ns(high: Indices, low: Indices, unit: _Interface) -> Indices:
    most = int(high.max()) << 32 | 0xFFFF_FFFF
    _check_range(most * _NS_PER_S // unit.per_s + unit.offset_s * _NS_PER_S)
    _check_range(unit.offset_s * _NS_PER_S)
    if unit.per_s <= _NS_PER_S:
        ticks = high << 32 | low
        # Compute seconds and the remainder separately: ticks times 10**9 would overflow.
        time_ns = ticks // unit.per_s * _NS_PER_S + (ticks % unit.per_s) * _NS_PER_S // unit.per_s
    else:
        # Units finer than a nanosecond are rare and need more than 64 bits: use Python's integers.
        pairs = zip(high.tolist(), low.tolist(), strict=True)
        fine = [(upper << 32 | lower) * _NS_PER_S // unit.per_s for upper, lower in pairs]
        time_ns = np.array(fine, dtype=np.int64)
    return time_ns + unit.offset_s * _NS_PER_S


def _check_range(time_ns: int) -> None:
    if abs(int(time_ns)) >= 1 << 63:
        raise ValueError("a time does not fit into 63 bits of nanoseconds (if_tsresol or if_tsoffset)")


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
