"""Capabilities of a rack: what preflight reports in advance, and what the holders' own code reports per target."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest
from click.testing import CliRunner
from house import HOUSE
from rack_state import rack_state

from faultbed.harness.cli.main import cli
from faultbed.inject import capability
from faultbed.inject.fault_plan import plan
from faultbed.inject.kinds.catalogue import CATALOGUE
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.mechanisms.rack import MECHANISMS
from faultbed.inject.mechanisms.rack.rack_mechanism import typed_command
from faultbed.inject.node import probe
from faultbed.testbed.errors import Unreachable
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.preflight.checks import run_checks, unchecked_parts
from faultbed.testbed.preflight.rack_checks import RACK_CHECKS
from faultbed.testbed.preflight.rack_formats import keeps_up
from faultbed.testbed.remote.remote_node import Completed
from faultbed.testbed.shipped import inventories

RACK = lab_inventory.load(inventories() / "rack-h100.example.yml")


class Machines:
    """A rack whose machines run all commands here, with stand-ins in PATH. The `silent` machines do not answer."""

    kind = "rack"
    topology = RACK.topology

    def __init__(self, *silent):
        self.silent = silent
        self.one_at_a_time = threading.Lock()  # the stand-ins share one state file

    def ensure_code(self, node):
        if node in self.silent:
            raise Unreachable(f"{node} does not answer")

    def python(self, module):
        return [sys.executable, "-m", module]

    def carrier(self, node):
        return self

    def run(self, argv, *, stdin, timeout_s, check):
        with self.one_at_a_time:
            done = subprocess.run(
                argv, input=stdin, text=True, capture_output=True, timeout=timeout_s, check=check, cwd=HOUSE
            )
        return Completed(argv=tuple(argv), rc=done.returncode, stdout=done.stdout, stderr=done.stderr)


def capability_at(capabilities, kind, target):
    (answer,) = [answer for answer in capabilities if (answer.kind, answer.target) == (kind, target)]
    return answer


def test_capability_every_rack_kind_has_a_target_in_the_example_lab():
    for name in MECHANISMS:
        if name in CATALOGUE:
            assert list(capability.targets_of(CATALOGUE[name], RACK.topology)), name


@pytest.mark.process
def test_query_capabilities_returns_each_machines_answer_and_changes_nothing(tools):
    state = json.loads(tools.read_text())
    tools.write_text(json.dumps(state | {"keep_up": "True(1)", "asic": "vs"}))
    before = tools.read_text()
    kinds = [CATALOGUE[name] for name in ("link.flap", "link.rate", "switch.withdraw", "packet.reorder")]
    lab = Machines("host2", "rtsw2", "rtsw3", "rtsw4", "host3", "host4")
    result = capability.query_capabilities(lab, kinds)
    assert tools.read_text() == before
    assert capability_at(result, "switch.withdraw", "rtsw1").can == "yes"
    kept_up = capability_at(result, "link.flap", "host1:mlx5_0")
    assert (kept_up.can, "KEEP_ETH_LINK_UP_P1=0" in kept_up.why) == ("no", True)
    assert "rtsw1:host1:mlx5_0" in kept_up.why, "the reason names a target that works"
    assert capability_at(result, "link.flap", "rtsw1:host1:mlx5_0").can == "yes"
    shaped = capability_at(result, "link.rate", "rtsw1:host1:mlx5_0")
    assert (shaped.can, "orchagent" in shaped.why) == ("no", True)
    assert "it needs a Linux switch" in capability_at(result, "packet.reorder", "rtsw1:host1:mlx5_0").why
    silent = capability_at(result, "link.flap", "host2:mlx5_0")
    assert (silent.can, silent.why) == ("unknown", "host2 does not answer")
    rows = capability.summary(result)
    assert len(rows) < len(result)
    assert any(row[1] == "unknown" and "more" in row[2] for row in rows)


def test_ability_probe_on_an_old_python_reports_the_required_version(monkeypatch):
    monkeypatch.setattr(probe, "OLDEST", (9, 0))
    assert "faults need 3.9 (SONiC 202111) or later" in probe.able({"actuator": "commands", "args": {}})["why"]


def test_probe_names_the_missing_program(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    args = {"netns": None, "path": [], "line": "redistribute connected"}
    assert probe.able({"actuator": "frr", "args": args})["why"].startswith("there is no vtysh here")


def test_plan_shows_commands_with_program_names_instead_of_placeholders():
    spec = FaultSpec(kind="link.flap", target="host1:mlx5_0", for_s=20.0, params={"period": 8})
    args = plan(spec, RACK.topology, lab_kind="rack").request["args"]
    assert typed_command(args["look"], args["needs"]).startswith("sh -c 'mlxlink -d 0000:18:00.0")
    assert typed_command(args["able"][1][0], args["needs"]).startswith("mlxconfig -d")


@pytest.mark.parametrize("as_json", [False, True])
def test_plan_shows_the_first_counters_of_a_witness_and_json_all(as_json):
    """A withdrawn prefix may show at every RNIC of a rack: the line had 3.4 kB on the example rack."""
    argv = ["--lab", str(RACK.path), "inject", "switch.withdraw", "rtsw1", "--for", "5s", "--plan"]
    done = CliRunner().invoke(cli, [*argv, *(["--json"] if as_json else [])])
    assert done.exit_code == 0, done.output
    planned = plan(FaultSpec(kind="switch.withdraw", target="rtsw1", for_s=5.0), RACK.topology, lab_kind="rack")
    (witness,) = planned.mechanism.must_move
    shown = [key for key in witness.any_of if key in done.output]
    if as_json:
        assert shown == list(witness.any_of)
    else:
        assert shown == list(witness.any_of[:6])
        assert f"or {len(witness.any_of) - 6} more (--json lists them)" in done.output


def test_probe_rejects_an_unknown_request():
    assert not probe.able({"actuator": "commands", "args": {"nonsense": 1}})["able"]
    assert "unknown actuator" in probe.able({"actuator": "no-such", "args": {}})["why"]


MISSING_CAPABILITIES = [
    ("host1", "tool mlxlink: mstlink", "", "no mlxlink"),
    ("host1", "tool dcgmi: dcgmi", "", "no dcgmi: needed for gpu.xid"),
    ("host1", "[none] integrity", "none [integrity]", "locked down"),
    ("rtsw1", "SONiC.202405", "SONiC.202111", "need 202205"),
    ("rtsw1", "SONiC.202405", "SONiC.202211", "switch.hash-policy needs 202311"),
    ("rtsw1", "SONiC.202405", "SONiC.master", "it does not report its release"),
    ("rtsw1", "asic: broadcom", "asic: vs", "ASIC vs may not shape a port; link.rate"),
    ("rtsw1", "acl EGRESS: PACKET_ACTION,COUNTER", "acl EGRESS: None", "drops at egress"),
    ("rtsw1", "restart: enabled", "restart: always_enabled", "switch.bgp-kill"),
    ("rtsw1", "python: Python 3.11.2", "", "its version of Python"),
]


@pytest.mark.parametrize(("node", "old", "new", "words"), MISSING_CAPABILITIES)
def test_preflight_reports_a_missing_capability_with_its_effect_on_faults(node, old, new, words):
    state = rack_state()
    assert old in state[node].raw["able"]
    state[node].raw["able"] = state[node].raw["able"].replace(old, new)
    assert run_checks(RACK, state, RACK_CHECKS) == []
    (unchecked,) = unchecked_parts(RACK, state, RACK_CHECKS)
    assert (unchecked.check, unchecked.where) == ("abilities", node)
    assert words in unchecked.why


def test_preflight_reports_an_old_python():
    state = rack_state()
    state["rtsw2"].raw["able"] = state["rtsw2"].raw["able"].replace("3.11.2", "3.7.3")
    (finding,) = run_checks(RACK, state, RACK_CHECKS)
    assert (finding.check, finding.where, finding.observed) == ("abilities", "rtsw2", "Python 3.7.3")


def test_preflight_names_ports_kept_up_and_dcbx_controlled_by_firmware():
    state = rack_state()
    state["host1"].raw["keep-up mlx5_0"] = (
        "Configurations:              Default             Current             Next Boot\n"
        "*       KEEP_ETH_LINK_UP_P1         True(1)             True(1)             False(0)            \n"
    )
    state["host1"].raw["qos mlx5_1"] = (
        state["host1"].raw["qos mlx5_1"].replace("DCBX mode: OS controlled", "DCBX mode: Firmware controlled")
    )
    reasons = {part.where: part.why for part in unchecked_parts(RACK, state, RACK_CHECKS)}
    assert "keeps the port up" in reasons["host1:mlx5_0"]
    assert "-d os" in reasons["host1:mlx5_1"]


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        ("        KEEP_ETH_LINK_UP_P1    True(1)   False(0)   True(1) \n", False),
        (" RO     KEEP_ETH_LINK_UP_P2    False(0)  True(1)    True(1) \n", True),
        ("        KEEP_ETH_LINK_UP_P1    True(1) \n", None),
        ("-E- Failed to open device: 18:00.0. No such file or directory.\n", None),
        ("", None),
    ],
)
def test_firmware_setting_in_force_is_the_current_column(row, kept):
    assert keeps_up(row) is kept
