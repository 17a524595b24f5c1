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

from testbed.packets.bth import HAS_AETH, HAS_RETH, ROCE_PORT

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from testbed.packets.capture_file import Frames

    Indices = NDArray[np.int64]
    Bytes = NDArray[np.uint8]

__all__ = ["Packets", "decode"]

_ETHERNET, _RAW_IP = 1, 101
_IPV4, _IPV6, _VLANS = 0x0800, 0x86DD, (0x8100, 0x88A8, 0x9100)
_MOST_TAGS = 4
_HOP_BY_HOP, _ROUTING, _FRAGMENT, _OPTIONS = 0, 43, 44, 60
"""Extension headers of IPv6 (RFC 8200)."""
_UDP = 17
_BTH_BYTES, _ICRC_BYTES, _UDP_BYTES = 12, 4, 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packets:
    """RoCEv2 packets in the order of the capture. All arrays have one length. `cut` counts truncated frames.

    `not_decoded` counts RoCEv2 packets that are left out: fragments, and those behind extension headers of IPv6.

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

    def __len__(self) -> int:
        return len(self.number)

    def take(self, selection: NDArray[np.bool_] | Indices) -> Packets:
        """Return some of the packets, in the order given."""
        columns = {
            field.name: getattr(self, field.name)[selection] for field in fields(self) if field.name not in _SHARED
        }
        return Packets(addresses=self.addresses, cut=self.cut, not_decoded=self.not_decoded, **columns)


_SHARED = ("addresses", "cut", "not_decoded")


def decode(frames: Frames) -> Packets:
    """Decode the RoCEv2 packets among `frames` (UDP to port 4791 over IPv4 or IPv6, VLAN tags allowed).

    Fragments, packets with extension headers of IPv6, and frames that end within their BTH are left out. `cut` counts
    the frames that are too short to decide whether they are RoCEv2, and the RoCEv2 packets without the whole BTH, AETH
    or RETH of their opcode. `not_decoded` counts the others.

    Raises:
        UsageError: an interface of the capture is neither Ethernet nor raw IP (from `Frames`).
    """
    data, starts, kept = frames.data, frames.start, frames.captured
    end = starts + kept
    ip, family, too_short = _network(data, starts, kept, frames)
    at, ip_bytes, v4 = _transport(data, ip, family)
    not_decoded = _not_decoded(data, end, ip, family)
    chosen = np.flatnonzero(at > 0)
    at = at[chosen]
    # Frames that end before the UDP ports may or may not be RoCEv2.
    readable = at + 4 <= end[chosen]
    cut = int((too_short & (kept < frames.length)).sum()) + int((frames.length > kept)[chosen[~readable]].sum())
    chosen, at = (column[readable] for column in (chosen, at))
    chosen, at = (column[_u16(data, at + 2) == ROCE_PORT] for column in (chosen, at))
    whole = at + _UDP_BYTES + _BTH_BYTES <= end[chosen]
    cut += int((~whole).sum())
    chosen, at = (column[whole] for column in (chosen, at))
    bth = at + _UDP_BYTES
    v4, ip, end = v4[chosen], ip[chosen], end[chosen]
    opcode = data[bth]
    extended = bth + _BTH_BYTES
    # AtomicAckETH follows AETH, RETH stands alone: no field read here lies behind another optional header.
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
    )


def _not_decoded(data: Bytes, end: Indices, ip: Indices, family: Indices) -> int:
    """Count first fragments of RoCEv2 packets, and RoCEv2 packets behind one extension header of IPv6."""
    four = ip[family == _IPV4]
    is_first = (data[four + 9] == _UDP) & ((_u16(data, four + 6) & 0x3FFF) == 0x2000)  # noqa: PLR2004 - more fragments
    udp = four + (data[four] & 0x0F).astype(np.int64) * 4
    fragments = is_first & (udp + 4 <= end[family == _IPV4]) & (_u16(data, udp + 2) == ROCE_PORT)
    six = ip[family == _IPV6]
    header, extension = data[six + 6], six + 40
    is_fragment = header == _FRAGMENT
    is_first = ~is_fragment | (_u16(data, extension + 2) & 0xFFF8 == 0)
    udp = extension + np.where(is_fragment, 8, 8 + 8 * data[extension + 1].astype(np.int64))
    inside = np.isin(header, (_HOP_BY_HOP, _ROUTING, _FRAGMENT, _OPTIONS)) & (udp + 4 <= end[family == _IPV6])
    udp = np.where(inside, udp, six)
    extended = inside & is_first & (data[extension] == _UDP) & (_u16(data, udp + 2) == ROCE_PORT)
    return int(fragments.sum() + extended.sum())


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
    for _ in range(_MOST_TAGS):
        tagged = np.flatnonzero(np.isin(kind, _VLANS))
        if not len(tagged):
            break
        at[tagged] += 4
        kind[tagged] = _u16(data, at[tagged])
    ip[ether], family[ether] = at + 2, kind
    header = np.where(family == _IPV4, 20, np.where(family == _IPV6, 40, 0))
    too_short = (starts + kept < ip + header) | (ip == 0)
    family[too_short] = 0
    return ip, family, too_short


def _transport(data: Bytes, ip: Indices, family: Indices) -> tuple[Indices, Indices, NDArray[np.bool_]]:
    """Return where UDP begins (0: no unfragmented UDP), the bytes to the end of the IP packet, and if it is IPv4."""
    at, size = np.zeros(len(ip), dtype=np.int64), np.zeros(len(ip), dtype=np.int64)
    v4 = family == _IPV4
    four = np.flatnonzero(v4)
    start = ip[four]
    header = (data[start] & 0x0F).astype(np.int64) * 4
    whole = (data[start + 9] == _UDP) & ((_u16(data, start + 6) & 0x3FFF) == 0) & (header >= 20)  # noqa: PLR2004
    at[four], size[four] = np.where(whole, start + header, 0), _u16(data, start + 2) - header
    six = np.flatnonzero(family == _IPV6)
    start = ip[six]
    at[six], size[six] = np.where(data[start + 6] == _UDP, start + 40, 0), _u16(data, start + 4)
    return at, size, v4


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
