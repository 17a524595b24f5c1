"""Reasons why the analysis of a capture may miss broken rules. Pure.

With any of them, "no rule broken" is not proven. Each reason is one sentence, which says what to do where that is not
obvious.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from faultbed.testbed.packets.bth import (
    ACKNOWLEDGE,
    MTUS,
    NAK_SEQUENCE,
    OPERATION,
    PSN_SPACE,
    distance,
    is_ack,
    is_rnr,
    is_syndrome_known,
)
from faultbed.testbed.suggestions import first_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from faultbed.harness.packets.analysis import FlowReport
    from faultbed.harness.packets.flows import Flow, Unpaired
    from faultbed.harness.packets.gobackn import Track
    from faultbed.harness.packets.read_data import DataTrack
    from faultbed.testbed.packets.columns import Packets
    from faultbed.testbed.packets.frames import Frames

__all__ = ["Capture", "PsnJump", "doubt_of_order", "doubts", "psn_jumps", "unfinished_flow"]

NEEDED_BYTES = 70
CLOCK_STEP_NS = 1_000_000_000
"""A packet this far behind a later one of the same port means that the clock was set, not that the order is off."""
_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A capture whose packets were sorted by time and into flows.

    `frames` are the frames of the file, `packets` those that are RoCEv2. In the file, `late` packets come after later
    ones of their port, by at most `behind_ns`. `host_ports` says for each interface whether a host is at its far end.
    `doubled` are the flows of hosts' ports that contain each packet twice. `unpaired` are responses that match no
    request.
    """

    frames: Frames
    packets: Packets
    late: int
    behind_ns: int
    host_ports: Sequence[bool]
    flows: Sequence[Flow]
    doubled: Sequence[Flow]
    unpaired: Sequence[Unpaired]

    @property
    def has_all_packets_in_order(self) -> bool:
        """Whether rules can be checked: packets that are cut, missing or in the wrong order look like a broken rule."""
        packets = self.packets
        is_whole = not (packets.cut or packets.not_decoded or packets.hidden or self.frames.dropped)
        return is_whole and not packets.odd_lengths and self.behind_ns <= CLOCK_STEP_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class PsnJump:
    """A flow that does not continue the PSNs of its queue pair, in a sentence.

    `is_reconnected`: the queue pair was connected again, because its responder's message sequence numbers (MSN) went
    back. Otherwise packets may be missing in between.
    """

    sentence: str
    is_reconnected: bool


def doubts(capture: Capture, jumps: Sequence[PsnJump]) -> tuple[str, ...]:
    """Return every reason why the capture's analysis may miss broken rules."""
    return (
        *_empty(capture),
        *_not_decoded(capture),
        *_unchecked_flows(capture),
        *_clock_set(capture),
        *_one_direction(capture),
        *(jump.sentence for jump in jumps if not jump.is_reconnected),
    )


def psn_jumps(capture: Capture) -> list[PsnJump]:
    """Return each flow that does not continue the PSNs of its queue pair."""
    packets, jumps = capture.packets, []
    last: dict[tuple[int, str, str, int], Flow] = {}
    for flow in capture.flows:
        key = flow.port, flow.src, flow.dst, flow.dqpn
        before = last.get(key)
        last[key] = flow
        if before is None:
            continue
        first, final = packets.msn[flow.responses], packets.msn[before.responses]
        first, final = first[first >= 0][:1], final[final >= 0][-1:]
        is_reconnected = bool(len(first) and len(final) and distance(first, final)[0] < 0)
        name = f"{flow.src} -> {flow.dst} QP {flow.dqpn}{_at_port(capture, flow.port)}"
        expected = int((before.psn + before.span).max()) % PSN_SPACE
        jump = f"PSNs continue at {int(flow.psn[0]) % PSN_SPACE:,} instead of {expected:,}"
        sentence = (
            f"{name}: connected again under the same number ({jump})"
            if is_reconnected
            else f"{name}: {jump}: it was connected again, or packets are missing in between; the gap was not checked"
        )
        jumps.append(PsnJump(sentence=sentence, is_reconnected=is_reconnected))
    return jumps


def _empty(capture: Capture) -> Iterator[str]:
    frames, packets, flows = capture.frames, capture.packets, capture.flows
    if frames.damage:
        yield f"the file is damaged at {frames.damage}"
    if not len(frames):
        yield "the capture has no frames"
    elif not len(packets):
        yield f"none of {len(frames):,} frames can be decoded as RoCEv2 (UDP port 4791 over IPv4 or IPv6)"
    elif not flows:
        yield f"{len(packets):,} RoCEv2 packets, but no request of a reliable connection: nothing to check"
    elif not any(len(flow.responses) or flow.is_ambiguous or flow.is_unreliable for flow in flows):
        yield "no response to any request was captured, so rules of responses were not checked; capture both directions"


def _not_decoded(capture: Capture) -> Iterator[str]:
    """Yield a doubt for each kind of frame that may hold RoCEv2 packets which were not decoded."""
    packets, dropped = capture.packets, capture.frames.dropped
    if packets.cut:
        yield (
            f"{packets.cut:,} frames are cut before their RoCEv2 headers end, so no rule was checked; capture at least "
            f"{NEEDED_BYTES} bytes of each frame"
        )
    if packets.not_decoded:
        yield (f"{packets.not_decoded:,} RoCEv2 packets are fragments and were not decoded, so no rule was checked")
    if packets.hidden:
        yield (
            f"{sum(packets.hidden.values()):,} frames may hold RoCEv2 that is not decoded "
            f"({', '.join(f'{count:,} in {name}' for name, count in sorted(packets.hidden.items()))}), so no rule was "
            "checked; capture where the packets are not in it"
        )
    if packets.odd_lengths:
        yield (
            f"{sum(packets.odd_lengths.values()):,} RoCEv2 packets have an IP length that cannot be theirs "
            f"({', '.join(f'{count:,} {name}' for name, count in sorted(packets.odd_lengths.items()))}), so no rule "
            "was checked; capture whole frames, at a port whose offloads are off (ethtool -K PORT gro off gso off)"
        )
    if dropped:
        yield (
            f"{dropped:,} frames were dropped when the file was captured, as its statistics say, so no rule was "
            "checked; capture headers alone, or with a larger buffer"
        )


def _unchecked_flows(capture: Capture) -> Iterator[str]:
    for flow in capture.doubled:
        yield (
            f"{flow.src} -> {flow.dst} QP {flow.dqpn} at {capture.frames.interfaces[flow.port]}: the capture has each "
            "packet twice, as if captured at two points, so rules that hold only at a host's port were not checked"
        )
    ambiguous: dict[tuple[int, str, str], list[int]] = {}
    for flow in capture.flows:
        if flow.is_ambiguous:
            ambiguous.setdefault((flow.port, flow.src, flow.dst), []).append(flow.dqpn)
    for (port, src, dst), qpns in ambiguous.items():
        yield (
            f"{src} -> {dst}{_at_port(capture, port)}: responses match more than one of the QPs "
            f"{first_of(sorted(qpns), _NAMED)} (equal UDP source ports, PSNs within one window), so rules of responses "
            "were not checked"
        )
    for item in capture.unpaired:
        if capture.host_ports[item.port]:
            yield (
                f"{item.responses:,} responses from {item.src} to QP {item.dqpn} of {item.dst} match no requests at "
                "this port and were not checked"
            )


def _clock_set(capture: Capture) -> Iterator[str]:
    if capture.behind_ns > CLOCK_STEP_NS:
        yield (
            f"times of one port go back by {capture.behind_ns / 1e9:.3f} s: the clock was set during the capture, or "
            "captures were joined; the order of its packets is unknown, so no rule was checked"
        )


def doubt_of_order(capture: Capture, reports: Sequence[FlowReport]) -> Iterator[str]:
    """Yield a doubt if broken rules rest on times that contradict the order of the file: either may be wrong.

    Times are right where an RNIC's queues were stored one after the other, and rules that all hold in their order show
    that. The order of the file is right where packets were stamped by different clocks, or stamped again by a tool.
    """
    broken = sum(sum(report.broken.values()) for report in reports)
    if broken and capture.late:
        yield (
            f"{capture.late:,} packets come after later ones in the file, by up to {capture.behind_ns / 1e9:.6f} s, "
            f"and in the order of their times {broken:,} rules would be broken: which order is right is not known, so "
            "no rule was checked; capture again with one clock, and without tools that change times or order"
        )


def _one_direction(capture: Capture) -> Iterator[str]:
    """Yield a doubt for each host port where only one direction was captured, if another port has both."""
    packets = capture.packets
    directions = {
        port: set(packets.outbound[packets.port == port].tolist()) - {-1}
        for port, is_host in enumerate(capture.host_ports)
        if is_host
    }
    if not any(len(sides) > 1 for sides in directions.values()):
        return  # no response was captured at all, which `_empty` reports
    for port, sides in directions.items():
        if len(sides) == 1:
            captured = "left the port towards the host" if sides == {1} else "came in from the host"
            yield f"{capture.frames.interfaces[port]}: all packets {captured}: responses were not checked there"


def unfinished_flow(packets: Packets, flow: Flow, tracked: Track, data: DataTrack, report: FlowReport) -> Iterator[str]:
    """Yield what is not known of one flow: packets without a known meaning, and what the capture's end left open."""
    name = f"{flow.src} -> {flow.dst} QP {flow.dqpn}{f' at {report.port}' if report.port else ''}"
    if len(flow.strange):
        numbers = sorted({f"0x{opcode:02x}" for opcode in packets.opcode[flow.strange].tolist()})
        yield (
            f"{name}: {_packets_of(packets, flow.strange)} have the opcode {first_of(numbers, _NAMED)}, which is none "
            "of RC, XRC, UC, UD or CNP: how many PSNs it takes is not known, so no rule of this flow was checked"
        )
    if flow.mtu not in MTUS:
        yield (
            f"{name}: its first and middle packets have {flow.mtu:,} bytes, which is no path MTU (an offload may have "
            "joined or split them), so no rule of this flow was checked; capture at a port whose offloads are off"
        )
    elif not flow.is_mtu_known:
        yield (
            f"{name}: no packet shows the path MTU, so how many PSNs its READs take is not known and no rule of this "
            "flow was checked; capture both directions"
        )
    syndrome = packets.syndrome[flow.responses]
    is_data = OPERATION[packets.opcode[flow.responses]] != ACKNOWLEDGE
    odd = flow.responses[~is_syndrome_known(syndrome) | (is_data & (syndrome >= 0) & ~is_ack(syndrome))]
    if len(odd):
        numbers = sorted({f"0x{value:02x}" for value in packets.syndrome[odd].tolist()})
        yield (
            f"{name}: {_packets_of(packets, odd)} have the AETH syndrome {first_of(numbers, _NAMED)}, which is "
            "reserved there: what the responder meant is not known"
        )
    if unexplained := report.causes.get("unknown", 0):
        first = next((episode.frame for episode in report.episodes if episode.cause == "unknown"), None)
        yield (
            f"{name}: {unexplained:,} retransmissions{'' if first is None else f', the first one in frame {first}'}, "
            "have no reason that was captured: neither a NAK, nor a gap in response data, nor a silence"
        )
    if report.is_checked and not flow.is_unreliable and not any(nak.is_fatal for nak in report.negative):
        yield from _left_open(name, flow, data, report)
        yield from _ignored(name, packets, flow, tracked)


def _ignored(name: str, packets: Packets, flow: Flow, tracked: Track) -> Iterator[str]:
    """Yield a doubt if a packet that a NAK requested did not pass again before it was acknowledged."""
    syndrome, answer = packets.syndrome[flow.responses], tracked.answer
    is_acknowledged = (OPERATION[packets.opcode[flow.responses]] == ACKNOWLEDGE) & is_ack(syndrome)
    acknowledged = np.where(is_acknowledged, answer, np.iinfo(np.int64).min)
    ignored = []
    for at in np.flatnonzero((syndrome == NAK_SEQUENCE) | is_rnr(syndrome)).tolist():
        after = np.flatnonzero(acknowledged[at + 1 :] >= answer[at])
        if len(after):
            between = slice(int(tracked.place[at]), int(tracked.place[at + 1 + after[0]]))
            low, high = flow.psn[between], flow.psn[between] + flow.span[between]
            if not ((low <= answer[at]) & (answer[at] < high)).any():
                ignored.append(at)
    if ignored:
        yield (
            f"{name}: {len(ignored):,} NAKs (the first one in frame {int(packets.number[flow.responses[ignored[0]]])}) "
            "requested packets that were acknowledged later and had not passed again: whether they came late on "
            "another path, or the requester or the responder is wrong, is not known"
        )


def _packets_of(packets: Packets, rows: NDArray[np.int64]) -> str:
    return f"{len(rows):,} packets from frame {int(packets.number[rows[0]])} on"


def _left_open(name: str, flow: Flow, data: DataTrack, report: FlowReport) -> Iterator[str]:
    """Yield what had not arrived when the capture ended. A sender that goes on without it would break the standard."""
    gap = data.open_gap
    if gap is not None and "read-abandoned" not in report.broken:
        yield (
            f"{name}: data of PSN {gap.psn % PSN_SPACE} had not arrived in order when later responses did (frame "
            f"{gap.frame}), and was not requested again before the capture ended: whether the requester went on "
            "without it is not known"
        )
    never = report.missing - report.returned - report.reordered
    if never and flow.side != "sender" and len(flow.responses):
        yield (
            f"{name}: {never:,} missing PSNs had not been sent again when the capture ended, or took another path: "
            "whether they were ever delivered is not known"
        )


def _at_port(capture: Capture, port: int) -> str:
    """Return " at NAME"; empty if the port has no name."""
    name = capture.frames.interfaces[port]
    return f" at {name}" if name else ""
