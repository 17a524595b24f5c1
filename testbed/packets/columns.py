"""A capture as columns: one array for each header field, one entry for each RoCEv2 packet.

`decode` reads the headers of all frames at once. It needs the first 70 bytes of a frame (Ethernet, IPv4, UDP, BTH and
RETH), so a capture of headers only is sufficient. Shorter frames are counted (`Packets.cut`), because a NAK whose AETH
is cut off cannot be recognised.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from faultbed.testbed.packets.bth import EXTENDED_BYTES, HAS_AETH, MTUS, RETH_AT, ROCE_PORT
from faultbed.testbed.packets.encapsulation import FIRST, IPV4, LATER, UDP, locate, u16
from faultbed.testbed.packets.frames import column, heads_at, records_at

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from faultbed.testbed.packets.frames import Frames

    Indices = NDArray[np.int64]
    Bytes = NDArray[np.uint8]

__all__ = ["Packets", "decode"]

_BTH_BYTES, _ICRC_BYTES, _UDP_BYTES, _IPV6_BYTES = 12, 4, 8, 40
_TOO_SHORT = "too short for their own headers"
_CONTRADICTED = "contradicted by their UDP header or by their frame"
_JOINED = "longer than the largest path MTU"
_AT_ONCE = 1 << 15
"""Frames that are decoded at once: arrays of so many numbers stay in the processor's cache."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packets:
    """RoCEv2 packets in the order of the capture. All arrays have the same length.

    `cut` counts truncated frames, `not_decoded` RoCEv2 packets that are left out because they are fragments, and
    `hidden` frames that may contain RoCEv2, by the name of the tunnel or encryption that hides it. `odd_lengths` counts
    packets whose IP length cannot be theirs, by what is wrong with it: an offload or a damaged header.

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
        wire         bytes of the frame on the wire, without the tunnel or mirror around it
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
    hidden: dict[str, int] = field(default_factory=dict)
    odd_lengths: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.number)

    def take(self, selection: NDArray[np.bool_] | Indices) -> Packets:
        """Return some of the packets, in the order given."""
        columns = {one.name: getattr(self, one.name)[selection] for one in fields(self) if one.name not in _SHARED}
        return Packets(**{name: getattr(self, name) for name in _SHARED}, **columns)


_SHARED = ("addresses", "cut", "not_decoded", "hidden", "odd_lengths")


def decode(frames: Frames) -> Packets:
    """Decode the RoCEv2 packets among `frames` (UDP to port 4791 over IPv4 or IPv6).

    The innermost IP packet counts (`faultbed.testbed.packets.encapsulation`). Fragments, and frames that end within
    their BTH, are left out. `cut` counts the frames that are too short to decide whether they are RoCEv2, and the
    RoCEv2 packets without the whole BTH, AETH or RETH of their opcode. `not_decoded` counts fragmented packets.
    """
    addresses = _Addresses()
    parts = [
        _decode_part(frames.part(slice(begin, begin + _AT_ONCE)), begin + 1, addresses)
        for begin in range(0, max(1, len(frames)), _AT_ONCE)
    ]
    columns = {
        one.name: np.concatenate([getattr(part, one.name) for part in parts])
        for one in fields(Packets)
        if one.name not in _SHARED
    }
    return Packets(
        addresses=addresses.names(),
        cut=sum(part.cut for part in parts),
        not_decoded=sum(part.not_decoded for part in parts),
        hidden=dict(sum((Counter(part.hidden) for part in parts), Counter[str]())),
        odd_lengths=dict(sum((Counter(part.odd_lengths) for part in parts), Counter[str]())),
        **columns,
    )


def _decode_part(frames: Frames, first: int, addresses: _Addresses) -> Packets:
    """Decode some frames, which fit into the processor's cache; the first one has the number `first` in the file."""
    data, end, found = frames.data, frames.start + frames.captured, locate(frames)
    cut = int((found.is_short & (frames.captured < frames.length)).sum())
    is_readable = (found.protocol == UDP) & (found.part != LATER) & (found.at + 4 <= end)
    rows = np.flatnonzero(is_readable)
    rows = rows[u16(data, found.at[rows] + 2) == ROCE_PORT]
    is_fragment = found.part[rows] == FIRST
    chosen = rows[~is_fragment]
    whole = found.at[chosen] + _UDP_BYTES + _BTH_BYTES <= end[chosen]
    cut += int((~whole).sum())
    chosen = chosen[whole]
    at, ip, end, v4 = found.at[chosen], found.ip[chosen], end[chosen], found.family[chosen] == IPV4
    head, ip_head = heads_at(data, at, _UDP_BYTES + _BTH_BYTES + 4), heads_at(data, ip, _IPV6_BYTES)
    # The first bits of the destination QP and of the PSN are flags.
    dqpn, psn, aeth_words = (column(head, offset, ">u4").astype(np.int64) for offset in (12, 16, 20))
    opcode = head[:, 8].copy()
    extended = at + _UDP_BYTES + _BTH_BYTES
    # An AETH follows the BTH directly, because responses of XRC have no XRCETH.
    aeth = HAS_AETH[opcode] & (extended + 4 <= end)
    reth_at = RETH_AT[opcode]
    reth = (reth_at >= 0) & (extended + reth_at + 16 <= end)
    cut += int((HAS_AETH[opcode] & ~aeth).sum() + ((reth_at >= 0) & ~reth).sum())
    with_reth = np.flatnonzero(reth)
    dma_bytes = np.full(len(chosen), -1, dtype=np.int64)
    dma_bytes[with_reth] = records_at(data, (extended + reth_at + 12)[with_reth], _LENGTH)
    src, dst = addresses.numbers(ip_head, v4)
    size, overhead = found.size[chosen], _UDP_BYTES + _BTH_BYTES + _ICRC_BYTES + (head[:, 9] >> 4 & 3)
    overhead = overhead + EXTENDED_BYTES[opcode]
    is_short = size < overhead
    # A switch may cut what it mirrors, so only the length of a frame of its own is the packet's.
    is_beyond = (at + size > (frames.start + frames.length)[chosen]) & (found.start == frames.start)[chosen]
    is_contradicted = ~is_short & ((column(head, 4, ">u2") != size) | is_beyond)
    is_joined = ~is_contradicted & (size - overhead > MTUS[-1])
    odd = {_TOO_SHORT: is_short, _CONTRADICTED: is_contradicted, _JOINED: is_joined}
    return Packets(
        addresses=(),
        number=chosen + first,
        time_ns=frames.time_ns[chosen],
        port=frames.interface[chosen],
        outbound=frames.outbound[chosen],
        src=src,
        dst=dst,
        sport=column(head, 0, ">u2").astype(np.int32),
        ecn=np.where(v4, ip_head[:, 1], ip_head[:, 1] >> 4).astype(np.int8) & 3,
        ident=np.where(v4, column(ip_head, 4, ">u2").astype(np.int32), np.int32(-1)),
        opcode=opcode,
        dqpn=dqpn & 0xFFFFFF,
        psn=psn & 0xFFFFFF,
        ack_req=psn >= 1 << 31,
        syndrome=np.where(aeth, head[:, 20], np.int16(-1)).astype(np.int16),
        msn=np.where(aeth, aeth_words & 0xFFFFFF, -1),
        dma_bytes=dma_bytes,
        payload=np.maximum(size - overhead, 0),
        wire=(frames.length + frames.start - found.start)[chosen],
        cut=cut,
        not_decoded=int(is_fragment.sum()),
        hidden=found.hidden,
        odd_lengths={name: int(chosen.sum()) for name, chosen in odd.items() if chosen.any()},
    )


_LENGTH = np.dtype(">u4")


class _Addresses:
    """Numbers the IP addresses of a capture from 0 on, in the order in which they are found."""

    def __init__(self) -> None:
        self._number: dict[bytes, int] = {}

    def names(self) -> tuple[str, ...]:
        """Return the addresses by number."""
        return tuple(str(ipaddress.ip_address(address)) for address in self._number)

    def numbers(self, ip_head: Bytes, is_v4: NDArray[np.bool_]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the numbers of the source and destination addresses in rows that begin with an IP header."""
        src, dst = np.zeros(len(ip_head), dtype=np.int32), np.zeros(len(ip_head), dtype=np.int32)
        four, six = np.flatnonzero(is_v4), np.flatnonzero(~is_v4)
        for numbers, at_v4, at_v6 in ((src, 12, 8), (dst, 16, 24)):
            numbers[four] = self._numbers_of(column(ip_head, at_v4, ">u4")[four].astype(np.uint32))
            numbers[six] = self._numbers_of(column(ip_head, at_v6, "S16")[six])
        return src, dst

    def _numbers_of(self, addresses: NDArray[Any]) -> NDArray[np.int32]:
        if not len(addresses):
            return np.zeros(0, dtype=np.int32)
        values = _distinct(addresses)
        keys = [
            # numpy's strings have no zero bytes at their end.
            value.ljust(16, b"\0") if isinstance(value, bytes) else value.to_bytes(4, "big")
            for value in values.tolist()
        ]
        numbers = [self._number.setdefault(key, len(self._number)) for key in keys]
        return np.array(numbers, dtype=np.int32)[np.searchsorted(values, addresses)]


_SAMPLE = 1024


def _distinct(numbers: NDArray[Any]) -> NDArray[Any]:
    """Return the distinct numbers, sorted. There are few addresses among many packets, and most occur early."""
    values = np.unique(numbers[:_SAMPLE])
    is_new = values[np.minimum(np.searchsorted(values, numbers), len(values) - 1)] != numbers
    return np.union1d(values, numbers[is_new]) if is_new.any() else values
