"""The plan: the same inputs give the same bytes, and the seed decides what the file leaves open."""

from __future__ import annotations

from house import DEMO
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import soft_topology

from faultbed.harness.experiment import run_plan as plans
from faultbed.harness.experiment.experiment_file import decode, load
from faultbed.harness.run.prepare.bind_to_lab import fit
from faultbed.harness.run.prepare.resolve import resolve
from faultbed.testbed import shipped
from faultbed.testbed.inventory import lab_inventory

OPEN = b"""
name = "open"
[workload]
collective = "all-reduce"
size = "1MiB"
duration = "60s"
[[faults]]
kind = "link.flap"
target = ["rtsw1:ctsw1", "rtsw1:ctsw2", "rtsw2:ctsw1"]
at = ["6s", "9s"]
for = "1s"
[[faults]]
kind = "gpu.throttle"
target = "host2:gpu0"
at = "2s"
for = "1s"
set = { percent = 50 }
"""


def planned(seed, content=OPEN):
    experiment = fit(decode(content, source="x"), soft_topology(), "soft")
    return plans.plan(experiment, seed=seed, inventory_digest="ab" * 32, version="0.1.0")


def test_plan_same_inputs_give_the_same_bytes():
    experiment = fit(load(DEMO), soft_topology(), "soft")
    first, second = (plans.encode(plans.plan(experiment, inventory_digest="00", version="0.1.0")) for _ in range(2))

    assert first == second
    assert first.endswith(b"}\n")
    assert plans.encode(plans.decode(first)) == first


def test_plan_draws_are_unchanged():
    """A change here breaks `repro.sh` of every older run: raise the plan's schema if the change is intended."""
    fault = planned(7).faults[1]

    assert (fault.target, fault.at_ns, fault.seed) == ("rtsw1:ctsw1", 8_000_000_000, 1_199_435_989)


def test_planned_faults_contain_the_specs_of_their_entries_in_the_plan():
    resolved = resolve(decode(OPEN, source="x"), OPEN, lab_inventory.load(shipped.inventories() / "soft.yml"), seed=7)

    assert [fault.spec.seed for fault in resolved.faults] == [fault.seed for fault in resolved.plan.faults]
    assert [fault.spec.id for fault in resolved.faults] == ["gpu.throttle", "link.flap"]


@given(st.integers(min_value=0, max_value=2**63 - 1))
def test_plan_draws_stay_inside_the_files_limits(seed):
    fault = planned(seed).faults[1]

    assert 6_000_000_000 <= fault.at_ns <= 9_000_000_000
    assert fault.at_ns % 1_000_000 == 0
    assert fault.target in {"rtsw1:ctsw1", "rtsw1:ctsw2", "rtsw2:ctsw1"}
    assert 0 <= fault.seed < 2**31


def test_plan_draws_depend_on_the_seed():
    assert len({planned(seed).faults[1].at_ns for seed in range(20)}) > 10
    assert {planned(seed).faults[1].target for seed in range(20)} == {
        "rtsw1:ctsw1",
        "rtsw1:ctsw2",
        "rtsw2:ctsw1",
    }


def test_plan_additional_fault_leaves_the_draws_of_the_others():
    more = OPEN + b'[[faults]]\nkind = "packet.drop"\ntarget = "host3:rxe0"\nat = ["20s", "30s"]\nfor = "1s"\n'

    assert planned(3, more).faults[:2] == planned(3).faults


def test_plan_orders_faults_by_time():
    assert [fault.kind for fault in planned(1).faults] == ["gpu.throttle", "link.flap"]
