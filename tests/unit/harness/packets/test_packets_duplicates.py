"""Copies that the network made are duplicates; retransmissions are not, whatever caused them."""

import struct

import msgspec
import pytest
from click.testing import CliRunner
from gbn_model import NAK, RQPN, A, B, Wire, frame, go_back_n, only_flow, plays
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import samples

from faultbed.harness.cli.main import cli
from faultbed.harness.packets.analysis import analyse
from faultbed.harness.packets.evidence import Evidence
from faultbed.harness.parts.capture.capture_part import summary_of
from faultbed.testbed.packets.pcapng_writer import write_pcapng

US, MS = 1000, 1_000_000
OWN = ("requests", "duplicates", "payload_bytes", "episodes", "violations")


def number(wire):
    """Give every request its own number in the identification field of the IPv4 header, as rxe does."""
    outgoing = wire.packets[0][2]
    for place, (time_ns, content, outbound) in enumerate(wire.packets):
        if outbound == outgoing:
            wire.packets[place] = time_ns, content[:18] + struct.pack(">H", place % 65536) + content[20:], outbound


def double(wire, chosen, *, after=0):
    """Copy the `chosen` requests, 1 ns later and behind the next `after` packets. Return the number of copies."""
    outgoing = wire.packets[0][2]
    requests = [place for place, one in enumerate(wire.packets) if one[2] == outgoing]
    places = sorted({requests[one % len(requests)] for one in chosen}, reverse=True)
    for place in places:
        behind = min(place + after, len(wire.packets) - 1)
        wire.packets.insert(behind + 1, (wire.packets[behind][0] + 1, *wire.packets[place][1:]))
    return len(places)


def story(flow):
    """Return the parts of a flow's report that copies must not change, without frame numbers."""
    actual = {name: value for name, value in msgspec.structs.asdict(flow).items() if name not in OWN}
    # Their frame numbers move with the copies before them.
    actual["negative"] = [(nak.psn, nak.syndrome) for nak in flow.negative]
    episodes = [
        (episode.cause, episode.psn, episode.missing, episode.resent, episode.retry, episode.signal_ns)
        for episode in flow.episodes
    ]
    return actual, episodes


@settings(max_examples=samples(200), deadline=None)
@given(
    play=plays,
    at=st.sampled_from(["receiver", "sender"]),
    chosen=st.lists(st.integers(0, 10_000), min_size=1, max_size=40),
    numbered=st.booleans(),
)
def test_duplicates_planted_copy_is_no_go_back(play, at, chosen, numbered):
    """Copies that follow after a nanosecond are counted, and do not change the rest of the report."""
    played = go_back_n(**play, at=at)
    if numbered:
        number(played.wire)
    before = story(only_flow(played.wire))
    planted = double(played.wire, chosen)
    flow = only_flow(played.wire)
    assert flow.duplicates == planted
    before[0]["last_ns"] = flow.last_ns
    assert story(flow) == before


@settings(max_examples=samples(100), deadline=None)
@given(play=plays, chosen=st.lists(st.integers(0, 10_000), min_size=1, max_size=10), after=st.integers(1, 30))
def test_duplicates_finds_numbered_copies_at_any_delay(play, chosen, after):
    """The copy may come behind other packets, behind a NAK, or in the middle of a go-back."""
    played = go_back_n(**play)
    number(played.wire)
    before = only_flow(played.wire)
    planted = double(played.wire, chosen, after=after)
    flow = only_flow(played.wire)
    assert flow.duplicates == planted
    assert (flow.again, flow.missing, flow.reordered) == (before.again, before.missing, before.reordered)
    assert [episode.psn for episode in flow.episodes] == [episode.psn for episode in before.episodes]


def test_duplicates_single_copy_is_no_retransmission():
    """The copy follows after a nanosecond. No packet was retransmitted, so no go-back starts a recovery phase."""
    wire = Wire()
    for time_ns, psn in ((0, 5), (1000, 6), (1001, 6), (2000, 7)):
        wire.request(time_ns, psn)
    wire.response(3000, 7)
    analysis = analyse(wire.frames())
    (flow,) = analysis.flows
    assert (flow.duplicates, flow.again, flow.causes, flow.requests) == (1, 0, {}, 4)
    result = Evidence(epoch_offset_ns=0, clock_error_ns=0, proofs=(), slices={}, analysis=analysis)
    assert summary_of(result).goings_back == ()


@pytest.mark.parametrize("numbered", [False, True])
def test_duplicates_when_every_packet_is_doubled(numbered):
    played = go_back_n(count=100, losses={21, 22}, window=16)
    if numbered:
        number(played.wire)
    before = story(only_flow(played.wire))
    planted = double(played.wire, range(10_000))
    flow = only_flow(played.wire)
    assert flow.duplicates == planted == flow.requests / 2
    assert flow.causes == before[0]["causes"]


def test_duplicates_packet_corrupted_twice_is_no_copy():
    """`packet.corrupt` writes one number into all packets that it hits, also into a retransmission."""
    wire = Wire()
    for time_ns, psn in ((0, 5), (100, 6), (200, 7), (70 * MS, 6), (70 * MS + 100, 7), (140 * MS, 6), (141 * MS, 7)):
        wire.request(time_ns, psn)
    number(wire)
    for place in (1, 3):
        time_ns, content, outbound = wire.packets[place]
        wire.packets[place] = time_ns, content[:18] + b"\xbe\xef" + content[20:], outbound
    flow = only_flow(wire)
    assert (flow.duplicates, flow.again, flow.causes) == (0, 4, {"timer": 2})


def test_duplicates_early_timer_is_a_retransmission():
    """rxe starts its timer before it sends the packet, so a retransmission with a new number may follow after 3 us."""
    wire = Wire()
    for time_ns, psn in ((0, 5), (40 * MS, 6), (40 * MS + 3 * US, 6), (40 * MS + 5 * US, 7)):
        wire.request(time_ns, psn)
    number(wire)
    flow = only_flow(wire)
    assert (flow.duplicates, flow.again, flow.causes) == (0, 1, {"timer": 1})


def test_duplicates_read_with_missing_response_is_a_retransmission():
    """A response is missing, so a repeated READ is a retransmission without a NAK. The READ right after is a copy."""
    reth = struct.pack(">QII", 0, 0, 4096)
    read = frame(A, B, opcode=0x0C, dqpn=RQPN, psn=100, extended=reth)
    wire = Wire()
    wire.put(0, read, outbound=True)
    for part in (0, 1, 3):
        back = frame(B, A, opcode=0x0E, dqpn=0x11, psn=100 + part, payload=1024)
        wire.put(100 + part, back, outbound=False)
    wire.put(50_000, read, outbound=True)
    wire.put(50_001, read, outbound=True)
    flow = only_flow(wire)
    assert (flow.again, flow.duplicates) == (1, 1)


def test_duplicates_late_packet_with_copy_and_nak_answer():
    """Packet 13 overtakes 12, and 12 is duplicated. The copy is no retransmission; the go-back after the NAK is one."""
    wire = Wire()
    for time_ns, psn in ((0, 10), (100, 11), (200, 13)):
        wire.request(time_ns, psn)
    wire.response(250, 12, NAK)
    for time_ns, psn in ((300, 12), (301, 12), (400, 14), (90_000, 12), (90_100, 13), (90_200, 14), (90_300, 15)):
        wire.request(time_ns, psn)
    flow = only_flow(wire)
    assert (flow.duplicates, flow.again) == (1, 3)
    assert len(flow.episodes) == 2


def test_duplicates_without_responses_counts_only_copies_faster_than_any_answer():
    wire = Wire(name="ctsw1:rtsw1")
    for time_ns, psn in ((0, 10), (100, 11), (101, 11), (200, 12), (90_000, 11), (90_100, 12), (90_200, 13)):
        wire.request(time_ns, psn)
    flow = only_flow(wire)
    assert (flow.side, flow.duplicates, flow.again) == ("between", 1, 2)


def test_episodes_loss_during_a_go_back_is_one_go_back():
    """Packets 10 to 15 are resent without 12: at 13 there is no second go-back."""
    wire = Wire()
    wire.request(0, 9)
    for index in range(6):
        wire.request(1000 + index, 10 + index)
    for index in (0, 1, 3, 4, 5):
        wire.request(70 * MS + index, 10 + index)
    wire.response(70 * MS + 100, 12, NAK)
    for index in range(2, 8):
        wire.request(71 * MS + index, 10 + index)
    assert [(episode.cause, episode.psn) for episode in only_flow(wire).episodes] == [("timer", 10), ("nak", 12)]


@pytest.mark.parametrize("twice", [False, True])
def test_capture_that_has_every_packet_twice_hides_no_broken_rule(twice):
    """In two merged captures, a packet that the sender skipped used to go unnoticed."""
    wire, time_ns = Wire(), 0
    packets = [(wire.request, psn, {}) for psn in range(16) if psn != 5]
    packets += [(wire.response, psn, {}) for psn in (3, 4)] + [(wire.response, 5, {"syndrome": NAK})]
    for put, psn, words in packets:
        for copy in range(1 + twice):
            put(time_ns + 300 * copy, psn, outbound=put == wire.response, **words)
        time_ns += 1000
    analysis = analyse(wire.frames())
    assert bool(analysis.doubts) is twice
    assert analysis.violations == (0 if twice else 1)
    assert not twice or "the capture has each packet twice" in analysis.doubts[0]


def test_packets_command_counts_duplicates(tmp_path):
    played = go_back_n(count=40, losses=set())
    double(played.wire, [3, 9, 20])
    write_pcapng(tmp_path / "capture.pcapng", played.wire.frames())
    capture = str(tmp_path / "capture.pcapng")
    done = CliRunner(env={"COLUMNS": "200"}).invoke(cli, ["packets", capture], standalone_mode=False)
    assert done.return_value == 0
    assert "duplicates" in done.output
    shown = CliRunner().invoke(cli, ["packets", capture, "--json"], standalone_mode=False)
    assert '"duplicates": 3' in shown.output


def test_packets_json_of_earlier_versions_is_still_read():
    """Earlier versions wrote no count of duplicates."""
    analysis = analyse(go_back_n(count=20, losses=set()).wire.frames())
    content = msgspec.json.encode(analysis).replace(b',"duplicates":0', b"")
    assert msgspec.json.decode(content, type=type(analysis)) == analysis
