"""The script that heals a machine is valid shell, and does not touch what may belong to other users."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from types import SimpleNamespace

import pytest
from planned_faults import SOFT, assert_shell

from faultbed.inject.heal import script
from faultbed.testbed.observe.fingerprint import Fingerprint
from faultbed.testbed.tenancy import dirty


def healed(tmp_path, kind="soft", topology=SOFT):
    return SimpleNamespace(
        topology=topology,
        kind=kind,
        state_dir=tmp_path,
        carrier=lambda name: SimpleNamespace(name=name),
        netns=lambda _: None,
    )


def test_heal_script_parses_and_has_every_mark(tmp_path):
    """This covers the script of every machine, with all its marks."""
    text = script(healed(tmp_path), "rtsw1")
    assert_shell(text)
    assert all(mark in text for mark in ("faultbed-fault-", "faultbed_", "fbvia", "cpu.max", "faultbed-hog"))
    assert "ip link set dev ctsw1 up" in text
    assert "not ours: rtsw1" not in text


def test_heal_script_leaves_a_rack_port_that_may_be_in_maintenance(tmp_path):
    """Only ports that were up before the run that left the lab DIRTY are brought up; the others are listed."""
    lab = healed(tmp_path, "rack")
    text = script(lab, "rtsw1")
    assert_shell(text)
    assert "link set dev" not in text
    assert "not ours: rtsw1:ctsw1 is down" in text
    before = {"rtsw1": {"link ctsw1": "UP LOWER_UP mtu 4200", "link ctsw2": "mtu 4200"}}
    dirty.mark(tmp_path, ["a port is down"], Fingerprint(nodes=before))
    text = script(lab, "rtsw1")
    assert_shell(text)
    assert "ip link set dev ctsw1 up" in text
    assert "ip link set dev ctsw2 up" not in text
    assert "not ours: rtsw1:ctsw2 is down" in text


@pytest.mark.parametrize(
    ("kind", "argument", "goes_on"),
    [("soft", "somebody", True), ("rack", "somebody", False), ("rack", "faultbed.traffic.node.engine", True)],
)
def test_heal_script_continues_only_our_stopped_processes(tmp_path, kind, argument, goes_on):
    """A real process is stopped: on a rack heal continues it only if it is a program of ours."""
    program = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        ["python3", "-c", program, argument], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            process.stdout.readline()
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            bare = SimpleNamespace(links=(), switches=(), host_by_name={})
            loop = re.search(r"for f in /proc/.*?\ndone\n", script(healed(tmp_path, kind, bare), "host1"), re.DOTALL)
            only = loop[0].replace("/proc/[0-9]*/stat", f"/proc/{process.pid}/stat")
            output = subprocess.run(["sh", "-c", only], capture_output=True, text=True, check=True, timeout=20).stdout
        finally:  # a stopped process would never end by itself
            process.kill()
    assert output.startswith(f"{'healed:' if goes_on else 'not ours:'} process {process.pid} (python3")
