"""Retransmission episodes: what was lost, how its sender detected it, and where the time went.

    nak:      gap seen --NAK generation--> NAK passes --NAK reaction--> the lost PSN passes again
    rnr:      the packet passes --NAK generation--> RNR NAK passes --at least its timer--> the packet passes again
    gap:      data of a READ or atomic is missing when a later response passes; its requester requests it again
    timer:    silence of about 4.096 us * 2**t, then the oldest packet without an ACK passes again
    unknown:  none of these was seen

The split of a NAK episode follows Lumina (SIGCOMM 2023). Times are those of the captured port. At the receiver's port
the NAK reaction includes the path to the sender and back; at the sender's port the NAK generation does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from faultbed.harness.packets.gobackn import TIMERS_FROM_NS
from faultbed.testbed.packets.bth import (
    IS_ANSWERED_BY_DATA,
    NAK_SEQUENCE,
    PSN_SPACE,
    is_rnr,
    rnr_timer_ns,
    timeout_ns,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from faultbed.harness.packets.flows import Flow
    from faultbed.harness.packets.gobackn import Track
    from faultbed.harness.packets.read_data import DataTrack
    from faultbed.testbed.packets.columns import Packets

    Indices = NDArray[np.int64]

__all__ = ["Cause", "Episode", "episodes", "ladder_step"]

Cause = Literal["nak", "rnr", "gap", "timer", "unknown"]
_EARLY = 1.02
"""Tolerance: measured timers are slightly shorter than nominal, by clock ticks at both ends of the silence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One go-back. Times are ns of the capture's clock, durations are ns; None if it does not apply.

    frame            frame of the first retransmitted packet
    psn              PSN from which the sender retransmitted, 24 bits
    missing          PSNs that were lost before this port and are missing when the go-back begins; of `gap`: responses
    dropped_ahead    packets out of order that the receiver had to drop since the last go-back
    resent           packets retransmitted until the flow was where it had been
    gap_ns           when the first packet out of order passed; of `rnr`: when the refused packet had passed
    signal_ns        when the NAK passed
    rnr_timer_ns     the least time that the RNR NAK requested between it and the packet
    resent_ns        when the first packet passed again
    silence_ns       how long the flow had been silent before that
    retry            1 for the first go-back to this PSN, 2 for the second, ...
    timeout_step     t of the timeout 4.096 us * 2**t that the silence reached; timer episodes only
    """

    cause: Cause
    frame: int
    psn: int
    missing: int
    dropped_ahead: int
    resent: int
    gap_ns: int | None
    signal_ns: int | None
    resent_ns: int
    silence_ns: int
    retry: int
    timeout_step: int | None
    rnr_timer_ns: int | None = None

    @property
    def generation_ns(self) -> int | None:
        """Time from the gap to the NAK."""
        return self.signal_ns - self.gap_ns if self.signal_ns is not None and self.gap_ns is not None else None

    @property
    def reaction_ns(self) -> int | None:
        """Time from the NAK, or from the gap if there is none, to the retransmission of the requested packet."""
        since_ns = self.gap_ns if self.cause == "gap" else self.signal_ns
        return self.resent_ns - since_ns if since_ns is not None else None


def ladder_step(silence_ns: int) -> int:
    """Return the largest t whose nominal timeout fits into a silence; 0 if none does."""
    return max(0, math.floor(math.log2(max(1.0, silence_ns * _EARLY / timeout_ns(0)))))


def episodes(packets: Packets, flow: Flow, tracked: Track, data: DataTrack) -> Iterator[Episode]:
    """Yield the episodes of a flow, in order.

    A go-back is a run of requests that begins before the highest PSN seen. If the first transmission was lost before
    this port, it is the first packet that fills a gap.
    """
    times = packets.time_ns[flow.requests]
    syndrome = packets.syndrome[flow.responses]
    signals = np.flatnonzero((syndrome == NAK_SEQUENCE) | is_rnr(syndrome))
    places, answer = tracked.place[signals], tracked.answer[signals]
    marks = np.flatnonzero(tracked.ahead)
    last, retries = 0, (-1, 0)
    for at in tracked.backwards.tolist():
        low = int(flow.psn[at])
        since, until = np.searchsorted(places, (last, at), side="right")
        own = signals[since:until][answer[since:until] == low]
        signal = int(own[0]) if len(own) else _of_a_lost_packet(flow, tracked, signals[since:until], at)
        in_between = marks[np.searchsorted(marks, last) : np.searchsorted(marks, at)]
        retries = (low, retries[1] + 1 if retries[0] == low else 1)
        silence = int(times[at] - _last_sign_of_life(packets, flow, at))
        gap = data.gap_before(at)
        cause: Cause = "timer" if silence >= TIMERS_FROM_NS or not len(flow.responses) else "unknown"
        if signal is not None:
            cause = "nak" if syndrome[signal] == NAK_SEQUENCE else "rnr"
        elif (gap is not None and low <= gap.psn) or (
            cause == "unknown" and _is_read_again(packets, flow, tracked, at)
        ):
            cause = "gap"
        signal_ns = int(packets.time_ns[flow.responses[signal]]) if signal is not None else None
        before = int(tracked.place[signal]) if signal is not None else at
        if cause == "gap":
            gap_ns = gap.time_ns if gap is not None else None
        elif cause == "rnr":
            gap_ns = _last_pass(flow, times, low, before)
        else:
            early = in_between[in_between < before]
            gap_ns = int(times[early[0]]) if len(early) else None
        yield Episode(
            cause=cause,
            frame=int(packets.number[flow.requests[at]]),
            psn=low % PSN_SPACE,
            missing=gap.missing if cause == "gap" and gap is not None else _missing(flow, tracked, last, at),
            dropped_ahead=len(in_between),
            resent=_resent(flow, tracked, at),
            gap_ns=gap_ns,
            signal_ns=signal_ns,
            resent_ns=int(times[at]),
            silence_ns=silence,
            retry=retries[1],
            timeout_step=ladder_step(silence) if cause == "timer" else None,
            rnr_timer_ns=rnr_timer_ns(int(syndrome[signal])) if cause == "rnr" and signal is not None else None,
        )
        last = at


def _of_a_lost_packet(flow: Flow, tracked: Track, signals: Indices, at: int) -> int | None:
    """Return the NAK for an earlier PSN than that of request `at`, if that one was lost again before this port."""
    for signal in signals[tracked.answer[signals] < flow.psn[at]][::-1].tolist() if flow.side != "sender" else ():
        since = slice(int(tracked.place[signal]), at)
        if not (flow.psn[since] == tracked.answer[signal]).any():
            return int(signal)
    return None


def _is_read_again(packets: Packets, flow: Flow, tracked: Track, at: int) -> bool:
    """Return whether a READ or atomic is repeated after a response beyond it: its data was lost behind this port."""
    if not IS_ANSWERED_BY_DATA[packets.opcode[flow.requests[at]]]:
        return False
    since = int(np.searchsorted(tracked.place, at, side="right"))
    return bool((tracked.answer[:since] >= flow.psn[at]).any())


def _last_pass(flow: Flow, times: Indices, psn: int, before: int) -> int | None:
    """Return when a PSN last passed among the first `before` requests."""
    passes = np.flatnonzero(flow.psn[:before] == psn)
    return int(times[passes[-1]]) if len(passes) else None


def _last_sign_of_life(packets: Packets, flow: Flow, at: int) -> int:
    """Return the time of the last request or response before request `at`, which restarted the requester's timer."""
    before = int(packets.time_ns[flow.requests[at - 1]])
    answers = int(np.searchsorted(flow.responses, flow.requests[at]))
    if answers:
        before = max(before, int(packets.time_ns[flow.responses[answers - 1]]))
    return before


def _missing(flow: Flow, tracked: Track, last: int, at: int) -> int:
    jumps = tracked.jumps[(tracked.jumps > last) & (tracked.jumps < at)]
    return int((flow.psn[jumps] - tracked.top[jumps - 1]).sum())


def _resent(flow: Flow, tracked: Track, at: int) -> int:
    """Count packets from `at` until the flow passes its previous position, or goes back once more."""
    stop = int(tracked.top[at - 1])
    later = tracked.backwards[np.searchsorted(tracked.backwards, at, side="right") :]
    end = int(later[0]) if len(later) else len(flow.psn)
    beyond = np.flatnonzero(flow.psn[at:end] >= stop)
    return int(beyond[0]) if len(beyond) else end - at
