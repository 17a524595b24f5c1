"""Verify go-back-N packet by packet: the PSN that the responder expects, what is missing, and the broken rules.

The receiver of an RC flow accepts packets in PSN order only. It answers the first packet out of order with one NAK that
carries the expected PSN, and drops everything until that PSN arrives (InfiniBand Architecture Specification, volume 1,
9.7.5). A sender that gets a NAK goes back to that PSN and continues from there.

A stretch of consecutive PSNs (a *run*) moves this state machine in one step. The loop is therefore over runs, of which
there are as many as there are anomalies; all else is array arithmetic.

Rules, and the capture point (`Flow.side`) at which they are exact:

    skipped-psn           sender               a PSN was left out that was never sent before
    repeated-psn          sender               an unreliable connection (UC) sent a PSN again
    went-back-wrong       sender               after a NAK, the sender went back to a PSN after the requested one
    opcode-order          any                  FIRST, MIDDLE, LAST or ONLY in an order that forms no message
    nak-ahead             any                  a NAK for a PSN beyond what the responder can expect
    nak-of-acknowledged   any                  a NAK for a PSN that was acknowledged before
    nak-repeated          any                  a second NAK for one PSN, which had not arrived again in between
    ack-ahead             any                  an ACK for a PSN that cannot have arrived in order
    ack-regress           any                  an ACK for less than the ACK before it
    ack-after-error       any                  an ACK for a request that a NAK had refused for good
    rnr-early             any                  a packet was sent again before the time that an RNR NAK requested
    request-length        any                  a FIRST or MIDDLE packet that is not as long as the path MTU

The rules of response data are in `faultbed.harness.packets.read_data`.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from faultbed.harness.packets.violation import Violation, violation
from faultbed.testbed.packets.bth import (
    ACKNOWLEDGE,
    IS_REQUEST,
    IS_UNRELIABLE,
    NAK_SEQUENCE,
    OPERATION,
    PSN_SPACE,
    distance,
    is_ack,
    is_fatal,
    is_rnr,
    rnr_timer_ns,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from faultbed.harness.packets.flows import Flow
    from faultbed.testbed.packets.columns import Packets

    Indices = NDArray[np.int64]

__all__ = ["TIMERS_FROM_NS", "Track", "answers", "track", "violations"]

TIMERS_FROM_NS = 500_000
"""Shortest ACK timer of an RNIC in practice (4.096 us * 2**7). Reordered packets are closer together than this."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Track:
    """State of a flow at each of its packets.

    For each request: `expected` is the PSN that the responder waits for after it; `top` is one more than the highest
    PSN so far, itself included; `ahead` is whether it was out of order and dropped. For each run: `begin` (position in
    the flow's requests) and `end`. For each response: `place` is the number of requests before it, and `answer` its
    unwrapped PSN. `backwards` and `jumps` are positions of requests that begin a run before, and beyond, `top`.
    `reordered` are those that arrived late without a retransmission. `beyond_port` counts losses behind the receiver's
    port.
    """

    expected: Indices
    top: Indices
    ahead: NDArray[np.bool_]
    begin: Indices
    end: Indices
    backwards: Indices
    jumps: Indices
    reordered: Indices
    place: Indices
    answer: Indices
    beyond_port: int


def track(packets: Packets, flow: Flow) -> Track:
    """Follow a flow through its packets. Duplicates must have been removed (`faultbed.harness.packets.duplicates`)."""
    psn, after = flow.psn, flow.psn + flow.span
    place = np.searchsorted(flow.requests, flow.responses)
    answer = answers(packets, flow, place)
    rewinds = _rewinds(packets, flow, place, answer)
    breaks = np.flatnonzero(psn[1:] != after[:-1]) + 1
    begin = np.unique(np.concatenate([[0], breaks, [at for at in rewinds if 0 < at < len(psn)]])).astype(np.int64)
    end = np.append(begin[1:], len(psn))
    top = np.maximum.accumulate(after)
    expected = np.empty(len(psn), dtype=np.int64)
    ahead = np.zeros(len(psn), dtype=np.bool_)
    now = _first_expected(packets, flow, place, answer)
    beyond_port = 0
    for first, last in zip(begin.tolist(), end.tolist(), strict=True):
        if first in rewinds:
            back, is_loss = rewinds[first]
            beyond_port += is_loss and back < now
            now = min(now, back)
        low = int(psn[first])
        if low > now:
            expected[first:last] = now
            ahead[first:last] = True
        else:
            expected[first:last] = np.maximum(after[first:last], now)
            now = int(expected[last - 1])
    starts = begin[np.isin(begin, breaks)]
    behind = top[starts - 1]
    backwards, jumps = starts[psn[starts] < behind], starts[psn[starts] > behind]
    ends = dict(zip(begin.tolist(), end.tolist(), strict=True))
    requested: dict[int, list[int]] = {}
    for at in np.flatnonzero(packets.syndrome[flow.responses] == NAK_SEQUENCE).tolist():
        requested.setdefault(int(answer[at]), []).append(int(place[at]))
    late = _reordered(packets, flow, top, {at: ends[at] for at in backwards.tolist()}, requested)
    return Track(
        expected=expected,
        top=top,
        ahead=ahead,
        begin=begin,
        end=end,
        backwards=_go_backs(packets, flow, starts, top, set(late.tolist()), requested),
        jumps=jumps,
        reordered=late,
        place=place,
        answer=answer,
        beyond_port=beyond_port,
    )


def answers(packets: Packets, flow: Flow, place: Indices) -> Indices:
    """Unwrap the responses' PSNs: each is nearest to that of the request before it, number `place` - 1."""
    near = flow.psn[np.maximum(place - 1, 0)]
    return near + distance(packets.psn[flow.responses], near % PSN_SPACE)


def _first_expected(packets: Packets, flow: Flow, place: Indices, answer: Indices) -> int:
    """Return the first PSN that the responder expects, which is lower if the capture began during an episode."""
    first = int(flow.psn[0])
    nak = np.flatnonzero(packets.syndrome[flow.responses] == NAK_SEQUENCE)
    if len(nak) and place[nak[0]] > 0 and answer[nak[0]] < first:
        return int(answer[nak[0]])
    return first


def _rewinds(packets: Packets, flow: Flow, place: Indices, answer: Indices) -> dict[int, tuple[int, bool]]:
    """Return, by position in the requests, the PSN expected from there on, and whether a loss caused it.

    After an RNR, packets that arrived in order were refused. A NAK below what passed the responder's port means a loss
    behind that port.
    """
    syndrome = packets.syndrome[flow.responses]
    rnr, nak = is_rnr(syndrome), syndrome == NAK_SEQUENCE
    lost = nak if flow.side == "receiver" else np.zeros(len(nak), dtype=np.bool_)
    return {int(place[at]): (int(answer[at]), bool(lost[at])) for at in np.flatnonzero(rnr | lost)}


def _go_backs(
    packets: Packets, flow: Flow, starts: Indices, top: Indices, late: set[int], requested: dict[int, list[int]]
) -> Indices:
    """Return the runs that begin before the top, except late packets and continuations of a go-back.

    A retransmission that is lost again, or was acknowledged meanwhile, leaves a gap in a go-back. It is still one
    go-back, unless a NAK since its begin requested the PSN behind the gap. `requested` are the places of the NAKs for
    each PSN, in requests before them.
    """
    go_backs: list[int] = []
    after = flow.psn + flow.span
    next_psn = int(after[starts[0] - 1]) if len(starts) else 0
    for at, end in itertools.pairwise([*starts.tolist(), len(flow.psn)]):
        low = int(flow.psn[at])
        if at in late:
            continue
        if low < int(top[at - 1]):
            silence = int(packets.time_ns[flow.requests[at]] - packets.time_ns[flow.requests[at - 1]])
            last = go_backs[-1] if go_backs else 0
            is_requested = any(last < place <= at for place in requested.get(low, ()))
            if low < next_psn or is_requested or silence >= TIMERS_FROM_NS:
                go_backs.append(at)
        next_psn = int(after[end - 1])
    return np.array(go_backs, dtype=np.int64)


def _reordered(packets: Packets, flow: Flow, top: Indices, ends: dict[int, int], requested: Container[int]) -> Indices:
    """Return the runs that arrived late but only once: they fill a hole, and the flow continues where it was.

    A run is a retransmission if a NAK requested it, if it follows a silence, or if it follows a retransmitted run: a
    sender that goes back sends everything from there on, and the packet between them was lost again.
    """
    late, holes = [], _holes(flow, top)
    opened = [hole for hole, _ in holes]
    resent: tuple[int, int] | None = None  # end of the last retransmitted run: position and PSN
    for at, last in ends.items():
        low, high = int(flow.psn[at]), int(flow.psn[last - 1] + flow.span[last - 1])
        # Holes are in order, and later ones begin at a top that `high` cannot reach.
        hole = bisect.bisect_right(opened, low) - 1
        is_late = (
            high < int(top[at - 1])  # it stops short of the top
            and (last == len(flow.psn) or int(flow.psn[last]) >= int(top[at - 1]))  # and the flow continues there
            and hole >= 0
            and high <= holes[hole][1]
            and low not in requested
            and int(packets.time_ns[flow.requests[at]] - packets.time_ns[flow.requests[at - 1]]) < TIMERS_FROM_NS
            and not (resent is not None and at == resent[0] and low >= resent[1])
        )
        if is_late:
            late.append(at)
        resent = None if is_late else (last, high)
    return np.array(late, dtype=np.int64)


def _holes(flow: Flow, top: Indices) -> list[tuple[int, int]]:
    jumps = np.flatnonzero(flow.psn[1:] > top[:-1]) + 1
    return list(zip(top[jumps - 1].tolist(), flow.psn[jumps].tolist(), strict=True))


def violations(packets: Packets, flow: Flow, tracked: Track) -> list[Violation]:
    """Return every broken rule of a flow, in the order of the capture."""
    broken = [
        *_sender_rules(packets, flow, tracked),
        *_opcode_order(packets, flow, tracked),
        *_request_length(packets, flow),
        *_responder_rules(packets, flow, tracked),
        *_rnr_rule(packets, flow, tracked),
    ]
    return sorted(broken, key=lambda violation: violation.frame)


def _sender_rules(packets: Packets, flow: Flow, tracked: Track) -> list[Violation]:
    if flow.side != "sender":
        return []
    broken = [
        violation(
            packets,
            "skipped-psn",
            int(flow.requests[at]),
            f"{int(flow.psn[at] - tracked.top[at - 1])} PSNs from {int(tracked.top[at - 1]) % PSN_SPACE} on were "
            "never sent",
        )
        for at in tracked.jumps.tolist()
    ]
    if flow.is_unreliable:
        return broken + [
            violation(packets, "repeated-psn", int(flow.requests[at]), "an unreliable connection sends each PSN once")
            for at in tracked.backwards.tolist()
        ]
    naks = np.flatnonzero(packets.syndrome[flow.responses] == NAK_SEQUENCE)
    places, requested_psns = tracked.place[naks], tracked.answer[naks]
    for at in tracked.backwards.tolist():
        before = int(np.searchsorted(places, at, side="right")) - 1
        if before < 0:
            continue
        requested, since = int(requested_psns[before]), int(places[before])
        served = bool((flow.psn[since:at] == requested).any())
        if int(flow.psn[at]) > requested and not served:
            detail = f"PSN {requested % PSN_SPACE} was requested and had not been retransmitted"
            broken.append(violation(packets, "went-back-wrong", int(flow.requests[at]), detail))
    return broken


def _message_tables() -> tuple[NDArray[np.int8], NDArray[np.int8]]:
    """Return by opcode which message it leaves open (0 none, 1 a SEND, 2 a WRITE), and which one it must continue."""
    leaves, needs = np.zeros(256, dtype=np.int8), np.zeros(256, dtype=np.int8)
    operations = np.where(IS_REQUEST | IS_UNRELIABLE, np.arange(256) & 0x1F, 0xFF)
    for kind, first, middle, lasts in ((1, 0x00, 0x01, (0x02, 0x03, 0x16)), (2, 0x06, 0x07, (0x08, 0x09))):
        leaves[np.isin(operations, (first, middle))] = kind
        needs[np.isin(operations, (middle, *lasts))] = kind
    return leaves, needs


_LEAVES, _NEEDS = _message_tables()


def _opcode_order(packets: Packets, flow: Flow, tracked: Track) -> list[Violation]:
    opcode = packets.opcode[flow.requests]
    follows = np.ones(len(opcode), dtype=np.bool_)
    follows[tracked.begin] = False
    # A rewind splits a run although its PSNs are consecutive.
    follows[1:] |= flow.psn[1:] == flow.psn[:-1] + flow.span[:-1]
    follows[0] = False
    wrong = np.flatnonzero(follows[1:] & (_NEEDS[opcode[1:]] != _LEAVES[opcode[:-1]])) + 1
    return [
        violation(packets, "opcode-order", int(flow.requests[at]), f"0x{opcode[at]:02x} after 0x{opcode[at - 1]:02x}")
        for at in wrong.tolist()
    ]


def _request_length(packets: Packets, flow: Flow) -> list[Violation]:
    opcode, payload = packets.opcode[flow.requests], packets.payload[flow.requests]
    wrong = ((_LEAVES[opcode] != 0) & (payload != flow.mtu)) | ((_NEEDS[opcode] != 0) & (payload > flow.mtu))
    return [
        violation(packets, "request-length", at, f"{int(packets.payload[at])} bytes, the path MTU is {flow.mtu}")
        for at in flow.requests[wrong].tolist()
    ]


_NEVER = np.iinfo(np.int64).min


def _highest_before(values: Indices) -> Indices:
    """Return for each value the highest of those before it."""
    return np.concatenate([[_NEVER], np.maximum.accumulate(values)[:-1]]) if len(values) else values


def _responder_rules(packets: Packets, flow: Flow, tracked: Track) -> list[Violation]:
    later = tracked.place > 0
    responses = flow.responses[later]
    answer, before = tracked.answer[later], tracked.place[later] - 1
    syndrome = packets.syndrome[responses]
    is_positive = (OPERATION[packets.opcode[responses]] == ACKNOWLEDGE) & is_ack(syndrome)
    is_sequence, is_refusal = syndrome == NAK_SEQUENCE, is_rnr(syndrome) | is_fatal(syndrome)
    exact = flow.side == "receiver"
    limit = tracked.expected[before] if exact else tracked.top[before]
    broken = []
    highest = _highest_before(np.where(is_positive, answer, _NEVER))
    refused = ~_highest_before(np.where(is_fatal(syndrome), ~answer, _NEVER))
    for rule, wrong, detail in (
        ("ack-ahead", is_positive & (answer >= limit), "{limit} had not arrived in order"),
        ("ack-regress", is_positive & (answer < highest), "{highest} was acknowledged before"),
        ("ack-after-error", is_positive & (answer >= refused), "{refused} was refused before"),
        # The packet that is refused has arrived; the one that a sequence error requests has not.
        ("nak-ahead", is_sequence & (answer > limit), "{limit} was expected"),
        ("nak-ahead", is_refusal & (answer >= limit), "{limit} had not arrived in order"),
        ("nak-of-acknowledged", (is_sequence | is_refusal) & (answer <= highest), "{highest} was acknowledged before"),
    ):
        for at in np.flatnonzero(wrong).tolist():
            words = detail.format(
                limit=int(limit[at]) % PSN_SPACE,
                highest=int(highest[at]) % PSN_SPACE,
                refused=int(refused[at]) % PSN_SPACE,
            )
            broken.append(violation(packets, rule, int(responses[at]), words))
    naks = np.flatnonzero(is_sequence)
    for earlier, later_nak in zip(naks[:-1].tolist(), naks[1:].tolist(), strict=True):
        requested = int(answer[earlier])
        between = flow.psn[before[earlier] + 1 : before[later_nak] + 1]
        if requested == int(answer[later_nak]) and not (between == requested).any():
            broken.append(
                violation(
                    packets,
                    "nak-repeated",
                    int(responses[later_nak]),
                    "the PSN had not arrived again since the previous NAK",
                )
            )
    return broken


_CLOCKS = 0.95
"""Share of an RNR timer that must have passed: the clocks of an RNIC and of a capture may differ, and have ticks."""


def _rnr_rule(packets: Packets, flow: Flow, tracked: Track) -> list[Violation]:
    """Check the time between each RNR NAK and the refused packet. Paths only make it longer, at any capture point."""
    broken, checked_until = [], dict[int, int]()
    for at in np.flatnonzero(is_rnr(packets.syndrome[flow.responses])).tolist():
        refused, place = int(tracked.answer[at]), int(tracked.place[at])
        passes = np.flatnonzero(flow.psn == refused)
        since = checked_until.get(refused, 0)
        checked_until[refused] = place
        before, again = passes[(passes >= since) & (passes < place)], passes[passes >= place]
        # A packet that was sent twice before may be on its way a second time when the RNR NAK for the first one passes.
        if len(before) != 1 or not len(again):
            continue
        request, response = int(flow.requests[again[0]]), int(flow.responses[at])
        waited_ns = int(packets.time_ns[request] - packets.time_ns[response])
        asked_ns = rnr_timer_ns(int(packets.syndrome[response]))
        if waited_ns < _CLOCKS * asked_ns:
            detail = f"after {waited_ns / 1e6:.3f} ms; the RNR NAK requested {asked_ns / 1e6:g} ms"
            broken.append(violation(packets, "rnr-early", request, detail))
    return broken
