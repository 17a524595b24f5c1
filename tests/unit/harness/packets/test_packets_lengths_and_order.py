"""Lengths that offloads and capture tools write, and files whose times contradict their order: nothing is proven."""

import numpy as np
import pytest
from gbn_model import MTU, WRITE_FIRST, A, B, Wire, frame, go_back_n, only_flow

from faultbed.harness.packets.analysis import analyse
from faultbed.testbed.packets.frames import Frames

MS = 1_000_000


def changed(wire, change, every=7):
    """Return the capture with the content of each seventh packet changed."""
    wire.packets = [
        (time_ns, change(content) if not number % every else content, outbound)
        for number, (time_ns, content, outbound) in enumerate(wire.packets)
    ]
    return wire


def ip_length(content, length):
    return content[:16] + length.to_bytes(2, "big") + content[18:]


def both_lengths(content, payload):
    """Return a packet whose IP and UDP headers agree on another length of its payload; its frame grows with it."""
    more = payload - MTU
    longer = ip_length(content, int.from_bytes(content[16:18], "big") + more)
    longer = longer[:38] + (int.from_bytes(content[38:40], "big") + more).to_bytes(2, "big") + longer[40:]
    return longer + bytes(max(0, more))


@pytest.mark.parametrize("length", [65_535, 9_000, 1_500])
def test_ip_length_beyond_its_frame_proves_no_rule(length):
    """A segmentation offload writes such lengths, and so does a damaged header."""
    analysis = analyse(
        changed(go_back_n(count=60, losses={5}).wire, lambda content: ip_length(content, length)).frames()
    )
    assert analysis.violations == 0
    assert any("contradicted by their UDP header or by their frame" in doubt for doubt in analysis.doubts)


def test_lengths_beyond_a_frame_that_was_cut_before_the_capture_prove_no_rule():
    """Both headers agree, but the file says that the frame was 128 bytes long on the wire."""
    frames = go_back_n(count=60, losses=set()).wire.frames()
    frames.length[:] = frames.captured
    analysis = analyse(frames)
    assert analysis.violations == 0
    assert any("contradicted" in doubt for doubt in analysis.doubts)


def test_packet_of_several_joined_segments_proves_no_rule():
    """GRO joins datagrams of one flow: each has a BTH of its own, and only the first one would be read."""
    wire = go_back_n(count=60, losses=set(), message=1).wire
    outgoing = wire.packets[0][2]
    wire.packets = [
        (time_ns, both_lengths(content, 12_000) if outbound == outgoing else content, outbound)
        for time_ns, content, outbound in wire.packets
    ]
    analysis = analyse(wire.frames())
    assert analysis.violations == 0
    assert any("longer than the largest path MTU" in doubt for doubt in analysis.doubts)


def test_packets_that_have_the_length_of_no_path_mtu_prove_no_rule():
    wire = Wire()
    for psn in range(20):
        content = frame(A, B, opcode=WRITE_FIRST, dqpn=1, psn=psn, extended=bytes(16), payload=2096)
        wire.put(psn * 1000, content, outbound=True)
    analysis = analyse(wire.frames())
    assert analysis.violations == 0
    assert any("2,096 bytes, which is no path MTU" in doubt for doubt in analysis.doubts)


def test_one_packet_of_another_length_is_the_wrong_one():
    """Its length is longer than that of all others, which are not blamed for it."""
    wire = go_back_n(count=60, losses=set(), at="sender").wire
    at = next(place for place, one in enumerate(wire.packets) if one[1][42] == WRITE_FIRST and place > 20)
    time_ns, content, outbound = wire.packets[at]
    wire.packets[at] = time_ns, both_lengths(content, 2048), outbound
    (violation,) = only_flow(wire).violations
    assert (violation.rule, violation.frame) == ("request-length", at + 1)


@pytest.mark.parametrize("at", ["receiver", "sender"])
@pytest.mark.parametrize("losses", [set(), {5, 20}])
def test_times_in_reverse_order_of_the_file_prove_no_rule(at, losses):
    wire = go_back_n(count=60, losses=losses, at=at).wire
    times = [time_ns for time_ns, *_ in wire.packets]
    wire.packets = [(time_ns, *rest) for time_ns, (_, *rest) in zip(reversed(times), wire.packets, strict=True)]
    analysis = analyse(wire.frames())
    assert analysis.violations == 0
    assert not any(flow.is_checked for flow in analysis.flows)
    assert any("which order is right is not known" in doubt for doubt in analysis.doubts)


def test_responses_stamped_by_an_earlier_clock_than_requests_prove_no_rule():
    """Some RNICs stamp what comes in, and the kernel what goes out: in time order ACKs come before their requests."""
    wire = go_back_n(count=60, losses=set()).wire
    requests = wire.packets[0][2]
    wire.packets = [
        (time_ns if outbound == requests else time_ns - 50_000, content, outbound)
        for time_ns, content, outbound in wire.packets
    ]
    analysis = analyse(wire.frames())
    assert analysis.violations == 0
    assert any("which order is right is not known" in doubt for doubt in analysis.doubts)


def test_captures_of_one_port_joined_in_the_wrong_order_are_sorted():
    wire = go_back_n(count=60, losses={5}).wire
    half = len(wire.packets) // 2
    wire.packets = wire.packets[half:] + wire.packets[:half]
    analysis = analyse(wire.frames())
    assert (analysis.violations, analysis.doubts) == (0, ())
    assert any("sorted by time" in note for note in analysis.notes)


def test_rule_broken_in_a_file_in_order_stays_broken():
    """The doubt is about order alone: it needs a packet that is out of place."""
    wire = go_back_n(count=60, losses=set()).wire
    last = wire.packets[-1]
    wire.response(last[0] + 1000, 400)
    assert only_flow(wire).broken == {"ack-ahead": 1}


def test_captures_of_two_ports_behind_each_other_are_no_disorder():
    """`mergecap -a`: each port is in order, and a rule that is broken at one of them is reported."""
    wire = go_back_n(count=60, losses=set()).wire
    wire.response(wire.packets[-1][0] + 1000, 400)
    frames = wire.frames()
    twice = Frames(
        data=frames.data,
        start=np.tile(frames.start, 2),
        captured=np.tile(frames.captured, 2),
        length=np.tile(frames.length, 2),
        time_ns=np.tile(frames.time_ns, 2),
        interface=np.repeat(np.array([0, 1], dtype=np.int16), len(frames)),
        outbound=np.tile(frames.outbound, 2),
        interfaces=("rtsw2:host4:rxe0", "rtsw1:host1:rxe0"),
        link_types=np.tile(frames.link_types, 2),
    )
    analysis = analyse(twice)
    assert analysis.violations == 2
    assert not any("order" in doubt for doubt in analysis.doubts)
