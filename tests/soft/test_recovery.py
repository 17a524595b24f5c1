"""Lost packets and a busy machine, as seen in rxe's counters and the queues of the software fabric."""

import os
import subprocess
import sys
import time

import pytest
from waiting import until, wait_s

from faultbed.testbed.observe import counters
from faultbed.traffic.engine.task_specs import QpParams

pytestmark = pytest.mark.soft

PATIENT = QpParams(timeout=18)
"""An ACK timeout of 1.07 s: on a busy machine a virtual CPU that pauses is not a lost packet."""


def growth(lab, before, *nodes):
    """Return the growth of each counter of some nodes, by `node/name`."""
    return counters.flat_deltas(before, counters.read(lab, nodes))


@pytest.mark.parametrize(
    ("place", "counted"),
    [
        pytest.param(8, 1, marks=pytest.mark.slow, id="amid-a-message"),
        pytest.param(0, 0, id="first-of-a-message"),
    ],
)
def test_lost_packet_is_one_nak_and_one_go_back_n(lab, traffic, inject, place, counted):
    """Exactly one data packet, selected by destination QP and PSN, is lost once in the fabric.

    The receiver sees one gap (one NAK), the sender goes back once, and no other queue pair of the port is affected. rxe
    counts a NAK only if it acknowledges something (rxe_comp.c, check_ack). If the lost packet is the first of a
    message, the message before it already had its ACK, so the NAK is obeyed and not counted.
    """
    last = lab.topology.hosts[-1].name
    flow = traffic.flow("host1:rxe0", f"{last}:rxe0", message_bytes=65536, qps=2, depth=2, duration_s=400.0, qp=PATIENT)
    struck, per_message = flow.connections[0], 65536 // PATIENT.mtu

    def sent():
        return flow.psns()[struck.index][0] - struck.sq_psn

    start, began = sent(), time.monotonic()
    wait_s(2.0)
    packets_per_s = (sent() - start) / (time.monotonic() - began)
    # Counted from here on, because switches resolve neighbours while a flow starts, and may drop packets of its first
    # burst.
    before = counters.read(lab, ["host1", last])
    # The rule must be armed before the packet comes, however busy the machine is; afterwards it would wait in vain.
    for lead_s in (3, 6, 20, 60):
        # If a fault was armed too late, try another one; the assertions at the end are about the last one.
        fault = inject("packet.drop", f"{last}:rxe0", qp="any", psn="+1", prove=False)
        fault.baseline()
        ahead = (sent() + int(lead_s * packets_per_s)) // per_message * per_message + 10 * per_message + place
        assert fault.arm(qp=struck.rqpn, psn=(struck.sq_psn + ahead) % (1 << 24)).ok
        if fault.observe().count or sent() < ahead:
            break
        assert fault.clear().fired.count == 0
    until(lambda: fault.observe().count, within_s=240.0)
    wait_s(1.0)
    receipt = fault.clear()
    moved = growth(lab, before, "host1", last)
    flow.stop()
    result = flow.wait(60.0)

    assert receipt.fired.count == 1
    assert receipt.proved, receipt.unproven
    episode = {
        "gaps seen": moved[f"{last}/rxe0.out_of_seq_request"],
        "NAKs counted": moved["host1/rxe0.rcvd_seq_err"],
        "goings back": moved["host1/rxe0.completer_retry_err"],
    }
    assert episode == {"gaps seen": 1, "NAKs counted": counted, "goings back": 1}
    assert result.outcome == "completed"
    assert not result.qp_errors


@pytest.mark.needs("hosts >= 4")
def test_busy_machine_slows_a_flow_and_loses_no_packet(lab, traffic):
    """CPU contention makes queues grow, and no queue of the fabric drops a packet.

    The default queue, fq_codel, used to drop packets that had waited long.
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
