"""ECN and CNP: which marked packets were answered by a congestion notification, and how fast.

A receiver of a packet with congestion experienced (CE) sends a CNP to the packet's sender, at most one per interval
(InfiniBand annex A17.9; DCQCN, SIGCOMM 2015: 50 us). How long that is, and whether queue pairs share it, is in the
documentation of the RNIC (`faultbed.testbed.packets.cnp_rule`). A marked packet is unanswered if no CNP passed in the
interval before it, nor in half an interval after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from faultbed.testbed.packets.bth import CNP

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from faultbed.harness.packets.flows import Flow
    from faultbed.testbed.packets.cnp_rule import CnpRule
    from faultbed.testbed.packets.columns import Packets

    Indices = NDArray[np.int64]

__all__ = ["Answers", "Congestion", "answers_to_marks", "congestion"]

_CE = 3
_CLOCKS = 0.95
"""The clocks of an RNIC and of a capture may differ, and have ticks: an interval is up to 1/0.95 of the documented."""
_PROMPT = 0.5
"""Share of the interval in which a CNP must follow. Longer, and the next CNP would hide one that is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Congestion:
    """Congestion signals of a flow: packets marked CE, CNPs, and CNPs without a marked packet since the previous CNP.

    Times are in ns.
    """

    marked: int
    notified: int
    unprovoked: int
    delay_median_ns: int | None
    interval_min_ns: int | None


def congestion(packets: Packets, flow: Flow) -> Congestion | None:
    """Pair each CNP to a flow's sender with the first marked packet since the previous CNP; None without signals."""
    marked = flow.requests[packets.ecn[flow.requests] == _CE]
    if flow.reply_qpn is None:
        notified = np.zeros(0, dtype=np.int64)
    else:
        notified = _notifications(packets, flow.port, flow.dst, flow.src, flow.reply_qpn)
        if flow.is_doubled:
            # All CNPs of a flow are identical. With two capture points, every second one is a copy.
            notified = notified[::2]
    if not len(marked) and not len(notified):
        return None
    before = np.concatenate([[-1], notified[:-1]])
    first = np.searchsorted(marked, before, side="right")
    provoked = (
        (first < len(marked)) & (marked[np.minimum(first, max(len(marked) - 1, 0))] < notified)
        if len(marked)
        else np.zeros(len(notified), dtype=np.bool_)
    )
    delays = packets.time_ns[notified[provoked]] - packets.time_ns[marked[first[provoked]]]
    gaps = np.diff(packets.time_ns[notified])
    return Congestion(
        marked=len(marked),
        notified=len(notified),
        unprovoked=int((~provoked).sum()),
        delay_median_ns=int(np.median(delays)) if len(delays) else None,
        interval_min_ns=int(gaps.min()) if len(gaps) else None,
    )


def _notifications(packets: Packets, port: int, sender: str, to: str | None, qpn: int | None) -> Indices:
    """Return the CNPs that one address sent at a port: to any address or queue pair where those are None."""
    chosen: Indices = np.flatnonzero((packets.opcode == CNP) & (packets.port == port))
    chosen = chosen[packets.src[chosen] == packets.addresses.index(sender)]
    if to is not None:
        chosen = chosen[packets.dst[chosen] == packets.addresses.index(to)]
    if qpn is not None:
        chosen = chosen[packets.dqpn[chosen] == qpn]
    return chosen


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """CNPs of one receiver in one scope of its rate limit.

    receiver, to     addresses; `to` is "" and `qpn` None where the scope has no single one
    marked, sent     marked packets that reached it, and CNPs
    missing          CNPs that should have been sent: unanswered marked packets, those within one interval counted once
    unknown          marked packets of which it is not known whether they were answered
    gap_ns           longest time from a marked packet to the next CNP, of packets without one in the interval before
    is_gap_open      no CNP ended that time: the capture did
    first_missing    frame of the first unanswered packet
    """

    port: str
    receiver: str
    to: str
    qpn: int | None
    marked: int
    sent: int
    missing: int
    unknown: int
    gap_ns: int
    is_gap_open: bool
    first_missing: int | None

    @property
    def scope(self) -> str:
        """Return what the limit is shared by, for messages."""
        queue_pair = "" if self.qpn is None else f" QP {self.qpn}"
        return f"{self.receiver} -> {self.to}{queue_pair}" if self.to else f"the port of {self.receiver}"


@dataclass(kw_only=True)
class _Scope:
    """Marked packets that share a rate limit, and whether it is known to which queue pair their CNPs go."""

    marked: list[Indices] = field(default_factory=list)
    is_known: bool = True


def answers_to_marks(
    packets: Packets, flows: Sequence[Flow], rule: CnpRule, ports: Sequence[str], *, is_whole: bool
) -> tuple[Answers, ...]:
    """Return how the receivers of marked packets answered them, where the capture is at a receiver's port.

    A file that records no directions is taken to be from there. `is_whole` is False if packets are missing from the
    capture, so that a CNP may be among them.
    """
    scopes: dict[tuple[int, str, str, int | None], _Scope] = {}
    for port, receiver, sender, qpn, marked, is_known in _marked(packets, flows):
        key = (
            port,
            receiver,
            "" if rule.per == "port" else sender,
            (qpn if is_known else -1) if rule.per == "qp" else None,
        )
        scope = scopes.setdefault(key, _Scope())
        scope.marked.append(marked)
        scope.is_known &= is_known or rule.per != "qp"
    return tuple(_answers(packets, key, scope, rule, ports[key[0]], is_whole=is_whole) for key, scope in scopes.items())


def _marked(packets: Packets, flows: Sequence[Flow]) -> Iterator[tuple[int, str, str, int | None, Indices, bool]]:
    """Yield port, receiver, sender, the sender's QP, marked packets, and whether that QP is known."""
    for flow in flows:
        has_directions = bool(packets.outbound[flow.requests[0]] >= 0)
        for rows, receiver, sender, qpn, side in (
            (flow.requests, flow.dst, flow.src, flow.reply_qpn, "receiver"),
            (flow.responses, flow.src, flow.dst, flow.dqpn, "sender"),
        ):
            marked = rows[packets.ecn[rows] == _CE]
            if len(marked) and (flow.side == side or not has_directions):
                yield flow.port, receiver, sender, qpn, marked, qpn is not None


def _answers(
    packets: Packets,
    key: tuple[int, str, str, int | None],
    scope: _Scope,
    rule: CnpRule,
    name: str,
    *,
    is_whole: bool,
) -> Answers:
    port, receiver, to, qpn = key
    marked = np.sort(np.concatenate(scope.marked))
    sent = _notifications(packets, port, receiver, to or None, qpn if scope.is_known else None)
    times, answers = packets.time_ns[marked], packets.time_ns[sent]
    of_port = packets.time_ns[packets.port == port]
    before = times - int(rule.interval_ns / _CLOCKS)
    at = np.searchsorted(answers, before)
    is_answered = np.append(answers, np.iinfo(np.int64).max)[at] <= times + int(rule.interval_ns * _PROMPT)
    # What passed before the capture began, or passes after it ended, is not known.
    is_open = (before < of_port[0]) | (times + int(rule.interval_ns * _PROMPT) > of_port[-1])
    is_missing = ~is_answered & ~is_open & is_whole
    # Whose CNPs those are is not known: they may be of other queue pairs.
    unknown = (~is_answered & ~is_missing) | (is_answered & (not scope.is_known))
    missing = _once_in(times[is_missing], rule.interval_ns)
    after = np.searchsorted(answers, times)
    counts = (np.searchsorted(answers, before) == after) & (before >= of_port[0])
    waits = np.append(answers, of_port[-1])[after] - times
    worst = int(np.argmax(np.where(counts, waits, -1))) if counts.any() else None
    return Answers(
        port=name,
        receiver=receiver,
        to=to,
        qpn=None if qpn == -1 else qpn,
        marked=len(marked),
        sent=len(sent),
        missing=missing,
        unknown=int(unknown.sum()),
        gap_ns=0 if worst is None else int(waits[worst]),
        is_gap_open=worst is not None and bool(after[worst] == len(answers)),
        first_missing=int(packets.number[marked[is_missing][0]]) if missing else None,
    )


def _once_in(times: Indices, interval_ns: int) -> int:
    """Count times, those within an interval of the first one once."""
    count = at = 0
    while at < len(times):
        count += 1
        at = int(np.searchsorted(times, times[at] + interval_ns))
    return count
