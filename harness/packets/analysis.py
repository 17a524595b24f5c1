"""All of a capture in one answer: `packets.json`, the table of `faultbed packets`, the section of the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from harness.packets import gobackn
from harness.packets.congestion import Congestion, congestion
from harness.packets.duplicates import duplicates, without
from harness.packets.episodes import Episode, episodes
from harness.packets.flows import Flow, Side, flows_of
from harness.packets.gobackn import Violation
from testbed.packets.bth import is_nak, is_rnr
from testbed.packets.columns import decode

if TYPE_CHECKING:
    from testbed.packets.capture_file import Frames
    from testbed.packets.columns import Packets

__all__ = ["Analysis", "FlowReport", "analyse"]

KEPT = 1000
"""Episodes, and violations, that are told one by one for each flow; all are counted."""


class FlowReport(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of one queue pair at one captured port.

    requests         packets of the requester, `responses` those back
    payload_bytes    of the requests, each transmission counted
    again            requests that had passed before, and were sent again
    duplicates       requests that had passed before and that nobody sent again: copies made on the way
    missing          PSNs that were jumped over: lost before this port, or late
    returned         of these, the ones that came when they were sent again
    reordered        of these, the ones that came late by themselves
    dropped_ahead    requests out of order that the receiver had to drop
    lost_behind      NAKs for what had passed the receiver's port
    naks, rnrs       negative acknowledgements
    causes           episodes by cause: nak, rnr, timer
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


class Analysis(msgspec.Struct, frozen=True, kw_only=True):
    """What a capture shows. `frames` are all, `roce` those that are RoCEv2."""

    schema: Literal[1] = 1
    frames: int
    roce: int
    ports: tuple[str, ...]
    flows: tuple[FlowReport, ...]

    @property
    def violations(self) -> int:
        """Broken rules of all flows."""
        return sum(sum(flow.broken.values()) for flow in self.flows)


def analyse(frames: Frames, *, host_ports: Sequence[bool] | None = None) -> Analysis:
    """Decode, sort into flows, check each.

    Args:
        frames: a capture.
        host_ports: for each interface whether a host is at its far end; None: told by its name, which for a switch port
            that faces an RNIC is `SWITCH:HOST:RNIC`.
    """
    packets = decode(frames)
    if host_ports is None:
        host_ports = [name.count(":") == 2 for name in frames.interfaces]  # noqa: PLR2004 - as the docstring says
    return Analysis(
        frames=len(frames),
        roce=len(packets),
        ports=frames.interfaces,
        flows=tuple(
            _report(packets, flow, frames.interfaces[flow.port]) for flow in flows_of(packets, host_ports=host_ports)
        ),
    )


def _report(packets: Packets, whole: Flow, port: str) -> FlowReport:
    flow = without(whole, duplicates(packets, whole))
    seen = gobackn.track(packets, flow)
    found, broken = list(episodes(packets, flow, seen)), gobackn.violations(packets, flow, seen)
    syndrome = packets.syndrome[flow.responses]
    missing = int((flow.psn[seen.jumps] - seen.top[seen.jumps - 1]).sum())
    late = _late(flow, seen)
    distinct, covered = _distinct(flow, seen)
    never = int(seen.top[-1] - flow.psn.min() - covered)
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
        responses=len(flow.responses),
        payload_bytes=int(packets.payload[whole.requests].sum()),
        again=len(flow.psn) - distinct,
        missing=missing,
        returned=max(0, missing - never - late),
        reordered=late,
        dropped_ahead=int(seen.ahead.sum()),
        lost_behind=seen.beyond_port,
        naks=int(is_nak(syndrome).sum()),
        rnrs=int(is_rnr(syndrome).sum()),
        causes=dict(Counter(one.cause for one in found)),
        broken=dict(Counter(one.rule for one in broken)),
        episodes=tuple(found[:KEPT]),
        violations=tuple(broken[:KEPT]),
        congestion=congestion(packets, whole),
        duplicates=len(whole.psn) - len(flow.psn),
    )


def _late(flow: Flow, seen: gobackn.Track) -> int:
    """PSNs in runs that came late by themselves."""
    ends = dict(zip(seen.begin.tolist(), seen.end.tolist(), strict=True))
    return sum(int(flow.psn[ends[at] - 1] + flow.span[ends[at] - 1] - flow.psn[at]) for at in seen.reordered.tolist())


def _distinct(flow: Flow, seen: gobackn.Track) -> tuple[int, int]:
    """Requests with a PSN of their own, and PSNs that passed at least once."""
    if not len(seen.backwards) and not len(seen.reordered):
        return len(flow.psn), int(flow.span.sum())
    distinct = len(np.unique(flow.psn))
    if (flow.span == 1).all():
        return distinct, distinct
    order = np.argsort(flow.psn, kind="stable")
    low, high = flow.psn[order], np.maximum.accumulate((flow.psn + flow.span)[order])
    gaps = np.maximum(0, low[1:] - high[:-1]).sum()
    return distinct, int(high[-1] - low[0] - gaps)
