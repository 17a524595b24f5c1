"""Metrics of the controller of te: how soon flows were placed again, how many moved, and how near the bound."""

from __future__ import annotations

import pytest
from synthetic_run import S, changed, synthetic_run

from faultbed.harness.analysis.effects.fault_windows import fired_windows
from faultbed.harness.analysis.links.flow_placements import placement_metrics
from faultbed.harness.verdict import (
    FlowPlacement,
    FlowPlacements,
    RoutingDecisions,
    RoutingReceipt,
    SchemeArmed,
    SchemeCleared,
)

RUN = synthetic_run()
WINDOWS = fired_windows(RUN.injected.faults)
FAULT = min(WINDOWS, key=lambda name: WINDOWS[name][0])
OTHERS = sorted(WINDOWS.keys() - {FAULT})
FIRED, CLEARED = WINDOWS[FAULT]
NONE = "no placement changed a rule while it was on"


def placed(at_ns, *, moved=1, ratio=1.0, cause="change"):
    return FlowPlacement(at_ns=at_ns, done_ns=at_ns + S // 2, cause=cause, moved=moved, bound_ratio=ratio)


def metrics(*placements, errors=()):
    record = FlowPlacements(cycles=9, largest_gap_s=5.0, placements=placements, errors=errors)
    receipt = RoutingReceipt(
        scheme="te",
        fidelity="real",
        armed=SchemeArmed(ok=True),
        decisions=RoutingDecisions(queried=1, agreed=1),
        placements=record,
        cleared=SchemeCleared(ok=True),
    )
    return placement_metrics(changed(RUN, routing=receipt))


def test_placements_last_one_under_the_fault_ends_its_rebalancing():
    found = metrics(
        placed(FIRED - 20 * S, moved=0, cause="start"),
        placed(FIRED + S // 10),
        placed(FIRED + S // 5, moved=2, ratio=1.25),
        placed(CLEARED + S),
    )
    assert found["te.rebalanced"].value == pytest.approx(0.7)
    assert found["te.rebalanced"].unseen == dict.fromkeys(OTHERS, NONE)
    assert found["te.moved"].value == 4
    assert found["te.bound_ratio"].value == 1.25


def test_placements_before_and_after_a_fault_say_nothing_about_it():
    found = metrics(placed(FIRED - S), placed(CLEARED + S))
    assert found["te.rebalanced"].value is None
    assert found["te.rebalanced"].unseen == dict.fromkeys(WINDOWS, NONE)


def test_placements_with_a_cycle_that_failed_have_no_value():
    found = metrics(placed(FIRED + S), errors=("fabric: no answer",))
    assert [one.value for one in found.values()] == [None] * 3
    assert found["te.moved"].detail == "1 cycles of the controller failed, the last one with: fabric: no answer"


def test_placements_of_a_run_without_controller_have_no_value():
    assert [one.value for one in placement_metrics(RUN).values()] == [None] * 3
