"""The playbooks' own programs, as far as they can be tested without a node, and the action that runs them."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from house import HOUSE

from faultbed.testbed.inventory.soft_presets import PRESETS, _tree
from faultbed.testbed.provision import RACK_DEADLINE_S, roles_of
from faultbed.testbed.shipped import inventories, playbooks

BIN = Path(sys.executable).parent


@pytest.fixture
def program(monkeypatch):
    """Import one of our files as Ansible or a node would."""
    monkeypatch.syspath_prepend(str(playbooks() / "module_utils"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def load(path):
        spec = importlib.util.spec_from_file_location(f"under_test_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in (
        "faultbed_state",
        "faultbed_frr",
        "faultbed_shapes",
        "faultbed_saved",
        "faultbed_dcb",
        "faultbed_fabric_bgp",
    ):
        sys.modules.pop(name, None)


def switches(preset):
    groups = _tree(PRESETS[preset])["all"]["children"]["switches"]["children"]
    return [
        {"name": name, **{key.removeprefix("faultbed_"): value for key, value in variables.items()}}
        for group in groups.values()
        for name, variables in group["hosts"].items()
    ]


@pytest.mark.process
def test_playbooks_are_well_formed():
    files = sorted(playbooks().glob("*.yml"))
    assert {path.name for path in files} == {"provision.yml", "verify.yml", "rack.yml", "rack-teardown.yml"}
    argv = [BIN / "ansible-playbook", "--syntax-check", "-i", inventories() / "soft.yml", *files]
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr


@pytest.mark.process
def test_rack_playbook_has_every_role_that_is_not_soft_lab_only_with_its_tag():
    soft = {"roce_host", "fabric_switch", "soft_gpu", "node_code", "verify_host", "verify_fabric"}
    there = {path.name for path in (playbooks() / "roles").iterdir()}
    assert set(roles_of("rack")) == there - soft - {"host_teardown"}
    argv = [BIN / "ansible-playbook", "--list-tasks", "-i", inventories() / "rack-h100.example.yml"]
    environment = {"PATH": f"{BIN}:/usr/bin:/bin", "HOME": "/", "ANSIBLE_CONFIG": str(playbooks() / "ansible.cfg")}
    environment |= {
        f"ANSIBLE_{kind}_PLUGINS": str(playbooks() / f"{kind.lower()}_plugins") for kind in ("ACTION", "FILTER")
    }
    done = subprocess.run(
        [*map(str, argv), str(playbooks() / "rack.yml")], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    listed = re.findall(r"^ +(\w+) : .*TAGS: \[(.*)\]$", done.stdout, re.MULTILINE)
    assert {role for role, _ in listed} == set(roles_of("rack"))
    assert all(tags in {role, f"always, {role}"} for role, tags in listed)


@pytest.mark.parametrize("name", ["rack", "rack-teardown"])
def test_rack_playbook_deadline_exceeds_the_sum_of_its_tasks(name):
    """If Ansible abandons an apt-get halfway, the host is broken."""
    tasks = [
        task["ansible.legacy.on_node"]
        for role in roles_of(name)
        for task in yaml.safe_load((playbooks() / f"roles/{role}/tasks/main.yml").read_text())
    ]
    assert sum(task.get("timeout_s", 60) for task in tasks) <= RACK_DEADLINE_S


def test_ansible_lint_is_locked_and_run_by_make_lint():
    """Linting itself takes most of a minute, too long for this suite, so only its configuration is checked here."""
    assert "ansible-lint==" in (HOUSE / "requirements.lock").read_text()
    recipe = (HOUSE / "Makefile").read_text().partition("\nlint: ")[2].partition("\n\n")[0]
    assert "ansible-lint" in recipe
    output = yaml.safe_load((playbooks() / ".ansible-lint").read_text())
    assert (output["profile"], output["skip_list"]) == ("production", ["fqcn[canonical]"])


def test_rack_switch_has_every_far_prefix_over_every_uplink(program):
    next_hop_counts = program(playbooks() / "roles/verify_fabric/files/verify_fabric.py").next_hop_counts
    lab = switches("soft")
    result = next_hop_counts(lab[0], lab)
    assert {result[f"10.77.2.{even}/31"] for even in (0, 2, 4, 6)} == {2}
    assert result["10.78.0.2/32"] == 2  # the other RTSW, over both CTSWs
    assert result["10.78.0.101/32"] == 1  # a CTSW is one hop away, and the path around the ring is longer
    assert "10.77.1.0/31" not in result


def test_verify_fabric_spine_has_one_next_hop_per_rack(program):
    next_hop_counts = program(playbooks() / "roles/verify_fabric/files/verify_fabric.py").next_hop_counts
    lab = switches("soft-3rack")
    spine = next(switch for switch in lab if switch["name"] == "ctsw1")
    result = next_hop_counts(spine, lab)
    assert {count for prefix, count in result.items() if prefix.startswith("10.77.")} == {1}
    assert "10.78.0.102/32" not in result, "the other CTSW has the same ASN: no route goes down and up again"


def test_bgp_runs_on_uplinks_only(program):
    config = program(playbooks() / "module_utils/faultbed_frr.py").bgpd_config(switches("soft")[0])
    assert " neighbor ctsw1 interface peer-group fabric" in config
    assert " neighbor ctsw2 interface peer-group fabric" in config
    assert "host1" not in config
    assert "router bgp 65101" in config


def test_spine_of_a_zone_expects_no_route_to_one_with_its_asn(program):
    next_hop_counts = program(playbooks() / "roles/verify_fabric/files/verify_fabric.py").next_hop_counts
    lab = switches("soft-zones")
    result = next_hop_counts(next(switch for switch in lab if switch["name"] == "ctsw1"), lab)
    assert "10.78.0.102/32" not in result
    assert result["10.78.0.103/32"] == 2
    assert result["10.77.4.0/31"] == 2


class Changes:
    def __init__(self, *, check=False):
        self.check, self.made = check, []

    def should_make(self, name):
        self.made.append(name)
        return not self.check


def qdiscs(rate, *, kind="netem"):
    """Return what `tc -j qdisc show` prints for a port with these shapes (bytes/s), and for its other queues."""
    options = {"limit": 64, "delay": {"delay": 0.0005, "jitter": 0, "correlation": 0}, "rate": {"rate": rate}}
    return json.dumps(
        [
            {"kind": "prio", "handle": "1:", "dev": "up", "root": True, "options": {"bands": 2}},
            {"kind": kind, "handle": "20:", "dev": "up", "parent": "1:2", "options": options},
            {"kind": "clsact", "handle": "ffff:", "dev": "up", "parent": "ffff:fff1"},
        ]
    )


def test_shaped_port_is_left_alone_and_any_other_one_is_shaped(program, monkeypatch):
    module = program(playbooks() / "module_utils/faultbed_shapes.py")
    ran, shape = [], {"rate_bps": 8_000_000, "packets": 64, "delay_us": 500}
    answers = {"now": qdiscs(1_000_000)}

    def run(argv, *, stdin=None):
        ran.extend((stdin or "").splitlines())
        return answers["now"]

    monkeypatch.setattr(module, "run", run)
    for answer, commands in ((qdiscs(1_000_000), 0), (qdiscs(999), 3), (qdiscs(1_000_000, kind="pfifo"), 3), ("[]", 3)):
        answers["now"], changes = answer, Changes()
        ran.clear()
        module.shape_ports({"up": shape}, changes, namespace="ctsw1")
        assert len(ran) == len(changes.made) == commands
        wrong = module.wrong_shapes({"name": "ctsw1", "netns": "ctsw1"}, {"up": shape})
        assert [line.partition(" ")[0] for line in wrong] == ["ctsw1:up"] * bool(commands)
    assert "netem limit 64 delay 500us rate 8000000bit" in ran[1]
    ran.clear()
    module.shape_ports({"up": shape}, Changes(check=True), namespace="ctsw1")
    assert ran == []


def on_node(tmp_path, source, **arguments):
    """Run a program through the action on this machine, as a playbook would; returns Ansible's result."""
    role = tmp_path / "files"
    role.mkdir()
    (role / "program.py").write_text(source)
    result = tmp_path / "result.json"
    tasks = [
        {
            "ansible.legacy.on_node": {"program": "program.py", **arguments},
            "register": "result",
            "ignore_errors": True,
        },
        {"ansible.builtin.copy": {"content": "{{ result | to_json }}", "dest": str(result), "mode": "0600"}},
    ]
    play = [{"hosts": "localhost", "gather_facts": False, "tasks": tasks}]
    (tmp_path / "play.json").write_text(json.dumps(play))
    environment = {
        "PATH": f"{BIN}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "ANSIBLE_ACTION_PLUGINS": str(playbooks() / "action_plugins"),
        "ANSIBLE_CONFIG": str(playbooks() / "ansible.cfg"),
        "LC_ALL": "C.UTF-8",
    }
    argv = [str(BIN / "ansible-playbook"), "-i", "localhost,", "-c", "local", str(tmp_path / "play.json")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)
    assert result.exists(), done.stdout + done.stderr
    return json.loads(result.read_text())


@pytest.mark.process
@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="nodes have /usr/bin/python3, this machine does not")
class TestOnNode:
    def test_program_gets_its_desired_state_and_reports_its_changes(self, tmp_path):
        (tmp_path / "blob").write_bytes(b"\x00\xff")
        source = (
            "from faultbed_state import answer\n"
            "def main(desired, check):\n"
            "    answer(work, desired, check=check)\n"
            "def work(desired, changes):\n"
            "    changes.should_make('x ' + desired['text'] + desired['files']['blob'])\n"
        )
        arguments = {"desired": {"text": 'it\'s "q" \\ {} é'}, "files": {"blob": str(tmp_path / "blob")}}
        result = on_node(tmp_path, source, **arguments)
        assert result["changed"] is True
        assert result["changes"] == ['x it\'s "q" \\ {} éAP8=']

    def test_state_that_cannot_be_reached_is_the_task_s_failure(self, tmp_path):
        source = (
            "from faultbed_state import StateError, answer\n"
            "def main(desired, check):\n"
            "    answer(work, desired, check=check)\n"
            "def work(desired, changes):\n"
            "    raise StateError('no wire')\n"
        )
        result = on_node(tmp_path, source)
        assert result["failed"] is True
        assert result["msg"] == "no wire"

    def test_program_failure_is_reported_with_its_last_output(self, tmp_path):
        result = on_node(tmp_path, "def main(desired, check):\n    raise ValueError('surprise')\n")
        assert result["failed"] is True
        assert "program ended with 1" in result["msg"]
        assert "surprise" in result["msg"]

    def test_program_that_hangs_is_terminated(self, tmp_path):
        source = "import signal\ndef main(desired, check):\n    signal.pause()\n"
        result = on_node(tmp_path, source, timeout_s=1)
        assert "program did not end within 1 s" in result["msg"]


ON_NODE = """\
from pathlib import Path
from ansible.plugins.action import ActionBase

class ActionModule(ActionBase):
    def run(self, tmp=None, task_vars=None):
        name = task_vars["inventory_hostname"]
        with Path({log!r}).open("a") as log:
            log.write(name + "\\n")
        return {{"failed": name == {failing!r}, "msg": "BGP is not established again", "changed": True}}
"""


@pytest.mark.process
def test_switch_that_is_not_healthy_again_leaves_the_others_untouched(tmp_path):
    """The play of all switches, with a program that fails on the second one."""
    for name in ("roles", "filter_plugins", "module_utils", "rack.yml", "ansible.cfg"):
        (tmp_path / name).symlink_to(playbooks().resolve() / name)
    (tmp_path / "action_plugins").mkdir()
    log = tmp_path / "log"
    (tmp_path / "action_plugins" / "on_node.py").write_text(ON_NODE.format(log=str(log), failing="rtsw2"))
    argv = [BIN / "ansible-playbook", "-i", inventories() / "rack-h100.example.yml", "-l", "switches"]
    environment = {
        "PATH": f"{BIN}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg"),
    }
    done = subprocess.run(
        [*map(str, argv), str(tmp_path / "rack.yml")], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 2, done.stdout
    assert log.read_text().split() == ["rtsw1", "rtsw2"], done.stdout
