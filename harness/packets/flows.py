"""Sort the packets of a capture into flows: one direction of one queue pair at one captured port.

A flow has the requests of one requester (with its PSNs) and the responses to them, which carry the same PSNs back. No
header names both QPs of a pair: a request carries the responder's QPN, a response the requester's. The PSNs show which
two belong together (`faultbed.harness.packets.pairing`). If two pairings match equally well, the flow is marked
ambiguous and has no responses: a guess could report queue pairs that follow the rules.

XRC is checked as RC is. Requests of an unreliable connection (UC) are flows without responses. A packet whose opcode no
table has is part of the flow that its queue pair numbers name: it takes PSNs, but how many is not known.

A queue pair that is connected again begins with another PSN, and may have the same number: its packets are a flow of
their own. So are those behind a gap that no window explains (`faultbed.harness.packets.pairing.NEAR`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from faultbed.harness.packets.pairing import NEAR, Requests, pair
from faultbed.testbed.errors import UsageError
from faultbed.testbed.packets.bth import IS_CHECKED, IS_READ, IS_REQUEST, IS_RESPONSE, IS_UNRELIABLE, MTUS, distance

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from faultbed.testbed.packets.columns import Packets

    Indices = NDArray[np.int64]

__all__ = ["Flow", "Side", "Unpaired", "flows_of"]

Side = Literal["sender", "receiver", "between"]
"""Capture point: at the requester's own port, at the responder's, or somewhere between them."""

_CODES = np.arange(256)
_FIRST_OR_MIDDLE = np.isin(
    _CODES, [prefix | code for prefix in (0x00, 0x20, 0xA0) for code in (0x00, 0x01, 0x06, 0x07)]
)
_READ_FIRST_OR_MIDDLE = np.isin(_CODES, (0x0D, 0x0E, 0xAD, 0xAE))
"""By opcode: whether the packet is as long as the path MTU."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flow:
    """Requests from `src` to QP `dqpn` of `dst`, as captured at one port, and the responses to them.

    `requests` and `responses` index the capture's packets. `psn` are the requests' PSNs, unwrapped beyond 2**24. `span`
    is how many PSNs each request takes: 1, or for a READ the number of packets in its response. `reply_qpn` is the QP
    that the responses go to; None if no response was seen or the flow is ambiguous. `is_ambiguous`: responses of
    several queue pairs match these requests equally well. `is_doubled`: the capture contains each of its packets twice.
    `is_mtu_known` is False if no packet shows the path MTU, or its packets have the length of none. `is_unreliable`: it
    is a flow of UC. `strange` are packets of its queue pairs, in either direction, whose opcode is unknown.
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
    strange: Indices
    is_ambiguous: bool = False
    is_doubled: bool = False
    is_mtu_known: bool = True
    is_unreliable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpaired:
    """Responses from `src` to QP `dqpn` of `dst` that match no requests seen at the port."""

    port: int
    src: str
    dst: str
    dqpn: int
    responses: int


def flows_of(packets: Packets, *, host_ports: Sequence[bool]) -> tuple[list[Flow], list[Unpaired]]:
    """Return the RC, XRC and UC flows of a capture, in the order of their first packet, and unmatched responses.

    `host_ports` says for each captured interface whether a host is at its far end. An outbound request on such a port
    is about to reach its receiver; an inbound one has just left its sender.

    Raises:
        UsageError: there are more addresses and ports than the sort key can hold.
    """
    requests_by_ends: dict[tuple[int, int, int], list[Indices]] = {}
    responses_by_ends: dict[tuple[int, int, int], list[Indices]] = {}
    strange = _strange(packets)
    for group in _groups(packets, IS_REQUEST[packets.opcode] | _requests_among(packets, strange)):
        port, src, dst = _ends(packets, group)
        requests_by_ends.setdefault((port, src, dst), []).append(group)
    for group in _groups(packets, IS_RESPONSE[packets.opcode]):
        port, src, dst = _ends(packets, group)
        psn = _unwrapped(packets, group)
        responses_by_ends.setdefault((port, dst, src), []).extend(np.split(group, _restarts(psn, psn + 1)))
    flows: list[Flow] = []
    unpaired: list[Unpaired] = []
    for ends, groups in requests_by_ends.items():
        candidates = responses_by_ends.pop(ends, [])
        parts = [part for group in groups for part in _requests(packets, group, candidates)]
        pairing = pair(packets, [part for part, *_ in parts], candidates)
        for (part, mtu, is_known), partner, is_ambiguous in zip(
            parts, pairing.partner, pairing.is_ambiguous, strict=True
        ):
            responses = candidates[partner] if partner >= 0 and not is_ambiguous else np.zeros(0, dtype=np.int64)
            flow = _flow(packets, part, responses, mtu, host_ports, is_ambiguous=is_ambiguous, is_mtu_known=is_known)
            flows.append(replace(flow, strange=_strange_of(packets, strange, part, responses)))
        unpaired += [_unpaired(packets, candidates[unmatched]) for unmatched in pairing.left]
    unpaired += [_unpaired(packets, group) for groups in responses_by_ends.values() for group in groups]
    for group in _groups(packets, IS_UNRELIABLE[packets.opcode]):
        nothing = np.zeros(0, dtype=np.int64)
        for part, mtu, _ in _requests(packets, group, []):
            flow = _flow(packets, part, nothing, mtu, host_ports, is_ambiguous=False, is_mtu_known=True)
            flows.append(replace(flow, is_unreliable=True))
    return sorted(flows, key=lambda flow: int(flow.requests[0])), unpaired


def _strange(packets: Packets) -> Indices:
    """Return the packets whose opcode no table has."""
    seen = np.flatnonzero(np.bincount(packets.opcode, minlength=256))
    if IS_CHECKED[seen].all():
        return np.zeros(0, dtype=np.int64)
    return np.flatnonzero(~IS_CHECKED[packets.opcode])


def _name_of(packets: Packets, rows: Indices) -> list[tuple[int, ...]]:
    """Return port, source, destination and destination QP of packets."""
    columns = (packets.port, packets.src, packets.dst, packets.dqpn)
    return list(zip(*(column[rows].tolist() for column in columns), strict=True))


def _requests_among(packets: Packets, strange: Indices) -> NDArray[np.bool_]:
    """Return the strange packets that go to a queue pair which also gets requests."""
    chosen = np.zeros(len(packets), dtype=np.bool_)
    if len(strange):
        names = set(_name_of(packets, np.flatnonzero(IS_REQUEST[packets.opcode])))
        chosen[strange] = [name in names for name in _name_of(packets, strange)]
    return chosen


def _strange_of(packets: Packets, strange: Indices, part: Requests, responses: Indices) -> Indices:
    """Return the strange packets to either queue pair of a flow."""
    if not len(strange):
        return strange
    ends = {*_name_of(packets, part.places[:1]), *_name_of(packets, responses[:1])}
    return strange[[name in ends for name in _name_of(packets, strange)]]


def _ends(packets: Packets, group: Indices) -> tuple[int, int, int]:
    first = group[0]
    return int(packets.port[first]), int(packets.src[first]), int(packets.dst[first])


def _unpaired(packets: Packets, group: Indices) -> Unpaired:
    port, src, dst = _ends(packets, group)
    return Unpaired(
        port=port,
        src=packets.addresses[src],
        dst=packets.addresses[dst],
        dqpn=int(packets.dqpn[group[0]]),
        responses=len(group),
    )


def _groups(packets: Packets, mask: NDArray[np.bool_]) -> list[Indices]:
    """Group packets by port, source, destination and destination QP, in the order of their first packet."""
    chosen = np.flatnonzero(mask)
    if not len(chosen):
        return []
    names, ports = len(packets.addresses), int(packets.port.max()) + 1
    if ports * names**2 >= 1 << 39:
        raise UsageError(
            f"{names:,} addresses at {ports:,} ports in one capture is too many; split it by port or by address"
        )
    ends = (packets.port[chosen].astype(np.int64) * names + packets.src[chosen]) * names + packets.dst[chosen]
    key = ends << 24 | packets.dqpn[chosen]
    if int(key[0]) == int(key.min()) == int(key.max()):
        return [chosen]
    order = np.argsort(key, kind="stable")
    cuts = np.flatnonzero(np.diff(key[order])) + 1
    return sorted(np.split(chosen[order], cuts), key=lambda group: int(group[0]))


def _requests(packets: Packets, requests: Indices, candidates: list[Indices]) -> list[tuple[Requests, int, bool]]:
    """Return the packets of each connection of one requester, with unwrapped PSNs, the path MTU, and if it is known."""
    psn = _unwrapped(packets, requests)
    span = np.ones(len(requests), dtype=np.int64)
    opcode = packets.opcode[requests]
    reads = np.flatnonzero(IS_READ[opcode])
    mtu, is_known = _mtu(packets, requests, candidates, psn, reads)
    if len(reads):
        size = packets.dma_bytes[requests[reads]]
        span[reads] = np.maximum(1, -(-size // mtu))
        is_known = is_known or not (size > MTUS[0]).any()
    guessed = (
        np.flatnonzero(~IS_CHECKED[opcode]) if is_known else np.union1d(reads, np.flatnonzero(~IS_CHECKED[opcode]))
    )
    guessed = guessed[guessed < len(psn) - 1]
    step = psn[guessed + 1] - psn[guessed]
    # Nothing is missing behind a packet of which it is not known how many PSNs it takes.
    span[guessed] = np.where((step > 0) & (step < NEAR), step, span[guessed])
    at = _restarts(psn, psn + span)
    columns = zip(np.split(requests, at), np.split(psn, at), np.split(span, at), strict=True)
    return [(Requests(places=places, psn=own, span=spans), mtu, is_known) for places, own, spans in columns]


def _unwrapped(packets: Packets, group: Indices) -> Indices:
    raw = packets.psn[group]
    return np.concatenate([raw[:1], raw[:1] + np.cumsum(distance(raw[1:], raw[:-1]))])


def _restarts(psn: Indices, after: Indices) -> list[int]:
    """Return the positions at which PSNs go on too far from all before them to be of the same connection.

    A sender goes back at most to where it has been. `after` is the PSN that follows each packet.
    """
    jumps = np.flatnonzero(np.abs(psn[1:] - after[:-1]) >= NEAR) + 1
    if not len(jumps):
        return []
    starts = np.concatenate([[0], jumps])
    lowest, highest = np.minimum.reduceat(psn, starts).tolist(), np.maximum.reduceat(after, starts).tolist()
    restarts = []
    low, top = lowest[0], highest[0]
    for at, first, its_low, its_top in zip(jumps.tolist(), psn[jumps].tolist(), lowest[1:], highest[1:], strict=True):
        if first - top >= NEAR or low - first >= NEAR:
            restarts.append(at)
            low, top = its_low, its_top
        else:
            low, top = min(low, its_low), max(top, its_top)
    return restarts


def _flow(
    packets: Packets,
    part: Requests,
    responses: Indices,
    mtu: int,
    host_ports: Sequence[bool],
    *,
    is_ambiguous: bool,
    is_mtu_known: bool,
) -> Flow:
    first = part.places[0]
    port, outbound = int(packets.port[first]), int(packets.outbound[first])
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
        requests=part.places,
        responses=responses,
        psn=part.psn,
        span=part.span,
        is_ambiguous=is_ambiguous,
        is_mtu_known=is_mtu_known,
        strange=np.zeros(0, dtype=np.int64),
    )


def _mtu(
    packets: Packets, requests: Indices, candidates: Sequence[Indices], psn: Indices, reads: Indices
) -> tuple[int, bool]:
    """Return the path MTU, and whether a packet shows it: 4096 if none does.

    Every first and middle packet of a message is as long as the path MTU. `candidates` are the responses between the
    same two addresses: a path has one MTU for all its QPs. Without such a packet, the PSN after a READ shows it.
    """
    full = packets.payload[requests[_FIRST_OR_MIDDLE[packets.opcode[requests]]]]
    if len(full):
        # The usual length, so that one packet of another length is the wrong one, and not all others are.
        usual = max(MTUS[0], int(np.bincount(full).argmax()))
        return usual, usual in MTUS
    if not len(reads):
        return MTUS[-1], True
    sizes = [
        int(np.bincount(packets.payload[group[mask]]).argmax())
        for group in candidates
        if (mask := _READ_FIRST_OR_MIDDLE[packets.opcode[group]]).any()
    ]
    if sizes:
        usual = max(MTUS[0], *sizes)
        return usual, usual in MTUS
    followed = reads[reads < len(psn) - 1]
    step, size = psn[followed + 1] - psn[followed], packets.dma_bytes[requests[followed]]
    shown = {mtu: int(((step > 1) & (-(-size // mtu) == step)).sum()) for mtu in MTUS}
    mtu = max(MTUS, key=lambda one: (shown[one], one))
    if shown[mtu]:
        return mtu, True
    # Every packet is at most as long as the path MTU, so no longer READ takes more than one PSN.
    seen = [packets.payload[group] for group in (requests, *candidates)]
    longest = max(int(np.concatenate([*seen, size[step == 1]]).max()), MTUS[0])
    return MTUS[-1], not (packets.dma_bytes[requests[reads]] > longest).any()
