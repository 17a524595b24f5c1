"""`faultbed routing plan`: what it prints, as text and as JSON, and what it refuses."""

import json

import pytest
from click.testing import CliRunner

from faultbed.harness.cli.main import cli
from faultbed.testbed.errors import FaultbedError
from faultbed.testbed.shipped import inventory_named

RACK = str(inventory_named("rack-h100.example"))


def planned(*words, lab=RACK):
    return CliRunner().invoke(cli, ["--lab", lab, "routing", "plan", *words])


def test_plan_of_one_switch_is_a_console_session_of_frr():
    lines = planned("rtsw1").output.splitlines()

    assert lines[:2] == ["! rtsw1", "configure terminal"]
    assert lines[-2] == "end"
    assert lines[-1].startswith("! then `show ip route` has one next hop")
    assert not any("rtsw2" in line for line in lines)


def test_plan_removes_what_it_applies():
    assert "no route-map FAULTBED_SCHEME_Ethernet128" in planned("rtsw1", "--remove").output.splitlines()


def test_plan_as_json_has_every_switch_with_both_directions():
    answer = json.loads(planned("--scheme", "pinned", "--json").output)

    assert answer["scheme"] == "pinned"
    assert [one["switch"] for one in answer["switches"]] == ["rtsw1", "rtsw2"]
    assert all(one["apply"] and one["remove"] and one["uplink_by_prefix"] for one in answer["switches"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--scheme", "e-ecmp"), "no public release of SONiC can hash on the queue pair"),
        (("rtsw9",), "no switch rtsw9 with a choice of uplinks; did you mean rtsw2?"),
        (("--scheme", "weighted"), "that the switch itself sets (FRR 10.3, tried on a soft lab)"),
    ],
)
def test_plan_refuses_what_cannot_be(words, message):
    refusal = planned(*words).exception

    assert isinstance(refusal, FaultbedError)
    assert message in str(refusal)
