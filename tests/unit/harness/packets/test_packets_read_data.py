"""Response data of READs and atomics is checked as requests are; NAKs and unknown packets are named."""

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from click.testing import CliRunner
from gbn_model import (
    ATOMIC_ACK,
    FETCH_ADD,
    FIRST,
    LAST,
    LQPN,
    MIDDLE,
    NAK,
    ONLY,
    READ,
    RQPN,
    SIDES,
    SPACE,
    A,
    B,
    Reads,
    Wire,
    frame,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import samples

from faultbed.harness.attribution import packet_stalls
from faultbed.harness.cli.main import cli
from faultbed.harness.packets.analysis import analyse
from faultbed.harness.packets.episodes import Cause
from faultbed.testbed.packets.bth import OPCODES, rnr_timer_ns
from faultbed.testbed.packets.capture_file import read

CAPTURES = Path(__file__).parents[3] / "data" / "captures"
US = 1000


def good(side="sender", *, first=1000):
    wire = Reads(side, first)
    for begin in (0, 8, 16):
        wire.read(begin, begin + 8)
    return wire


def flow_of(wire):
    (flow,) = analyse(wire.frames()).flows
    return flow


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("first", [1000, SPACE - 4])
def test_read_data_without_a_fault_breaks_no_rule(side, first):
    analysis = analyse(good(side, first=first).frames())
    assert (analysis.violations, analysis.doubts) == (0, ())
    assert analysis.flows[0].data_missing == 0


@pytest.mark.parametrize("wait_ns", [20 * US, 5_000 * US])
def test_read_data_that_is_lost_and_read_again_is_a_gap(wait_ns):
    """However long the requester takes: the gap was there, so no timer was needed."""
    wire = Reads()
    wire.ask(0, 8)
    wire.data(0, 1, 2, 4, 5, 6, 7, begin=0, end=8)
    wire.now += wait_ns
    wire.read(3, 8)
    wire.read(8, 16)
    analysis = analyse(wire.frames())
    (flow,) = analysis.flows
    assert (flow.causes, flow.broken, analysis.doubts) == ({"gap": 1}, {}, ())
    assert (flow.data_missing, flow.data_returned, flow.data_reordered) == (1, 1, 0)
    assert flow.episodes[0].reaction_ns == wait_ns + 4 * US
    assert flow.episodes[0].generation_ns is None


def test_read_data_lost_twice_and_in_a_whole_response_is_counted():
    wire = Reads()
    wire.ask(0, 4)
    wire.ask(4, 4)
    wire.data(*range(4, 8), begin=4, end=8)
    wire.ask(0, 4)
    wire.data(0, 2, 3, begin=0, end=4)
    wire.read(1, 4)
    wire.ask(4, 4)
    wire.data(*range(4, 8), begin=4, end=8)
    flow = flow_of(wire)
    assert (flow.data_missing, flow.data_returned, flow.broken) == (4, 4, {})


@pytest.mark.parametrize("side", ["sender", "between"])
def test_read_data_that_never_arrives_is_inconclusive(side):
    wire = Reads(side)
    wire.ask(0, 8)
    wire.data(0, 1, 2, 5, 6, 7, begin=0, end=8)
    wire.read(8, 16)
    analysis = analyse(wire.frames())
    assert analysis.flows[0].data_missing == 2
    assert any("PSN 1003 had not arrived" in doubt for doubt in analysis.doubts)


def test_read_data_that_an_acknowledgement_implies_is_missing():
    """The responder acknowledges a WRITE behind the READ: the whole READ's data was lost, or was never sent."""
    wire = Reads("receiver")
    wire.ask(0, 2)
    wire.request(wire.now + US, 1002)
    wire.response(wire.now + 2 * US, 1002)
    flow = flow_of(wire)
    assert (flow.data_missing, flow.broken) == (2, {"response-skipped": 1})


def test_read_data_is_abandoned_after_more_requests_than_can_be_outstanding():
    wire = Reads()
    wire.ask(0, 2)
    wire.data(1, begin=0, end=2)
    for place in range(2, 260):
        wire.read(place, place + 1)
    assert flow_of(wire).broken == {"read-abandoned": 1}


@pytest.mark.parametrize(
    ("side", "broken"),
    [("sender", {}), ("receiver", {"response-order": 2, "response-skipped": 1}), ("between", {})],
)
def test_read_data_in_another_order_is_reported(side, broken):
    wire = Reads(side)
    wire.ask(0, 8)
    wire.data(0, 1, 2, 5, 4, 3, 6, 7, begin=0, end=8)
    analysis = analyse(wire.frames())
    assert (analysis.flows[0].data_reordered, analysis.flows[0].broken) == (2, broken)
    assert any("had not arrived in order" in doubt for doubt in analysis.doubts)


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_read_data_twice_is_repeated_and_breaks_a_rule_at_its_responder(side):
    wire = Reads(side)
    wire.ask(0, 8)
    wire.data(*range(8), 4, begin=0, end=8)
    flow = flow_of(wire)
    assert (flow.data_repeated, flow.broken) == (1, {"response-repeated": 1} if side == "receiver" else {})


def unasked(wire):
    wire.read(0, 8)
    wire.data(8, begin=8, end=9)


def of_another_kind(wire):
    wire.ask(0, 1, opcode=FETCH_ADD)
    wire.data(0, begin=0, end=1, opcode=ONLY)


def at_another_place(wire):
    wire.ask(0, 8)
    wire.data(0, 1, begin=0, end=8)
    wire.data(2, begin=0, end=8, opcode=LAST)
    wire.data(3, 4, 5, 6, 7, begin=0, end=8)


@pytest.mark.parametrize(
    ("play", "rule"),
    [(unasked, "response-ahead"), (of_another_kind, "response-kind"), (at_another_place, "response-kind")],
)
def test_read_data_that_does_not_fit_its_request_breaks_a_rule(play, rule):
    wire = Reads()
    play(wire)
    assert flow_of(wire).broken == {rule: 1}


def test_read_data_of_atomics_and_xrc_is_checked_alike():
    wire = Reads()
    for place in range(4):
        wire.ask(place, 1, opcode=0xA0 | FETCH_ADD)
        wire.data(place, begin=place, end=place + 1, opcode=0xA0 | ATOMIC_ACK)
    wire.ask(4, 4, opcode=0xA0 | READ)
    for place, kind in zip(range(4, 8), (FIRST, MIDDLE, MIDDLE, LAST), strict=True):
        wire.data(place, begin=4, end=8, opcode=0xA0 | kind)
    analysis = analyse(wire.frames())
    assert (analysis.violations, analysis.doubts) == (0, ())
    del wire.packets[5]
    assert flow_of(wire).data_missing == 1


def forbidden(wire, rng):
    """Drop, duplicate, swap or change one packet of data, as no rule-abiding pair of hosts would send it."""
    packets = wire.packets
    data = [at for at, (_, content, _) in enumerate(packets) if content[42] in (FIRST, MIDDLE, LAST)]
    at = int(rng.choice(data[:-1]))
    time_ns, content, outbound = packets[at]
    kind = int(rng.integers(5))
    if kind == 0:
        del packets[at]
    elif kind == 1:
        packets.insert(at + 1, (time_ns + 1, content, outbound))
    elif kind == 2:
        at = int(rng.choice([at for at in data[:-1] if packets[at + 1][1][42] in (FIRST, MIDDLE, LAST)]))
        earlier, later = packets[at : at + 2]
        packets[at : at + 2] = [(earlier[0], *later[1:]), (later[0], *earlier[1:])]
    elif kind == 3:
        packets[at] = (time_ns, content[:42] + bytes([content[42] ^ 1]) + content[43:], outbound)
    else:
        psn = int.from_bytes(content[51:54], "big") + int(rng.integers(1, 1000))
        packets[at] = (time_ns, content[:51] + (psn % SPACE).to_bytes(3, "big") + content[54:], outbound)


@settings(max_examples=samples(200), deadline=None)
@given(seed=st.integers(0, 1 << 32), side=st.sampled_from(["sender", "receiver", "between"]))
def test_read_data_mutation_that_the_standard_forbids_is_found(seed, side):
    """A broken rule, a doubt, or a count of what is missing or repeated: never "nothing broken" without a word."""
    wire = good(side)
    forbidden(wire, np.random.default_rng(seed))
    analysis = analyse(wire.frames())
    counted = any(flow.data_missing or flow.data_repeated for flow in analysis.flows)
    assert analysis.violations or analysis.doubts or counted


@settings(max_examples=samples(200), deadline=None)
@given(losses=st.sets(st.integers(0, 40), max_size=6), first=st.sampled_from([1000, SPACE - 9]), size=st.integers(1, 8))
def test_read_data_of_any_losses_that_are_read_again_breaks_no_rule(losses, first, size):
    """A requester that obeys the rules: it drops what is out of order and requests again from the first missing one."""
    wire, sent, expected, total = Reads(first=first), 0, 0, 3 * size
    while expected < total:
        begin = expected
        end = (begin // size + 1) * size
        wire.ask(begin, end - begin)
        for place in range(begin, end):
            if sent not in losses:
                wire.data(place, begin=begin, end=end)
                expected += place == expected
            sent += 1
        wire.now += 5_000 * US
    analysis = analyse(wire.frames())
    assert (analysis.violations, analysis.doubts) == (0, ())
    flow = analysis.flows[0]
    assert flow.data_missing == flow.data_returned
    assert flow.data_reordered == flow.data_repeated == 0


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("50-read-response-lost.pcapng", 0, ["gap in the responses (implied NAK)", "no rule of go-back-N is broken"]),
        ("51-read-hole.pcapng", 2, ["INCONCLUSIVE", "PSN 1003 had not arrived in order"]),
        ("52-read-out-of-order.pcapng", 2, ["INCONCLUSIVE", "reordered"]),
        ("80-nak-invalid-request.pcap", 0, ["NAK, invalid request (0x61)", "frame 4"]),
        ("81-nak-remote-access.pcap", 0, ["NAK, remote access error (0x62)", "frame 4"]),
        ("82-nak-remote-operational.pcap", 0, ["NAK, remote operational error (0x63)", "frame 4"]),
        ("30-rnr.pcap", 0, ["10 µs to the RNR NAK, asked to wait 1.28 ms, 1.99 ms to the packet, retry 1"]),
        *(
            (f"{name}.pcap", 0, ["24", "no rule of go-back-N is broken"])
            for name in ("08-sll", "09-sll2", "10-raw228", "11-erf", "12-vxlan", "13-erspan1", "14-erspan2")
        ),
    ],
)
def test_packets_command_of_a_recorded_case_gives_its_right_answer(name, code, words):
    done = CliRunner(env={"COLUMNS": "250"}).invoke(cli, ["packets", str(CAPTURES / name)], standalone_mode=False)
    assert done.return_value == code
    for word in words:
        assert word in done.output


def test_nak_that_ends_a_connection_is_in_the_report_with_its_code():
    (flow,) = analyse(read(CAPTURES / "81-nak-remote-access.pcap")).flows
    (nak,) = flow.negative
    assert (nak.frame, nak.psn, nak.syndrome, nak.is_fatal) == (4, 11, 0x62, True)


def test_ack_for_a_request_that_was_refused_for_good_breaks_a_rule():
    wire = Wire()
    for psn in range(3):
        wire.request(1000 * psn, psn)
    wire.response(4000, 1, 0x62)
    wire.response(5000, 2)
    assert flow_of(wire).broken == {"ack-after-error": 1}


@pytest.mark.parametrize("early", [False, True])
def test_rnr_packet_that_comes_before_the_requested_time_breaks_a_rule(early):
    wire = Wire(name="")
    wire.request(0, 7, 4)
    wire.response(10 * US, 7, 0x2E)
    wire.request(20 * US, 8, 4)
    again = 10 * US + rnr_timer_ns(0x2E) // (2 if early else 1)
    wire.request(again, 7, 4)
    wire.request(again + US, 8, 4)
    flow = flow_of(wire)
    assert flow.broken == ({"rnr-early": 1} if early else {})
    (episode,) = flow.episodes
    assert (episode.cause, episode.generation_ns, episode.rnr_timer_ns) == ("rnr", 10 * US, 1_280 * US)


UNKNOWN = sorted({*range(256)} - OPCODES.keys())


@pytest.mark.parametrize("opcode", [UNKNOWN[0], 0x1F, 0x4C, 0xC0, 0xFF])
@pytest.mark.parametrize("at_responder", [False, True])
def test_opcode_outside_the_table_makes_its_flow_inconclusive(opcode, at_responder):
    """Its PSNs are not missing: how many it takes is not known."""
    wire = Wire()
    wire.request(0, 1)
    wire.response(1000, 1)
    src, dst, qpn = (B, A, LQPN) if at_responder else (A, B, RQPN)
    wire.put(2000, frame(src, dst, opcode=opcode, dqpn=qpn, psn=2), outbound=not at_responder)
    wire.request(3000, 2 if at_responder else 5)
    analysis = analyse(wire.frames())
    (flow,) = analysis.flows
    assert (flow.missing, flow.broken, flow.is_checked) == (0, {}, False)
    assert any(f"opcode 0x{opcode:02x}" in doubt for doubt in analysis.doubts)


@pytest.mark.parametrize("syndrome", [0x40, 0x64, 0x7F, 0x80, 0xE0])
def test_reserved_syndrome_makes_its_flow_inconclusive(syndrome):
    wire = Wire()
    wire.request(0, 1)
    wire.response(1000, 1, syndrome)
    analysis = analyse(wire.frames())
    assert any(f"0x{syndrome:02x}, which is reserved" in doubt for doubt in analysis.doubts)
    assert analysis.violations == 0


def test_retransmission_for_no_reason_that_was_captured_is_inconclusive():
    wire = Wire()
    for time_us, psn in ((0, 1), (1, 3), (9, 2), (10, 3)):
        wire.request(time_us * US, psn)
    wire.response(11 * US, 3)
    analysis = analyse(wire.frames())
    assert any("no reason that was captured" in doubt for doubt in analysis.doubts)


def test_missing_request_that_is_never_sent_again_is_inconclusive():
    wire = Wire()
    for time_us, psn in ((0, 1), (1, 3), (3, 4)):
        wire.request(time_us * US, psn)
    wire.response(2 * US, 2, NAK)
    analysis = analyse(wire.frames())
    assert any("1 missing PSNs had not been sent again" in doubt for doubt in analysis.doubts)


def test_flow_of_an_unreliable_connection_counts_its_losses():
    """UC has no responses, so none is expected; a PSN is never sent again."""
    wire = Wire()
    for time_us, psn in ((0, 1), (1, 2), (2, 4)):
        wire.put(time_us * US, frame(A, B, opcode=0x24, dqpn=RQPN, psn=psn, payload=64), outbound=True)
    analysis = analyse(wire.frames())
    (flow,) = analysis.flows
    assert (flow.transport, flow.missing, flow.causes, analysis.doubts) == ("UC", 1, {}, ())


def test_read_without_a_known_path_mtu_is_inconclusive():
    """No packet shows how many PSNs a READ takes: neither its data nor the request behind it."""
    wire = Reads()
    wire.ask(0, 8)
    wire.response(wire.now + US, 1007)
    assert any("no packet shows the path MTU" in doubt for doubt in analyse(wire.frames()).doubts)


def test_every_cause_of_an_episode_has_words_in_the_stalls_of_a_run():
    assert set(packet_stalls._AWAITED) == set(get_args(Cause))
