"""Copies of requests that were not retransmitted: made by the network, or by a fault such as `packet.duplicate`. Pure.

If the sender numbers its packets (identification of the IPv4 header; rxe does), a copy has the number of its original,
and a retransmission has a new number. Otherwise the reason decides. A requester retransmits a packet for one of three
reasons (InfiniBand Architecture Specification, volume 1, 9.7.5 and 9.7.6):

    NAK, RNR   the responder requested that very PSN;
    timer      it had not been acknowledged for the queue pair's ACK timeout, 4.096 us * 2**t, since it was sent;
    response   a packet of the response to a READ or an atomic is missing; this needs no NAK.

A repeated packet without any of these reasons is a duplicate. Only the shortest possible timer counts: rxe starts its
timer before the packet that it retransmits, which then repeats sooner than the timeout. If a port does not see a flow's
responses (they may take another path), a NAK cannot be ruled out. There, only copies that arrive sooner than any answer
could are identified.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from faultbed.harness.packets.gobackn import TIMERS_FROM_NS, answers
from faultbed.inject.mechanisms.soft.hop import CORRUPTED_ID
from faultbed.testbed.packets.bth import IS_ANSWERED_BY_DATA, NAK_SEQUENCE, is_rnr

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from faultbed.harness.packets.flows import Flow
    from faultbed.testbed.packets.columns import Packets

    Indices = NDArray[np.int64]

__all__ = ["duplicates", "without_copies"]

_NO_ANSWER_NS = 1_000
"""No fabric carries a packet there and its NAK back in less time."""

_NUMBERED = 0.25
"""Share of packets that must have a number different from their predecessor's. Duplicating every packet leaves half."""

_DOUBLED = 0.4
"""Minimum share of copies, among requests and among responses, that shows two capture points on a flow's path."""


def duplicates(packets: Packets, flow: Flow) -> NDArray[np.bool_]:
    """Return, for each request of a flow, whether it is a duplicate."""
    after = flow.psn + flow.span
    top = np.maximum.accumulate(after)
    starts = np.flatnonzero(flow.psn[1:] != after[:-1]) + 1
    if not (flow.psn[starts] < top[starts - 1]).any():
        return np.zeros(len(flow.psn), dtype=np.bool_)
    ident = packets.ident[flow.requests]
    if _is_numbered(ident):
        # `packet.corrupt` sets a fixed number: two corrupted packets are not copies of each other.
        copies: NDArray[np.bool_] = _seen_before(flow.psn << 16 | ident) & (ident != CORRUPTED_ID)
        return copies
    return _without_reason(packets, flow, starts, top)


def _is_numbered(ident: NDArray[np.int32]) -> bool:
    return len(ident) > 1 and float(np.mean(ident[1:] != ident[:-1])) > _NUMBERED


def _response_copies(packets: Packets, flow: Flow) -> tuple[NDArray[np.bool_], bool]:
    """Return whether each response equals an earlier one, and whether that makes it a copy at any capture point.

    Compared are opcode, PSN and AETH, and for numbered packets the number. Without numbers, every second one of several
    equal packets counts as a copy, if it follows its predecessor soon.
    """
    responses = flow.responses
    ident = packets.ident[responses]
    is_numbered = _is_numbered(ident) or (_is_numbered(packets.ident[flow.requests]) and bool((ident > 0).all()))
    number = ident if is_numbered else np.zeros_like(ident)
    fields = np.stack(
        [packets.opcode[responses], packets.psn[responses], packets.syndrome[responses], packets.msn[responses], number]
    )
    order = np.lexsort(np.vstack([np.arange(len(responses)), fields]))
    equal = (fields[:, order[1:]] == fields[:, order[:-1]]).all(axis=0)
    copies = np.zeros(len(responses), dtype=np.bool_)
    if is_numbered:
        copies[order[1:][equal]] = True
        return copies & (ident != CORRUPTED_ID), True
    times = packets.time_ns[responses][order]
    place = 0
    for at in np.flatnonzero(equal).tolist():
        # `at` and the next one are equal; the first of them is not a copy.
        if at >= place and times[at + 1] - times[at] < TIMERS_FROM_NS:
            copies[order[at + 1]] = True
            place = at + 2
    return copies, False


def _seen_before(numbers: Indices) -> NDArray[np.bool_]:
    """Return which numbers occurred before."""
    order = np.argsort(numbers, kind="stable")
    repeated = np.zeros(len(numbers), dtype=np.bool_)
    repeated[order[1:]] = numbers[order[1:]] == numbers[order[:-1]]
    return repeated


def _without_reason(packets: Packets, flow: Flow, starts: Indices, top: Indices) -> NDArray[np.bool_]:
    copies, after = np.zeros(len(flow.psn), dtype=np.bool_), flow.psn + flow.span
    judge = _Judge.of(packets, flow, starts)
    next_psn = int(after[starts[0] - 1])
    for at, end in itertools.pairwise([*starts.tolist(), len(flow.psn)]):
        if int(flow.psn[at]) < next_psn:
            # The run may continue beyond its copies: from there on it is the flow's next part.
            known = int(np.searchsorted(flow.psn[at:end], next_psn))
            if judge.is_copy(at, known):
                copies[at : at + known] = True
                judge.copies.update(range(at, at + known))
                next_psn = next_psn if at + known == end else int(after[end - 1])
                continue
            judge.back = at
            if end < len(flow.psn) and after[end - 1] < top[at - 1] <= flow.psn[end]:
                continue  # a late packet: the flow continues where it was
        next_psn = int(after[end - 1])
    return copies


def without_copies(packets: Packets, flow: Flow) -> Flow:
    """Return the flow without copies. If it was captured at two points of its path, its side becomes "between"."""
    copies = duplicates(packets, flow)
    repeated, is_certain = _response_copies(packets, flow)
    is_doubled = len(repeated) > 0 and min(copies.mean(), repeated.mean()) >= _DOUBLED
    if not copies.any() and not (is_certain and repeated.any()):
        return flow
    keep = ~repeated if is_certain or is_doubled else np.ones(len(repeated), dtype=np.bool_)
    return replace(
        flow,
        requests=flow.requests[~copies],
        psn=flow.psn[~copies],
        span=flow.span[~copies],
        responses=flow.responses[keep],
        side="between" if is_doubled else flow.side,
        is_doubled=is_doubled,
    )


@dataclass(kw_only=True)
class _Judge:
    """State for deciding whether a run that begins before the flow's position is a copy.

    `requested` are the PSNs requested by NAKs and RNRs, `before_nak` the number of requests before each of them, and
    `before_response` the number of requests before every response. `at_psn` lists where PSNs pass that may be copies.
    `back` is where the flow last went back. `copies` are the duplicates so far. `filled` is the PSN that a NAK
    requested and that then arrived for the first time: perhaps late, so that the retransmission is still to come.
    """

    flow: Flow
    times: Indices
    requested: Indices
    before_nak: Indices
    before_response: Indices
    by_response: NDArray[np.bool_]
    at_psn: dict[int, list[int]]
    back: int = 0
    copies: set[int] = field(default_factory=set)
    filled: int | None = None

    @classmethod
    def of(cls, packets: Packets, flow: Flow, starts: Indices) -> _Judge:
        before_response = np.searchsorted(flow.requests, flow.responses)
        answer = answers(packets, flow, before_response)
        syndrome = packets.syndrome[flow.responses]
        signals = (syndrome == NAK_SEQUENCE) | is_rnr(syndrome)
        at_psn: dict[int, list[int]] = {}
        for at in np.flatnonzero(np.isin(flow.psn, np.concatenate([flow.psn[starts], answer[signals]]))).tolist():
            at_psn.setdefault(int(flow.psn[at]), []).append(at)
        return cls(
            flow=flow,
            times=packets.time_ns[flow.requests],
            requested=answer[signals],
            before_nak=before_response[signals],
            before_response=before_response,
            by_response=IS_ANSWERED_BY_DATA[packets.opcode[flow.requests]],
            at_psn=at_psn,
        )

    def is_copy(self, at: int, known: int) -> bool:
        """Return whether the sender had no reason to retransmit request `at` and the `known` - 1 that follow it."""
        low = int(self.flow.psn[at])
        first, last = (int(np.searchsorted(self.before_nak, request, side="right")) for request in (self.back, at))
        is_requested = bool((self.requested[first:last] == low).any())
        sent = next((request for request in reversed(self._passes(low, at)) if request not in self.copies), None)
        if sent is None:
            self.filled = low if is_requested else None
            return False
        if is_requested or self.times[at] - self.times[sent] >= TIMERS_FROM_NS:
            return False
        if low == self.filled and known > 1:
            self.filled = None
            return False
        if not len(self.before_response) and self.flow.side == "between":
            return bool(self.times[at] - self.times[sent] < _NO_ANSWER_NS)
        if self.by_response[at] and ((self.before_response > sent) & (self.before_response <= at)).any():
            return False
        # If an earlier PSN was requested, the sender goes back to the wrong one, unless the right one follows soon.
        lower = np.flatnonzero(self.requested[first:last] < low)
        return not len(lower) or self._comes_soon(first + int(lower[-1]), at)

    def _passes(self, psn: int, before: int) -> list[int]:
        places = self.at_psn[psn]
        return places[: bisect.bisect_left(places, before)]

    def _comes_soon(self, signal: int, at: int) -> bool:
        places = self.at_psn.get(int(self.requested[signal]), [])
        after = bisect.bisect_left(places, int(self.before_nak[signal]))
        return after < len(places) and bool(self.times[places[after]] - self.times[at] < TIMERS_FROM_NS)
