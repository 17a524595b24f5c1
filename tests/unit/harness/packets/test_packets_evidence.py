"""Captured packets in a run: blocks of the ring, stored slices, and their use by report and judge."""

import base64
import gzip
import struct
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from gbn_model import go_back_n
from synthetic_run import soft_topology

from faultbed.harness import bounds
from faultbed.harness.cli.main import cli
from faultbed.harness.experiment import experiment_file as experiments
from faultbed.harness.experiment import run_plan as plans
from faultbed.harness.experiment.metrics import METRICS
from faultbed.harness.ledger.statistics.level_tolerance import DECLARED
from faultbed.harness.packets import evidence
from faultbed.harness.parts.capture.capture_part import summary_of
from faultbed.harness.parts.capture.packet_metrics import captured_packets
from faultbed.harness.parts.capture.packet_summary import PacketSummary
from faultbed.harness.run.prepare.bind_to_lab import fit
from faultbed.testbed.errors import ConfigError, LabError, UsageError
from faultbed.testbed.node.capture import write_whole
from faultbed.testbed.observe import clock
from faultbed.testbed.observe.clock import ClockOffset
from faultbed.testbed.observe.packet_capture import Captured, Capturing, PortProof, frames_of, port_named, port_proof
from faultbed.testbed.packets import capture_file
from faultbed.testbed.packets.pcapng_writer import write_pcapng

EPOCH = 1_700_000_000_000_000_000


def ring_file(packets, *, per_block=3, port=0):
    """Return a file of packets in TPACKET_V3 blocks, as the kernel and the node program write it."""
    content = b""
    for begin in range(0, len(packets), per_block):
        some = packets[begin : begin + per_block]
        body = b""
        for place, (time_ns, data, outbound) in enumerate(some):
            mac = 48 + 20 + 12
            size = -(-(mac + len(data[:128])) // 8) * 8
            head = struct.pack(
                "=IIIIIIHHIIHHQ",
                size if place + 1 < len(some) else 0,
                time_ns // 10**9,
                time_ns % 10**9,
                len(data[:128]),
                len(data),
                0,
                mac,
                mac + 14,
                *(0,) * 5,
            )
            address = struct.pack("=HHiHBB8s", 17, 0, 2, 1, 4 if outbound else 0, 6, b"")
            body += (head + address + bytes(12) + data[:128]).ljust(size, b"\0")
        block = struct.pack("=IIIIIIQ", 1, 0, 1, len(some), 48, 48 + len(body), 0) + bytes(16)
        content += struct.pack("=II", port, len(block + body)) + block + body
    return content


def test_capture_ring_blocks_are_read_as_written():
    """Times, directions, lengths and bytes match. Two ports are merged by time, up to the counted number of packets."""
    one, two = (go_back_n(count=20, losses={3}).wire.packets for _ in range(2))
    two = [(time_ns + 500, data, outbound) for time_ns, data, outbound in two]
    content = ring_file(one) + ring_file(two, port=1)
    frames = frames_of(content, ["a", "b"], keep=[len(one), len(two) - 2], shift_ns=EPOCH)
    want = sorted(
        [(t, d, o, 0) for t, d, o in one] + [(t, d, o, 1) for t, d, o in two[:-2]], key=lambda packet: packet[0]
    )
    assert frames.time_ns.tolist() == [EPOCH + t for t, *_ in want]
    assert frames.outbound.tolist() == [int(o) for _, _, o, _ in want]
    assert frames.interface.tolist() == [port for *_, port in want]
    assert frames.length.tolist() == [len(d) for _, d, _, _ in want]
    for index, (_, data, _, _) in enumerate(want):
        start = int(frames.start[index])
        assert frames.data[start : start + int(frames.captured[index])].tobytes() == data[:128]


def test_capture_ring_with_a_damaged_block_is_an_error():
    """A damaged block must not yield wrong packets."""
    content = ring_file(go_back_n(count=5, losses=set()).wire.packets)
    with pytest.raises(LabError, match="damaged"):
        frames_of(struct.pack("=II", 0, 50) + content, ["a"], keep=[99], shift_ns=0)


def test_capture_ring_that_ends_within_a_block_is_an_error():
    """The frames of such a block were counted as captured, with zeros for their headers, or it was an IndexError."""
    content = ring_file(go_back_n(count=12, losses=set()).wire.packets)
    ends, at = set(), 0
    while at < len(content):
        at += 8 + struct.unpack_from("=I", content, at + 4)[0]
        ends.add(at)
    for end in set(range(4, len(content), 4)) - ends:
        with pytest.raises(LabError, match="truncated"):
            frames_of(content[:end], ["a"], keep=[99], shift_ns=0)


def test_capture_on_a_disk_that_takes_a_part_writes_the_rest():
    written = []

    class AlmostFull:
        def write(self, content):
            written.append(bytes(content[:3]))
            return len(written[-1])

    write_whole(AlmostFull(), b"0123456789")
    assert b"".join(written) == b"0123456789"


@pytest.mark.parametrize(
    ("selector", "name"),
    [
        ("rtsw2:host4:rxe0", "rtsw2:host4:rxe0"),
        ("host4:rxe0", "rtsw2:host4:rxe0"),
        ("rtsw1:ctsw1", "rtsw1:ctsw1"),
        ("ctsw1:rtsw1", "ctsw1:rtsw1"),
    ],
)
def test_capture_ports_resolve_from_selectors(selector, name):
    """A port is named as a switch port or by the RNIC that it faces."""
    result, port = port_named(soft_topology(), selector)
    assert result == name
    assert port.node == name.partition(":")[0]


def test_capture_of_an_unknown_port_is_refused():
    """The error shows a valid port as an example."""
    with pytest.raises(UsageError, match="such as rtsw2:host4:rxe0"):
        port_named(soft_topology(), "host1")


def captured():
    frames = go_back_n(count=200, losses={60}).wire.frames()
    frames.time_ns[:] += EPOCH
    proof = PortProof(name=frames.interfaces[0], captured=len(frames), counted=len(frames), drops=0)
    return Captured(frames=frames, proofs=(proof,), epoch_offset_ns=EPOCH, clock_error_ns=1000)


def test_evidence_stores_the_capture_and_one_slice_per_fault(tmp_path):
    """Both files open as captures, and `packets.json` decodes to the stored analysis."""
    result = evidence.keep(captured(), tmp_path, {"loss": (1_100_000, 1_200_000)})
    assert len(capture_file.read(tmp_path / "capture.pcapng")) == result.analysis.frames
    assert 0 < len(capture_file.read(tmp_path / result.slices["loss"])) <= result.analysis.frames
    assert evidence.read(evidence.write(result)) == result
    assert result.missed == 0


def test_evidence_slice_surrounds_its_fault(tmp_path):
    """The slice begins half a second before the fault and ends a second and a half after it."""
    one = captured()
    one.frames.time_ns[:] = EPOCH + np.arange(len(one.frames)) * 100_000_000
    result = evidence.keep(one, tmp_path, {"loss": (5_000_000_000, 6_000_000_000)})
    times = capture_file.read(tmp_path / result.slices["loss"]).time_ns - EPOCH
    assert (int(times.min()), int(times.max())) == (4_500_000_000, 7_400_000_000)


EXPERIMENT = """
name = "seen"
[workload]
flow = "write"
src = "host1:rxe0"
dst = "host4:rxe0"
duration = "10s"
[capture]
ports = {ports}
[[expect]]
metric = "capture.broken_rules"
max = 0
"""


def decide(ports):
    return fit(experiments.decode(EXPERIMENT.format(ports=ports).encode(), source="x"), soft_topology(), "soft")


def test_capture_section_ports_are_in_the_plan():
    """The plan has the full name of each port once, and no key without a capture."""
    fitted = decide('["host4:rxe0", "rtsw2:host4:rxe0", "rtsw1:ctsw1"]')
    assert fitted.capture == ("rtsw2:host4:rxe0", "rtsw1:ctsw1")
    plan = plans.plan(fitted, inventory_digest="00", version="0")
    assert plans.decode(plans.encode(plan)) == plan
    assert b'"capture"' in plans.encode(plan)


@pytest.mark.parametrize(
    ("ports", "complaint"),
    [('["rtsw9:host4:rxe0"]', r"capture\.ports\[0\]"), ('["host4"]', "such as rtsw2"), ("[]", "an empty list")],
)
def test_capture_section_with_an_unknown_port_is_rejected_with_its_path(ports, complaint):
    """The error comes before anything is done."""
    with pytest.raises(ConfigError, match=complaint):
        decide(ports)


def test_capture_with_missed_frames_has_no_count_of_broken_rules():
    """A hole in the capture could look like a broken rule: no value, so the check is INCONCLUSIVE."""
    good = PacketSummary(frames=10, missed=0, broken=2)
    assert captured_packets(good)["capture.broken_rules"].value == 2
    holed = PacketSummary(frames=10, missed=1, broken=2)
    assert captured_packets(holed)["capture.broken_rules"].value is None
    assert captured_packets(holed)["capture.missed"].value == 1
    assert captured_packets(None)["capture.missed"].value is None


@pytest.mark.parametrize(
    ("captured", "counted", "missing", "extra"),
    [
        ((5, 5), (5, 5), 0, 0),
        ((5, 4), (5, 5), 1, 0),
        ((5, 7), (5, 5), 0, 2),
        ((3, 7), (5, 5), 2, 2),  # as many as were counted, in all
        ((12, 12), (6, 6), 0, 12),  # every frame was mirrored twice
    ],
)
def test_capture_with_more_frames_than_the_port_counted_is_not_whole(captured, counted, missing, extra):
    """Copies were called missing, and copies of one direction made up for frames that the other one lacked."""
    proof = port_proof("rtsw2:host4:rxe0", captured=captured, counted=counted, drops=0)
    assert (proof.missing, proof.extra, proof.is_whole) == (missing, extra, not (missing or extra))
    assert (proof.captured, proof.counted) == (sum(captured), sum(counted))
    old = {"name": "a", "captured": sum(captured), "counted": sum(counted), "drops": 0}
    read = msgspec.convert(old, PortProof)  # of a run from before the directions were compared
    assert (read.missing, read.extra) == (max(missing - extra, 0), max(extra - missing, 0))


@pytest.mark.parametrize(("missed", "extra"), [(0, 3), (2, 3), (2, 0)])
def test_capture_that_is_not_whole_proves_nothing_and_says_both(tmp_path, missed, extra):
    one = captured()
    count = len(one.frames)
    proof = replace(one.proofs[0], captured=count, counted=count + missed - extra, missing=missed, extra=extra)
    result = evidence.keep(replace(one, proofs=(proof,)), tmp_path, {})
    assert (result.missed, result.extra) == (missed, extra)
    metrics = captured_packets(summary_of(result))
    (expectation,) = decide('["host4:rxe0"]').expectations
    verdicts = {}
    for name in ("capture.missed", "capture.broken_rules"):
        bound = replace(expectation, metric=METRICS[name], maximum=0)
        (check,) = bounds.check_expectation(bound, metrics[name], (), tolerance=DECLARED["rack"])
        verdicts[name] = check.verdict
    assert verdicts == {
        "capture.missed": "FAIL" if missed else "INCONCLUSIVE", "capture.broken_rules": "INCONCLUSIVE"
    }  # fmt: skip
    broken = metrics["capture.broken_rules"].detail
    assert (f"{missed} frames are missing" in broken) is bool(missed)
    assert (f"{extra} frames of the capture were not counted by their ports" in broken) is bool(extra)
    (tmp_path / "packets.json").write_bytes(evidence.write(result))
    done = CliRunner(env={"COLUMNS": "250"}).invoke(cli, ["packets", str(tmp_path)], standalone_mode=False)
    assert done.return_value == 2
    assert (f"{missed} frames that the ports counted are missing" in done.output) is bool(missed)
    assert (f"{extra} frames of the capture were not counted by the ports" in done.output) is bool(extra)


class CapturingMachine:
    """A machine whose capture has these frames, of which the first two came before the first reading."""

    def __init__(self, packets, *, received, sent):
        self.content, self.answers = ring_file(packets), []
        self.port = {"name": "a", "before": 2, "captured": len(packets) - 2, "received": received, "sent": sent}

    def open_module(self, _machine, _module):
        return self

    def node(self, _machine):
        return self

    def netns(self, node):
        return node

    def send(self, request):
        stopped = {"ports": [self.port | {"drops": 0}], "bytes": len(self.content)}
        self.answers.append({"event": "ok", "epoch_offset_ns": EPOCH, **(stopped if request["do"] == "stop" else {})})

    def receive(self, timeout_s):
        del timeout_s
        return self.answers.pop()

    def run(self, _argv, **_):
        return SimpleNamespace(stdout=base64.b64encode(gzip.compress(self.content)).decode())

    def close(self):
        pass


def test_capture_compares_each_direction_without_the_frames_from_before(monkeypatch):
    monkeypatch.setattr(clock, "measure", lambda *_, **__: ClockOffset(offset_ns=0, error_ns=1000))
    packets = go_back_n(count=20, losses={3}).wire.packets
    sent = sum(outbound for _, _, outbound in packets[2:])
    received = len(packets) - 2 - sent
    _, port = port_named(soft_topology(), "rtsw2:host4:rxe0")
    for counted, missing, extra in (
        ((received, sent), 0, 0),
        ((received + 1, sent), 1, 0),
        ((received + 1, sent - 1), 1, 1),
    ):
        machine = CapturingMachine(packets, received=counted[0], sent=counted[1])
        (proof,) = Capturing(machine, "fabric", {"a": port}).stop().proofs
        assert (proof.captured, proof.missing, proof.extra) == (len(packets) - 2, missing, extra)
        msgspec.json.encode(proof)


def test_capture_of_an_idle_port_has_no_count_of_broken_rules(tmp_path):
    """A port that no request passed: `max = 0` on it is INCONCLUSIVE, not PASS."""
    one = captured()
    idle = Captured(
        frames=replace(one.frames, interfaces=(*one.frames.interfaces, "rtsw1:ctsw1"), link_types=np.array([1, 1])),
        proofs=one.proofs,
        epoch_offset_ns=EPOCH,
        clock_error_ns=1000,
    )
    result = evidence.keep(idle, tmp_path, {})
    assert result.analysis.doubts == ("no request of a reliable connection passed rtsw1:ctsw1: nothing to check there",)
    broken_rules = captured_packets(summary_of(result))["capture.broken_rules"]
    assert broken_rules.value is None
    assert "rtsw1:ctsw1" in broken_rules.detail


def test_packets_command_on_a_run_with_an_idle_port_has_the_verdict_of_its_metric(tmp_path):
    """`faultbed packets` used to end with 0 for a run whose metric was INCONCLUSIVE because of an idle port."""
    one = captured()
    frames = replace(one.frames, interfaces=(*one.frames.interfaces, "rtsw1:ctsw1"), link_types=np.array([1, 1]))
    result = evidence.keep(replace(one, frames=frames), tmp_path, {})
    (tmp_path / "packets.json").write_bytes(evidence.write(result))
    done = CliRunner(env={"COLUMNS": "200"}).invoke(cli, ["packets", str(tmp_path)], standalone_mode=False)
    assert done.return_value == 2
    assert "no request of a reliable connection passed rtsw1:ctsw1" in done.output


@pytest.mark.parametrize("end", ["short", "foreign"])
def test_packets_command_on_a_run_whose_capture_lost_its_end_proves_nothing(tmp_path, end):
    """A copy that was cut between two frames has no damage to see: `faultbed packets` used to end with 0 for it."""
    result = evidence.keep(captured(), tmp_path, {})
    (tmp_path / "packets.json").write_bytes(evidence.write(result))
    frames = captured().frames if end == "short" else go_back_n(count=150, losses={60}).wire.frames()
    kept = len(frames) // 2 if end == "short" else len(frames)
    write_pcapng(tmp_path / "capture.pcapng", frames, order=np.arange(kept))
    done = CliRunner(env={"COLUMNS": "250"}).invoke(cli, ["packets", str(tmp_path)], standalone_mode=False)
    assert done.return_value == 2
    assert f"has {kept:,} frames, and the run captured {result.analysis.frames:,}" in done.output


@pytest.mark.parametrize(
    ("broken", "bound", "verdict"), [(0, 0, "INCONCLUSIVE"), (2, 0, "FAIL"), (2, 5, "INCONCLUSIVE")]
)
def test_broken_rules_of_a_doubtful_capture_fail_or_are_inconclusive(broken, bound, verdict):
    """In a doubtful capture a violation counts, but the absence of violations proves nothing."""
    summary = PacketSummary(frames=10, missed=0, broken=broken, doubts=("the capture has no frames",))
    (expectation,) = decide('["host4:rxe0"]').expectations
    (check,) = bounds.check_expectation(
        replace(expectation, maximum=float(bound)),
        captured_packets(summary)["capture.broken_rules"],
        (),
        tolerance=DECLARED["rack"],
    )
    assert check.verdict == verdict
