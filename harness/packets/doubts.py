"""Reasons why the analysis of a capture may miss broken rules. Pure.

With any of them, "no rule broken" is not proven. Each reason is one sentence, which says what to do where that is not
obvious.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from faultbed.testbed.packets.bth import PSN_SPACE, distance
from faultbed.testbed.suggestions import first_of

if TYPE_CHECKING:
    from faultbed.harness.packets.flows import Flow, Unpaired
    from faultbed.testbed.packets.capture_file import Frames
    from faultbed.testbed.packets.columns import Packets

__all__ = ["Capture", "PsnJump", "doubts", "psn_jumps"]

NEEDED_BYTES = 70
CLOCK_STEP_NS = 1_000_000_000
"""A packet this far behind a later one of the same port means that the clock was set, not that the order is off."""
_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A capture whose packets were sorted by time and into flows.

    `frames` are the frames of the file, `packets` those that are RoCEv2. In the file, a packet comes at most
    `behind_ns` after a later one of its port. `host_ports` says for each interface whether a host is at its far end.
    `doubled` are the flows of hosts' ports that contain each packet twice. `unpaired` are responses that match no
    request.
    """

    frames: Frames
    packets: Packets
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
        return is_whole and self.behind_ns <= CLOCK_STEP_NS


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
    elif not any(len(flow.responses) or flow.is_ambiguous for flow in flows):
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
            f"{packets.hidden:,} frames are encrypted (IPsec, MACsec) or in a tunnel (VXLAN, Geneve, GRE, IP in IP, "
            "MPLS, PPPoE): RoCEv2 in them was not seen, so no rule was checked; capture where they are not"
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


def _at_port(capture: Capture, port: int) -> str:
    """Return " at NAME"; empty if the port has no name."""
    name = capture.frames.interfaces[port]
    return f" at {name}" if name else ""
