"""A capture as columns: one array for each header field, one entry for each RoCEv2 packet.

`decode` reads the headers of all frames at once. It needs the first 70 bytes of a frame (Ethernet, IPv4, UDP, BTH and
RETH), so a capture of headers only is sufficient. Shorter frames are counted (`Packets.cut`), because a NAK whose AETH
is cut off cannot be recognised.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from faultbed.testbed.packets.bth import HAS_AETH, HAS_RETH, ROCE_PORT

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from faultbed.testbed.packets.capture_file import Frames

    Indices = NDArray[np.int64]
    Bytes = NDArray[np.uint8]

__all__ = ["Packets", "decode"]

_ETHERNET, _RAW_IP = 1, 101
_IPV4, _IPV6, _VLANS = 0x0800, 0x86DD, (0x8100, 0x88A8, 0x9100)
_FRAGMENT, _AUTHENTICATION, _NOTHING = 44, 51, 59
_EXTENSIONS = (0, 43, _FRAGMENT, _AUTHENTICATION, 60, 135, 139, 140)
"""Extension headers of IPv6 that another header follows (IANA, IPv6 Extension Header Types)."""
_UDP = 17
_HIDING_TYPES = (0x8847, 0x8848, 0x8864, 0x88E5)
"""EtherTypes of MPLS, PPPoE and MACsec."""
_HIDING_PROTOCOLS, _HIDING_PORTS = (4, 41, 47, 50, _AUTHENTICATION), (4789, 6081, 8472)
"""Protocols: IPv4 and IPv6 in IP, GRE, IPsec (its authentication header after IPv6 is decoded). UDP ports: VXLAN,
Geneve, and Linux's first port of VXLAN."""
_BTH_BYTES, _ICRC_BYTES, _UDP_BYTES = 12, 4, 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packets:
    """RoCEv2 packets in the order of the capture. All arrays have the same length.

    `cut` counts truncated frames, `not_decoded` RoCEv2 packets that are left out because they are fragments, and
    `hidden` frames that may contain RoCEv2 in a tunnel or encrypted.

        number       number of the frame in the file, from 1, as in Wireshark
        time_ns      time stamp in the file
        port         interface in the file (index into `Frames.interfaces`)
        outbound     1: left the captured interface, 0: came in, -1: not recorded in the file
        src, dst     index into `addresses`
        sport        UDP source port
        ecn          two bits of the IP header; 3 is congestion experienced
        ident        identification in the IPv4 header; -1 for IPv6
        opcode, dqpn, psn, ack_req       from the BTH
        syndrome     from the AETH; -1 without an AETH
        msn          from the AETH; -1 without an AETH
        dma_bytes    length in the RETH; -1 without a RETH
        payload      bytes after all headers, from the IP length, without padding and ICRC
        wire         bytes of the frame on the wire
    """

    addresses: tuple[str, ...]
    number: Indices
    time_ns: Indices
    port: NDArray[np.int16]
    outbound: NDArray[np.int8]
    src: NDArray[np.int32]
    dst: NDArray[np.int32]
    sport: NDArray[np.int32]
    ecn: NDArray[np.int8]
    ident: NDArray[np.int32]
    opcode: NDArray[np.uint8]
    dqpn: Indices
    psn: Indices
    ack_req: NDArray[np.bool_]
    syndrome: NDArray[np.int16]
    msn: Indices
    dma_bytes: Indices
    payload: Indices
    wire: Indices
    cut: int = 0
    not_decoded: int = 0
    hidden: int = 0

    def __len__(self) -> int:
        return len(self.number)

    def take(self, selection: NDArray[np.bool_] | Indices) -> Packets:
        """Return some of the packets, in the order given."""
        columns = {
            field.name: getattr(self, field.name)[selection] for field in fields(self) if field.name not in _SHARED
        }
        return Packets(**{name: getattr(self, name) for name in _SHARED}, **columns)


_SHARED = ("addresses", "cut", "not_decoded", "hidden")


def decode(frames: Frames) -> Packets:
    """Decode the RoCEv2 packets among `frames` (UDP to port 4791 over IPv4 or IPv6).

    Any number of VLAN tags and IPv6 extension headers may precede the UDP header. Fragments, and frames that end within
    their BTH, are left out, and so are frames that are neither Ethernet nor raw IP. `cut` counts the frames that are
    too short to decide whether they are RoCEv2, and the RoCEv2 packets without the whole BTH, AETH or RETH of their
    opcode. `not_decoded` counts fragmented packets. `hidden` counts tunnelled and encrypted frames, which are not
    decoded.
    """
    data, starts, kept = frames.data, frames.start, frames.captured
    end = starts + kept
    ip, family, too_short = _network(data, starts, kept, frames)
    v4, v6 = family == _IPV4, family == _IPV6
    protocol, at, ip_bytes, part = _transport(data, end, ip, family)
    is_udp = (protocol == _UDP) & (part != _LATER)
    is_readable = is_udp & (at + 4 <= end)
    # Frames that end before the UDP ports, or between extension headers, may or may not be RoCEv2.
    is_open = too_short | (is_udp & ~is_readable) | (v6 & np.isin(protocol, _EXTENSIONS))
    cut = int((is_open & (kept < frames.length)).sum())
    ports = np.full(len(at), -1, dtype=np.int64)
    ports[is_readable] = _u16(data, at[is_readable] + 2)
    not_decoded = int(((part == _FIRST) & (ports == ROCE_PORT)).sum())
    hidden = np.isin(family, _HIDING_TYPES) | np.isin(protocol, _HIDING_PROTOCOLS) | np.isin(ports, _HIDING_PORTS)
    chosen = np.flatnonzero((part == _WHOLE) & (ports == ROCE_PORT))
    at = at[chosen]
    whole = at + _UDP_BYTES + _BTH_BYTES <= end[chosen]
    cut += int((~whole).sum())
    chosen, at = (column[whole] for column in (chosen, at))
    bth = at + _UDP_BYTES
    v4, ip, end = v4[chosen], ip[chosen], end[chosen]
    opcode = data[bth]
    extended = bth + _BTH_BYTES
    # AETH and RETH both follow the BTH directly: no other optional header precedes a field that is read here.
    aeth = HAS_AETH[opcode] & (extended + 4 <= end)
    reth = HAS_RETH[opcode] & (extended + 16 <= end)
    cut += int((HAS_AETH[opcode] & ~aeth).sum() + (HAS_RETH[opcode] & ~reth).sum())
    addresses, src, dst = _addresses(data, ip, v4)
    flags = data[bth + 1]
    overhead = _UDP_BYTES + _BTH_BYTES + _ICRC_BYTES + ((flags >> 4) & 3) + _EXTENDED_BYTES[opcode]
    return Packets(
        addresses=addresses,
        number=chosen + 1,
        time_ns=frames.time_ns[chosen],
        port=frames.interface[chosen],
        outbound=frames.outbound[chosen],
        src=src,
        dst=dst,
        sport=_u16(data, at).astype(np.int32),
        ecn=np.where(v4, data[ip + 1], data[ip + 1] >> 4).astype(np.int8) & 3,
        ident=np.where(v4, _u16(data, ip + 4), -1).astype(np.int32),
        opcode=opcode,
        dqpn=_u24(data, bth + 5),
        psn=_u24(data, bth + 9),
        ack_req=data[bth + 8] >= 0x80,  # noqa: PLR2004 - the top bit
        syndrome=_optional(data, extended, aeth, _u8).astype(np.int16),
        msn=_optional(data, extended + 1, aeth, _u24),
        dma_bytes=_optional(data, extended + 12, reth, _u32),
        payload=np.maximum(ip_bytes[chosen] - overhead, 0),
        wire=frames.length[chosen],
        cut=cut,
        not_decoded=not_decoded,
        hidden=int(hidden.sum()),
    )


def _extended_bytes() -> Indices:
    """Return the bytes of extended transport headers by opcode (RC, UC and UD)."""
    table = np.zeros(256, dtype=np.int64)
    sizes = {
        4: (0x03, 0x05, 0x09, 0x23, 0x25, 0x29, 0x0D, 0x0F, 0x10, 0x11, 0x16, 0x17),
        8: (0x64,),
        12: (0x12, 0x65),
        16: (0x06, 0x0A, 0x0C, 0x26, 0x2A),
        20: (0x0B, 0x2B),
        28: (0x13, 0x14),
    }
    for size, opcodes in sizes.items():
        table[list(opcodes)] = size
    return table


_EXTENDED_BYTES = _extended_bytes()


def _u8(data: Bytes, at: Indices) -> Indices:
    return data[at].astype(np.int64)


def _u16(data: Bytes, at: Indices) -> Indices:
    return (_u8(data, at) << 8) | data[at + 1]


def _u24(data: Bytes, at: Indices) -> Indices:
    return (_u16(data, at) << 8) | data[at + 2]


def _u32(data: Bytes, at: Indices) -> Indices:
    return (_u16(data, at) << 16) | _u16(data, at + 2)


def _optional(data: Bytes, at: Indices, present: NDArray[np.bool_], read: object) -> Indices:
    values = np.full(len(at), -1, dtype=np.int64)
    present_at = np.flatnonzero(present)
    values[present_at] = read(data, at[present_at])  # type: ignore[operator]
    return values


def _network(data: Bytes, starts: Indices, kept: Indices, frames: Frames) -> tuple[Indices, Indices, NDArray[np.bool_]]:
    """Locate each frame's IP header.

    Return its offset and EtherType (both 0 if there is none), and if it is truncated.
    """
    ip, family = np.zeros(len(starts), dtype=np.int64), np.zeros(len(starts), dtype=np.int64)
    link = frames.link_types[frames.interface]
    raw = np.flatnonzero((link == _RAW_IP) & (kept > 0))
    version = data[starts[raw]] >> 4
    ip[raw], family[raw] = starts[raw], np.where(version == 4, _IPV4, np.where(version == 6, _IPV6, 0))  # noqa: PLR2004
    ether = np.flatnonzero((link == _ETHERNET) & (kept >= 14))  # noqa: PLR2004 - its header
    at = starts[ether] + 12
    kind = _u16(data, at)
    tagged = np.arange(len(ether))
    while len(tagged := tagged[np.isin(kind[tagged], _VLANS) & (at[tagged] + 6 <= (starts + kept)[ether[tagged]])]):
        at[tagged] += 4
        kind[tagged] = _u16(data, at[tagged])
    ip[ether], family[ether] = at + 2, kind
    header = np.where(family == _IPV4, 20, np.where(family == _IPV6, 40, 0))
    # The captured bytes of a frame may end between its VLAN tags.
    too_short = (starts + kept < ip + header) | (ip == 0) | np.isin(family, _VLANS)
    family[too_short] = 0
    return ip, family, too_short


_WHOLE, _FIRST, _LATER = 0, 1, 2
"""A packet that is no fragment, a first fragment, and a later fragment, which has no header of the upper layer."""


def _transport(
    data: Bytes, end: Indices, ip: Indices, family: Indices
) -> tuple[Indices, Indices, Indices, NDArray[np.int8]]:
    """Locate what each IP packet carries.

    Return its protocol (-1: no IP packet), its offset, the bytes from there to the end of the IP packet, and which
    part of it the frame has.
    """
    protocol, at, size = (np.full(len(ip), -1, dtype=np.int64) for _ in range(3))
    part = np.full(len(ip), _WHOLE, dtype=np.int8)
    four = np.flatnonzero(family == _IPV4)
    start = ip[four]
    header = (data[start] & 0x0F).astype(np.int64) * 4
    protocol[four] = np.where(header >= 20, _u8(data, start + 9), -1)  # noqa: PLR2004 - its least length
    at[four], size[four] = start + header, _u16(data, start + 2) - header
    part[four] = _part_of(_u16(data, start + 6) & 0x1FFF, _u16(data, start + 6) & 0x2000)
    six = np.flatnonzero(family == _IPV6)
    protocol[six], at[six], size[six] = _u8(data, ip[six] + 6), ip[six] + 40, _u16(data, ip[six] + 4)
    rows = six
    while len(rows := rows[np.isin(protocol[rows], _EXTENSIONS) & (at[rows] + 8 <= end[rows])]):
        place, kind = at[rows], protocol[rows]
        words = _u8(data, place + 1)
        length = np.where(kind == _AUTHENTICATION, 4 * words + 8, 8 * words + 8)
        length[kind == _FRAGMENT] = 8
        fragments = rows[kind == _FRAGMENT]
        offset = _u16(data, at[fragments] + 2)
        part[fragments] = np.maximum(part[fragments], _part_of(offset & 0xFFF8, offset & 1))
        protocol[rows] = np.where(part[rows] == _LATER, _NOTHING, _u8(data, place))
        at[rows] += length
        size[rows] -= length
    return protocol, at, size, part


def _part_of(offset: Indices, more: Indices) -> NDArray[np.int8]:
    return np.where(offset != 0, _LATER, np.where(more != 0, _FIRST, _WHOLE)).astype(np.int8)


def _addresses(
    data: Bytes, ip: Indices, v4: NDArray[np.bool_]
) -> tuple[tuple[str, ...], NDArray[np.int32], NDArray[np.int32]]:
    names: list[str] = []
    src, dst = np.zeros(len(ip), dtype=np.int32), np.zeros(len(ip), dtype=np.int32)
    four, six = np.flatnonzero(v4), np.flatnonzero(~v4)
    if len(four):
        addresses = np.concatenate([_u32(data, ip[four] + 12), _u32(data, ip[four] + 16)])
        # Without return_inverse numpy need not sort: there are few addresses among many packets.
        values = np.sort(np.unique(addresses))
        index = np.searchsorted(values, addresses)
        names += [str(ipaddress.IPv4Address(int(value))) for value in values]
        src[four], dst[four] = index[: len(four)], index[len(four) :]
    if len(six):
        start = np.concatenate([ip[six] + 8, ip[six] + 24])
        rows = data[start[:, None] + np.arange(16)]
        values, index = np.unique(rows, axis=0, return_inverse=True)
        index = index.reshape(-1) + len(names)
        names += [str(ipaddress.IPv6Address(value.tobytes())) for value in values]
        src[six], dst[six] = index[: len(six)], index[len(six) :]
    return tuple(names), src, dst
