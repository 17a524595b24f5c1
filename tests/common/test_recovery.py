"""Recovery and performance bounds, with real queue pairs through a real fabric.

Bounds are ratios within one run, or counts; nothing here depends on how fast the machine is. Not yet run on hardware.
"""

import pytest
from waiting import until, wait_s

from faultbed.testbed.model.selectors import select_one
from faultbed.traffic.engine.task_specs import QpParams

RANKS = tuple(f"host[{number}]:rnic[0]" for number in range(4))

PATIENT = QpParams(timeout=18)
"""An ACK timeout of 1.07 s: on a busy machine a virtual CPU that pauses is not a lost packet."""


def wait_for_iterations(job, count):
    """Wait until every rank has ended so many more iterations, or the job is over, however long that takes here."""

    def ended():
        names = [event.message["task"] for event in list(job.events) if event.name == "iteration"]
        return min(names.count(task.name) for task in job.plan.tasks)

    wanted = ended() + count
    until(lambda: ended() >= wanted or job.is_over, within_s=120.0)


@pytest.mark.needs("rdma", "uplinks >= 2", "hosts >= 4")
def test_job_survives_uplink_flap_with_correct_results(lab, traffic, inject):
    """eBGP moves the traffic off a flapping uplink that is in use: the job completes and all sums are correct."""
    fault = inject("link.flap", "rtsw[0]:used-uplink[0]", for_s=2.0)
    job = traffic.collective(ranks=RANKS, size_bytes=1 << 18, duration_s=300.0, qp=PATIENT)
    wait_for_iterations(job, 2)
    assert fault.arm().ok
    wait_s(2.0)
    receipt = fault.clear()
    wait_for_iterations(job, 2)  # the first of them had begun before the link came back
    job.stop()
    result = job.wait(120.0)

    assert receipt.proved, receipt.unproven
    assert result.outcome in ("completed", "recovered")
    assert result.wrong_elements == 0
    assert result.checked_elements == result.iterations_completed * 4 * (1 << 16)
    after = [item for item in result.iterations[0] if item.start_ns > receipt.cleared.at_ns]
    assert after, "no iteration began after the link came back"


@pytest.mark.needs("rdma", "hosts >= 4")
def test_job_results_are_correct_under_packet_loss(lab, traffic, inject):
    """2 % of the packets to one RNIC are lost: go-back-N repairs each of them, and no element is wrong."""
    fault = inject("packet.drop", "host[2]:rnic[0]", share=0.02)
    job = traffic.collective(ranks=RANKS, size_bytes=1 << 18, duration_s=300.0)
    wait_for_iterations(job, 1)
    assert fault.arm().ok
    wait_s(5.0)
    receipt = fault.clear()
    wait_for_iterations(job, 2)
    job.stop()
    result = job.wait(120.0)

    assert receipt.proved, receipt.unproven
    assert result.wrong_elements == 0
    assert result.outcome in ("completed", "recovered")


@pytest.mark.needs("rdma", "gpu", "hosts >= 4")
def test_throttled_gpu_slows_the_job_and_is_the_straggler(lab, traffic, inject):
    """A GPU at a quarter of its speed lengthens every rank's iterations, and its rank is the straggler."""
    fault = inject("gpu.throttle", "host[1]:gpu[0]", percent=75)
    job = traffic.collective(ranks=RANKS, size_bytes=1 << 16, duration_s=300.0, compute_units=24, qp=PATIENT)
    wait_for_iterations(job, 4)
    armed = fault.arm()
    wait_for_iterations(job, 5)  # the first of them had begun before the fault
    receipt = fault.clear()
    job.stop()
    result = job.wait(120.0)

    assert receipt.proved, receipt.unproven
    slow_rank = result.ranks.index(select_one(lab.topology, "host[1]:rnic[0]"))

    def median_compute(rank, start_ns, end_ns):
        times = sorted(i.compute_ns for i in result.iterations[rank] if start_ns <= i.start_ns and i.end_ns <= end_ns)
        assert len(times) >= 3, f"rank {rank} finished {len(times)} iterations"
        return times[len(times) // 2]

    before = [median_compute(rank, 0, armed.at_ns) for rank in range(4)]
    during = [median_compute(rank, armed.at_ns, receipt.cleared.at_ns) for rank in range(4)]
    slowdown = [now / then for now, then in zip(during, before, strict=True)]
    assert slowdown.index(max(slowdown)) == slow_rank, slowdown
    assert slowdown[slow_rank] >= 1.25 * sorted(slowdown)[-2], slowdown


@pytest.mark.needs("rdma", "hosts >= 4")
def test_dead_link_kills_queue_pair_and_job_rebuilds_it(lab, traffic, inject):
    """A host link is down for longer than the retry budget: the QP dies, is rebuilt, and results are correct."""
    fault = inject("link.flap", "host[0]:downlink[0]", for_s=4.0)
    job = traffic.collective(ranks=RANKS, size_bytes=1 << 17, duration_s=300.0, qp=QpParams(timeout=14, retry_cnt=3))
    wait_for_iterations(job, 1)
    assert fault.arm().ok
    wait_s(4.0)
    receipt = fault.clear()
    wait_for_iterations(job, 2)
    job.stop()
    result = job.wait(120.0)

    assert receipt.proved, receipt.unproven
    assert result.outcome == "recovered"
    assert result.qp_errors, "a rebuild without a reported QP error is hidden"
    assert all(rebuild.recovered_ns for rebuild in result.rebuilds)
    assert result.wrong_elements == 0
