"""The section [fabric]: read strictly, part of the plan, and refused if the lab cannot apply the scheme."""

import json
import re
from dataclasses import replace

import pytest
from experiment_text import COLLECTIVE, read, refused

from faultbed.harness.experiment import run_plan
from faultbed.harness.run.prepare.bind_to_lab import fit
from faultbed.testbed.errors import FaultbedError
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.routing.schemes import SCHEMES
from faultbed.testbed.shipped import inventories, inventory_named

LABS = {name: lab_inventory.load(inventory_named(name)).topology for name in ("soft-3rack", "soft-mini")}
RACK = lab_inventory.load(inventories() / "rack-h100.example.yml").topology
PLAIN = COLLECTIVE.format("all-reduce", "")
TEXT = PLAIN + "\n[fabric]\n"


def fitted(section, lab="soft-3rack"):
    return fit(read(TEXT + section), LABS[lab], "soft")


def planned(section):
    return run_plan.plan(fitted(section), inventory_digest="0", version="1")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_fabric_section_scheme_is_in_the_plan_with_its_fidelity(scheme):
    plan = json.loads(run_plan.encode(planned(f'routing = "{scheme}"')))["fabric"]

    assert plan["routing"] == scheme
    assert plan["fidelity"] == ("emulated" if scheme == "e-ecmp" else "real")
    assert run_plan.decode(run_plan.encode(planned(f'routing = "{scheme}"'))) == planned(f'routing = "{scheme}"')


def test_fabric_section_plan_has_only_the_schemes_own_parameters():
    assert planned('routing = "e-ecmp"\nqp_hash_seed = 9').fabric.parameters == {"qp_hash_seed": 9}
    assert planned('routing = "resilient"').fabric.parameters == {"buckets": 128}
    assert planned('routing = "weighted"\nweights = { "rtsw1:ctsw1" = 3 }').fabric.parameters == {
        "weights": {"rtsw1:ctsw1": 3}
    }
    assert planned('routing = "spray"').fabric.parameters == {}


def test_fabric_section_absent_leaves_the_plan_unchanged():
    plan = run_plan.plan(fit(read(PLAIN), LABS["soft-3rack"], "soft"), inventory_digest="0", version="1")

    assert "fabric" not in json.loads(run_plan.encode(plan))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("", "fabric: `routing` is missing; add it"),
        ('routing = "sprey"', 'fabric.routing: no routing "sprey"; did you mean spray?'),
        ('routnig = "spray"', 'fabric: no key "routnig" here; did you mean routing?'),
        (
            'routing = "spray"\nqp_hash_seed = 3',
            "fabric.qp_hash_seed: is a parameter of e-ecmp, not of spray; remove it",
        ),
        ('routing = "ecmp"\nbuckets = 64', "fabric.buckets: is a parameter of resilient, not of ecmp; remove it"),
        ('routing = "e-ecmp"\nqp_hash_seed = 0', "fabric.qp_hash_seed"),
        ('routing = "resilient"\nbuckets = 1', "fabric.buckets"),
        ('routing = "weighted"\nweights = { "rtsw1:ctsw1" = 0 }', "fabric.weights"),
    ],
)
def test_fabric_section_invalid_value_is_rejected_with_its_path(section, message):
    assert message in str(refused(TEXT + section))


def test_fabric_section_weight_of_an_unknown_link_names_the_nearest_link():
    with pytest.raises(FaultbedError, match=re.escape('fabric.weights: no link between switches "rtsw1:ctsw9"')):
        fitted('routing = "weighted"\nweights = { "rtsw1:ctsw9" = 3 }')


def test_fabric_section_buckets_fewer_than_next_hops_are_refused():
    topology = LABS["soft-3rack"]
    third = [
        replace(link, a=replace(link.a, netdev="ctsw3"), b=replace(link.b, node="ctsw3"))
        for link in topology.uplinks
        if link.b.node == "ctsw2"
    ]
    switches = (*topology.switches, replace(topology.switch_by_name["ctsw2"], name="ctsw3"))
    wide = replace(topology, switches=switches, links=(*topology.links, *third))
    text = TEXT + 'routing = "resilient"\nbuckets = {}'
    fit(read(text.format(3)), wide, "soft")
    message = (
        "fabric.buckets: 2 is less than the 3 next hops of a group, so that one would have no bucket; write at least"
    )
    with pytest.raises(FaultbedError, match=message):
        fit(read(text.format(2)), wide, "soft")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_fabric_section_scheme_needs_a_lab_with_a_choice_of_paths(scheme):
    with pytest.raises(FaultbedError, match=f"fabric.routing: {scheme}: no switch of this lab has two next hops"):
        fitted(f'routing = "{scheme}"', "soft-mini")


def test_fabric_section_rank_behind_a_single_uplink_is_rejected_by_name():
    topology = LABS["soft-3rack"]
    cut = replace(topology, links=tuple(link for link in topology.links if link.name != "rtsw3:ctsw2"))
    with pytest.raises(
        FaultbedError, match="needs two uplinks of every rank's switch; rtsw3, the switch of host5:rxe0"
    ):
        fit(read(TEXT + 'routing = "pinned"'), cut, "soft")


def test_fabric_section_looks_only_at_the_rnics_of_the_workload():
    """The second RNIC of host1 is at a switch with one uplink, which matters only if a rank uses it."""
    topology = LABS["soft-3rack"]
    links = [link for link in topology.links if link.name != "rtsw3:ctsw2"]
    at = [link.name for link in links].index("rtsw1:host1:rxe1")
    links[at] = replace(links[at], a=replace(links[at].a, node="rtsw3"))
    moved = replace(topology, links=tuple(links))
    text = COLLECTIVE.format("all-reduce", 'ranks = ["host1:{0}", "host3:{0}"]') + '[fabric]\nrouting = "pinned"\n'

    fit(read(text.format("rxe0")), moved, "soft")
    with pytest.raises(FaultbedError, match="rtsw3, the switch of host1:rxe1, has one uplink"):
        fit(read(text.format("rxe1")), moved, "soft")


def test_fabric_section_on_a_rack_is_rejected_with_the_command_that_plans_it():
    with pytest.raises(
        FaultbedError, match=r"fabric.routing: faultbed does not .*`faultbed routing plan --scheme pinned`"
    ):
        fit(read(TEXT + 'routing = "pinned"'), RACK, "rack")
