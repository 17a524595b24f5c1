"""The go-back-N checker reports every planted violation, and none in a correct capture."""

import msgspec
import numpy as np
import pytest
from gbn_model import NAK, RQPN, SPACE, WRITE_FIRST, WRITE_LAST, A, Wire, go_back_n, only_flow, plays
from hypothesis import example, given, settings
from hypothesis import strategies as st
from samples import samples

from faultbed.harness.packets.analysis import Analysis, analyse

MS = 1_000_000


LOST_AGAIN_IN_GOING_BACK = {
    "count": 76,
    "losses": {0, 1, 2, 3, 78, 88, 99, 101},
    "first_psn": 0,
    "message": 1,
    "window": 15,
}
"""PSN 73 is missing, and while it is sent again 72 before it is lost: it fills a hole, but did not come late."""


@settings(max_examples=samples(200), deadline=None)
@example(play=LOST_AGAIN_IN_GOING_BACK, at="receiver")
@given(play=plays, at=st.sampled_from(["receiver", "sender"]))
def test_gobackn_correct_flow_breaks_no_rule(play, at):
    """With any losses, any window and wrapping PSNs, no rule is broken and all counts are exact."""
    played = go_back_n(**play, at=at)
    flow = only_flow(played.wire)
    assert flow.broken == {}
    assert flow.side == at
    assert flow.naks == played.naks
    assert flow.again == played.again
    assert flow.reordered == 0
    if at == "receiver":
        assert flow.dropped_ahead == played.ahead
        assert flow.missing == flow.returned
    else:
        assert flow.missing == 0


def test_gobackn_one_lost_packet_is_one_gap_one_nak_one_go_back():
    """The episode with its times: gap, NAK, retransmission."""
    played = go_back_n(count=64, losses={21}, window=16, message=4)
    flow = only_flow(played.wire)
    (episode,) = flow.episodes
    assert (flow.missing, flow.returned, flow.naks) == (1, 1, 1)
    assert (episode.cause, episode.psn, episode.missing, episode.retry) == ("nak", 21, 1, 1)
    assert episode.dropped_ahead == episode.resent - 1 == played.ahead
    assert episode.gap_ns < episode.signal_ns < episode.resent_ns
    assert episode.generation_ns + episode.reaction_ns == episode.resent_ns - episode.gap_ns
    assert episode.timeout_step is None


@pytest.mark.parametrize("step", [10, 14, 18])
def test_gobackn_lost_tail_is_a_timer_episode_with_its_step(step):
    """The last packets of a window are lost: no gap, no NAK; after the QP's timeout the sender goes back."""
    nominal = round(4096 * 2**step)
    played = go_back_n(count=16, losses={6, 7}, window=8, message=8, at="sender", timeout_ns=nominal)
    (episode,) = only_flow(played.wire).episodes
    assert (episode.cause, episode.timeout_step) == ("timer", step)
    assert nominal <= episode.silence_ns < 1.05 * nominal


def test_gobackn_timer_episodes_count_their_retries():
    """A packet that is lost three times: retries 1, 2 and 3 to the same PSN."""
    wire = Wire()
    wire.request(0, 9, outbound=False)
    wire.response(1000, 9, outbound=True)
    for retry in range(4):
        wire.request(2000 + retry * 67 * MS, 10, outbound=False)
    assert [(episode.retry, episode.psn, episode.cause) for episode in only_flow(wire).episodes] == [
        (1, 10, "timer"),
        (2, 10, "timer"),
        (3, 10, "timer"),
    ]


def plant(played, rule, rng):
    """Break one rule in a capture that keeps them all; False: this capture has no place for it."""
    packets = played.wire.packets
    outgoing = played.wire.packets[0][2]
    answers = [at for at, one in enumerate(packets) if one[2] != outgoing]
    naks = [at for at in answers if packets[at][1][-8] == NAK]
    acks = [at for at in answers if packets[at][1][-8] == 0]
    pick = lambda places: places[int(rng.integers(len(places)))]  # noqa: E731

    def psn_of(at):
        return int.from_bytes(packets[at][1][51:54], "big")

    def with_psn(at, psn):
        time_ns, content, outbound = packets[at]
        return time_ns, content[:51] + (psn % SPACE).to_bytes(3, "big") + content[54:], outbound

    if rule == "nak-ahead" and naks:
        at = pick(naks)
        packets[at] = with_psn(at, psn_of(at) + 200)
    elif rule == "nak-repeated" and naks:
        at = pick(naks)
        packets.insert(at + 1, (packets[at][0] + 1, *packets[at][1:]))
    elif rule == "nak-of-acknowledged" and naks and acks and acks[0] < naks[-1]:
        at = naks[-1]
        packets[at] = with_psn(at, psn_of(max(a for a in acks if a < at)))
    elif rule == "ack-ahead" and acks:
        at = pick(acks)
        packets[at] = with_psn(at, psn_of(at) + 300)
    elif rule == "ack-regress" and len(acks) > 1 and psn_of(acks[-1]) != psn_of(acks[0]):
        packets.append((packets[-1][0] + 10, *with_psn(acks[0], psn_of(acks[0]))[1:]))
    elif rule == "opcode-order":
        firsts = [
            at
            for at, one in enumerate(packets[:-1])
            if one[2] == outgoing and one[1][42] == WRITE_FIRST and packets[at + 1][2] == outgoing
        ]
        if not firsts or psn_of(firsts[0] + 1) != (psn_of(firsts[0]) + 1) % SPACE:
            return False
        time_ns, content, outbound = packets[firsts[0]]
        packets[firsts[0]] = (time_ns, content[:42] + bytes([WRITE_LAST]) + content[43:], outbound)
    else:
        return False
    return True


PLANTED = ["nak-ahead", "nak-repeated", "nak-of-acknowledged", "ack-ahead", "ack-regress", "opcode-order"]


@pytest.mark.parametrize("rule", PLANTED)
def test_gobackn_detects_each_planted_violation(rule):
    """Each rule is broken once in each of 100 captures (20 by default), and every violation is detected."""
    rng = np.random.default_rng(7)
    planted = result = 0
    while planted < samples(100):
        played = go_back_n(
            count=int(rng.integers(30, 120)),
            losses=set(rng.integers(0, 80, size=int(rng.integers(1, 6))).tolist()),
            first_psn=int(rng.integers(SPACE)),
            message=int(rng.choice([2, 4])),
            window=int(rng.integers(6, 16)),
        )
        if plant(played, rule, rng):
            planted += 1
            result += rule in only_flow(played.wire).broken
    assert result == planted


@settings(max_examples=samples(100), deadline=None)
@given(count=st.integers(3, 120), skip=st.integers(1, 50), at=st.integers(0, 10_000), first=st.integers(0, SPACE - 1))
def test_gobackn_detects_skipped_psns(count, skip, at, first):
    """From some first transmission on, all PSNs are too high by `skip`."""
    played = go_back_n(count=count, losses=set(), first_psn=first, message=1, at="sender")
    packets = played.wire.packets
    requests = [place for place, one in enumerate(packets) if not one[2]]
    start = requests[1 + at % (len(requests) - 1)]
    for place in range(start, len(packets)):
        time_ns, content, outbound = packets[place]
        psn = int.from_bytes(content[51:54], "big")
        if not outbound:
            packets[place] = time_ns, content[:51] + ((psn + skip) % SPACE).to_bytes(3, "big") + content[54:], outbound
    assert only_flow(played.wire).broken.get("skipped-psn") == 1


@settings(max_examples=samples(100), deadline=None)
@given(lost=st.integers(0, 40), beyond=st.integers(1, 6), first=st.integers(0, SPACE - 1))
def test_gobackn_detects_a_wrong_go_back(lost, beyond, first):
    """After a NAK for the lost PSN, the sender goes back, but not far enough."""
    wire = Wire()
    wire.request(0, first, outbound=False)
    for index in range(1, lost + 10):
        wire.request(index * 100, first + index, outbound=False)
    wire.response(10_000, first + lost + 1, NAK, outbound=True)
    wire.request(11_000, first + lost + 1 + beyond, outbound=False)
    assert "went-back-wrong" in only_flow(wire).broken
    assert only_flow(wire).broken["went-back-wrong"] == 1


def test_gobackn_late_packets_count_as_reordered():
    """Packet 13 overtakes 12: no go-back happens, and nothing is missing in the end."""
    wire = Wire()
    for time_ns, psn in enumerate((10, 11, 13, 12, 14, 15)):
        wire.request(time_ns * 100, psn)
    flow = only_flow(wire)
    assert (flow.reordered, flow.missing, flow.returned, flow.again) == (1, 1, 0, 0)
    assert flow.episodes == ()


def test_gobackn_separates_rnr_from_loss():
    """The responder was not ready, so it refuses the packet and requests the same PSN again. No packet was lost."""
    wire = Wire()
    wire.request(0, 5)
    wire.response(100, 5)
    wire.request(200, 6)
    wire.response(300, 6, 0x2C)
    wire.request(5 * MS, 6)
    wire.response(5 * MS + 100, 6)
    flow = only_flow(wire)
    assert [episode.cause for episode in flow.episodes] == ["rnr"]
    assert (flow.rnrs, flow.naks, flow.broken) == (1, 0, {})


def test_gobackn_nak_below_passed_psns_is_a_loss_behind_the_port():
    """The receiver's own queue dropped the packet. No rule is broken, and the report shows the loss behind the port."""
    wire = Wire()
    for index in range(6):
        wire.request(index * 100, 10 + index)
    wire.response(1000, 12, NAK)
    for index in range(2, 6):
        wire.request(2000 + index * 100, 10 + index)
    wire.response(3000, 15)
    flow = only_flow(wire)
    assert (flow.lost_behind, flow.missing, flow.broken) == (1, 0, {})
    assert [episode.cause for episode in flow.episodes] == ["nak"]


def test_gobackn_capture_that_begins_in_an_episode_breaks_no_rule():
    """The first packets are out of order already, and the NAK asks for one from before the capture."""
    wire = Wire()
    for index in range(4):
        wire.request(index * 100, 110 + index)
    wire.response(500, 107, NAK)
    for index in range(10):
        wire.request(1000 + index * 100, 107 + index)
    wire.response(3000, 116)
    assert only_flow(wire).broken == {}


def test_gobackn_reads_use_one_psn_per_response_packet():
    """A READ of 4 packets uses 4 PSNs, so the next request's PSN is 4 higher without a gap."""
    import struct

    from gbn_model import B, frame

    wire = Wire()
    for index in range(5):
        reth = struct.pack(">QII", 0, 0, 4096)
        content = frame(A, B, opcode=0x0C, dqpn=RQPN, psn=100 + 4 * index, extended=reth)
        wire.put(index * 1000, content, outbound=True)
        for part, opcode in enumerate((0x0D, 0x0E, 0x0E, 0x0F)):
            extended = b"" if opcode == 0x0E else bytes(4)
            back = frame(B, A, opcode=opcode, dqpn=0x11, psn=100 + 4 * index + part, extended=extended, payload=1024)
            wire.put(index * 1000 + 100 + part, back, outbound=False)
    flow = only_flow(wire)
    assert (flow.mtu, flow.missing, flow.requests, flow.broken) == (1024, 0, 5, {})


def test_congestion_pairs_marked_packets_with_cnps():
    """Two CEs, one CNP for both; later a CNP without any mark."""
    from gbn_model import LQPN, B, frame

    wire = Wire()
    wire.request(0, 1)
    wire.response(50, 1)
    wire.request(1000, 2, ecn=3)
    wire.request(2000, 3, ecn=3)
    wire.put(5000, frame(B, A, opcode=0x81, dqpn=LQPN, psn=0, payload=16, becn=1), outbound=False)
    wire.put(90_000, frame(B, A, opcode=0x81, dqpn=LQPN, psn=0, payload=16, becn=1), outbound=False)
    congestion = only_flow(wire).congestion
    assert (congestion.marked, congestion.notified, congestion.unprovoked) == (2, 2, 1)
    assert (congestion.delay_median_ns, congestion.interval_min_ns) == (4000, 85_000)


def test_analysis_survives_encoding():
    """The analysis is equal after encoding and decoding."""
    analysis = analyse(go_back_n(count=60, losses={9, 30}).wire.frames())
    assert msgspec.json.decode(msgspec.json.encode(analysis), type=Analysis) == analysis


def test_gobackn_synthetic_capture_of_the_benchmark_is_analysed():
    """Flows between two addresses are interleaved: each is found, every loss is counted, no rule is broken."""
    from bench.packets import synthetic_capture

    frames, lost = synthetic_capture(20_000, flows=4, loss=0.01)
    analysis = analyse(frames)
    assert len(analysis.flows) == 4
    assert {flow.dqpn - flow.reply_qpn for flow in analysis.flows} == {0x100}
    assert lost > 50
    assert sum(flow.missing for flow in analysis.flows) == lost
    assert analysis.violations == 0


def test_packets_command_prints_a_table_and_exits_with_the_verdict(tmp_path):
    """0 for a capture that keeps the rules, 1 for one that does not, 4 for a run without packets."""
    from click.testing import CliRunner

    from faultbed.harness.cli.main import cli
    from faultbed.testbed.errors import UsageError
    from faultbed.testbed.packets.pcapng_writer import write_pcapng

    good = go_back_n(count=64, losses={21}, window=16).wire
    write_pcapng(tmp_path / "capture.pcapng", good.frames())
    done = CliRunner().invoke(cli, ["packets", str(tmp_path)], standalone_mode=False)
    assert done.return_value == 2  # this run has no file that shows missed frames
    assert "the run kept no packets.json" in done.output
    done = CliRunner().invoke(cli, ["packets", str(tmp_path / "capture.pcapng")], standalone_mode=False)
    assert done.return_value == 0
    assert "no rule of go-back-N is broken" in done.output
    assert "PSN 21" in done.output
    bad = go_back_n(count=64, losses={21}, window=16)
    assert plant(bad, "nak-repeated", np.random.default_rng(1))
    write_pcapng(tmp_path / "bad.pcapng", bad.wire.frames())
    done = CliRunner().invoke(cli, ["packets", str(tmp_path / "bad.pcapng"), "--json"], standalone_mode=False)
    assert done.return_value == 1
    assert '"nak-repeated": 1' in done.output
    (tmp_path / "empty").mkdir()
    done = CliRunner().invoke(cli, ["packets", str(tmp_path / "empty")], standalone_mode=False)
    assert isinstance(done.exception, UsageError)


@settings(max_examples=samples(40), deadline=None)
@given(play=plays, at=st.sampled_from(["receiver", "sender"]), seed=st.integers(0, 1000))
def test_analysis_of_unordered_frames_only_adds_a_note(play, at, seed):
    """Frames of an RNIC's queues may be stored one queue after the other. The time stamps give the order."""
    played = go_back_n(**play, at=at)
    want = analyse(played.wire.frames())
    order = np.random.default_rng(seed).permutation(len(played.wire.packets))
    frame_of = {int(old) + 1: new + 1 for new, old in enumerate(order)}
    played.wire.packets = [played.wire.packets[place] for place in order]
    all_analysis = analyse(played.wire.frames())

    def renumbered(analysis, numbers):
        flows = [msgspec.to_builtins(flow) for flow in analysis.flows]
        for flow in flows:
            # If a clock was set, which the doubt below says, the order is unknown and rules are not checked.
            flow.pop("is_checked")
            for named in (*flow["episodes"], *flow["negative"]):
                named["frame"] = numbers[named["frame"]]
        return flows

    assert renumbered(all_analysis, {number: number for number in frame_of}) == renumbered(want, frame_of)
    assert bool(all_analysis.notes) == (list(order) != sorted(order))
    assert all("go back by" in doubt for doubt in all_analysis.doubts if doubt not in want.doubts)


def test_analysis_of_a_clock_set_back_has_a_doubt():
    """The clock was set back by two seconds, so the order of packets is unknown."""
    wire = Wire()
    for time_s, psn in ((10, 1), (11, 2), (9, 3), (10, 4)):
        wire.request(time_s * 1000 * MS, psn)
    *_, doubt = analyse(wire.frames()).doubts
    assert "2.000 s" in doubt


@pytest.mark.parametrize("numbered", [False, True])
def test_analysis_of_two_capture_points_counts_each_packet_once(numbered):
    """Both points have all packets, but the report has one gap, one NAK and one go-back, as from a single point."""
    import struct

    played = go_back_n(count=64, losses={21}, window=16, message=4)
    once = only_flow(played.wire)
    twice = Wire()
    for number, (time_ns, content, outbound) in enumerate(played.wire.packets):
        ident = struct.pack(">H", 1000 + number) if numbered else bytes(2)
        for delay_ns in (0, 700):
            twice.put(time_ns + delay_ns, content[:18] + ident + content[20:], outbound=outbound)
    twice.packets.sort(key=lambda packet: packet[0])
    flow = only_flow(twice)
    assert (flow.requests, flow.responses) == (2 * once.requests, 2 * once.responses)
    assert (flow.duplicates, flow.response_duplicates) == (once.requests, once.responses)
    for name in ("missing", "returned", "again", "naks", "causes", "broken", "reordered"):
        assert getattr(flow, name) == getattr(once, name), name
    assert flow.side == "between"


@pytest.mark.parametrize(
    ("snap", "count", "reason"), [(48, 64, "none of"), (128, 0, "no frames"), (57, 64, "cut before")]
)
def test_packets_command_of_an_inconclusive_capture_exits_with_2(tmp_path, snap, count, reason):
    """An empty or undecodable capture is INCONCLUSIVE, and says why."""
    from click.testing import CliRunner

    from faultbed.harness.cli.main import cli
    from faultbed.testbed.packets.pcapng_writer import write_pcapng

    frames = go_back_n(count=64, losses={21}).wire.frames(snap=snap)
    write_pcapng(tmp_path / "a.pcapng", frames, order=np.arange(count))
    done = CliRunner().invoke(cli, ["packets", str(tmp_path / "a.pcapng")], standalone_mode=False)
    assert done.return_value == 2
    assert reason in " ".join(done.output.split())
    assert "no rule of go-back-N is broken" not in done.output


@pytest.mark.parametrize("port", ["rtsw2:host4:rxe0", ""])
@pytest.mark.parametrize("case", ["one request", "requests alone", "responses of another queue pair"])
def test_analysis_without_any_response_has_a_doubt(port, case):
    """Half of the rules concern responses. A capture of requests alone used to show "no rule broken"."""
    wire = Wire(name=port)
    for index in range(1 if case == "one request" else 50):
        wire.request(2000 * index, 5 + index)
    if case.startswith("responses"):
        for index in range(50):
            wire.response(200_000 + 2000 * index, 900_000 + index)
    analysis = analyse(wire.frames())
    assert analysis.violations == 0
    assert "no response to any request was captured" in analysis.doubts[0]


def connected_twice(first, then, *, sent=50, msn=True):
    """Analyse a sender's port with two queue pairs of one number: PSNs of the later one start at `then`."""
    wire = Wire(name="rtsw1:host1:rxe0")
    time_ns = 0
    for start in (first, then):
        for number in range(sent):
            wire.request(time_ns, start + number, outbound=False)
            wire.response(time_ns + 10_000, start + number, msn=number + 1 if msn else 7, outbound=True)
            time_ns += 20_000
        time_ns += 5_000_000_000
    return analyse(wire.frames())


@pytest.mark.parametrize(
    ("first", "then"),
    [(1_000, 3_000_000), (3_000_000, 1_000), (2_000_000, SPACE - 20), (SPACE - 10, 3_000_000), (5, SPACE // 2 + 20)],
)
def test_gobackn_queue_pair_that_is_connected_again_breaks_no_rule(first, then):
    """The PSNs of a new connection begin anywhere, so PSNs in between were not skipped, and ACKs may be lower."""
    analysis = connected_twice(first, then)
    assert (analysis.violations, analysis.doubts) == (0, ())
    assert [flow.requests for flow in analysis.flows] == [50, 50]
    assert [(flow.missing, flow.again) for flow in analysis.flows] == [(0, 0), (0, 0)]
    assert "connected again under the same number" in analysis.notes[0]


def test_gobackn_psns_that_go_on_far_away_for_no_known_reason_are_a_doubt():
    """A jump of a million PSNs does not prove a new connection, so rules may have been broken in the gap."""
    analysis = connected_twice(1_000, 1_000_000, msn=False)
    assert analysis.violations == 0
    assert "packets are missing in between" in analysis.doubts[0]
    assert f"QP {RQPN}" in analysis.doubts[0]


@given(st.integers(1, 400), st.integers(0, SPACE - 1))
def test_gobackn_a_go_back_never_splits_a_flow(back, first):
    """A sender that goes back to any PSN it has sent is the same connection, also where PSNs wrap around."""
    wire = Wire(name="rtsw1:host1:rxe0")
    for number in range(400):
        wire.request(1000 * number, first + number, outbound=False)
    for number in range(400 - back, 420):
        wire.request(10**9 + 1000 * number, first + number, outbound=False)
    assert len(analyse(wire.frames()).flows) == 1
