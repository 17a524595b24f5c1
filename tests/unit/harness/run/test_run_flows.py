"""Flows that the harness runs to measure a lab: result, time, and the error if a flow fails."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import house
import pytest

from faultbed.harness.analysis.links import emulation_headroom
from faultbed.harness.live import emulation_limit
from faultbed.harness.live.emulation_limit import NotMeasured
from faultbed.harness.live.measured_flows import run_flows
from faultbed.harness.run import bisection_run
from faultbed.harness.run.workload_kinds import GRACE_S
from faultbed.testbed.errors import LabError
from faultbed.testbed.inventory import lab_inventory
from faultbed.traffic.flows import flow_run
from faultbed.traffic.flows.flow_run import FlowSpec

ZONES = lab_inventory.load(house.HOUSE / "inventory" / "soft-zones.yml")
ONE = FlowSpec(src="host1:rxe0", dst="host2:rxe0", duration_s=4.0)
OTHER = FlowSpec(src="host3:rxe0", dst="host4:rxe0", duration_s=4.0)


@pytest.fixture
def fabric(monkeypatch):
    """A lab whose flows end with `outcome`, `where` and `goodput_bps`, or raise `error`."""
    made = SimpleNamespace(outcome="finished", where=None, goodput_bps=48e6, error=None, waited_s=[], beats=0)
    running = SimpleNamespace(started_ns=5, ended_ns=9)

    def wait(timeout_s):
        made.waited_s.append(timeout_s)
        return made

    def start_all(lab, specs, on_event):
        if made.error is not None:
            raise made.error
        on_event({})
        running.wait = wait
        return contextlib.nullcontext(running)

    def beat():
        made.beats += 1

    monkeypatch.setattr(flow_run, "start_all", start_all)
    node = SimpleNamespace(run=lambda command, stdin: None)
    made.lab = SimpleNamespace(
        name="soft-zones", inventory_model=ZONES, topology=ZONES.topology, heartbeat=beat, node=lambda _: node
    )
    return made


def test_run_flows_returns_result_and_window_and_refreshes_the_lease(fabric):
    result, window = run_flows(fabric.lab, [ONE, OTHER])
    assert (result.goodput_bps, window.start_ns, window.end_ns) == (48e6, 5, 9)
    assert (fabric.waited_s, fabric.beats) == ([4.0 + GRACE_S], 1)


@pytest.mark.parametrize(
    ("specs", "message"),
    [([ONE, OTHER], "host1:rxe0 to host2:rxe0 and 1 more: QP 3"), ([ONE], "host1:rxe0 to host2:rxe0: QP 3")],
)
def test_run_flows_with_a_failed_flow_is_an_error_with_its_place(fabric, specs, message):
    fabric.outcome, fabric.where = "failed", "QP 3: retry exceeded"
    with pytest.raises(LabError) as caught:
        run_flows(fabric.lab, specs)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outcome": "failed", "where": "QP 3: retry exceeded"}, "QP 3: retry exceeded; repeat the run"),
        ({"goodput_bps": 0.0}, "nothing came through in 8 s; repeat the run"),
        ({"error": LabError("host1: no engine")}, "host1: no engine; repeat the run"),
    ],
)
def test_emulation_limit_is_not_measured_by_flows_that_fail(fabric, changes, message):
    vars(fabric).update(changes)
    with pytest.raises(NotMeasured, match=message):
        emulation_limit.measure(fabric.lab, "key", 1e6)


def test_emulation_limit_is_the_goodput_of_all_rnics(fabric):
    limit = emulation_limit.measure(fabric.lab, "key", 1e6)
    assert (limit.flows, limit.carried_bps) == (8, 48e6)


def test_bisection_on_an_emulation_of_unknown_capacity_is_inconclusive(fabric, monkeypatch):
    def capacity_of(*_):
        raise NotMeasured("the emulation's capacity is unknown: QP 3")

    monkeypatch.setattr(emulation_limit, "capacity_of", capacity_of)
    lines = []
    assert "the emulation's capacity could not be measured" in bisection_run._emulation_limit(fabric.lab, lines.append)
    assert lines == ["the emulation's capacity is unknown: QP 3"]
    assert emulation_headroom.exceeds_headroom(1.0, None)
