"""Packets of a capture, sorted into flows: one direction of one queue pair at one captured port.

A flow has the requests of one requester (with its PSNs) and the responses to them, which carry the same PSNs back. No
header names both QPs of a pair, so responses are matched to requests by address pair and by PSN: PSNs start at
random, and a response lies close to the last request before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from testbed.packets.bth import IS_REQUEST, IS_RESPONSE, READ_REQUEST, distance

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from testbed.packets.columns import Packets

    Indices = NDArray[np.int64]

__all__ = ["Flow", "Side", "flows_of"]

Side = Literal["sender", "receiver", "between"]
"""Where the capture stands: at the requester's own port, at the responder's, or somewhere between them."""

_NEAR = 1 << 16
"""A response is that close to the last request, in PSNs: far more than any window, 1 % of the circle."""
_TRIED = 64
_FIRST_OR_MIDDLE = (0x00, 0x01, 0x06, 0x07)
_READ_FIRST_OR_MIDDLE = (0x0D, 0x0E)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flow:
    """Requests from `src` to QP `dqpn` of `dst`, as captured at one port, and the responses to them.

    `requests` and `responses` index the capture's packets. `psn` are the requests' PSNs unwrapped (they go on beyond
    2**24), `span` how many PSNs each takes: 1, and for a READ as many as its response has packets. `reply_qpn` is the
    QP that the responses go to; None when no response was seen.
    """

    port: int
    src: str
    dst: str
    dqpn: int
    reply_qpn: int | None
    side: Side
    mtu: int
    requests: Indices
    responses: Indices
    psn: Indices
    span: Indices


def flows_of(packets: Packets, *, host_ports: Sequence[bool]) -> Iterator[Flow]:
    """The RC flows of a capture, in the order of their first packet.

    `host_ports` says of each captured interface whether a host is at its far end: there, a request on its way out is
    seen last before its receiver, and one that comes in first after its sender.
    """
    asked = _groups(packets, IS_REQUEST[packets.opcode])
    answered = _groups(packets, IS_RESPONSE[packets.opcode])
    by_ends: dict[tuple[int, int, int], list[Indices]] = {}
    for group in answered:
        first = group[0]
        ends = (int(packets.port[first]), int(packets.dst[first]), int(packets.src[first]))
        by_ends.setdefault(ends, []).append(group)
    for group in asked:
        first = group[0]
        ends = (int(packets.port[first]), int(packets.src[first]), int(packets.dst[first]))
        yield _flow(packets, group, _match(packets, group, by_ends.get(ends, [])), host_ports)


def _groups(packets: Packets, which: NDArray[np.bool_]) -> list[Indices]:
    """Indices of packets with one port, source, destination and destination QP; in order of their first packet."""
    chosen = np.flatnonzero(which)
    if not len(chosen):
        return []
    key = packets.dqpn[chosen] | packets.src[chosen].astype(np.int64) << 24
    key |= packets.dst[chosen].astype(np.int64) << 40 | packets.port[chosen].astype(np.int64) << 56
    if int(key[0]) == int(key.min()) == int(key.max()):
        return [chosen]
    order = np.argsort(key, kind="stable")
    cuts = np.flatnonzero(np.diff(key[order])) + 1
    return sorted(np.split(chosen[order], cuts), key=lambda group: int(group[0]))


def _match(packets: Packets, requests: Indices, candidates: list[Indices]) -> Indices:
    """The responses among `candidates` (same two addresses) that lie next to these requests' PSNs, if any do."""
    best, found = 0.5, -1
    sport = int(packets.sport[requests[0]])
    for place, group in enumerate(candidates):
        tried = group[np.linspace(0, len(group) - 1, min(_TRIED, len(group))).astype(np.int64)]
        before = np.searchsorted(requests, tried) - 1
        later = before >= 0
        if not later.any():
            continue
        far = distance(packets.psn[tried[later]], packets.psn[requests[before[later]]])
        near = float((np.abs(far) < _NEAR).mean())
        # rxe sends both directions of a pair from one UDP source port: that decides between equals.
        near += 0.1 * (int(packets.sport[group[0]]) == sport) if near else 0
        if near > best:
            best, found = near, place
    return candidates.pop(found) if found >= 0 else np.zeros(0, dtype=np.int64)


def _flow(packets: Packets, requests: Indices, responses: Indices, host_ports: Sequence[bool]) -> Flow:
    first = requests[0]
    port, outbound = int(packets.port[first]), int(packets.outbound[first])
    raw = packets.psn[requests]
    psn = np.concatenate([raw[:1], raw[:1] + np.cumsum(distance(raw[1:], raw[:-1]))])
    mtu = _mtu(packets, requests, responses)
    span = np.ones(len(requests), dtype=np.int64)
    reads = np.flatnonzero(packets.opcode[requests] == READ_REQUEST)
    span[reads] = np.maximum(1, -(-packets.dma_bytes[requests[reads]] // mtu))
    side: Side = "between"
    if host_ports[port] and outbound >= 0:
        side = "receiver" if outbound else "sender"
    return Flow(
        port=port,
        src=packets.addresses[packets.src[first]],
        dst=packets.addresses[packets.dst[first]],
        dqpn=int(packets.dqpn[first]),
        reply_qpn=int(packets.dqpn[responses[0]]) if len(responses) else None,
        side=side,
        mtu=mtu,
        requests=requests,
        responses=responses,
        psn=psn,
        span=span,
    )


def _mtu(packets: Packets, requests: Indices, responses: Indices) -> int:
    """Path MTU: what every first and middle packet of a message carries. 4096 when the capture shows none."""
    for group, opcodes in ((requests, _FIRST_OR_MIDDLE), (responses, _READ_FIRST_OR_MIDDLE)):
        full = np.isin(packets.opcode[group], opcodes)
        if full.any():
            return max(256, int(packets.payload[group[full]].max()))
    return 4096
