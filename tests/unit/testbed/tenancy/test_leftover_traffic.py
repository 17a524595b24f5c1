"""Traffic that another command starts during a manual fault is not a leftover of that fault."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from house import HOUSE, SUPPORT
from local_lab import SOFT

from faultbed.testbed.observe import fingerprint
from faultbed.testbed.observe.fingerprint import Fingerprint
from faultbed.testbed.tenancy.lab_lease import hold

QUIET = Fingerprint(nodes={"host1": {"link be0": "UP"}, "host2": {"link be0": "UP"}})
TRAFFIC = {"program faultbed.traffic.node.engine": "1 running", "rdma resources python3": "3 mr, 2 qp"}

IN_ANOTHER_SHELL = """
import sys
from local_lab import SOFT
from faultbed.testbed.tenancy.lab_lease import hold
with hold(SOFT, ["host1"], why="traffic flow", mode="shared"):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def left(monkeypatch):
    """Return the differences of a quiet lab that now looks like `nodes`, while commands `held_by_others` run."""
    monkeypatch.setattr(fingerprint, "SETTLE_S", 0.0)
    monkeypatch.setattr(fingerprint, "QUIET_S", 0.0)

    def compare(nodes, held_by_others):
        lab = SimpleNamespace(reserved=("*",), held_by_others=lambda: held_by_others)
        monkeypatch.setattr(fingerprint, "capture", lambda _: Fingerprint(nodes={**QUIET.nodes, **nodes}))
        return fingerprint.settle(lab, QUIET, within_s=0.0)

    return compare


def test_traffic_of_a_live_command_is_no_leftover(left):
    """A flow in another shell began during an `inject` and outlasted it. The lab used to be called DIRTY."""
    assert left({"host1": {**QUIET.nodes["host1"], **TRAFFIC}}, ("host1",)) == []
    assert left({"host1": {**QUIET.nodes["host1"], **TRAFFIC}}, ("*",)) == []


def test_traffic_without_a_live_owner_is_a_leftover(left):
    for held_by_others in ((), ("host2",)):
        assert len(left({"host1": {**QUIET.nodes["host1"], **TRAFFIC}}, held_by_others)) == 2


def test_leftovers_beside_traffic_of_other_users_are_reported(left):
    """Traffic does not explain a port that is down, a CPU hog or a holder."""
    actual = {"link be0": "DOWN", "program faultbed.inject.node.holder": "1 running", "hogs": "2", **TRAFFIC}
    assert [line.split(" ")[1] for line in left({"host1": actual}, ("*",))] == ["hogs", "link", "program"]


@pytest.mark.process
def test_others_are_the_live_commands_except_this_one(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path))
    path = os.pathsep.join((str(HOUSE), str(SUPPORT)))
    with hold(SOFT, ["host2"], why="inject", mode="shared") as mine:
        assert mine.held_by_others() == ()
        command = subprocess.Popen(
            [sys.executable, "-c", IN_ANOTHER_SHELL],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        with command:
            assert command.stdout.readline() == b"held\n"
            assert "host1" in mine.held_by_others()
            assert "host2" not in mine.held_by_others()
            command.kill()
            command.wait()
            assert mine.held_by_others() == (), "a command that was killed excuses nothing"
