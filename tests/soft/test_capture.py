"""Packets captured in the soft lab's fabric: none is missing, and they agree with the counters.

Counts only; nothing here depends on how fast the machine is.
"""

import time

import pytest
from waiting import until, wait_s

from faultbed.harness.packets.analysis import analyse
from faultbed.testbed.observe import counters, packet_capture
from faultbed.testbed.packets import capture_file
from faultbed.testbed.packets.pcapng_writer import write_pcapng
from faultbed.traffic.engine.task_specs import QpParams

pytestmark = pytest.mark.soft

PATIENT = QpParams(timeout=18)
"""An ACK timeout of 1.07 s: on a busy machine a virtual CPU that pauses is not a lost packet."""


def test_lost_packet_is_one_gap_one_nak_and_one_go_back_n_in_the_capture(lab, traffic, inject, tmp_path):
    """One data packet, selected by destination QP and PSN, is lost at the captured port.

    The capture has every packet that the port counted. The lost PSN is missing once and arrives by retransmission, one
    NAK requests it, and no rule of go-back-N is broken.
    """
    last = lab.topology.hosts[-1].name
    port, _ = packet_capture.port_named(lab.topology, f"{last}:rxe0")
    with packet_capture.start(lab, [port]) as running:
        # Longer than any machine needs to arm the fault; the flow is stopped once its packet is dropped.
        flow = traffic.flow(
            "host1:rxe0", f"{last}:rxe0", message_bytes=65536, qps=2, depth=2, duration_s=120.0, qp=PATIENT
        )
        struck = flow.connections[0]
        before, began = counters.read(lab, ["host1"]), time.monotonic()
        wait_s(2.0)
        moved = counters.flat_deltas(before, counters.read(lab, ["host1"]))["host1/rxe0.sent_pkts"]
        ahead = int(3 * moved / 2 / (time.monotonic() - began)) + 100
        fault = inject("packet.drop", f"{last}:rxe0", qp=struck.rqpn, psn=f"+{ahead}")
        armed = fault.arm()
        assert armed.ok
        until(lambda: fault.observe().count)
        wait_s(1.0)
        receipt = fault.clear()
        flow.stop()
        result = flow.wait(60.0)
        captured = running.stop()

    assert receipt.fired.count == 1
    assert receipt.proved, receipt.unproven
    (proof,) = captured.proofs
    assert proof.is_whole, proof
    assert proof.captured > 1000

    write_pcapng(tmp_path / "capture.pcapng", captured.frames)
    analysis = analyse(capture_file.read(tmp_path / "capture.pcapng"))
    flows = {flow.dqpn: flow for flow in analysis.flows if flow.side == "receiver"}
    assert set(flows) == {each.rqpn for each in flow.connections}
    assert analysis.violations == 0, [flow.broken for flow in analysis.flows]
    hit, other = flows[struck.rqpn], flows[flow.connections[1].rqpn]
    assert hit.reply_qpn == struck.lqpn
    (episode,) = (episode for episode in hit.episodes if episode.psn == armed.learned["psn"])
    assert (episode.cause, episode.missing, episode.retry) == ("nak", 1, 1)
    assert (hit.missing, hit.returned, hit.naks, hit.causes) == (1, 1, 1, {"nak": 1})
    assert (other.missing, other.naks, other.episodes) == (0, 0, ())
    # Times of the capture equal the controller's within the errors of both clock measurements.
    slack_ns = captured.clock_error_ns + 50_000_000
    seen_ns = episode.gap_ns - captured.epoch_offset_ns
    assert armed.at_ns - slack_ns < seen_ns < receipt.cleared.at_ns + slack_ns
    assert result.outcome == "completed"


@pytest.mark.slow
def test_capture_leaves_nothing_behind_when_its_controller_is_gone(lab):
    """When the SSH channel ends, packet sockets and capture file are removed."""
    fabric = lab.carrier("rtsw1")

    def there():
        files = fabric.run(["ls", "/var/lib/faultbed/capture"]).stdout.split()
        taps = fabric.run(["ip", "netns", "exec", "rtsw1", "cat", "/proc/net/packet"]).stdout.splitlines()[1:]
        return len(files), len(taps)

    running = packet_capture.start(lab, ["host1:rxe0"])
    try:
        assert there() == (1, 1)
    finally:
        running.close()
    until(lambda: there() == (0, 0))
