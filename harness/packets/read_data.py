"""Data of READ and atomic responses, checked packet by packet as requests are. Pure.

A READ request takes one PSN for each packet of its response, and the responder sends them in PSN order; an atomic,
FLUSH or ATOMIC WRITE takes one. Nothing acknowledges these packets. A requester that sees a later response knows that
data is missing (an implied NAK), drops everything from there on, and requests the rest again: a READ from the first
missing packet on (InfiniBand Architecture Specification, volume 1, 9.7.5.1.4 and 9.7.6).

`_Owed` numbers the packets of all such responses in PSN order, without the PSNs between them. In these numbers, what a
requester may accept is simply the next one. A response that acknowledges beyond a packet implies that it was sent.

Rules, and the capture point at which they are exact:

    response-ahead        any        data for a PSN that was not yet requested
    response-kind         any        a response of another kind than its request, or at another place of its message
    response-length       any        a response packet whose length its request does not allow
    response-skipped      receiver   the responder left out data of a response
    response-order        receiver   the responder sent data out of PSN order
    response-repeated     receiver   the responder repeated data that was not requested again
    read-abandoned        sender     the requester went on without data, for more requests than can be outstanding
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from faultbed.harness.packets.violation import Violation, violation
from faultbed.testbed.packets.bth import (
    ACKNOWLEDGE,
    ATOMIC_ACKNOWLEDGE,
    COMPARE_SWAP,
    FETCH_ADD,
    IS_ANSWERED_BY_DATA,
    OPERATION,
    PSN_SPACE,
    READ_REQUEST,
    is_ack,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from faultbed.harness.packets.flows import Flow
    from faultbed.harness.packets.gobackn import Track
    from faultbed.testbed.packets.columns import Packets

    Indices = NDArray[np.int64]
    Flags = NDArray[np.bool_]

__all__ = ["DataTrack", "Gap", "data_violations", "track_data"]

_FIRST, _MIDDLE, _LAST, _ONLY = 0x0D, 0x0E, 0x0F, 0x10
_MOST_OUTSTANDING = 255
"""`max_rd_atomic` of a queue pair has 8 bits: no requester has more READs and atomics without an answer."""
_REMEMBERED = 64
"""Repeated READs whose responses are still expected; older ones were lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A gap in the response data that is still open: the first missing PSN, unwrapped, and when the gap was seen.

    `missing` is how many packets are missing before the next one that passed.
    """

    psn: int
    missing: int
    time_ns: int
    frame: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DataTrack:
    """What became of the data of a flow's READ and atomic responses, in packets.

    `missing` had not passed when a later response did. Of these, `returned` were requested and came again, and
    `reordered` came late without a new request. `repeated` passed again without one. `open_gap` is where a requester
    still waits at the end. `places` and `gaps` are parallel: the gap from the moment on at which that many requests
    had passed. `broken` are rules that only the pass over all responses can check.
    """

    missing: int = 0
    returned: int = 0
    reordered: int = 0
    repeated: int = 0
    places: tuple[int, ...] = ()
    gaps: tuple[Gap | None, ...] = ()
    broken: tuple[Violation, ...] = ()

    @property
    def open_gap(self) -> Gap | None:
        """Where the requester still waits when the capture ends; None if it has all data up to the last response."""
        return self.gaps[-1] if self.gaps else None

    def gap_before(self, request: int) -> Gap | None:
        """Return the gap that was open when the flow's request number `request` passed."""
        at = bisect.bisect_right(self.places, request) - 1
        return self.gaps[at] if at >= 0 else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Owed:
    """Disjoint intervals of PSNs that are answered by data, in order; `before` is the sum of all earlier lengths."""

    start: Indices
    size: Indices
    before: Indices

    @classmethod
    def of(cls, low: Indices, high: Indices) -> _Owed:
        order = np.argsort(low, kind="stable")
        low, high = low[order], np.maximum.accumulate(high[order])
        # A READ that is repeated, in whole or in part, lies within the interval of its first transmission.
        begins = np.flatnonzero(np.concatenate([[True], low[1:] >= high[:-1]]))
        ends = np.append(begins[1:], len(low)) - 1
        start, size = low[begins], high[ends] - low[begins]
        return cls(start=start, size=size, before=np.cumsum(size) - size)

    def interval(self, psn: Indices) -> tuple[Indices, Flags]:
        """Return the last interval that begins at or before each PSN, and whether the PSN is in it."""
        at = np.searchsorted(self.start, psn, side="right") - 1
        inside = (at >= 0) & (psn < self.start[at] + self.size[at])
        return np.maximum(at, 0), inside

    def number(self, psn: Indices) -> Indices:
        """Return how many packets of data are owed for PSNs below each PSN."""
        at = np.searchsorted(self.start, psn, side="right") - 1
        within = self.before[at] + np.clip(psn - self.start[at], 0, self.size[at])
        return np.where(at >= 0, within, 0)

    def psn(self, number: int) -> int:
        """Return the PSN of the packet of data with this number."""
        at = int(np.searchsorted(self.before, number, side="right")) - 1
        return int(self.start[at]) + number - int(self.before[at])


def track_data(packets: Packets, flow: Flow, tracked: Track, *, has_copies: bool) -> DataTrack:
    """Follow the data of a flow's responses. `has_copies`: requests were duplicated on the path, and answered twice."""
    asks = np.flatnonzero(IS_ANSWERED_BY_DATA[packets.opcode[flow.requests]])
    if not len(asks) or not len(flow.responses):
        return DataTrack()
    owed = _Owed.of(flow.psn[asks], flow.psn[asks] + flow.span[asks])
    opcode = OPERATION[packets.opcode[flow.responses]]
    syndrome, answer = packets.syndrome[flow.responses], tracked.answer
    is_data = opcode != ACKNOWLEDGE
    _, inside = owed.interval(answer)
    acknowledges = (opcode == ACKNOWLEDGE) & is_ack(syndrome)
    number = owed.number(answer + acknowledges)
    after = number + is_data
    counts = (~is_data | inside) & (tracked.place > 0)
    top = np.maximum.accumulate(np.where(counts, after, 0))
    before = np.concatenate([[0], top[:-1]])
    # An acknowledgement moves nothing, except where it implies data that had not passed.
    events = np.flatnonzero(counts & (is_data | (number > before)))
    if not len(events) or (number[events] == before[events]).all():
        return DataTrack()
    walk = _Walk(packets=packets, flow=flow, owed=owed, tracked=tracked, asks=asks, has_copies=has_copies)
    return walk.run(events, number[events], after[events], before[events])


@dataclass(kw_only=True)
class _Walk:
    """A pass over the runs of consecutive response packets; there are as many as there are anomalies."""

    packets: Packets
    flow: Flow
    owed: _Owed
    tracked: Track
    asks: Indices
    has_copies: bool

    def run(self, events: Indices, number: Indices, after: Indices, before: Indices) -> DataTrack:
        begin = np.flatnonzero(np.concatenate([[True], number[1:] != after[:-1]]))
        end = np.append(begin[1:], len(number))
        repeats, waiting = self._repeats(), deque[list[int]](maxlen=_REMEMBERED)
        expected = missing = reordered = repeated = taken = 0
        gap: Gap | None = None
        holes: list[list[int]] = []
        places: list[int] = []
        gaps: list[Gap | None] = []
        broken: list[Violation] = []
        for first, last in zip(begin.tolist(), end.tolist(), strict=True):
            low, high, top = int(number[first]), int(after[last - 1]), int(before[first])
            event = int(events[first])
            place = int(self.tracked.place[event])
            while taken < len(repeats) and repeats[taken][0] < place:
                waiting.append(repeats[taken])
                taken += 1
            if low > top:
                missing += low - top
                holes.append([top, low])
                broken += self._at_responder(
                    "response-skipped", event, f"data from PSN {self._psn(top)} on was left out"
                )
            elif low < top and not _is_requested(waiting, low, high):
                count = min(high, top) - low
                late = _filled(holes, low, low + count)
                reordered += late
                repeated += count - late
                if late:
                    broken += self._at_responder("response-order", event, "data with later PSNs was sent before it")
                if count > late and not self.has_copies:
                    broken += self._at_responder("response-repeated", event, "the data had not been requested again")
            else:
                _filled(holes, low, high)
            if low > expected:
                gap = gap or self._gap(expected, low, event)
            elif high > expected:
                expected = high
                gap = self._gap(expected, max(top, high), event) if max(top, high) > expected else None
            places.append(place)
            gaps.append(gap)
        lost = sum(high - low for low, high in holes)
        return DataTrack(
            missing=missing,
            returned=missing - lost - reordered,
            reordered=reordered,
            repeated=repeated,
            places=tuple(places),
            gaps=tuple(gaps),
            broken=(*broken, *self._abandoned(gaps[-1])),
        )

    def _repeats(self) -> list[list[int]]:
        """Return position, first and last number of each READ or atomic whose PSN had been requested before."""
        psn = self.flow.psn[self.asks]
        again = self.asks[(self.asks > 0) & (psn < self.tracked.top[np.maximum(self.asks - 1, 0)])]
        low = self.owed.number(self.flow.psn[again])
        high = self.owed.number(self.flow.psn[again] + self.flow.span[again])
        return [list(row) for row in zip(again.tolist(), low.tolist(), high.tolist(), strict=True)]

    def _gap(self, expected: int, reached: int, event: int) -> Gap:
        at = int(self.flow.responses[event])
        return Gap(
            psn=self.owed.psn(expected),
            missing=reached - expected,
            time_ns=int(self.packets.time_ns[at]),
            frame=int(self.packets.number[at]),
        )

    def _psn(self, number: int) -> int:
        return self.owed.psn(number) % PSN_SPACE

    def _at_responder(self, rule: str, event: int, detail: str) -> list[Violation]:
        at = int(self.flow.responses[event])
        return [violation(self.packets, rule, at, detail)] if self.flow.side == "receiver" else []

    def _abandoned(self, gap: Gap | None) -> list[Violation]:
        if gap is None or self.flow.side != "sender":
            return []
        later = self.asks[
            (self.packets.time_ns[self.flow.requests[self.asks]] > gap.time_ns) & (self.flow.psn[self.asks] > gap.psn)
        ]
        if len(later) <= _MOST_OUTSTANDING:
            return []
        detail = (
            f"data of PSN {gap.psn % PSN_SPACE} had not arrived, was not requested again, and {len(later):,} more "
            "READs and atomics followed"
        )
        return [violation(self.packets, "read-abandoned", int(self.flow.requests[later[_MOST_OUTSTANDING]]), detail)]


def _is_requested(waiting: deque[list[int]], low: int, high: int) -> bool:
    """Return whether a run answers a repeated READ, and note how far. A responder answers in order."""
    for place, (_, begin, end) in enumerate(waiting):
        if begin <= low < end:
            for _ in range(place):
                waiting.popleft()
            waiting[0][1] = high
            return True
    return False


def _filled(holes: list[list[int]], low: int, high: int) -> int:
    """Remove the numbers from `low` to `high` from the holes, and return how many were in them."""
    count = 0
    for at in range(len(holes) - 1, -1, -1):
        begin, end = holes[at]
        if end <= low:
            break
        if begin >= high:
            continue
        count += min(end, high) - max(begin, low)
        holes[at : at + 1] = [part for part in ([begin, low], [high, end]) if part[0] < part[1]]
    return count


def data_violations(packets: Packets, flow: Flow, tracked: Track) -> list[Violation]:
    """Return every response with data whose PSN, kind, place or length does not fit the request it answers."""
    asks = np.flatnonzero(IS_ANSWERED_BY_DATA[packets.opcode[flow.requests]])
    opcode = OPERATION[packets.opcode[flow.responses]]
    data = np.flatnonzero((opcode != ACKNOWLEDGE) & (tracked.place > 0))
    if not len(data):
        return []
    answer, at = tracked.answer[data], flow.responses[data]
    is_ahead = answer >= tracked.top[tracked.place[data] - 1]
    broken = [
        violation(packets, "response-ahead", place, "no request for it had passed") for place in at[is_ahead].tolist()
    ]
    if flow.side == "receiver":
        broken += _before_all_requests(packets, flow, at, answer)
    plain = np.setdiff1d(flow.psn, flow.psn[asks])
    if not len(asks):
        wrong, inside = np.isin(answer, plain), np.zeros(len(data), dtype=np.bool_)
    else:
        low, span = flow.psn[asks], flow.span[asks]
        owed = _Owed.of(low, low + span)
        interval, inside = owed.interval(answer)
        wrong = ~inside & np.isin(answer, plain)
        wanted = _kinds(packets, flow, asks, owed, answer, interval)
        mismatch = np.flatnonzero(inside & (opcode[data] != wanted) & ~is_ahead)
        starts = {(int(psn), size > 1) for psn, size in zip(low, span, strict=True)} if len(mismatch) else set()
        ends = set((low + span - 1)[span > 1].tolist()) if len(mismatch) else set()
        for row in mismatch.tolist():
            kind, psn = int(opcode[data[row]]), int(answer[row])
            is_atomic = ATOMIC_ACKNOWLEDGE in (kind, int(wanted[row]))
            fits_repeat = ((psn, kind == _FIRST) in starts and kind in (_FIRST, _ONLY)) or (
                kind == _LAST and psn in ends
            )
            wrong[row] = is_atomic or (flow.is_mtu_known and not fits_repeat)
    broken += [
        violation(
            packets, "response-kind", place, f"opcode 0x{int(packets.opcode[place]):02x} does not fit its request"
        )
        for place in at[wrong & ~is_ahead].tolist()
    ]
    is_full = np.isin(opcode[data], (_FIRST, _MIDDLE))
    payload = packets.payload[at]
    too_long = (payload > flow.mtu) | (is_full & (payload != flow.mtu))
    if flow.is_mtu_known:
        broken += [
            violation(
                packets, "response-length", place, f"{int(packets.payload[place])} bytes, the path MTU is {flow.mtu}"
            )
            for place in at[inside & too_long].tolist()
        ]
    return broken


def _before_all_requests(packets: Packets, flow: Flow, at: Indices, answer: Indices) -> list[Violation]:
    """Return data for READs of before the capture that a responder sent after data for one in it."""
    is_older = answer < int(flow.psn.min())
    is_late = is_older & np.maximum.accumulate(~is_older)
    return [
        violation(packets, "response-order", place, "data with later PSNs was sent before it")
        for place in at[is_late].tolist()
    ]


def _kinds(
    packets: Packets, flow: Flow, asks: Indices, owed: _Owed, answer: Indices, interval: Indices
) -> NDArray[np.uint8]:
    """Return the operation that answers each PSN if its request was sent once, in whole."""
    first_of = np.searchsorted(flow.psn[asks], owed.start) if np.all(np.diff(flow.psn[asks]) >= 0) else None
    if first_of is None:
        order = np.argsort(flow.psn[asks], kind="stable")
        first_of = order[np.searchsorted(flow.psn[asks][order], owed.start)]
    request = OPERATION[packets.opcode[flow.requests[asks[first_of]]]][interval]
    offset, size = answer - owed.start[interval], owed.size[interval]
    place = np.where(offset == 0, _FIRST, np.where(offset == size - 1, _LAST, _MIDDLE))
    read = np.where(size == 1, _ONLY, place)
    is_atomic = np.isin(request, (COMPARE_SWAP, FETCH_ADD))
    kinds: NDArray[np.uint8] = np.where(is_atomic, ATOMIC_ACKNOWLEDGE, np.where(request == READ_REQUEST, read, _ONLY))
    return kinds.astype(np.uint8)
