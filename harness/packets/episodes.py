"""Retransmission episodes: what was lost, how its sender learned of it, and where the time went.

    NAK:      gap seen --NAK generation--> NAK passes --NAK reaction--> the lost PSN passes again
    timer:    silence of about 4.096 us * 2**t, then the oldest packet without an ACK passes again

The split of a NAK episode follows Lumina (SIGCOMM 2023). Times are those of the captured port: at the receiver's port
the NAK reaction holds the way to the sender and back, at the sender's port the NAK generation does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from testbed.packets.bth import NAK_SEQUENCE, PSN_SPACE, is_rnr, timeout_ns

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.packets.flows import Flow
    from harness.packets.gobackn import Track
    from testbed.packets.columns import Packets

    Indices = NDArray[np.int64]

__all__ = ["Cause", "Episode", "episodes", "ladder_step"]

Cause = Literal["nak", "rnr", "timer"]
_EARLY = 1.02
"""Timers are seen a little short of nominal: clock ticks at both ends of the silence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One going back. Times are ns of the capture's clock, lengths are ns; None where there was no such thing.

    frame            of the first packet that was sent again
    psn              from which it was sent again, 24 bits
    missing          PSNs that were lost before this port and are missing when the going back begins
    dropped_ahead    packets out of order that the receiver had to drop since the last going back
    resent           packets sent again until the flow was where it had been
    gap_ns           when the first packet out of order passed
    signal_ns        when the NAK passed
    resent_ns        when the first packet passed again
    silence_ns       how long the flow had been silent before that
    retry            1 for the first going back to this PSN, 2 for the second, ...
    timeout_step     t of the ladder 4.096 us * 2**t that the silence reached; timer episodes only
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

    @property
    def generation_ns(self) -> int | None:
        """From the gap to the NAK."""
        return self.signal_ns - self.gap_ns if self.signal_ns is not None and self.gap_ns is not None else None

    @property
    def reaction_ns(self) -> int | None:
        """From the NAK to the packet that was asked for."""
        return self.resent_ns - self.signal_ns if self.signal_ns is not None else None


def ladder_step(silence_ns: int) -> int:
    """The highest t whose nominal timeout fits into a silence; 0 for what is shorter than all."""
    return max(0, math.floor(math.log2(max(1.0, silence_ns * _EARLY / timeout_ns(0)))))


def episodes(packets: Packets, flow: Flow, seen: Track) -> Iterator[Episode]:
    """The episodes of a flow, in order.

    A going back is a run of requests that begins before the highest PSN seen, or, where the first transmission was lost
    before this port, the first packet that fills a gap.
    """
    times = packets.time_ns[flow.requests]
    syndrome = packets.syndrome[flow.responses]
    signals = np.flatnonzero((syndrome == NAK_SEQUENCE) | is_rnr(syndrome))
    marks = np.flatnonzero(seen.ahead)
    last, retries = 0, (-1, 0)
    for at in seen.backwards.tolist():
        low = int(flow.psn[at])
        own = signals[(seen.place[signals] > last) & (seen.place[signals] <= at) & (seen.answer[signals] == low)]
        signal = int(own[0]) if len(own) else None
        in_between = marks[np.searchsorted(marks, last) : np.searchsorted(marks, at)]
        retries = (low, retries[1] + 1 if retries[0] == low else 1)
        silence = int(times[at] - _last_sign_of_life(packets, flow, at))
        cause: Cause = "timer"
        if signal is not None:
            cause = "nak" if syndrome[signal] == NAK_SEQUENCE else "rnr"
        yield Episode(
            cause=cause,
            frame=int(packets.number[flow.requests[at]]),
            psn=low % PSN_SPACE,
            missing=_missing(flow, seen, last, at),
            dropped_ahead=len(in_between),
            resent=_resent(flow, seen, at),
            gap_ns=int(times[in_between[0]]) if len(in_between) else None,
            signal_ns=int(packets.time_ns[flow.responses[signal]]) if signal is not None else None,
            resent_ns=int(times[at]),
            silence_ns=silence,
            retry=retries[1],
            timeout_step=ladder_step(silence) if cause == "timer" else None,
        )
        last = at


def _last_sign_of_life(packets: Packets, flow: Flow, at: int) -> int:
    """The last request or response before request `at`: what a requester's timer was last started by."""
    before = int(packets.time_ns[flow.requests[at - 1]])
    answers = int(np.searchsorted(flow.responses, flow.requests[at]))
    if answers:
        before = max(before, int(packets.time_ns[flow.responses[answers - 1]]))
    return before


def _missing(flow: Flow, seen: Track, last: int, at: int) -> int:
    jumps = seen.jumps[(seen.jumps > last) & (seen.jumps < at)]
    return int((flow.psn[jumps] - seen.top[jumps - 1]).sum())


def _resent(flow: Flow, seen: Track, at: int) -> int:
    """Packets from `at` until the flow goes beyond where it had been, or goes back once more."""
    stop = int(seen.top[at - 1])
    later = seen.backwards[np.searchsorted(seen.backwards, at, side="right") :]
    end = int(later[0]) if len(later) else len(flow.psn)
    beyond = np.flatnonzero(flow.psn[at:end] >= stop)
    return int(beyond[0]) if len(beyond) else end - at
