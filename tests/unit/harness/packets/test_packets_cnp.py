"""CNPs that receivers of marked packets owe, against a model of a receiver with a rate limit."""

import numpy as np
import pytest
from click.testing import CliRunner
from gbn_model import LQPN, MTU, RQPN, US, WRITE_ONLY, A, B, Wire, frame

from faultbed.harness.cli.main import cli
from faultbed.harness.experiment.experiment_file import decode
from faultbed.harness.packets.analysis import analyse
from faultbed.harness.parts.capture.packet_metrics import notifications
from faultbed.harness.parts.capture.packet_summary import PacketSummary
from faultbed.testbed.errors import ConfigError
from faultbed.testbed.packets.cnp_rule import CnpRule
from faultbed.testbed.packets.pcapng_writer import write_pcapng

INTERVAL = 50 * US
QPS = 2


def stream(seed, *, limit="qp", lost=0, count=900, name="rtsw2:host4:rxe0"):
    """Return a port's packets: two QPs, marks in bursts, CNPs by the receiver's limit, and `lost` of them dropped."""
    rng = np.random.default_rng(seed)
    wire, events, last, psn = Wire(name=name), [], {}, [100, 9_000_000]
    now, is_congested = 1_000_000, False
    cnps = []
    for number in range(count):
        now += int(rng.integers(500, 2500))
        is_congested ^= bool(rng.random() < 0.01)
        qp = int(rng.integers(QPS))
        # Nothing is marked at the ends, where a capture cannot tell.
        ecn = 3 if is_congested and rng.random() < 0.5 and 100 < number < count - 100 else 2
        content = frame(
            A, B, opcode=WRITE_ONLY, dqpn=RQPN + qp, psn=psn[qp], extended=bytes(16), payload=MTU, ecn=ecn, sport=qp
        )
        events.append((now, content, True))
        ack = frame(B, A, opcode=0x11, dqpn=LQPN + qp, psn=psn[qp], extended=bytes(4), sport=qp)
        events.append((now + 900, ack, False))
        psn[qp] += 1
        scope = {"qp": qp, "address": 0, "port": 0}[limit]
        if ecn == 3 and now - last.get(scope, -INTERVAL) >= INTERVAL:
            last[scope] = now
            cnp = frame(B, A, opcode=0x81, dqpn=LQPN + qp, psn=0, payload=16, becn=1, sport=qp)
            cnps.append((now + int(rng.integers(1, 8)) * US, cnp, False))
    dropped = set(rng.choice(len(cnps), lost, replace=False).tolist())
    events += [cnp for number, cnp in enumerate(cnps) if number not in dropped]
    wire.packets = sorted(events, key=lambda event: event[0])
    return wire


def missing(wire, per="qp"):
    analysis = analyse(wire.frames(), cnp=CnpRule(interval_ns=INTERVAL, per=per))
    assert not analysis.violations
    return sum(answers.missing for answers in analysis.cnp), sum(answers.unknown for answers in analysis.cnp)


@pytest.mark.parametrize("per", ["qp", "address", "port"])
@pytest.mark.parametrize("seed", range(20))
def test_capture_with_one_missing_cnp_is_found_and_a_whole_one_is_not(seed, per):
    assert missing(stream(seed, limit=per), per) == (0, 0)
    count, unknown = missing(stream(seed, limit=per, lost=1), per)
    assert 1 <= count <= 2
    assert not unknown


def test_receiver_with_one_limit_for_all_queue_pairs_breaks_the_rule_of_each():
    wire = stream(3, limit="port")
    assert missing(wire, "port") == (0, 0)
    assert missing(wire, "qp")[0] > 0


def test_marked_packets_at_the_end_of_a_capture_are_unknown():
    wire = stream(1)
    last = wire.packets[-1][0]
    wire.request(last + 2000, 102_000, ecn=3, sport=0)
    count, unknown = missing(wire)
    assert (count, unknown) == (0, 1)


def test_capture_that_lacks_packets_proves_no_missing_cnp():
    frames = stream(2, lost=3).frames(snap=60)
    analysis = analyse(frames, cnp=CnpRule(interval_ns=INTERVAL))
    assert sum(answers.missing for answers in analysis.cnp or ()) == 0
    assert analysis.doubts


def test_packets_command_fails_for_a_missing_cnp_and_proves_nothing_without_marks(tmp_path):
    def run(wire, *options):
        write_pcapng(tmp_path / "a.pcapng", wire.frames())
        return CliRunner().invoke(cli, ["packets", str(tmp_path / "a.pcapng"), *options], standalone_mode=False)

    assert run(stream(4)).return_value == 0
    assert run(stream(4, lost=1)).return_value == 0, "no rule for CNPs was given"
    assert run(stream(4), "--cnp-interval", "50us").return_value == 0
    done = run(stream(4, lost=1), "--cnp-interval", "50us")
    assert done.return_value == 1
    assert "cnp-missing" in done.output
    assert "no rule of go-back-N is broken" not in done.output
    unmarked = stream(4)
    unmarked.packets = [
        (time_ns, content[:15] + b"\x02" + content[16:], outbound)
        for time_ns, content, outbound in unmarked.packets
        if content[42] != 0x81
    ]
    done = run(unmarked, "--cnp-interval", "50us")
    assert done.return_value == 2
    assert "no marked packet" in done.output
    assert "50us" in str(run(stream(4), "--cnp-interval", "fast").exception)


EXPERIMENT = b"""
name = "cnp"
[workload]
flow = "write"
src = "host1:rxe0"
dst = "host3:rxe0"
size = "64KiB"
duration = "8s"
[[expect]]
metric = "cnp.missing"
max = 0
[capture]
ports = ["host3:rxe0"]
"""


def test_experiment_names_the_interval_of_its_cnp_bounds():
    experiment = decode(EXPERIMENT + b'cnp_interval = "50us"\ncnp_per = "port"\n', source="a.toml")
    assert experiment.cnp == CnpRule(interval_ns=INTERVAL, per="port")
    with pytest.raises(ConfigError, match="cnp_interval"):
        decode(EXPERIMENT, source="a.toml")
    with pytest.raises(ConfigError, match="more than 0"):
        decode(EXPERIMENT + b'cnp_interval = "0us"\n', source="a.toml")


def observed(lost, missed=0):
    cnp = analyse(stream(5, lost=lost).frames(), cnp=CnpRule(interval_ns=INTERVAL)).cnp
    values = notifications(PacketSummary(frames=1, missed=missed, broken=0, cnp=cnp))
    return values["cnp.missing"].value, values["cnp.gap"].value


def test_cnp_metrics_of_a_run_have_values_if_its_capture_is_whole():
    assert observed(0)[0] == 0
    assert 0 < observed(0)[1] <= 8e-6
    assert observed(1)[0] >= 1
    assert observed(1)[1] > 20e-6
    assert observed(1, missed=1) == (None, None)
    assert notifications(None)["cnp.missing"].value is None
