"""Find the IP packet in each frame of a capture: behind link headers, VLAN tags, mirrors and tunnels. Pure.

    link types   Ethernet, raw IP, loopback, Linux cooked captures (`tcpdump -i any`), ERF (`ibdump --erf 1`)
    tags         VLAN and QinQ, any number
    tunnels      VXLAN, Geneve, GRE, IP in IP
    mirrors      ERSPAN types I to III, and Everflow of SONiC (GRE 0x88BE, or 0x8949 with 22 bytes on Mellanox)

What may hide a RoCEv2 packet but is not decoded has a name: `Located.hidden` counts it. Sources: linktypes of
tcpdump.org; ERF types of Endace; RFC 2784 and 2890 (GRE), 7348 (VXLAN), 8926 (Geneve); draft-foschiano-erspan-03.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from faultbed.testbed.packets.bth import ROCE_PORT
from faultbed.testbed.packets.frames import PADDING, column, heads_at, records_at
from faultbed.testbed.packets.link_types import (
    COOKED,
    COOKED_2,
    ERF,
    ETHERNET,
    HARMLESS,
    LOOPBACK,
    RAW_IP,
    READ,
    refusal,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from faultbed.testbed.packets.frames import Frames

    Indices = NDArray[np.int64]
    Bytes = NDArray[np.uint8]
    Flags = NDArray[np.bool_]

__all__ = ["FIRST", "IPV4", "IPV6", "LATER", "UDP", "WHOLE", "Located", "locate", "u16"]

IPV4, IPV6, UDP = 0x0800, 0x86DD, 17
WHOLE, FIRST, LATER = 0, 1, 2
"""A packet that is no fragment, a first fragment, and a later fragment, which has no header of the upper layer."""
_VLANS = (0x8100, 0x88A8, 0x9100, 0x9200)
_FRAGMENT, _AUTHENTICATION, _NOTHING = 44, 51, 59
_EXTENSIONS = (0, 43, _FRAGMENT, _AUTHENTICATION, 60, 135, 139, 140)
"""Extension headers of IPv6 that another header follows (IANA, IPv6 Extension Header Types)."""
_GRE, _IP_IN_IP, _IPV6_IN_IP = 47, 4, 41
_VXLAN, _GENEVE = (4789, 8472), 6081
"""UDP ports: VXLAN's and Linux's first one for it; Geneve's."""
_BRIDGED, _ERSPAN, _ERSPAN_3, _MELLANOX = 0x6558, 0x88BE, 0x22EB, 0x8949
_MELLANOX_BYTES = 22
"""Bytes before the mirrored frame on Mellanox switches, which SONiC's own test of Everflow expects."""
_ERF_ETHERNET, _ERF_IP, _ERF_INFINIBAND = (2, 11, 16, 20), (22, 23), (21, 25)
_DEPTH = 4
"""Most tunnels inside each other that are decoded."""
_IP = 101
"""Marks a place where an IP header begins, beside the link types of a file."""
_ALL_LINKS = (*READ, _IP)
_HIDING_TYPES = {0x8847: "MPLS", 0x8848: "MPLS", 0x8864: "PPPoE", 0x88E5: "MACsec", 0x88E7: "provider backbone (PBB)"}
_HIDING_PROTOCOLS = {50: "IPsec", _AUTHENTICATION: "IPsec", 137: "MPLS in IP"}
_HIDING_PORTS = {4500: "IPsec", 4790: "VXLAN-GPE", 6635: "MPLS in UDP", 51820: "WireGuard"}
_ICMP = (1, 58)
_SEARCHED, _PLAIN_IP_UDP = PADDING, 20 + 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Located:
    """Where the innermost IP packet of each frame is, and what it carries. All arrays have one entry a frame.

        start        offset of the innermost link header: the frame itself, or the frame in a mirror or tunnel
        ip, family   offset of the IP header, and its EtherType; 0 if there is none
        protocol     that the packet carries, behind extension headers; -1: no IP packet
        at, size     offset of that, and its bytes up to the end of the IP packet
        part         `WHOLE`, `FIRST` or `LATER` fragment
        is_short     the frame ends before it is known what it carries

    `hidden` counts frames that may hold RoCEv2 but are not decoded, by the name of what hides it.
    """

    start: Indices
    ip: Indices
    family: Indices
    protocol: Indices
    at: Indices
    size: Indices
    part: NDArray[np.int8]
    is_short: Flags
    hidden: dict[str, int]


def locate(frames: Frames) -> Located:
    """Find the innermost IP packet of every frame."""
    count, data, end = len(frames), frames.data, frames.start + frames.captured
    hidden: Counter[str] = Counter()
    found = Located(
        start=frames.start.copy(),
        ip=np.zeros(count, dtype=np.int64),
        family=np.zeros(count, dtype=np.int64),
        protocol=np.full(count, -1, dtype=np.int64),
        at=np.full(count, -1, dtype=np.int64),
        size=np.full(count, -1, dtype=np.int64),
        part=np.zeros(count, dtype=np.int8),
        is_short=np.zeros(count, dtype=np.bool_),
        hidden=hidden,
    )
    rows = np.flatnonzero(~_locate_plain(frames, found))
    if not len(rows):
        return found
    unlocated = rows
    link = frames.link_types[frames.interface[rows]]
    start, link = _behind_erf(data, frames.start[rows], end[rows], link, hidden)
    for _ in range(_DEPTH + 1):
        if not len(rows):
            break
        rows, start, link = _one_layer(data, found, rows, start, end, link, hidden)
    hidden["tunnels in tunnels"] += len(rows)
    is_read = np.isin(frames.link_types[frames.interface[unlocated]], tuple(READ))
    _count_hidden(hidden, found, unlocated[is_read], data, end)
    for number, count in enumerate(np.bincount(frames.interface, minlength=1).tolist()):
        if count and (kind := int(frames.link_types[number])) not in READ | HARMLESS:
            hidden[refusal(kind).split(" is not read")[0]] += count
    return Located(**{name: getattr(found, name) for name in Located.__slots__} | {"hidden": dict(+hidden)})


_U16 = np.dtype(">u2")


def u16(data: Bytes, at: Indices) -> Indices:
    """Return the big-endian 16-bit numbers at these offsets."""
    return records_at(data, at, _U16).astype(np.int64)


_PLAIN_BYTES = 14 + 20 + 8
"""Ethernet, an IPv4 header without options, UDP."""


def _locate_plain(frames: Frames, found: Located) -> Flags:
    """Locate whole RoCEv2 packets of IPv4 right in an Ethernet frame, as most are; return which frames are those.

    Layer by layer takes five times as long.
    """
    is_plain: Flags = frames.link_types[frames.interface] == ETHERNET
    is_plain &= frames.captured >= _PLAIN_BYTES
    head = heads_at(frames.data, frames.start, _PLAIN_BYTES)
    for at, layout, value in ((12, ">u2", IPV4), (14, "u1", 0x45), (23, "u1", UDP), (36, ">u2", ROCE_PORT)):
        is_plain &= column(head, at, layout) == value
    is_plain &= column(head, 20, ">u2") & 0x3FFF == 0
    found.ip[is_plain] = (frames.start + 14)[is_plain]
    found.at[is_plain] = (frames.start + 34)[is_plain]
    found.family[is_plain], found.protocol[is_plain] = IPV4, UDP
    found.size[is_plain] = column(head, 16, ">u2")[is_plain].astype(np.int64) - 20
    return is_plain


def _one_layer(
    data: Bytes, found: Located, rows: Indices, start: Indices, all_ends: Indices, link: Indices, hidden: Counter[str]
) -> tuple[Indices, Indices, Indices]:
    """Decode one link header and one IP header of `rows`. Return the rows that carry another frame, and where."""
    end = all_ends[rows]
    ip, family, is_short = _network(data, start, end, link)
    protocol, at, size, part = _transport(data, end, ip, family)
    found.start[rows], found.ip[rows], found.family[rows] = start, ip, family
    found.protocol[rows], found.at[rows], found.size[rows], found.part[rows] = protocol, at, size, part
    is_open = (protocol == UDP) & (part != LATER) & (at + 4 > end)
    found.is_short[rows] = is_short | is_open | ((family == IPV6) & np.isin(protocol, _EXTENSIONS))
    inner, kind = _tunnelled(data, end, protocol, at, part, hidden)
    deeper = np.flatnonzero(kind >= 0)
    return rows[deeper], inner[deeper], kind[deeper]


def _behind_erf(
    data: Bytes, start: Indices, end: Indices, link: Indices, hidden: Counter[str]
) -> tuple[Indices, Indices]:
    """Replace ERF records by the frame that is in them: 16 bytes, extension headers of 8, and 2 before Ethernet."""
    records = np.flatnonzero((link == ERF) & (start + 16 <= end))
    if not len(records):
        return start, link
    start, link = start.copy(), link.copy()
    at = start[records] + 16
    first = data[start[records] + 8]
    has_more = first >= 0x80  # noqa: PLR2004 - the top bit
    while len(more := np.flatnonzero(has_more & (at + 8 <= end[records]))):
        has_more[more] = data[at[more]] >= 0x80  # noqa: PLR2004
        at[more] += 8
        has_more[at + 8 > end[records]] = False
    kind = first & 0x7F
    is_ethernet, is_ip = np.isin(kind, _ERF_ETHERNET), np.isin(kind, _ERF_IP)
    hidden["native InfiniBand (ERF)"] += int(np.isin(kind, _ERF_INFINIBAND).sum())
    start[records] = at + np.where(is_ethernet, 2, 0)
    link[records] = np.where(is_ethernet, ETHERNET, np.where(is_ip, _IP, -1))
    return start, link


def _network(data: Bytes, start: Indices, end: Indices, link: Indices) -> tuple[Indices, Indices, Flags]:
    """Return the offset and EtherType of each IP header (both 0 if there is none), and which frames are too short."""
    before = np.full(len(start), -1, dtype=np.int64)
    """Offset of the bytes before the network header: its EtherType, except where that is elsewhere."""
    kind = np.zeros(len(start), dtype=np.int64)
    # A sorted set of few small numbers; np.unique takes far longer.
    for number in (np.flatnonzero(np.bincount(link + 1)) - 1).tolist():
        rows = np.flatnonzero(link == number)
        if number in (ETHERNET, COOKED):
            size = 14 if number == ETHERNET else 16
            rows = rows[start[rows] + size <= end[rows]]
            before[rows] = start[rows] + size - 2
            kind[rows] = u16(data, before[rows])
        elif number == COOKED_2:
            rows = rows[start[rows] + 20 <= end[rows]]
            before[rows] = start[rows] + 18
            kind[rows] = u16(data, start[rows])
        elif number == _IP or number in RAW_IP or number in LOOPBACK:
            size = 4 if number in LOOPBACK else 0
            rows = rows[start[rows] + size < end[rows]]
            before[rows] = start[rows] + size - 2
            version = data[start[rows] + size] >> 4
            kind[rows] = np.where(version == 4, IPV4, np.where(version == 6, IPV6, 0))  # noqa: PLR2004
    tagged = np.flatnonzero(np.isin(kind, _VLANS))
    while len(tagged := tagged[np.isin(kind[tagged], _VLANS) & (before[tagged] + 6 <= end[tagged])]):
        before[tagged] += 4
        kind[tagged] = u16(data, before[tagged])
    ip = np.where(before >= 0, before + 2, 0)
    header = np.where(kind == IPV4, 20, np.where(kind == IPV6, 40, 0))
    # The captured bytes of a frame may end between its VLAN tags.
    is_short = (end < ip + header) | ((before < 0) & np.isin(link, _ALL_LINKS)) | np.isin(kind, _VLANS)
    return ip, np.where(is_short, 0, kind), is_short


def _transport(
    data: Bytes, end: Indices, ip: Indices, family: Indices
) -> tuple[Indices, Indices, Indices, NDArray[np.int8]]:
    """Return protocol, offset, bytes to the end of the IP packet, and part of what each IP packet carries."""
    protocol, at, size = (np.full(len(ip), -1, dtype=np.int64) for _ in range(3))
    part = np.full(len(ip), WHOLE, dtype=np.int8)
    four = np.flatnonzero(family == IPV4)
    start = ip[four]
    header = (data[start] & 0x0F).astype(np.int64) * 4
    protocol[four] = np.where(header >= 20, data[start + 9], -1)  # noqa: PLR2004 - its least length
    at[four], size[four] = start + header, u16(data, start + 2) - header
    flags = u16(data, start + 6)
    part[four] = _part_of(flags & 0x1FFF, flags & 0x2000)
    six = np.flatnonzero(family == IPV6)
    if not len(six):
        return protocol, at, size, part
    protocol[six], at[six], size[six] = data[ip[six] + 6], ip[six] + 40, u16(data, ip[six] + 4)
    rows = six
    while len(rows := rows[np.isin(protocol[rows], _EXTENSIONS) & (at[rows] + 8 <= end[rows])]):
        place, kind = at[rows], protocol[rows]
        words = data[place + 1].astype(np.int64)
        length = np.where(kind == _AUTHENTICATION, 4 * words + 8, 8 * words + 8)
        length[kind == _FRAGMENT] = 8
        fragments = rows[kind == _FRAGMENT]
        offset = u16(data, at[fragments] + 2)
        part[fragments] = np.maximum(part[fragments], _part_of(offset & 0xFFF8, offset & 1))
        protocol[rows] = np.where(part[rows] == LATER, _NOTHING, data[place])
        at[rows] += length
        size[rows] -= length
    return protocol, at, size, part


def _part_of(offset: Indices, more: Indices) -> NDArray[np.int8]:
    return np.where(offset != 0, LATER, np.where(more != 0, FIRST, WHOLE)).astype(np.int8)


def _tunnelled(
    data: Bytes, end: Indices, protocol: Indices, at: Indices, part: NDArray[np.int8], hidden: Counter[str]
) -> tuple[Indices, Indices]:
    """Return the offset and link type of the frame that each packet carries; link type -1: none, or it is not known."""
    inner, kind = np.zeros(len(at), dtype=np.int64), np.full(len(at), -1, dtype=np.int64)
    is_candidate = (part != LATER) & (at >= 0)
    plain = np.flatnonzero(is_candidate & ((protocol == _IP_IN_IP) | (protocol == _IPV6_IN_IP)))
    inner[plain], kind[plain] = at[plain], _IP
    gre = np.flatnonzero(is_candidate & (protocol == _GRE) & (at + 4 <= end))
    inner[gre], kind[gre] = _behind_gre(data, at[gre], end[gre], hidden)
    readable = np.flatnonzero(is_candidate & (protocol == UDP) & (at + 16 <= end))
    port = u16(data, at[readable] + 2)
    vxlan = readable[np.isin(port, _VXLAN)]
    inner[vxlan], kind[vxlan] = at[vxlan] + 16, ETHERNET
    geneve = readable[port == _GENEVE]
    carried = u16(data, at[geneve] + 10)
    inner[geneve] = at[geneve] + 16 + 4 * (data[at[geneve] + 8] & 0x3F).astype(np.int64)
    is_ip = np.isin(carried, (IPV4, IPV6))
    kind[geneve] = np.where(carried == _BRIDGED, ETHERNET, np.where(is_ip, _IP, -1))
    hidden["Geneve with an unknown payload"] += int((kind[geneve] < 0).sum())
    return inner, kind


def _behind_gre(data: Bytes, at: Indices, end: Indices, hidden: Counter[str]) -> tuple[Indices, Indices]:
    """Return the offset and link type of what each GRE header carries; -1 if it is not decoded, which is counted."""
    flags, protocol = u16(data, at), u16(data, at + 2)
    # Checksum (or routing) and offset, key, sequence number: 4 bytes each (RFC 2784, 2890, 1701).
    inner = at + 4 + 4 * sum(((flags & bits) != 0).astype(np.int64) for bits in (0xC000, 0x2000, 0x1000))
    kind = np.where(
        np.isin(protocol, (_BRIDGED, _ERSPAN)), ETHERNET, np.where(np.isin(protocol, (IPV4, IPV6)), _IP, -1)
    )
    # Type I has neither a sequence number nor a header of its own; type II has both.
    inner += 8 * ((protocol == _ERSPAN) & ((flags & 0x1000) != 0))
    third = np.flatnonzero((protocol == _ERSPAN_3) & (inner + 12 <= end))
    carries_ip = (data[inner[third] + 10] >> 2 & 0x1F) == 2  # noqa: PLR2004 - frame type FT
    kind[third] = np.where(carries_ip, _IP, ETHERNET)
    inner[third] += np.where(data[inner[third] + 11] & 1, 20, 12)
    for before in (0, _MELLANOX_BYTES):
        mirrored = np.flatnonzero((protocol == _MELLANOX) & (kind < 0))
        is_frame = np.isin(u16(data, inner[mirrored] + before + 12), (IPV4, IPV6, *_VLANS))
        inner[mirrored[is_frame]] += before
        kind[mirrored[is_frame]] = ETHERNET
    is_other_version = (flags & 7) != 0
    kind[is_other_version] = -1
    hidden["GRE of another version"] += int(is_other_version.sum())
    for number in np.unique(protocol[(kind < 0) & ~is_other_version]).tolist():
        name = _HIDING_TYPES.get(number, f"GRE with protocol 0x{number:04x}")
        hidden[name] += int(((kind < 0) & ~is_other_version & (protocol == number)).sum())
    return inner, kind


def _count_hidden(hidden: Counter[str], found: Located, rows: Indices, data: Bytes, end: Indices) -> None:
    family, protocol = found.family[rows], found.protocol[rows]
    is_named = np.zeros(len(rows), dtype=np.bool_)
    for kinds, names in ((family, _HIDING_TYPES), (protocol, _HIDING_PROTOCOLS)):
        for number, name in names.items():
            hidden[name] += int((kinds == number).sum())
            is_named |= kinds == number
    is_udp = (protocol == UDP) & (found.part[rows] != LATER) & (found.at[rows] + 4 <= end[rows])
    port = np.where(is_udp, u16(data, np.where(is_udp, found.at[rows] + 2, 0)), -1)
    for number, name in _HIDING_PORTS.items():
        hidden[name] += int((port == number).sum())
        is_named |= port == number
    # An ICMP error quotes the packet that it is about.
    others = rows[~is_named & (port != ROCE_PORT) & ~np.isin(protocol, _ICMP)]
    hidden["an encapsulation that is not known"] += int(_holds_roce(data, found.start[others], end[others]).sum())


def _holds_roce(data: Bytes, start: Indices, end: Indices) -> Flags:
    """Return which frames have the headers of an IPv4 RoCEv2 packet somewhere in their first bytes.

    Tunnels, samples (sFlow) and switch tags are more than can be listed: what is in none of our tables must not be
    taken for traffic of another kind.
    """
    holds = np.zeros(len(start), dtype=np.bool_)
    for offset in (0, _SEARCHED - _PLAIN_IP_UDP):  # as many bytes as may be read behind the end of a file
        at = np.minimum(start + offset, len(data) - _SEARCHED)
        head = heads_at(data, at, _SEARCHED)
        last = _SEARCHED - _PLAIN_IP_UDP
        matches = (head[:, : last + 1] == 0x45) & (head[:, 9 : last + 10] == UDP)  # noqa: PLR2004 - version and length
        matches &= (head[:, 22 : last + 23] == ROCE_PORT >> 8) & (head[:, 23 : last + 24] == ROCE_PORT & 0xFF)
        matches &= at[:, None] + np.arange(last + 1) + _PLAIN_IP_UDP <= end[:, None]
        holds |= matches.any(axis=1)
    return holds
