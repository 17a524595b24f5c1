"""Late receives on a real lab: the sender gets RNR NAKs, waits or loses its queue pair, and continues."""

from __future__ import annotations

import pytest
from waiting import wait_s

from faultbed.inject.fault_plan import plan
from faultbed.inject.injector import Injector
from faultbed.inject.journal import Journal
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.testbed.observe import counters
from faultbed.traffic.engine.task_specs import QpParams
from faultbed.traffic.flows import flow_run
from faultbed.traffic.flows.flow_run import FlowSpec

pytestmark = [pytest.mark.soft, pytest.mark.needs("hosts >= 3")]

SENT = {
    "src": "host1:rxe0",
    "dst": "host3:rxe0",
    "message_bytes": 16384,
    "depth": 4,
    "duration_s": 120.0,
    "verb": "send",
}


def hold_up(lab, folder, target, spec, mutate=None):
    """Return the receipt of a fault of two seconds without receives, and the flow's result."""
    with (
        flow_run.start(lab, spec) as running,
        Journal(folder / "j") as journal,
        Injector(lab, journal, mutate=mutate) as injector,
    ):
        fault = FaultSpec(kind="congestion.late-receives", target=target, for_s=2.0)
        prepared = injector.prepare(plan(fault, lab.topology, lab_kind="soft"))
        wait_s(2.0)
        prepared.arm()
        wait_s(2.0)
        receipt = prepared.clear()
        assert receipt.cleared.ok, receipt.cleared.error
        running.stop()
        result = running.wait(60.0)
    return receipt, result


def test_sender_with_unlimited_rnr_retry_waits_and_continues(lab, tmp_path):
    before = counters.read(lab, ["host1", "host3"])
    receipt, result = hold_up(lab, tmp_path, "host3", FlowSpec(**SENT, qp=QpParams(rnr_retry=7)))
    after = counters.read(lab, ["host1", "host3"])

    assert receipt.proved, receipt.unproven
    assert receipt.fired.witness == "host1/rxe0.rcvd_rnr_err"
    assert receipt.fired.count > 10, "0.64 ms after each NAK it tries again"
    sent, actual = (
        after[host][f"rxe0.{name}"] - before[host][f"rxe0.{name}"]
        for host, name in (("host3", "send_rnr_err"), ("host1", "rcvd_rnr_err"))
    )
    assert sent == actual
    assert (result.outcome, result.qp_errors) == ("completed", ())


@pytest.mark.slow
def test_sender_out_of_rnr_retries_loses_and_rebuilds_its_queue_pair(lab, tmp_path):
    receipt, result = hold_up(lab, tmp_path, "host3", FlowSpec(**SENT))

    assert receipt.proved, receipt.unproven
    assert result.outcome == "recovered"
    assert {error.status for error in result.qp_errors} == {"RNR_RETRY_EXC_ERR"}


@pytest.mark.slow
@pytest.mark.parametrize(("target", "mutate"), [("host3", "noop"), ("host3", "lie"), ("host2", None)])
def test_late_receives_without_effect_or_elsewhere_are_not_proved(lab, tmp_path, target, mutate):
    """The late receives are on a host to which no flow sends, so no sender gets an RNR NAK."""
    beside = FlowSpec(**{**SENT, "dst": "host2:rxe1", "message_bytes": 64, "rate_bps": 51200, "verb": "write"})
    with flow_run.start(lab, beside) as other:
        receipt, result = hold_up(lab, tmp_path, target, FlowSpec(**SENT), mutate)
        assert not receipt.proved
        assert result.outcome == "completed"
        other.stop()
        other.wait(60.0)
