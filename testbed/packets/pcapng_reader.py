"""Read pcapng files (draft-ietf-opsawg-pcapng) in bulk."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from faultbed.testbed.packets.frames import Frames, column, damage_at, heads_at
from faultbed.testbed.packets.record_chain import Guesses, windows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Indices = NDArray[np.int64]
    Words = NDArray[np.uint32]

__all__ = ["parse_pcapng"]

_SHB, _IDB, _SPB, _EPB, _ISB = 0x0A0D0D0A, 1, 3, 6, 5
_OBSOLETE_PACKET = 2
_MOST_INTERFACES = 32_767
_NO_COUNT = (1 << 64) - 1
_NO_PACKETS = frozenset({_SHB, 4, _ISB, 9, 10, 0xBAD, 0x40000BAD})
"""Blocks without packets: names, statistics, journal, secrets, custom ones (IANA's pcapng registry)."""
_ORDER_OF_MAGIC = {b"\x4d\x3c\x2b\x1a": "<", b"\x1a\x2b\x3c\x4d": ">"}
_HEADER_BYTES, _BLOCK_BYTES, _EPB_BYTES, _SECTION_BYTES = 28, 12, 32, 28
"""Bytes before the packet of an enhanced packet block; of the smallest block, packet block and section header."""
_NS_PER_S = 1_000_000_000


@dataclass(slots=True, kw_only=True)
class _Interface:
    """An interface: ticks per second (if_tsresol), and an offset added to each time (if_tsoffset)."""

    name: str
    link: int
    per_s: int
    offset_s: int


@dataclass(slots=True, kw_only=True)
class _Section:
    """A pcapng section from byte `begin` on, as far as its blocks were read.

    `packets` are its packet blocks, arrays of eight rows (`_START` to `_END`). `dropped` are frames by interface;
    statistics are totals, so the last ones count. `end` is the byte after the last block that was read.
    """

    begin: int
    order: str
    end: int
    interfaces: list[_Interface] = field(default_factory=list)
    dropped: dict[int, int] = field(default_factory=dict)
    packets: list[Indices] = field(default_factory=lambda: [np.zeros((8, 0), dtype=np.int64)])
    damage: str = ""


_START, _CAPTURED, _LENGTH, _TIME, _INTERFACE, _OUTBOUND, _LOW, _END = range(8)
"""Rows of packet blocks: offset of the packet, the fields of its block, its direction, offset of the next block.

`_TIME` is the upper half of the time until the section's interfaces are known, and in ns then."""


def parse_pcapng(data: NDArray[np.uint8], size: int) -> Frames | None:
    """Return the frames of all sections of the first `size` bytes; None if they are no pcapng file.

    Interfaces are numbered across the whole file.

    Raises:
        ValueError, struct.error: a block contradicts itself, or is of a type whose packets are not read.
    """
    if data[:4].tobytes() != _SHB.to_bytes(4, "big"):
        return None
    sections: list[_Section] = []
    at = 0
    while at + _SECTION_BYTES <= size and not (sections and sections[-1].damage):
        sections.append(_walk_section(data, at, size))
        at = sections[-1].end
    if not sections:
        raise ValueError("the file ends within its section header")
    damage = sections[-1].damage
    if not damage and at < size:
        damage = damage_at(at, size, "the file ends within a section header")
    interfaces = [item for section in sections for item in section.interfaces]
    if len(interfaces) > _MOST_INTERFACES:
        raise ValueError(f"{len(interfaces):,} interfaces; at most {_MOST_INTERFACES:,} are read")
    firsts = np.cumsum([0, *(len(section.interfaces) for section in sections)]).tolist()
    for section, first in zip(sections, firsts[:-1], strict=True):
        for blocks in section.packets:
            _resolve(blocks, section.interfaces, first)
    packets = np.concatenate([blocks for section in sections for blocks in section.packets], axis=1)
    return Frames(
        data=data,
        start=packets[_START],
        captured=packets[_CAPTURED],
        length=packets[_LENGTH],
        time_ns=packets[_TIME],
        interface=packets[_INTERFACE].astype(np.int16),
        outbound=packets[_OUTBOUND].astype(np.int8),
        interfaces=tuple(item.name for item in interfaces),
        link_types=np.array([item.link for item in interfaces], dtype=np.int64),
        damage=damage,
        dropped=sum(sum(section.dropped.values()) for section in sections),
    )


def _walk_section(data: NDArray[np.uint8], begin: int, size: int) -> _Section:
    """Walk the blocks of the section that begins at `begin`, up to the next section or to the first damage."""
    order = _ORDER_OF_MAGIC.get(data[begin + 8 : begin + 12].tobytes())
    section = _Section(begin=begin, order=order or "<", end=begin)
    if order is None:
        section.damage = damage_at(begin, size, "a section header without its byte-order magic")
        return section
    # Blocks are aligned to four bytes.
    words = data.view(f"{order}u4")
    for first, until in windows(begin, size):
        if section.end >= until:
            continue
        guesses: Guesses | None = None
        while section.end < until:
            stretch = None
            if words[section.end >> 2] == _EPB:
                if guesses is None:
                    blocks = _packet_blocks(data, words, first, until, size, order)
                    guesses = Guesses.of(blocks[_START] - _HEADER_BYTES, blocks[_END])
                stretch = guesses.stretch(section.end)
            if stretch is not None:
                section.packets.append(blocks[:, stretch])
                section.end = int(blocks[_END, stretch.stop - 1])
            elif not _read_other_block(section, data, words, size):
                return section
    return section
    return section


def _packet_blocks(data: NDArray[np.uint8], words: Words, first: int, until: int, size: int, order: str) -> Indices:
    """Return the consistent packet blocks that may begin from byte `first` to byte `until`."""
    at = np.flatnonzero(words[first >> 2 : until >> 2] == _EPB) + (first >> 2)
    at = at[(at << 2) + _EPB_BYTES <= size]
    head = heads_at(data, at << 2, _HEADER_BYTES)
    total, captured = (column(head, offset, f"{order}u4").astype(np.int64) for offset in (4, 20))
    fits = (total >= _EPB_BYTES) & (total & 3 == 0) & ((at << 2) + total <= size)
    fits &= (captured + 3 & ~3) <= total - _EPB_BYTES
    fits &= words[np.where(fits, at + (total >> 2) - 1, 0)] == total
    if not fits.all():
        at, head, total, captured = at[fits], head[fits], total[fits], captured[fits]
    interface, high, low, length = (column(head, offset, f"{order}u4") for offset in (8, 12, 16, 24))
    # epb_flags (code 2, 4 bytes) as the first option, where writers put it. Its two low bits: 1 inbound, 2 outbound.
    options = at + 7 + (captured + 3 >> 2)
    has = options + 2 <= at + (total >> 2) - 1
    options = np.where(has, options, 0)
    has &= words[options] == (2 | 4 << 16 if order == "<" else 2 << 16 | 4)
    flags = np.where(has, words[options + 1] & 3, 0)
    outbound = np.array([-1, 0, 1, -1])[flags]
    start = (at << 2) + _HEADER_BYTES
    return np.vstack([start, captured, length, high, interface, outbound, low, (at << 2) + total])


def _read_other_block(section: _Section, data: NDArray[np.uint8], words: Words, size: int) -> bool:
    """Read the block at the section's end; return False if it is damaged or begins the next section."""
    at = section.end
    if at + _BLOCK_BYTES > size:
        section.damage = damage_at(at, size, "the file ends within a block")
        return False
    kind, length = words[at >> 2 : (at >> 2) + 2].tolist()
    if length < _BLOCK_BYTES or length & 3 or at + length > size or words[(at + length >> 2) - 1] != length:
        problem = f"a block of {length:,} bytes that is truncated or does not end with its length"
        section.damage = damage_at(at, size, problem)
        return False
    if kind == _EPB:
        problem = f"a packet block of {length:,} bytes whose lengths contradict each other"
        section.damage = damage_at(at, size, problem)
        return False
    if kind == _SHB and at != section.begin:
        return False
    if kind == _IDB:
        section.interfaces.append(_read_interface(data[at + 8 : at + length - 4].tobytes(), section.order))
    elif kind == _ISB and length >= 24:  # noqa: PLR2004 - interface and time
        (number,) = struct.unpack_from(f"{section.order}I", data.data, at + 8)
        section.dropped[number] = _dropped(data[at + 20 : at + length - 4].tobytes(), section.order)
    elif kind in (_SPB, _OBSOLETE_PACKET):
        raise ValueError(
            f"byte {at:,}: a packet block of type {kind} is not supported; convert the file with `editcap -F pcapng`"
        )
    elif kind not in _NO_PACKETS:
        raise ValueError(f"byte {at:,}: an unknown block of type {kind}, which may hold a packet")
    section.end = at + length
    return True


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


def _resolve(packets: Indices, interfaces: Sequence[_Interface], first: int) -> None:
    """Set the times of packet blocks in ns, and number their interfaces from `first` on, in place.

    Raises:
        ValueError: a time does not fit into 63 bits of ns, or a packet's interface has no block.
    """
    high, low, interface = packets[_TIME], packets[_LOW], packets[_INTERFACE]
    if not len(interface):
        return
    if (last := int(interface.max())) >= len(interfaces):
        raise ValueError(f"a packet of interface {last}, which has no interface block")
    if all(unit.per_s == _NS_PER_S and not unit.offset_s for unit in interfaces):
        _check_range(int(high.max()) << 32)
        high <<= 32
        high |= low
    else:
        for number in np.unique(interface).tolist():
            chosen = interface == number
            high[chosen] = _one_unit_ns(high[chosen], low[chosen], interfaces[number])
    interface += first


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
