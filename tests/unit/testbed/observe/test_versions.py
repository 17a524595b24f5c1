"""Versions of a rack's machines: what a run records, so that a comparison of two runs names a changed firmware."""

from __future__ import annotations

import os
import platform
import subprocess
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from faultbed.testbed.errors import Unreachable
from faultbed.testbed.observe import versions

TOOLS = {
    "dpkg-query": "printf 50.0-2",
    "ofed_info": "echo OFED-internal-24.10-0.7.0:",
    "sonic-cfggen": "echo 202411.123-abc",
    "vtysh": "echo 'FRRouting 10.3 (rtsw1) on Linux(6.1.0).'; echo Copyright",
}


def run(tmp_path, tools):
    for name, body in tools.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", versions.SCRIPT],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    return versions.parse(done.stdout)


def test_versions_of_a_machine_are_those_that_its_tools_print(tmp_path):
    found = run(tmp_path, TOOLS)
    assert (
        found.items()
        >= {
            "kernel": platform.release(),
            "rdma-core": "50.0-2",
            "OFED": "OFED-internal-24.10-0.7.0:",
            "SONiC": "202411.123-abc",
            "FRR": "10.3",
        }.items()
    )
    assert "system" not in found, "SONiC's own version says more than that of its Debian"


def test_versions_of_a_tool_that_fails_are_left_out(tmp_path):
    broken = dict.fromkeys(TOOLS, "echo 'Traceback (most recent call last):' >&2; exit 1")
    assert run(tmp_path, broken).keys() <= {"kernel", "system"}


@given(st.text())
def test_versions_of_any_output_are_short_lines(text):
    assert all(len(name) <= 60 and len(value) <= 120 for name, value in versions.parse(text).items())


def test_versions_of_a_machine_that_does_not_answer_say_so():
    class Node:
        def __init__(self, name):
            self.name = name

        def run(self, argv, *, timeout_s):
            if self.name == "host2":
                raise Unreachable("host2 does not answer")
            return SimpleNamespace(
                stdout="kernel\t6.12\nmlx5_0 firmware\t28.39 (MT_1)\n" if self.name == "host1" else ""
            )

    lab = SimpleNamespace(
        inventory_model=SimpleNamespace(management=dict.fromkeys(("host1", "host2", "rtsw1"))), node=Node
    )
    assert versions.read(lab) == {
        "host1 kernel": "6.12",
        "host1 mlx5_0 firmware": "28.39 (MT_1)",
        "host2 versions": "not read: host2 does not answer",
        "rtsw1 versions": "not read: the machine prints none",
    }
