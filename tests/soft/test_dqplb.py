"""Segments over several queue pairs (`spread = "dqplb"`) while one of two uplinks is dead, or eight times slower.

All queue pairs of a test have flow labels, so a rebuilt queue pair keeps its UDP source port, and thus its uplink.
"""

from __future__ import annotations

import contextlib
import itertools
import time

import numpy as np
import pytest
from waiting import until, wait_s

from faultbed.inject.journal import Journal
from faultbed.inject.routing.scheme_lease import SchemeLease
from faultbed.testbed.routing.schemes import Routing
from faultbed.testbed.routing.switch_tables import scheme_tables
from faultbed.traffic.engine.task_specs import QpParams
from faultbed.traffic.probes.ecmp_entropy import Flow5, data_and_ack_paths, paths, udp_sport

pytestmark = [pytest.mark.soft, pytest.mark.slow, pytest.mark.needs("hosts >= 4", "uplinks >= 2")]

SRC, DST = "host1:rxe0", "host3:rxe0"
UPLINK, OTHER = "rtsw1:ctsw1", "rtsw1:ctsw2"
QUEUE_PAIRS = 4
LABELS = 64
DEAD_S = 12.0
BUDGET_S = 7 * 4.096e-6 * 2**15
"""Seven transmissions of a packet, each with an ACK timeout of 134 ms: then its queue pair dies."""
FAST_MBPS, SLOW_MBPS = 16, 2


def first_label(lab, fits):
    """Return the first of `QUEUE_PAIRS` consecutive flow labels whose spines from SRC to DST satisfy `fits`."""
    address = {
        f"{host.name}:{rnic.name}": rnic.address.split("/")[0] for host in lab.topology.hosts for rnic in host.rnics
    }
    flows = [
        Flow5(src_ip=address[SRC], dst_ip=address[DST], sport=udp_sport(0, 0, label)) for label in range(1, LABELS + 1)
    ]
    by_flow = paths(lab, flows)
    spines = [by_flow[flow][2] for flow in flows]
    return next(first + 1 for first in range(LABELS - QUEUE_PAIRS) if fits(spines[first : first + QUEUE_PAIRS]))


def operations(result):
    """Return (begin, end) of each operation on rank 0."""
    return [(one.start_ns, one.end_ns) for one in result.iterations[0]]


@pytest.mark.parametrize("spread", ["dqplb", "split"])
def test_job_survives_a_dead_uplink_with_dqplb_and_stalls_without(lab, traffic, inject, spread):
    """RoCEv2 packets are lost on one uplink, unnoticed by BGP. Queue pairs die there, and again after a rebuild.

    With `split`, every message needs every queue pair, so the job waits until the uplink works again. With `dqplb` it
    continues.
    """
    # Two of each rank's queue pairs use the uplink, for data or for ACKs; the two others do not.
    label = first_label(lab, lambda spines: spines.count("ctsw1") == QUEUE_PAIRS // 2)
    job = traffic.collective(
        collective="all-to-all",
        size_bytes=1 << 20,
        ranks=(SRC, DST),
        qps_per_peer=QUEUE_PAIRS,
        spread=spread,
        entropy=QUEUE_PAIRS,
        duration_s=300.0,
        qp=QpParams(timeout=15, flow_label=label),
    )
    wait_s(4.0)
    dead = {
        index
        for index, ways in data_and_ack_paths(lab, job.connections).items()
        if any(("rtsw1", "ctsw1") in itertools.pairwise(way) for way in ways)
    }
    # With `split` the job stands still once the first queue pairs are dead, so other queue pairs may survive.
    least = len(dead) if spread == "dqplb" else 1
    fault = inject("packet.drop", UPLINK, share=1.0)
    armed = fault.arm()
    until(lambda: len({error.connection for error in job.qp_errors}) >= least, within_s=DEAD_S)
    wait_s(DEAD_S - BUDGET_S)
    died = len(job.qp_errors)
    begin, end = armed.at_ns, time.monotonic_ns()
    cleared = fault.clear().cleared
    until(lambda: {one.connection for one in job.rebuilds} >= {one.connection for one in job.qp_errors}, within_s=60.0)
    wait_s(2.0)
    job.stop()
    result = job.wait(90.0)

    during = [at for at in operations(result) if begin + 2 * BUDGET_S * 1e9 < at[0] and at[1] < end]
    before = [after - at for at, after in operations(result) if after < begin]
    pauses = [right - left for (_, left), (_, right) in itertools.pairwise(operations(result))]
    redone = sum(rebuild.redone_segments for rebuild in result.rebuilds)
    print(
        f"{spread}: {len(dead)} of {len(result.connections)} queue pairs on the uplink, {died} deaths, "
        f"{len(during)} operations while it was dead for {(end - begin) / 1e9:.1f} s "
        f"({np.median([right - left for left, right in during]) / 1e6 if during else 0:.0f} ms each; "
        f"{np.median(before) / 1e6:.0f} ms before, n = {len(before)}), longest pause {max(pauses) / 1e9:.2f} s, "
        f"{redone} segments moved in {len(result.rebuilds)} rebuilds, {result.wrong_elements} wrong elements"
    )
    assert (result.outcome, result.where, result.wrong_elements) == ("recovered", None, 0)
    lost = {error.connection for error in result.qp_errors}
    assert lost <= dead, "only queue pairs on that uplink died"
    assert len(lost) >= least
    assert all(rebuild.recovered_ns is not None for rebuild in result.rebuilds), "each carried data again in the end"
    assert operations(result)[-1][1] > cleared.at_ns
    if spread == "dqplb":
        assert redone > 0
        assert max(pauses) < 3 * BUDGET_S * 1e9
        assert len(during) > 10
    else:
        assert during == []
        assert max(pauses) > (end - begin) - BUDGET_S * 1e9


@contextlib.contextmanager
def skew(inject, *, idle=None):
    """Give one uplink eight times the rate of the other; `idle` is an uplink that the workload does not use.

    The workloads begin and end while the faults are on, so that the receipts alone prove them.
    """
    faults = [
        inject("link.rate", uplink, rate=f"{rate}Mb/s", prove=False)
        for uplink, rate in ((UPLINK, SLOW_MBPS), (OTHER, FAST_MBPS))
    ]
    for fault in faults:
        assert fault.arm().ok
    yield
    for fault in faults:
        receipt = fault.clear()
        assert receipt.cleared.ok
        assert receipt.proved or receipt.target == idle, receipt.unproven


@contextlib.contextmanager
def sprayed(lab, tmp_path):
    with Journal(tmp_path / "scheme.jsonl") as journal:
        lease = SchemeLease(lab, scheme_tables(lab.topology, "spray", Routing()), lab.carrier("rtsw1").name, journal)
        lease.apply()
        assert lease.readback["whole"], lease.readback
        try:
            yield
        finally:
            assert lease.release().ok


def test_paths_of_unequal_rate_halve_a_sprayed_flow_and_not_a_dqplb_job(lab, traffic, inject, tmp_path):
    """Uplinks of 16 and 2 Mb/s: a single queue pair uses the faster one, and the job's four queue pairs share both."""
    fast = first_label(lab, lambda spines: spines[0] == "ctsw2")
    mixed = first_label(lab, lambda spines: spines.count("ctsw1") == QUEUE_PAIRS // 2)

    def flow(*outcomes):
        qp = QpParams(timeout=18, flow_label=fast)
        running = traffic.flow(SRC, DST, message_bytes=65536, qps=1, depth=4, duration_s=12.0, qp=qp)
        result = running.wait(60.0)
        assert result.outcome in outcomes, result.where
        return result.goodput_bps

    def job(queue_pairs, label):
        running = traffic.collective(
            collective="broadcast",
            size_bytes=8 << 20,
            ranks=(SRC, DST),
            qps_per_peer=queue_pairs,
            entropy=queue_pairs,
            spread="dqplb",
            segment_bytes=16384,
            slots=16,
            iterations=4,
            deadline_s=60.0,
            op_deadline_s=60.0,
            qp=QpParams(timeout=18, flow_label=label),
        )
        result = running.wait(120.0)
        assert (result.outcome, result.wrong_elements) == ("completed", 0), result.where
        return 8 * (8 << 20) / (result.time_ns / 1e9)

    with skew(inject, idle=UPLINK):
        unsprayed, single = flow("completed"), job(1, fast)
    with sprayed(lab, tmp_path), skew(inject):
        spread = flow("completed", "recovered")  # go-back-N may exceed the deadline of a message
    with skew(inject):
        balanced = job(QUEUE_PAIRS, mixed)
    print(
        f"flow: {unsprayed / 1e6:.1f} Mb/s unsprayed, {spread / 1e6:.2f} Mb/s sprayed ({spread / unsprayed:.2f}); "
        f"job: {single / 1e6:.1f} Mb/s on the faster uplink, {balanced / 1e6:.1f} Mb/s with dqplb on both "
        f"({balanced / single:.2f})"
    )
    assert spread / unsprayed <= 0.5
    assert balanced / single >= 0.9
