"""Analyse a whole capture, for `packets.json`, the table of `faultbed packets` and the section of the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from harness.packets import gobackn
from harness.packets.congestion_signals import Congestion, congestion
from harness.packets.duplicates import without_copies
from harness.packets.episodes import Episode, episodes
from harness.packets.flows import Flow, Side, Unpaired, flows_of
from harness.packets.gobackn import Violation
from testbed.packets.bth import PSN_SPACE, distance, is_nak, is_rnr
from testbed.packets.columns import decode
from testbed.suggestions import first_of

if TYPE_CHECKING:
    from testbed.packets.capture_file import Frames
    from testbed.packets.columns import Packets

__all__ = ["Analysis", "FlowReport", "analyse"]

NEEDED_BYTES = 70
CLOCK_STEP_NS = 1_000_000_000
"""A packet this far behind a later one of the same port means that the clock was set, not that the order is off."""
_NAMED = 8
KEPT = 1000
"""Episodes, and violations, that are listed individually for each flow; all are counted."""


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
    naks, rnrs           negative acknowledgements
    causes               episodes by cause: nak, rnr, timer
    broken               violations by rule
    is_ambiguous         responses match several queue pairs: rules of responses and causes were not checked
    is_doubled           a host's port has each packet twice: rules of that port were not checked
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


class Analysis(msgspec.Struct, frozen=True, kw_only=True):
    """Analysis of a capture. `frames` counts all frames, `roce` those that are RoCEv2.

    `doubts` are reasons why the analysis may miss broken rules. With any doubt, "no rule broken" is not proven. `notes`
    say how the capture was read if that is not obvious.
    """

    schema: Literal[1] = 1
    frames: int
    roce: int
    ports: tuple[str, ...]
    flows: tuple[FlowReport, ...]
    doubts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def violations(self) -> int:
        """Number of broken rules in all flows."""
        return sum(sum(flow.broken.values()) for flow in self.flows)


def analyse(frames: Frames, *, host_ports: Sequence[bool] | None = None) -> Analysis:
    """Decode a capture, sort it by time, split it into flows, and check each flow.

    Args:
        frames: a capture.
        host_ports: for each interface, whether a host is at its far end. None derives it from the name: a switch port
            that faces an RNIC is named `SWITCH:HOST:RNIC`.

    Raises:
        UsageError: the capture has too many addresses and ports to sort (`flows_of`).
    """
    decoded = decode(frames)
    packets, late, back_ns = _in_time_order(decoded)
    if host_ports is None:
        host_ports = [name.count(":") == 2 for name in frames.interfaces]  # noqa: PLR2004 - see the docstring
    flows, unpaired = flows_of(packets, host_ports=host_ports)
    # Frames that are truncated, missing or in the wrong order can look like a broken rule.
    is_exact = not (packets.cut or packets.not_decoded or packets.hidden or frames.dropped)
    is_exact = is_exact and back_ns <= CLOCK_STEP_NS
    reports = tuple(_report(packets, flow, frames.interfaces[flow.port], is_exact=is_exact) for flow in flows)
    begun_again = list(_begun_again(packets, flows, frames.interfaces))
    notes = tuple(said for said, is_known in begun_again if is_known)
    if late:
        notes += (
            f"{late:,} packets come after later ones in the file, by up to {back_ns / 1e9:.6f} s: sorted by time",
        )
    return Analysis(
        frames=len(frames),
        roce=len(packets),
        ports=frames.interfaces,
        flows=reports,
        doubts=(
            *_doubts(frames, packets, reports, [item for item in unpaired if host_ports[item.port]], back_ns),
            *_one_way(frames, packets, [number for number, is_host in enumerate(host_ports) if is_host]),
            *(said for said, is_known in begun_again if not is_known),
        ),
        notes=notes,
    )


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


def _doubts(
    frames: Frames, packets: Packets, flows: Sequence[FlowReport], unpaired: Sequence[Unpaired], back_ns: int
) -> Iterator[str]:
    if frames.damage:
        yield f"the file is damaged at {frames.damage}"
    if not len(frames):
        yield "the capture has no frames"
    elif not len(packets):
        yield f"none of {len(frames):,} frames can be decoded as RoCEv2 (UDP port 4791 over IPv4 or IPv6)"
    elif not flows:
        yield f"{len(packets):,} RoCEv2 packets, but no request of a reliable connection: nothing to check"
    elif not any(item.responses or item.is_ambiguous for item in flows):
        yield "no response to any request was captured, so rules of responses were not checked; capture both directions"
    yield from _unseen(frames, packets)
    yield from _unchecked_flows(flows, unpaired)
    if back_ns > CLOCK_STEP_NS:
        yield (
            f"times of one port go back by {back_ns / 1e9:.3f} s: the clock was set during the capture, or captures "
            "were joined; the order of its packets is unknown, so no rule was checked"
        )


def _unseen(frames: Frames, packets: Packets) -> Iterator[str]:
    """Yield a doubt for each kind of frame that may hold RoCEv2 packets which were not decoded."""
    if packets.cut:
        yield (
            f"{packets.cut:,} frames are cut before their RoCEv2 headers end, so no rule was checked; capture at least "
            f"{NEEDED_BYTES} bytes of each frame"
        )
    if packets.not_decoded:
        yield (f"{packets.not_decoded:,} RoCEv2 packets are fragments and were not decoded, so no rule was checked")
    if packets.hidden:
        yield (
            f"{packets.hidden:,} frames are encrypted (IPsec, MACsec) or in a tunnel (VXLAN, Geneve, GRE, IP in IP, "
            "MPLS, PPPoE): RoCEv2 in them was not seen, so no rule was checked; capture where they are out of it"
        )
    if frames.dropped:
        yield (
            f"{frames.dropped:,} frames were dropped when the file was captured, as its statistics say, so no rule was "
            "checked; capture headers alone, or with a larger buffer"
        )


def _one_way(frames: Frames, packets: Packets, host_ports: Sequence[int]) -> Iterator[str]:
    """Yield a doubt for each host port where only one direction was captured, if another port has both."""
    directions = {number: set(packets.outbound[packets.port == number].tolist()) - {-1} for number in host_ports}
    if not any(len(sides) > 1 for sides in directions.values()):
        return  # no response was captured at all, which `_doubts` reports
    for number, sides in directions.items():
        if len(sides) == 1:
            captured_side = "left the port towards the host" if sides == {1} else "came in from the host"
            yield f"{frames.interfaces[number]}: all packets {captured_side}: responses were not checked there"


def _begun_again(packets: Packets, flows: Sequence[Flow], ports: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield a sentence for each flow that does not continue the PSNs of its queue pair, and if the reason is known.

    A responder's message sequence number (MSN) only goes back when its queue pair is connected again.
    """
    last: dict[tuple[int, str, str, int], Flow] = {}
    for flow in flows:
        key = flow.port, flow.src, flow.dst, flow.dqpn
        before = last.get(key)
        last[key] = flow
        if before is None:
            continue
        first, final = packets.msn[flow.responses], packets.msn[before.responses]
        first, final = first[first >= 0][:1], final[final >= 0][-1:]
        is_known = bool(len(first) and len(final) and distance(first, final)[0] < 0)
        name = f"{flow.src} -> {flow.dst} QP {flow.dqpn}{f' at {ports[flow.port]}' if ports[flow.port] else ''}"
        jump = f"PSNs continue at {int(flow.psn[0]) % PSN_SPACE:,} instead of {_after(before):,}"
        yield (
            (f"{name}: connected again under the same number ({jump})", True)
            if is_known
            else (
                f"{name}: {jump}: it was connected again, or packets are missing in between; the gap was not checked",
                False,
            )
        )


def _after(flow: Flow) -> int:
    return int((flow.psn + flow.span).max()) % PSN_SPACE


def _unchecked_flows(flows: Sequence[FlowReport], unpaired: Sequence[Unpaired]) -> Iterator[str]:
    for flow in flows:
        if flow.is_doubled:
            yield (
                f"{flow.src} -> {flow.dst} QP {flow.dqpn} at {flow.port}: the capture has each packet twice, as if "
                "captured at two points, so rules that hold only at a host's port were not checked"
            )
    for port, src, dst in dict.fromkeys((item.port, item.src, item.dst) for item in flows if item.is_ambiguous):
        qpns = sorted(
            item.dqpn for item in flows if item.is_ambiguous and (item.port, item.src, item.dst) == (port, src, dst)
        )
        yield (
            f"{src} -> {dst}{f' at {port}' if port else ''}: responses match more than one of the QPs "
            f"{first_of(qpns, _NAMED)} (equal UDP source ports, PSNs within one window), so rules of responses "
            "were not checked"
        )
    for item in unpaired:
        yield (
            f"{item.responses:,} responses from {item.src} to QP {item.dqpn} of {item.dst} match no requests at this "
            "port and were not checked"
        )


def _report(packets: Packets, whole: Flow, port: str, *, is_exact: bool) -> FlowReport:
    flow = without_copies(packets, whole)
    tracked = gobackn.track(packets, flow)
    go_backs, broken = (
        list(episodes(packets, flow, tracked)),
        gobackn.violations(packets, flow, tracked) if is_exact else [],
    )
    if flow.is_ambiguous:
        # Without its responses the reason for a retransmission is unknown.
        go_backs = []
    syndrome = packets.syndrome[flow.responses]
    missing = int((flow.psn[tracked.jumps] - tracked.top[tracked.jumps - 1]).sum())
    late = _late(flow, tracked)
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
    )


def _late(flow: Flow, tracked: gobackn.Track) -> int:
    """Count the PSNs in runs that arrived late without a retransmission."""
    ends = dict(zip(tracked.begin.tolist(), tracked.end.tolist(), strict=True))
    return sum(
        int(flow.psn[ends[at] - 1] + flow.span[ends[at] - 1] - flow.psn[at]) for at in tracked.reordered.tolist()
    )


def _distinct(flow: Flow, tracked: gobackn.Track) -> tuple[int, int]:
    """Count the requests with distinct PSNs, and the PSNs that passed at least once."""
    if not len(tracked.backwards) and not len(tracked.reordered):
        return len(flow.psn), int(flow.span.sum())
    distinct = len(np.unique(flow.psn))
    if (flow.span == 1).all():
        return distinct, distinct
    order = np.argsort(flow.psn, kind="stable")
    low, high = flow.psn[order], np.maximum.accumulate((flow.psn + flow.span)[order])
    gaps = np.maximum(0, low[1:] - high[:-1]).sum()
    return distinct, int(high[-1] - low[0] - gaps)
