"""What makes two runs different experiments: plan, lab, paths, environment. Equal parts are not listed."""

from __future__ import annotations

import dataclasses

import msgspec
from synthetic_run import changed, synthetic_run

from faultbed.harness.experiment.run_plan import Plan, PlannedFabric
from faultbed.harness.record.evidence.environment import Environment
from faultbed.harness.report.comparison.differences import of_environments, of_labs, of_plans, words

RUN = synthetic_run()
PLAN = Plan(
    faultbed="0",
    experiment="x",
    seed=7,
    inventory="00",
    workload={"size_bytes": 1},
    faults=tuple(f.plan for f in RUN.injected.faults),
)
HERE = Environment(
    faultbed="0",
    git=None,
    python="3.11",
    platform="Linux",
    controller_kernel="6",
    cpu_count=2,
    packages={"numpy": "2.0"},
)


def test_differences_of_equal_runs_are_empty():
    assert of_plans(PLAN, PLAN) == of_labs(RUN, RUN) == of_environments(HERE, HERE) == ()


def test_differences_list_each_decided_field_of_a_fault():
    first, second, third = PLAN.faults
    later = dataclasses.replace(first, at_s=first.at_s + 1, params={"share": 0.5})
    differences = of_plans(PLAN, msgspec.structs.replace(PLAN, faults=(later, third)))
    actual = {difference.what: (difference.a, difference.b) for difference in differences}
    assert actual["uplink: at"] == ("9.37 s", "10.4 s")
    assert actual["uplink: share"] == ("—", "0.5")
    assert actual["loss"][1] == "—"
    assert "packet.drop on host3:rxe0" in actual["loss"][0]
    assert {difference.part for difference in differences} == {"faults"}
    assert words(differences) == ("the faults, or their times",)
    assert second.id == "loss"


def test_captured_ports_are_a_difference():
    (difference,) = of_plans(PLAN, msgspec.structs.replace(PLAN, capture=("rtsw1:ctsw1",)))
    assert (difference.what, difference.b) == ("captured ports", "rtsw1:ctsw1")


def test_differences_list_flows_on_another_uplink():
    moved = msgspec.structs.replace(RUN.workload.connections[1], path=("host2", "rtsw1", "ctsw2", "rtsw2", "host3"))
    other = changed(RUN, connections=(RUN.workload.connections[0], moved, *RUN.workload.connections[2:]))
    (difference,) = of_labs(RUN, other)
    assert (difference.what, difference.b) == ("paths through the fabric", "1 of them took another")
    unknown = changed(RUN, connections=tuple(msgspec.structs.replace(c, path=()) for c in RUN.workload.connections))
    assert of_labs(RUN, unknown) == (), "a way that is not known is not another one"


def test_differences_list_kernels_and_packages():
    other = msgspec.structs.replace(HERE, guest_kernel="6.12", packages={"numpy": "2.1"})
    assert {(one.what, one.a, one.b) for one in of_environments(HERE, other)} == {
        ("guest kernel", "—", "6.12"),
        ("numpy", "2.0", "2.1"),
    }


def test_differences_name_the_firmware_that_changed_on_a_rack():
    parts = {"host1 mlx5_0 firmware": "28.39 (MT_1)", "rtsw1 SONiC": "202411", "host2 GPU driver": "580"}
    here = msgspec.structs.replace(HERE, versions=parts)
    other = msgspec.structs.replace(
        HERE, versions={"host1 mlx5_0 firmware": "28.43 (MT_1)", "rtsw1 SONiC": "202411", "host2 versions": "not read"}
    )
    assert {(one.what, one.a, one.b) for one in of_environments(here, other)} == {
        ("host1 mlx5_0 firmware", "28.39 (MT_1)", "28.43 (MT_1)"),
        ("host2 GPU driver", "580", "—"),
        ("host2 versions", "—", "not read"),
    }


def test_routing_scheme_and_its_parameters_are_a_difference():
    """A comparison used to call two runs equal that differ only in their routing scheme."""
    weighted = PlannedFabric(routing="weighted", fidelity="real", parameters={"weights": {"rtsw1:ctsw1": 2.0}})
    (found,) = of_plans(PLAN, msgspec.structs.replace(PLAN, fabric=weighted))
    assert (found.what, found.a, found.b) == ("routing scheme", "—", "weighted, weights {'rtsw1:ctsw1': 2.0}")
    other = msgspec.structs.replace(weighted, parameters={"weights": {"rtsw1:ctsw1": 3.0}})
    (found,) = of_plans(*(msgspec.structs.replace(PLAN, fabric=one) for one in (weighted, other)))
    assert words((found,))[0].startswith("routing scheme: weighted, weights")
