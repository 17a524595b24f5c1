"""Faults that something else has ended in part: each part is looked at before the fault is removed.

A readback that shows any part (`applied`) is right for a revert, and wrong for the question whether the fault is on.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from own_namespace import answer_of
from waiting import until

from faultbed.inject.node.actuator import Actuator
from faultbed.inject.node.gpu.synthetic_health import GpuHeatActuator
from faultbed.inject.node.machine import limit, process
from faultbed.inject.node.machine.disk import DiskActuator
from faultbed.inject.node.machine.hog import HogActuator
from faultbed.inject.node.machine.limit import LimitActuator
from faultbed.inject.node.machine.reboot import RebootActuator
from faultbed.inject.node.network import detour
from faultbed.inject.node.network.background import BackgroundActuator
from faultbed.inject.node.network.detour import DetourActuator
from faultbed.inject.node.network.tamper import TamperActuator

STEER = """
import json, subprocess
from faultbed.inject.node.network.interface import LinkActuator
from faultbed.inject.node.network.steer import SteerActuator
def ip(words):
    subprocess.run(["ip", *words.split()], check=True)
for name, address in (("up1", "10.9.0.0/31"), ("port", "10.77.1.0/31")):
    ip(f"link add {name} type veth peer name far-{name}")
    ip(f"addr add {address} dev {name}")
    ip(f"link set {name} up")
    ip(f"link set far-{name} up")
for prefix in ("10.77.2.0/31", "10.77.3.0/31"):
    ip(f"route add {prefix} via 10.9.0.1 dev up1")
steer = SteerActuator(netns=None, device="up1", prefixes=["10.77.2.0/31", "10.77.3.0/31"])
steer.prepare()
seen = {}
for name, ended in (
    ("nothing", None), ("rule", "rule del priority 900"), ("route", "route del 10.77.3.0/31 table 251")
):
    steer.on()
    if ended:
        ip(ended)
    seen[name] = [steer.read()["applied"], steer.is_lost()]
    steer.off()
link = LinkActuator(netns=None, device="up1")
link.prepare()
link.on()
seen["link down"] = [link.read()["applied"], link.is_lost()]
ip("link set up1 up")
seen["link up"] = [link.read()["applied"], link.is_lost()]
print(json.dumps(seen))
"""


def test_steered_prefix_without_its_rule_or_one_of_its_routes_is_lost():
    """The routes that were left showed a fault that steered nothing any more."""
    assert answer_of(STEER) == {
        "nothing": [True, False], "rule": [True, True], "route": [True, True],
        "link down": [True, False], "link up": [False, True],
    }  # fmt: skip


def test_hog_of_which_one_process_was_killed_is_lost(monkeypatch):
    hogs = HogActuator(count=2, share=0.1)
    monkeypatch.setattr(
        "faultbed.inject.node.machine.hog.busy_processes", lambda: {x._pid for x in hogs._hogs if x.is_running()}
    )
    hogs.prepare()
    hogs.on()
    try:
        assert not hogs.is_lost()
        os.kill(hogs._hogs[0]._pid, signal.SIGKILL)
        until(hogs.is_lost)
        assert hogs.read()["applied"], "one of them still runs"
    finally:
        hogs.off()


def test_background_load_whose_process_was_stopped_is_lost():
    """A stopped process exists, but sends nothing."""
    load = BackgroundActuator(
        sources=[(None, "127.0.0.1")], destination="127.0.0.1", rate_bps=1_000_000, flows=1, size_bytes=1000
    )
    load.prepare()
    load.on()
    try:
        until(lambda: load.hits() > 0)
        assert not load.is_lost()
        os.kill(load._child._pid, signal.SIGSTOP)
        until(load.is_lost)
    finally:
        load.off()
    assert not load.read()["applied"]


@pytest.fixture
def limited(tmp_path, monkeypatch):
    """Return a limit that is on, of processes 11 and 12."""
    monkeypatch.setattr(limit, "processes_with", lambda _: [11, 12])
    one = LimitActuator(argument="x", cgroup=str(tmp_path / "limit.service"), value="1000 20000")
    one._homes = {11: "/", 12: "/"}
    one.on()
    (tmp_path / "limit.service" / "cgroup.procs").write_text("11\n12\n")
    return one, tmp_path / "limit.service", monkeypatch


def test_limit_that_was_raised_or_left_by_a_process_is_lost(limited):
    """The group's existence was the only evidence."""
    one, group, monkeypatch = limited
    assert not one.is_lost()
    (group / "cgroup.procs").write_text("11\n")
    assert one.is_lost()
    monkeypatch.setattr(limit, "processes_with", lambda _: [11])
    assert not one.is_lost(), "process 12 has ended"
    (group / "cpu.max").write_text("max 20000\n")
    assert one.is_lost()
    assert one.read()["applied"]


def test_rebooted_switch_of_which_one_daemon_runs_again_is_lost(tmp_path, monkeypatch):
    alive = set()
    monkeypatch.setattr(process, "_alive", lambda path: path in alive)
    monkeypatch.setattr(process, "_stat", lambda _: None)
    reboot = RebootActuator(netns="n", ports=[], daemons=["zebra", "bgpd"])
    daemons = reboot._daemons
    daemons._started, daemons._commands, daemons._over = {1: 1, 2: 2}, [("zebra", ":"), ("bgpd", ":")], False
    assert (reboot.read()["applied"], reboot.is_lost()) == (True, False)
    alive.add("zebra")
    assert (reboot.read()["applied"], reboot.is_lost()) == (True, True)


@pytest.mark.parametrize(("find", "lost"), [({"daemons": ["bgpd"]}, True), ({"argument": "x"}, False)])
def test_frozen_daemon_that_was_killed_is_lost_and_a_hanging_rank_is_not(monkeypatch, find, lost):
    """A supervisor that replaces a frozen daemon ends the freeze; a job that ends a hanging rank is its effect."""
    frozen = process.ProcessActuator(find=find, how="STOP")
    frozen._started = {1: 1}
    monkeypatch.setattr(process, "_stat", lambda _: ("T", 1))
    assert not frozen.is_lost()
    monkeypatch.setattr(process, "_stat", lambda _: None)
    assert frozen.is_lost() is lost


def test_full_disk_on_which_something_else_was_deleted_is_lost(tmp_path, monkeypatch):
    disk = DiskActuator(folder=str(tmp_path))
    disk._file = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR)
    for is_full in (True, False):
        monkeypatch.setattr("faultbed.testbed.node.counts.is_full", lambda _, is_full=is_full: is_full)
        assert disk.is_lost() is not is_full
    assert disk.read()["applied"], "its file is open"
    disk.close()


class Effect(Actuator):
    """An effect of heat that is on, or has ended."""

    is_on = True

    def read(self):
        return {"applied": self.is_on}


def test_hot_gpu_that_runs_at_its_normal_clock_again_is_lost(tmp_path, monkeypatch):
    heat = GpuHeatActuator(gpu="gpu0", celsius=95, unit="x", cgroup=str(tmp_path), slow="1 2")
    monkeypatch.setattr(heat._health, "state", lambda _: {"temp_c": 95})
    heat._effect = Effect()
    assert (heat.read()["applied"], heat.is_lost()) == (True, False)
    heat._effect.is_on = False
    assert (heat.read()["applied"], heat.is_lost()) == (True, True)


@pytest.mark.parametrize(
    ("options", "filters", "lost"),
    [(b"5 ms", "redirect to device fbd0", False), (b"0 ms", "redirect to device fbd0", True), (b"5 ms", "", True)],
)
def test_detour_whose_queue_was_changed_or_whose_redirection_is_gone_is_lost(monkeypatch, options, filters, lost):
    """The rule still counts packets, and none of them is delayed."""
    hop = {"netns": None, "device": "p", "hook": "egress", "table": "t", "ruleset": ""}
    one = DetourActuator(via="fbd0", mark=1, queue="netem delay 5ms", count="hits", drain_s=0.0, **hop)
    monkeypatch.setattr(one, "read", lambda: {"applied": True})
    monkeypatch.setattr(detour, "run", lambda _: filters)
    one._options = b"5 ms"
    monkeypatch.setattr(one, "_root", lambda: {2: options})
    assert one.is_lost() is lost


def test_corrupted_data_without_the_child_that_changes_it_is_lost(monkeypatch):
    """The device drops every packet of the rule then: that is another fault."""
    hop = {"netns": None, "device": "p", "hook": "egress", "table": "t", "ruleset": ""}
    one = TamperActuator(via="fbt0", **hop)
    monkeypatch.setattr(one, "read", lambda: {"applied": True})
    one._child.start(signal.pause)
    assert not one.is_lost()
    child = Path(f"/proc/{one._child._pid}")
    os.kill(one._child._pid, signal.SIGKILL)
    until(lambda: not child.exists() or one.is_lost())
    assert one.is_lost()
