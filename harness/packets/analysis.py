"""Analyse a whole capture, for `packets.json`, the table of `faultbed packets` and the section of the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from faultbed.harness.packets import gobackn
from faultbed.harness.packets.congestion_signals import Answers, Congestion, answers_to_marks, congestion
from faultbed.harness.packets.doubts import Capture, doubt_of_order, doubts, psn_jumps, unfinished_flow
from faultbed.harness.packets.duplicates import without_copies
from faultbed.harness.packets.episodes import Episode, episodes
from faultbed.harness.packets.flows import Flow, Side, flows_of
from faultbed.harness.packets.read_data import DataTrack, data_violations, track_data
from faultbed.harness.packets.violation import Violation
from faultbed.testbed.packets.bth import is_fatal, is_nak, is_rnr, syndrome_name
from faultbed.testbed.packets.columns import decode

if TYPE_CHECKING:
    from faultbed.testbed.packets.cnp_rule import CnpRule
    from faultbed.testbed.packets.columns import Packets
    from faultbed.testbed.packets.frames import Frames

__all__ = ["Analysis", "FlowReport", "Nak", "analyse"]

KEPT = 1000
"""Episodes, and violations, that are listed individually for each flow; all are counted."""


class Nak(msgspec.Struct, frozen=True, kw_only=True):
    """A negative acknowledgement: its frame, PSN and AETH syndrome, what that means, and if it ends the connection."""

    frame: int
    time_ns: int
    psn: int
    syndrome: int
    meaning: str
    is_fatal: bool


class FlowReport(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of one queue pair at one captured port.

    requests             packets of the requester
    responses            packets of the responder
    payload_bytes        payload of the requests; each transmission counts
    again                retransmitted requests, which had passed before
    duplicates           requests that had passed before and were not retransmitted: copies made on the path
    response_duplicates  copies of responses made on the path
    missing              skipped PSNs: lost before this port, or late
    returned             missing PSNs that arrived by retransmission
    reordered            missing PSNs that arrived late without a retransmission
    dropped_ahead        requests out of order that the receiver had to drop
    lost_behind          NAKs for packets that had passed the receiver's port
    naks, rnrs           negative acknowledgements; `negative` lists the first of both
    data_missing         packets of READ and atomic responses that had not passed when a later response did
    data_returned        those of them that were requested and came again
    data_reordered       those of them that came late without a new request
    data_repeated        response packets with data that passed again without a new request
    causes               episodes by cause: nak, rnr, gap, timer, unknown
    broken               violations by rule
    is_ambiguous         responses match several queue pairs: rules of responses and causes were not checked
    is_doubled           a host's port has each packet twice: rules of that port were not checked
    is_checked           its rules were checked, as far as its port and its responses allow
    transport            RC (XRC included) or UC
    """

    port: str
    side: Side
    src: str
    dst: str
    dqpn: int
    reply_qpn: int | None
    mtu: int
    first_ns: int
    last_ns: int
    requests: int
    responses: int
    payload_bytes: int
    again: int
    missing: int
    returned: int
    reordered: int
    dropped_ahead: int
    lost_behind: int
    naks: int
    rnrs: int
    causes: dict[str, int]
    broken: dict[str, int]
    episodes: tuple[Episode, ...]
    violations: tuple[Violation, ...]
    congestion: Congestion | None
    duplicates: int = 0
    response_duplicates: int = 0
    is_ambiguous: bool = False
    is_doubled: bool = False
    is_checked: bool = True
    transport: Literal["RC", "UC"] = "RC"
    data_missing: int = 0
    data_returned: int = 0
    data_reordered: int = 0
    data_repeated: int = 0
    negative: tuple[Nak, ...] = ()


class Analysis(msgspec.Struct, frozen=True, kw_only=True):
    """Analysis of a capture. `frames` counts all frames, `roce` those that are RoCEv2.

    `doubts` are reasons why the analysis may miss broken rules. With any doubt, "no rule broken" is not proven. `notes`
    say how the capture was read if that is not obvious. `cnp` are the answers to marked packets, if a rule for them was
    given; None without one.
    """

    schema: Literal[1] = 1
    frames: int
    roce: int
    ports: tuple[str, ...]
    flows: tuple[FlowReport, ...]
    doubts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    cnp: tuple[Answers, ...] | None = None

    @property
    def violations(self) -> int:
        """Number of broken rules in all flows."""
        return sum(sum(flow.broken.values()) for flow in self.flows)

    @property
    def fatal_naks(self) -> tuple[tuple[FlowReport, Nak], ...]:
        """The NAKs that ended a connection, each with its flow."""
        return tuple((flow, nak) for flow in self.flows for nak in flow.negative if nak.is_fatal)


def analyse(frames: Frames, *, host_ports: Sequence[bool] | None = None, cnp: CnpRule | None = None) -> Analysis:
    """Decode a capture, sort it by time, split it into flows, and check each flow.

    Args:
        frames: a capture.
        host_ports: for each interface, whether a host is at its far end. None derives it from the name: a switch port
            that faces an RNIC is named `SWITCH:HOST:RNIC`.
        cnp: how receivers answer marked packets, by their documentation; None: not checked.

    Raises:
        UsageError: the capture has too many addresses and ports to sort (`flows_of`).
    """
    packets, late, behind_ns = _in_time_order(decode(frames))
    if host_ports is None:
        host_ports = [name.count(":") == 2 for name in frames.interfaces]  # noqa: PLR2004 - see the docstring
    flows, unpaired = flows_of(packets, host_ports=host_ports)
    followed = [_Followed.of(packets, flow) for flow in flows]
    capture = Capture(
        frames=frames,
        packets=packets,
        late=late,
        behind_ns=behind_ns,
        host_ports=host_ports,
        flows=flows,
        doubled=[one.whole for one in followed if one.single.is_doubled and one.whole.side != "between"],
        unpaired=unpaired,
    )
    jumps = psn_jumps(capture)
    notes = [jump.sentence for jump in jumps if jump.is_reconnected]
    if late:
        notes.append(
            f"{late:,} packets come after later ones in the file, by up to {behind_ns / 1e9:.6f} s: sorted by time"
        )
    reports = _reports(capture, followed, check_rules=capture.has_all_packets_in_order)
    disorder = tuple(doubt_of_order(capture, reports))
    if disorder:
        reports = _reports(capture, followed, check_rules=False)
    unfinished = [
        doubt
        for one, report in zip(followed, reports, strict=True)
        for doubt in unfinished_flow(packets, one.single, one.tracked, one.data, report)
    ]
    return Analysis(
        frames=len(frames),
        roce=len(packets),
        ports=frames.interfaces,
        flows=tuple(reports),
        doubts=(*doubts(capture, jumps), *disorder, *unfinished),
        notes=tuple(notes),
        cnp=None
        if cnp is None
        else answers_to_marks(
            packets, flows, cnp, frames.interfaces, is_whole=capture.has_all_packets_in_order and not late
        ),
    )


def _reports(capture: Capture, followed: Sequence[_Followed], *, check_rules: bool) -> list[FlowReport]:
    return [
        _report(capture.packets, one, capture.frames.interfaces[one.whole.port], check_rules=check_rules)
        for one in followed
    ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Followed:
    """A flow as captured, without the copies that the network made, and its state at each packet."""

    whole: Flow
    single: Flow
    tracked: gobackn.Track
    data: DataTrack

    @classmethod
    def of(cls, packets: Packets, whole: Flow) -> _Followed:
        single = without_copies(packets, whole)
        tracked = gobackn.track(packets, single)
        data = track_data(packets, single, tracked, has_copies=len(single.psn) < len(whole.psn))
        return cls(whole=whole, single=single, tracked=tracked, data=data)


def _in_time_order(packets: Packets) -> tuple[Packets, int, int]:
    """Sort packets by time (stable). Return them with the number of misplaced packets and their maximum delay in ns.

    Each port is compared only with itself: a file may contain one port's packets after another's.
    """
    if not len(packets) or (np.diff(packets.time_ns) >= 0).all():
        return packets, 0, 0
    late = most = 0
    for port in np.unique(packets.port):
        times = packets.time_ns[packets.port == port]
        behind = np.maximum.accumulate(times) - times
        late, most = late + int((behind > 0).sum()), max(most, int(behind.max()))
    return packets.take(np.argsort(packets.time_ns, kind="stable")), late, most


def _report(packets: Packets, followed: _Followed, port: str, *, check_rules: bool) -> FlowReport:
    """Check a flow without the copies that the network made, and count all of its packets."""
    whole, flow, tracked, data = followed.whole, followed.single, followed.tracked, followed.data
    # Without its responses the reason for a retransmission is unknown.
    has_reasons = not (flow.is_ambiguous or flow.is_unreliable)
    go_backs = list(episodes(packets, flow, tracked, data)) if has_reasons else []
    is_checked = check_rules and flow.is_mtu_known and not len(flow.strange)
    broken: list[Violation] = []
    if is_checked:
        broken = [
            *gobackn.violations(packets, flow, tracked),
            *data_violations(packets, flow, tracked),
            *data.broken,
        ]
        broken.sort(key=lambda violation: violation.frame)
    syndrome = packets.syndrome[flow.responses]
    missing = int((flow.psn[tracked.jumps] - tracked.top[tracked.jumps - 1]).sum())
    late = _count_late(flow, tracked)
    distinct, covered = _distinct(flow, tracked)
    never = int(tracked.top[-1] - flow.psn.min() - covered)
    times = packets.time_ns[np.concatenate([whole.requests[[0, -1]], flow.responses[-1:]])]
    return FlowReport(
        port=port,
        side=flow.side,
        src=flow.src,
        dst=flow.dst,
        dqpn=flow.dqpn,
        reply_qpn=flow.reply_qpn,
        mtu=flow.mtu,
        first_ns=int(times.min()),
        last_ns=int(times.max()),
        requests=len(whole.requests),
        responses=len(whole.responses),
        payload_bytes=int(packets.payload[whole.requests].sum()),
        again=len(flow.psn) - distinct,
        missing=missing,
        returned=max(0, missing - never - late),
        reordered=late,
        dropped_ahead=int(tracked.ahead.sum()),
        lost_behind=tracked.beyond_port,
        naks=int(is_nak(syndrome).sum()),
        rnrs=int(is_rnr(syndrome).sum()),
        causes=dict(Counter(item.cause for item in go_backs)),
        broken=dict(Counter(item.rule for item in broken)),
        episodes=tuple(go_backs[:KEPT]),
        violations=tuple(broken[:KEPT]),
        congestion=congestion(packets, flow),
        duplicates=len(whole.psn) - len(flow.psn),
        response_duplicates=len(whole.responses) - len(flow.responses),
        is_ambiguous=flow.is_ambiguous,
        is_doubled=bool(flow.is_doubled) and whole.side != "between",
        is_checked=is_checked,
        transport="UC" if flow.is_unreliable else "RC",
        data_missing=data.missing,
        data_returned=data.returned,
        data_reordered=data.reordered,
        data_repeated=data.repeated,
        negative=tuple(_negative(packets, flow)),
    )


def _negative(packets: Packets, flow: Flow) -> Iterator[Nak]:
    """Yield the negative acknowledgements of a flow: the first of each kind, and all that end a connection."""
    syndrome = packets.syndrome[flow.responses]
    is_final = is_fatal(syndrome)
    chosen = np.flatnonzero(is_nak(syndrome) | is_rnr(syndrome))
    for row in np.union1d(chosen[:KEPT], np.flatnonzero(is_final)[:KEPT]).tolist():
        at = int(flow.responses[row])
        yield Nak(
            frame=int(packets.number[at]),
            time_ns=int(packets.time_ns[at]),
            psn=int(packets.psn[at]),
            syndrome=int(syndrome[row]),
            meaning=syndrome_name(int(syndrome[row])),
            is_fatal=bool(is_final[row]),
        )


def _count_late(flow: Flow, tracked: gobackn.Track) -> int:
    """Count the PSNs in runs that arrived late without a retransmission."""
    ends = dict(zip(tracked.begin.tolist(), tracked.end.tolist(), strict=True))
    return sum(
        int(flow.psn[ends[at] - 1] + flow.span[ends[at] - 1] - flow.psn[at]) for at in tracked.reordered.tolist()
    )


def _distinct(flow: Flow, tracked: gobackn.Track) -> tuple[int, int]:
    """Count the requests with distinct PSNs, and the PSNs that passed at least once."""
    if not len(tracked.backwards) and not len(tracked.reordered):
        return len(flow.psn), int(flow.span.sum())
    # Nearly sorted already, which makes this sort much faster than np.unique.
    distinct = 1 + int(np.count_nonzero(np.diff(np.sort(flow.psn, kind="stable"))))
    if (flow.span == 1).all():
        return distinct, distinct
    order = np.argsort(flow.psn, kind="stable")
    low, high = flow.psn[order], np.maximum.accumulate((flow.psn + flow.span)[order])
    gaps = np.maximum(0, low[1:] - high[:-1]).sum()
    return distinct, int(high[-1] - low[0] - gaps)
