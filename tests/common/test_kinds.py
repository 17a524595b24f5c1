"""Every kind of fault that a soft lab and a rack both have: proved by its receipt, and not when nothing was done.

The unit test `test_rack_suite.py` plans each of them on the example of a rack. Not yet run on hardware.
"""

from __future__ import annotations

import pytest
from common_faults import CASES
from waiting import until, wait_s

from faultbed.testbed.model.selectors import select_one
from faultbed.traffic.engine.task_specs import QpParams
from faultbed.traffic.workloads.job import JobPhase
from faultbed.traffic.workloads.storage_service import Storage

pytestmark = [pytest.mark.slow, pytest.mark.needs("rdma", "gpu", "hosts >= 4", "rnics >= 2")]

RANKS = tuple(f"host[{number}]:rnic[0]" for number in range(4))


@pytest.fixture
def case(request):
    return CASES[request.param]


@pytest.fixture
def busy(lab, traffic, case):
    """A job that computes, reduces, and needs its storage on the second host, and that waits through silence."""
    if not case.under_job:
        return None
    running = traffic.job(
        ranks=RANKS,
        grid=(("dp", 4),),
        phases=(JobPhase(along="dp", collective="all-reduce", size_bytes=1 << 16),),
        iterations=10_000,
        warmup=1,
        compute_units=2,
        op_deadline_s=90.0,
        peer_deadline_s=90.0,
        stall_deadline_s=120.0,
        storage=Storage(
            host=select_one(lab.topology, "host[1]"), ingest_bytes=1 << 16, checkpoint_bytes=1 << 18, every=2,
            mode="async",
        ),
        qp=QpParams(timeout=18, retry_cnt=6),
    )  # fmt: skip
    until(lambda: sum(event.name == "iteration" for event in list(running.events)) >= 2 * len(RANKS), within_s=60.0)
    return running


def receipt_of(case, lab, inject, *, prove=True):
    """The receipt of a fault that was prepared, on for its window, and cleared."""
    for_s, params = case.of(lab.kind)
    fault = inject(case.kind, case.target, for_s=for_s, prove=prove, **params)
    armed = fault.arm()
    wait_s(for_s)
    return armed, fault.clear()


@pytest.mark.parametrize("case", CASES, indirect=True)
def test_fault_of_each_kind_is_proved_by_its_receipt(busy, lab, inject, case):
    armed, receipt = receipt_of(case, lab, inject)
    assert armed.ok
    assert receipt.cleared.ok, receipt.cleared.error
    assert receipt.proved, receipt.unproven
    assert busy is None or not busy.is_over, busy.failure


@pytest.mark.parametrize("fault_mutation", ["noop"])
@pytest.mark.parametrize("case", CASES, indirect=True)
def test_fault_replaced_by_a_noop_is_not_proved(busy, lab, inject, case, fault_mutation):
    _, receipt = receipt_of(case, lab, inject, prove=False)
    assert receipt.cleared.ok, receipt.cleared.error
    assert not receipt.proved
    assert busy is None or not busy.is_over, busy.failure
