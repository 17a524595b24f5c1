"""One switch at a time, by Ansible itself: rack.yml as it is, on switches of which one does not become healthy.

What is a stand-in: the machines, which are this one (connection `local`), and the program of each role, which records
its switch and fails for one of them, as the role's own does when BGP does not return (test_sonic_tables.py, and
test_rack_switches.py of the unit tests).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from faultbed.testbed.shipped import playbooks

pytestmark = pytest.mark.process

NAMES = [f"rtsw{number}" for number in range(1, 11)]
LINUX = ["ctsw1", "ctsw2"]
PROGRAM = """\
import json, pathlib
def main(desired, check):
    with pathlib.Path(desired["log"]).open("a") as log:
        log.write(desired["name"] + "\\n")
    failed = {"failed": True, "msg": "BGP with Ethernet128 is not established again"}
    print(json.dumps(failed if desired["name"] == desired["fails"] else {"changed": True, "changes": ["x"]}))
"""
TASK = """\
- name: Configure
  ansible.legacy.on_node:
    program: {role}.py
    desired: {{name: "{{{{ inventory_hostname }}}}", log: "{{{{ log }}}}", fails: "{{{{ fails }}}}"}}
"""


@pytest.fixture
def rack(tmp_path):
    """Return a function that runs rack.yml on ten SONiC and two Linux switches; it returns the switches in order."""
    shutil.copy(playbooks() / "rack.yml", tmp_path)
    shutil.copytree(playbooks() / "action_plugins", tmp_path / "action_plugins")
    (tmp_path / "module_utils").mkdir()
    for role in (path.name for path in (playbooks() / "roles").iterdir()):
        (tmp_path / f"roles/{role}/tasks").mkdir(parents=True)
        (tmp_path / f"roles/{role}/files").mkdir()
        (tmp_path / f"roles/{role}/tasks/main.yml").write_text(TASK.format(role=role))
        (tmp_path / f"roles/{role}/files/{role}.py").write_text(PROGRAM)
    kinds = [("sonic", name) for name in NAMES] + [("frr", name) for name in LINUX]
    machines = {name: {"ansible_connection": "local", "faultbed_nos": kind} for kind, name in kinds}
    inventory = {"all": {"children": {"switches": {"hosts": machines}, "hosts": {}}}}
    (tmp_path / "lab.json").write_text(json.dumps(inventory))

    def run(fails):
        log = tmp_path / "log"
        log.write_text("")
        argv = [Path(sys.executable).with_name("ansible-playbook"), "-i", "lab.json", "rack.yml"]
        done = subprocess.run(
            [*argv, "-e", json.dumps({"log": str(log), "fails": fails})],
            cwd=tmp_path,
            env={**os.environ, "ANSIBLE_HOME": str(tmp_path / "home"), "LC_ALL": "C.UTF-8"},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        return log.read_text().split(), done

    return run


@pytest.mark.parametrize("fails", [*NAMES, *LINUX])
def test_switch_that_is_not_healthy_leaves_the_switches_after_it_untouched(rack, fails):
    touched, done = rack(fails)
    order = [*NAMES, *LINUX]
    assert touched == order[: order.index(fails) + 1], done.stdout[-2000:]
    assert done.returncode != 0
    assert "BGP with Ethernet128 is not established again" in done.stdout


def test_healthy_switches_are_all_configured_one_after_the_other(rack):
    touched, done = rack("none")
    assert touched == [*NAMES, *LINUX], done.stdout[-2000:]
    assert done.returncode == 0
