"""An RNIC loses its address, a queue pair goes to the error state: proved under a flow, and not if nothing was done."""

from __future__ import annotations

import threading

import pytest

from faultbed.inject.fault_plan import plan
from faultbed.inject.injector import Injector
from faultbed.inject.journal import Journal
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.traffic.engine.task_specs import QpParams
from faultbed.traffic.flows import flow_run
from faultbed.traffic.flows.flow_run import FlowSpec

pytestmark = [pytest.mark.soft, pytest.mark.slow, pytest.mark.needs("hosts >= 4", "rnics >= 2")]

FLOW = ("host1", "host3")
CASES = {
    "address": ("rnic.address", "host2:rxe1", 3.0),
    "queue pair of the sender": ("rnic.qp-error", "host1:rxe0", 3.0),
    "queue pair where no flow is": ("rnic.qp-error", "host2:rxe1", 3.0),
}


@pytest.fixture
def flow(lab):
    one, three = (f"{host}:{lab.topology.host_by_name[host].rnics[0].name}" for host in FLOW)
    running = flow_run.start(
        lab,
        FlowSpec(
            src=one, dst=three, message_bytes=16384, qps=2, depth=2, duration_s=300.0, op_deadline_s=90.0,
            peer_deadline_s=90.0, stall_deadline_s=120.0, qp=QpParams(timeout=18, retry_cnt=6),
        ),
    )  # fmt: skip
    yield running
    if not running.is_over:
        running.abort("the test is over")
    running.wait(60.0)


@pytest.mark.parametrize("mutation", [None, "noop", "lie"])
def test_rnic_kind_is_proved_only_if_it_happened_at_its_target(lab, tmp_path, flow, mutation):
    proved = {}
    with Journal(tmp_path / "j") as journal, Injector(lab, journal, until_cleared=True, mutate=mutation) as injector:
        for index, (name, (kind, target, for_s)) in enumerate(CASES.items()):
            prepared = injector.prepare(
                plan(FaultSpec(kind=kind, target=target, for_s=for_s), lab.topology, lab_kind="soft", index=index)
            )
            armed = prepared.arm()
            threading.Event().wait(for_s)
            receipt = prepared.clear()
            print(name, receipt.fired, armed.readback, armed.while_on, receipt.cleared, receipt.doubts)
            assert receipt.cleared.ok, receipt.cleared.error
            proved[name] = not receipt.doubts
    happened = mutation is None
    assert proved == {"address": happened, "queue pair of the sender": happened, "queue pair where no flow is": False}
