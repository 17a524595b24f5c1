"""Recovery and performance bounds on the soft lab, with real queue pairs through a real eBGP/ECMP fabric.

Bounds are ratios within one run, or counts; nothing here depends on how fast the machine is.
"""

import os
import subprocess
import sys
import time

import pytest
from waiting import until, wait_s

from testbed import counters
from traffic.plan import QpParams

pytestmark = pytest.mark.soft

PATIENT = QpParams(timeout=18)
"""An ACK timeout of 1.07 s: on a busy machine a virtual CPU that pauses is not a lost packet."""


def growth(lab, before, *nodes):
    """How much each counter of some nodes moved, as `node/name`."""
    return counters.flat_deltas(before, counters.read(lab, nodes))


@pytest.mark.needs("uplinks >= 2", "hosts >= 4")
def test_the_job_survives_an_uplink_flap_and_every_result_is_right(lab, traffic, inject):
    """With the uplink of a used path gone, eBGP moves the traffic: the job ends by itself, and all sums are right."""
    fault = inject("link.flap", "rtsw1:ctsw1", for_s=2.0)
    job = traffic.collective(size_bytes=1 << 18, duration_s=14.0, qp=PATIENT)
    wait_s(5.0)
    assert fault.arm().ok
    wait_s(2.0)
    receipt = fault.clear()
    result = job.wait(120.0)

    assert receipt.proved, receipt.doubts
    assert result.outcome in ("completed", "recovered")
    assert result.wrong_elements == 0
    assert result.checked_elements == result.iterations_completed * 4 * (1 << 16)
    after = [item for item in result.iterations[0] if item.start_ns > receipt.cleared.at_ns]
    assert after, "no iteration began after the link came back"


@pytest.mark.needs("hosts >= 4")
def test_results_stay_right_under_loss(lab, traffic, inject):
    """2 % of the packets to one RNIC are lost: go-back-N repairs each of them, and no element is wrong."""
    fault = inject("packet.drop", "host3:rxe0", share=0.02)
    job = traffic.collective(size_bytes=1 << 18, duration_s=12.0)
    wait_s(3.0)
    assert fault.arm().ok
    wait_s(5.0)
    receipt = fault.clear()
    result = job.wait(120.0)

    assert receipt.proved, receipt.doubts
    assert result.wrong_elements == 0
    assert result.outcome in ("completed", "recovered")


@pytest.mark.parametrize(("place", "counted"), [(8, 1), (0, 0)], ids=["amid-a-message", "first-of-a-message"])
def test_one_lost_packet_is_one_nak_and_one_go_back_n(lab, traffic, inject, place, counted):
    """Exactly one data packet, named by destination QP and PSN, is lost once in the fabric.

    The receiver sees one gap (one NAK), the sender goes back once, and no other queue pair of the port notices. Of the
    NAK, rxe counts only one that acknowledges something (rxe_comp.c, check_ack): before the first packet of a message
    the message before it was acknowledged by its own ACK, so that its NAK is obeyed and not counted.
    """
    last = lab.topology.hosts[-1].name
    flow = traffic.flow("host1:rxe0", f"{last}:rxe0", message_bytes=65536, qps=2, depth=2, duration_s=400.0, qp=PATIENT)
    struck, per_message = flow.connections[0], 65536 // PATIENT.mtu

    def sent():
        return flow.psns()[struck.index][0] - struck.sq_psn

    start, began = sent(), time.monotonic()
    wait_s(2.0)
    packets_per_s = (sent() - start) / (time.monotonic() - began)
    # From here on: while a flow starts, switches resolve neighbours, and may lose packets of its first burst.
    before = counters.read(lab, ["host1", last])
    # Armed before the packet comes, however busy the machine is: a hop on which it has passed waits for nothing.
    for lead_s in (6, 20, 60):
        fault = inject("packet.drop", f"{last}:rxe0", qp="any", psn="+1")
        fault.baseline()
        ahead = (sent() + int(lead_s * packets_per_s)) // per_message * per_message + 10 * per_message + place
        assert fault.arm(qp=struck.rqpn, psn=(struck.sq_psn + ahead) % (1 << 24)).ok
        if fault.observe()["count"] or sent() < ahead:
            break
        assert fault.clear().fired.count == 0
    until(lambda: fault.observe()["count"], within_s=240.0)
    wait_s(1.0)
    receipt = fault.clear()
    moved = growth(lab, before, "host1", last)
    flow.stop()
    result = flow.wait(60.0)

    assert receipt.fired.count == 1
    assert receipt.proved, receipt.doubts
    episode = {
        "gaps seen": moved[f"{last}/rxe0.out_of_seq_request"],
        "NAKs counted": moved["host1/rxe0.rcvd_seq_err"],
        "goings back": moved["host1/rxe0.completer_retry_err"],
    }
    assert episode == {"gaps seen": 1, "NAKs counted": counted, "goings back": 1}
    assert result.outcome == "completed"
    assert not result.qp_errors


@pytest.mark.needs("hosts >= 4")
def test_a_busy_machine_makes_a_flow_slow_and_loses_none_of_its_packets(lab, traffic):
    """Other processes want the CPUs: queues grow, and no queue of the fabric drops what an experiment did not ask for.

    It did once: the default queue, fq_codel, drops what has waited long.
    """
    last = lab.topology.hosts[-1].name
    flow = traffic.flow("host1:rxe0", f"{last}:rxe0", message_bytes=65536, qps=4, depth=4, duration_s=12.0, qp=PATIENT)
    wait_s(2.0)
    before = counters.read(lab, ["host1", last])
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        wait_s(8.0)
        moved = growth(lab, before, "host1", last)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    result = flow.wait(60.0)

    assert moved["host1/rxe0.sent_pkts"] > 1000
    assert (moved[f"{last}/rxe0.out_of_seq_request"], moved["host1/rxe0.rcvd_seq_err"]) == (0, 0)
    assert result.outcome == "completed"


@pytest.mark.needs("hosts >= 4")
def test_one_slow_gpu_slows_the_whole_job_and_is_named(lab, traffic, inject):
    """A GPU at half speed: everybody's iterations take longer, and the straggler is that rank."""
    fault = inject("gpu.throttle", "host2:gpu0", percent=50)
    job = traffic.collective(size_bytes=1 << 16, duration_s=20.0, compute_units=24, qp=PATIENT)
    wait_s(8.0)
    armed = fault.arm()
    wait_s(8.0)
    receipt = fault.clear()
    result = job.wait(120.0)

    assert receipt.proved, receipt.doubts
    slow_rank = result.ranks.index("host2:rxe0")

    def median_compute(rank, start_ns, end_ns):
        times = sorted(i.compute_ns for i in result.iterations[rank] if start_ns <= i.start_ns and i.end_ns <= end_ns)
        assert len(times) >= 3, f"rank {rank} finished {len(times)} iterations"
        return times[len(times) // 2]

    before = [median_compute(rank, 0, armed.at_ns) for rank in range(4)]
    during = [median_compute(rank, armed.at_ns, receipt.cleared.at_ns) for rank in range(4)]
    slowdown = [now / then for now, then in zip(during, before, strict=True)]
    assert slowdown.index(max(slowdown)) == slow_rank, slowdown
    assert slowdown[slow_rank] >= 1.25 * sorted(slowdown)[-2], slowdown


@pytest.mark.needs("hosts >= 4")
def test_a_dead_link_kills_the_queue_pair_and_the_job_rebuilds_it(lab, traffic, inject):
    """A host link that is down for longer than the retry budget: the QP dies, is rebuilt, and results are right."""
    fault = inject("link.flap", "rtsw1:host1:rxe0", for_s=4.0)
    job = traffic.collective(size_bytes=1 << 17, duration_s=16.0, qp=QpParams(timeout=14, retry_cnt=3))
    wait_s(4.0)
    assert fault.arm().ok
    wait_s(4.0)
    receipt = fault.clear()
    result = job.wait(120.0)

    assert receipt.proved, receipt.doubts
    assert result.outcome == "recovered"
    assert result.qp_errors, "a rebuild that nobody reports is hidden"
    assert all(rebuild.recovered_ns for rebuild in result.rebuilds)
    assert result.wrong_elements == 0
