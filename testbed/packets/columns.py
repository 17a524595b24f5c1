"""A capture as columns: one array for each header field, one entry for each RoCEv2 packet.

`decode` reads the headers of all frames at once. It needs the first 70 bytes of a frame (Ethernet, IPv4, UDP, BTH and
RETH), so a capture of headers only is sufficient. Shorter frames are counted (`Packets.cut`), because a NAK whose AETH
is cut off cannot be recognised.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from faultbed.testbed.packets.bth import EXTENDED_BYTES, HAS_AETH, RETH_AT, ROCE_PORT
from faultbed.testbed.packets.encapsulation import FIRST, IPV4, LATER, UDP, locate, u16

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from faultbed.testbed.packets.capture_file import Frames

    Indices = NDArray[np.int64]
    Bytes = NDArray[np.uint8]

__all__ = ["Packets", "decode"]

_BTH_BYTES, _ICRC_BYTES, _UDP_BYTES = 12, 4, 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packets:
    """RoCEv2 packets in the order of the capture. All arrays have the same length.

    `cut` counts truncated frames, `not_decoded` RoCEv2 packets that are left out because they are fragments, and
    `hidden` frames that may contain RoCEv2, by the name of the tunnel or encryption that hides it.

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

    def __len__(self) -> int:
        return len(self.number)

    def take(self, selection: NDArray[np.bool_] | Indices) -> Packets:
        """Return some of the packets, in the order given."""
        columns = {one.name: getattr(self, one.name)[selection] for one in fields(self) if one.name not in _SHARED}
        return Packets(**{name: getattr(self, name) for name in _SHARED}, **columns)


_SHARED = ("addresses", "cut", "not_decoded", "hidden")


def decode(frames: Frames) -> Packets:
    """Decode the RoCEv2 packets among `frames` (UDP to port 4791 over IPv4 or IPv6).

    The innermost IP packet counts (`faultbed.testbed.packets.encapsulation`). Fragments, and frames that end within
    their BTH, are left out. `cut` counts the frames that are too short to decide whether they are RoCEv2, and the
    RoCEv2 packets without the whole BTH, AETH or RETH of their opcode. `not_decoded` counts fragmented packets.
    """
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
    head = _records(data, at, _HEADERS)
    opcode = head["opcode"]
    extended = at + _UDP_BYTES + _BTH_BYTES
    # An AETH follows the BTH directly, because responses of XRC have no XRCETH.
    aeth = HAS_AETH[opcode] & (extended + 4 <= end)
    reth_at = RETH_AT[opcode]
    reth = (reth_at >= 0) & (extended + reth_at + 16 <= end)
    cut += int((HAS_AETH[opcode] & ~aeth).sum() + ((reth_at >= 0) & ~reth).sum())
    with_reth = np.flatnonzero(reth)
    dma_bytes = np.full(len(chosen), -1, dtype=np.int64)
    dma_bytes[with_reth] = _records(data, (extended + reth_at + 12)[with_reth], _LENGTH)
    addresses, src, dst = _addresses(data, ip, v4)
    overhead = _UDP_BYTES + _BTH_BYTES + _ICRC_BYTES + ((head["flags"] >> 4) & 3) + EXTENDED_BYTES[opcode]
    return Packets(
        addresses=addresses,
        number=chosen + 1,
        time_ns=frames.time_ns[chosen],
        port=frames.interface[chosen],
        outbound=frames.outbound[chosen],
        src=src,
        dst=dst,
        sport=head["sport"].astype(np.int32),
        ecn=np.where(v4, data[ip + 1], data[ip + 1] >> 4).astype(np.int8) & 3,
        ident=np.where(v4, u16(data, ip + 4), -1).astype(np.int32),
        opcode=np.ascontiguousarray(opcode),
        dqpn=(head["dqpn"] & 0xFFFFFF).astype(np.int64),
        psn=(head["psn"] & 0xFFFFFF).astype(np.int64),
        ack_req=head["psn"] >= 1 << 31,
        syndrome=np.where(aeth, (head["aeth"] >> 24).astype(np.int16), np.int16(-1)),
        msn=np.where(aeth, (head["aeth"] & 0xFFFFFF).astype(np.int64), -1),
        dma_bytes=dma_bytes,
        payload=np.maximum(found.size[chosen] - overhead, 0),
        wire=(frames.length + frames.start - found.start)[chosen],
        cut=cut,
        not_decoded=int(is_fragment.sum()),
        hidden=found.hidden,
    )


_HEADERS = np.dtype(
    [
        ("sport", ">u2"),
        ("rest_of_udp", "V6"),
        ("opcode", "u1"),
        ("flags", "u1"),
        ("pkey", ">u2"),
        ("dqpn", ">u4"),
        ("psn", ">u4"),
        ("aeth", ">u4"),
    ]
)
"""UDP header, BTH, and the AETH if there is one. The first bits of `dqpn` and `psn` are flags."""
_LENGTH = np.dtype(">u4")
_PAIR = np.dtype([("src", ">u4"), ("dst", ">u4")])


def _records(data: Bytes, at: Indices, layout: np.dtype[Any]) -> NDArray[Any]:
    """Return one record of this layout for each offset: a copy of consecutive bytes, much faster than single ones."""
    every = np.ndarray((len(data) - layout.itemsize + 1,), dtype=layout, buffer=data.data, strides=(1,))
    records: NDArray[Any] = every[at]
    return records


_SAMPLE = 4096


def _distinct(numbers: Indices) -> Indices:
    """Return the distinct numbers, sorted. There are few addresses among many packets, and most occur early."""
    values = np.unique(numbers[:_SAMPLE])
    is_new = values[np.minimum(np.searchsorted(values, numbers), len(values) - 1)] != numbers
    return np.union1d(values, numbers[is_new]) if is_new.any() else values


def _addresses(
    data: Bytes, ip: Indices, v4: NDArray[np.bool_]
) -> tuple[tuple[str, ...], NDArray[np.int32], NDArray[np.int32]]:
    names: list[str] = []
    src, dst = np.zeros(len(ip), dtype=np.int32), np.zeros(len(ip), dtype=np.int32)
    four, six = np.flatnonzero(v4), np.flatnonzero(~v4)
    if len(four):
        addresses = _records(data, ip[four] + 12, _PAIR)
        addresses = np.concatenate([addresses["src"], addresses["dst"]]).astype(np.int64)
        values = _distinct(addresses)
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
