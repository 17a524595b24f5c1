"""The section [bystander]: read strictly, part of the plan, and refused if it would share RNICs with the workload."""

import json

import pytest
from experiment_text import read, refused
from synthetic_run import soft_topology

from faultbed.harness.experiment import run_plan
from faultbed.harness.report.comparison.differences import of_plans
from faultbed.harness.run.prepare.bind_to_lab import fit
from faultbed.harness.run.prepare.resolve import resolve, touched
from faultbed.testbed.errors import ConfigError
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.shipped import inventories

SOFT = lab_inventory.load(inventories() / "soft.yml")
RANKS = 'ranks = ["host1:rxe0", "host3:rxe0"]'
PLAIN = f'name = "x"\n[workload]\ncollective = "all-reduce"\nsize = "1MiB"\niterations = 30\n{RANKS}\n'
OTHERS = 'src = "host2:rxe1"\ndst = "host4:rxe1"'
TEXT = PLAIN + "[bystander]\n{}\n"
FAULT = '[[faults]]\nid = "loss"\nkind = "{}"\ntarget = "{}"\nat = "5s"\nfor = "3s"\n{}\n'


def planned(section):
    fitted = fit(read(TEXT.format(section)), soft_topology(), "soft")
    return run_plan.plan(fitted, inventory_digest="0", version="1")


def test_bystander_is_in_the_plan_with_its_rnics_and_absent_without_a_section():
    plan = planned('src = "host[1]:rnic[1]"\ndst = "host4:rxe1"\nsize = "16KiB"\nrate = "4Mb/s"')

    flow = json.loads(run_plan.encode(plan))["bystander"]
    assert flow == flow | {
        "src": "host2:rxe1",
        "dst": "host4:rxe1",
        "verb": "write",
        "message_bytes": 16384,
        "qps": 1,
        "depth": 4,
        "rate_bps": 4e6,
    }
    assert run_plan.decode(run_plan.encode(plan)) == plan
    without = run_plan.plan(fit(read(PLAIN), soft_topology(), "soft"), inventory_digest="0", version="1")
    assert "bystander" not in json.loads(run_plan.encode(without))
    (difference,) = of_plans(without, plan)
    assert (difference.what, difference.b) == (
        "bystander",
        "1 x 4 write of 16 KiB host2:rxe1 to host4:rxe1 at 4 Mb/s",
    )


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ('src = "host2:rxe1"', "bystander: `dst` is missing; add it"),
        (f'{OTHERS}\nsise = "4KiB"', 'bystander: no key "sise" here; did you mean size?'),
        (f'{OTHERS}\nflow = "wriet"', 'bystander.flow: no flow "wriet"; did you mean write?'),
        (f'{OTHERS}\nsize = "0B"', "bystander.size: "),
        (f"{OTHERS}\nrate = nan", "bystander.rate: "),
        (
            'src = "host1:rxe0"\ndst = "host4:rxe1"',
            "bystander.src: host1:rxe0 is already used by the workload; choose one of host1:",
        ),
        (
            'src = "host2:rxe1"\ndst = "host2:rxe1"',
            "bystander.dst: src and dst are the same RNIC (host2:rxe1); choose two",
        ),
        ('src = "host2:rxe1"\ndst = "host9:rxe1"', "bystander.dst: "),
        ('src = "rnic[*]"\ndst = "host4:rxe1"', "bystander.src: "),
    ],
)
def test_bystander_section_is_refused_with_its_path(section, message):
    assert f"x.toml: {message}" in refused(TEXT.format(section))


def test_bystander_metric_without_a_bystander_is_refused():
    message = refused(PLAIN + '[[expect]]\nmetric = "bystander.gap"\nmax = "1s"\n')
    assert message == "x.toml: expect[0].metric: bystander.gap needs a bystander: add [bystander] with src and dst"


@pytest.mark.parametrize(
    ("kind", "target", "parameters", "where"),
    [
        ("host.freeze", "host2", "", "host2"),
        ("link.down", "host4:rxe1", "", "host4:rxe1"),
        ("packet.drop", "rtsw1:host2:rxe1", "set = { share = 0.1 }", "rtsw1:host2:rxe1"),
    ],
)
def test_fault_of_the_bystander_itself_is_refused(kind, target, parameters, where):
    text = TEXT.format(OTHERS) + FAULT.format(kind, target, parameters)
    with pytest.raises(ConfigError, match=r"faults\[0\]: .* which the bystander uses") as caught:
        resolve(read(text), text.encode(), SOFT)
    assert f"affects {where}, " in str(caught.value)


@pytest.mark.parametrize("target", ["rtsw1:host1:rxe0", "rtsw1:ctsw1"])
def test_fault_off_the_bystanders_path_is_accepted_and_the_bystanders_hosts_are_reserved(target):
    text = TEXT.format(OTHERS) + FAULT.format("packet.drop", target, "set = { share = 0.1 }")
    resolved = resolve(read(text), text.encode(), SOFT)
    assert {"host1", "host2", "host3", "host4"} <= set(touched(resolved, SOFT.topology))
