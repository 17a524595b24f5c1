"""States that show whether a fault was active: read too late, they prove nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from faultbed.inject import prepared_fault
from faultbed.inject.evidence.observation import Observation
from faultbed.inject.evidence.receipt import Armed, judge_fired
from faultbed.inject.fault_plan import plan
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.prepared_fault import PreparedFault
from faultbed.testbed.inventory.lab_inventory import load
from faultbed.testbed.shipped import inventory_named

TOPOLOGY = load(inventory_named("soft")).topology
PLANNED = plan(
    FaultSpec(kind="host.cpu-steal", target="host2", for_s=3.0, params={"share": 0.5}), TOPOLOGY, lab_kind="soft"
)
BUSY = "host2/hogs.running"


@pytest.mark.parametrize(
    ("states", "state", "kept"),
    [
        ({BUSY: 1}, "active", {BUSY: 1}),
        ({BUSY: 0}, "active", {BUSY: 0}),
        ({BUSY: 0}, "over", {}),
        ({BUSY: 1}, "over", {BUSY: 1}),
    ],
)
def test_state_read_after_the_window_is_no_evidence(states, state, kept, monkeypatch):
    """A starved host may answer after the fault's end, and then its state looks as if the fault never acted."""
    monkeypatch.setattr(prepared_fault, "STATES_S", 0.0)
    prepared = SimpleNamespace(
        planned=PLANNED,
        _witnesses=SimpleNamespace(states=lambda _: states),
        lease=SimpleNamespace(where="it", request=lambda _: {"state": state}),
    )
    assert PreparedFault._states_while_on(prepared) == kept


def test_states_while_on_that_lag_are_read_again():
    readings = iter([{BUSY: 0}, {BUSY: 0}, {BUSY: 1}])
    pauses = []
    prepared = SimpleNamespace(
        planned=PLANNED,
        _witnesses=SimpleNamespace(states=lambda _: next(readings)),
        lease=SimpleNamespace(where="it", request=lambda _: {"state": "active"}, pause=pauses.append),
    )
    assert PreparedFault._states_while_on(prepared) == {BUSY: 1}
    assert len(pauses) == 2


def test_states_while_on_of_window_that_ends_meanwhile_are_the_last_within_it():
    states = iter(["active", "over"])
    readings = iter([{BUSY: 0}, {BUSY: None}])
    prepared = SimpleNamespace(
        planned=PLANNED,
        _witnesses=SimpleNamespace(states=lambda _: next(readings)),
        lease=SimpleNamespace(where="it", request=lambda _: {"state": next(states)}, pause=lambda _: None),
    )
    assert PreparedFault._states_while_on(prepared) == {BUSY: 0}


@pytest.mark.parametrize(
    ("while_on", "doubt"), [({}, "lengthen its window"), ({BUSY: 0}, "was 0 while the fault was on")]
)
def test_receipt_distinguishes_a_wrong_state_from_an_unread_one(while_on, doubt):
    armed = Armed(ok=True, readback={"applied": True, **PLANNED.mechanism.shows}, while_on=while_on)
    _, doubts = judge_fired(PLANNED, armed=armed, observed=Observation(state="over", count=1), before={}, after={})
    assert any(doubt in one for one in doubts), doubts
