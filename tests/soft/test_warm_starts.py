"""Node programs that are forked from a machine's warm parent, beside those that the SSH server starts."""

from __future__ import annotations

import re

import pytest
from faults import case
from waiting import until

from faultbed.inject.injector import Injector
from faultbed.inject.journal import Journal
from faultbed.testbed.backends.soft import lifecycle
from faultbed.testbed.lab import open_lab
from faultbed.testbed.remote import warm_start
from faultbed.testbed.stopping import Deadline
from faultbed.traffic.engine import engine_client

pytestmark = pytest.mark.soft

ENGINE = engine_client.MODULE
DESCRIBE = r"""
cd /proc/$1
for f in comm cgroup limits oom_score_adj; do echo "$f: $(cat $f)"; done
grep -E '^(policy|prio) ' sched
echo "cmdline: $(tr '\0' ' ' <cmdline)"
grep -E '^(State|Umask|Uid|Gid|Groups|NoNewPrivs|Seccomp|Threads|Cap|Cpus_allowed|Sig(Blk|Ign|Cgt|Pnd)|ShdPnd)' status
for l in cwd root exe ns/*; do echo "$l $(readlink $l)"; done
echo "files: $(ls fd | grep -xE '[012]' | tr '\n' ' ')"
tr '\0' '\n' <environ | grep -vE '^SSH_(CLIENT|CONNECTION)=' | sort
read _ _ _ _ group session _ <stat; [ $group $session = "$1$1" ] || echo "leads: $([ $session = $1 ] && echo session)"
"""
"""What /proc shows of a process from outside, without its numbers."""


def started(lab, host, *, warm):
    """Return a channel to an engine, and its process id."""
    if warm:
        channel = warm_start.start_program(lab._connections[host], [ENGINE])
        assert channel is not None, f"{host}: no warm parent answers"
    else:
        lab.ensure_code(host)
        channel = lab.node(host).open(lab.python(ENGINE))
    channel.send({"do": "clock"})
    return channel, channel.receive(timeout_s=60)["pid"]


@pytest.fixture
def host(lab):
    return lab.topology.hosts[0].name


def test_forked_program_is_described_as_one_that_ssh_started(lab, host):
    descriptions = []
    for warm in (False, True):
        channel, pid = started(lab, host, warm=warm)
        lines = lab.node(host).run(["sh", "-c", DESCRIBE, "describe", str(pid)]).stdout.splitlines()
        descriptions.append([line for line in lines if line])
        channel.close()
    assert descriptions[1] == descriptions[0]
    assert f"cmdline: python3 -m {ENGINE} " in descriptions[1]
    assert "comm: python3" in descriptions[1]


@pytest.mark.parametrize("warm", [False, True], ids=["by ssh", "forked"])
def test_program_ends_with_its_channel(lab, host, warm):
    channel, pid = started(lab, host, warm=warm)
    channel.close()
    deadline = Deadline(30)
    while not deadline.is_over:
        if lab.node(host).run(["test", "-e", f"/proc/{pid}"], check=False).rc:
            return
    pytest.fail(f"engine {pid} still runs")


@pytest.mark.parametrize("warm", [False, True], ids=["by ssh", "forked"])
def test_killed_program_ends_its_channel(lab, host, warm):
    channel, pid = started(lab, host, warm=warm)
    lab.node(host).run(["kill", "-KILL", str(pid)])
    assert channel.receive(timeout_s=30) is None
    channel.close()


def test_parent_has_one_thread_and_no_device_or_network_socket(lab, host):
    parent = lab.warm_parent(host)
    script = "ls /proc/$1/task; readlink /proc/$1/fd/*; sed 's/^/unix /' /proc/$1/net/unix"
    listed = lab.node(host).run(["sh", "-c", script, "list", str(parent["pid"])]).stdout.splitlines()
    unix = {line.split()[7] for line in listed if line.startswith("unix ")}
    sockets = [line.strip("socket:[]") for line in listed if line.startswith("socket:")]
    assert [line for line in listed if line.isdigit()] == [str(parent["pid"])]
    assert {line for line in listed if line.startswith(("/", "anon"))} <= {"/dev/null", "anon_inode:[pidfd]"}
    assert sockets
    assert set(sockets) <= unix
    assert parent["missing"] == []


def test_without_warm_parent_programs_start_and_its_forks_go_on(lab, host):
    """SIGKILL of the parent: forks go on, and the next program is started by an interpreter of its own."""
    with open_lab(lab.inventory_model) as another:
        channel, pid = started(another, host, warm=True)
        another.node(host).run(["kill", "-KILL", str(another.warm_parent(host)["pid"])])
        channel.send({"do": "clock"})
        assert channel.receive(timeout_s=30)["pid"] == pid
        channel.close()
        assert another.warm_parent(host) is None
        channel = another.open_module(host, ENGINE)
        channel.send({"do": "clock"})
        assert channel.receive(timeout_s=60)["event"] == "clock"
        channel.close()
    warm_start.prepare(lab.node(host))
    lab._cold.discard(host)
    assert lab.warm_parent(host) is not None


TTL_S = 10.0
UNIT = (
    "NotifyAccess,WatchdogUSec,WatchdogSignal,RuntimeMaxUSec,TimeoutStartUSec,TimeoutStopUSec,OOMScoreAdjust,KillMode"
)
STOP = "ExecStopPost,ActiveState,SubState,CollectMode,Slice,Restart"


def described_unit(node, unit):
    """Return what systemd and /proc show of a unit's main process, and its process id."""
    shown = node.run(["systemctl", "show", unit, "-p", f"{UNIT},{STOP}"]).stdout.splitlines()
    pid = node.run(["systemctl", "show", unit, "-p", "MainPID", "--value"]).stdout.strip()
    of_process = node.run(["sh", "-c", DESCRIBE, "describe", pid]).stdout
    lines = [*shown, *of_process.splitlines(), node.run(["ps", "-o", "ppid=", "-p", pid]).stdout.strip()]
    # The kernel shows the environment that a process was started with, and a fork's is that of its parent.
    return [line.replace(unit, "UNIT") for line in lines if line and not re.match("[A-Z_]+=", line)], pid


@pytest.mark.slow
def test_forked_holder_is_described_as_one_that_systemd_started(lab, tmp_path):
    descriptions = []
    for warm in (False, True):
        fault = case(lab, "throttle", for_s=300.0)
        node = lab.carrier(fault.planned.place.node)
        if not warm:
            lab._cold.add(node.name)
        with Journal(tmp_path / f"{warm}") as journal, Injector(lab, journal, ttl_s=TTL_S) as injector:
            prepared = injector.prepare(fault.planned)
            lab._cold.discard(node.name)
            lines, _ = described_unit(node, f"{prepared.lease.unit}.service")
            descriptions.append([line.replace(prepared.lease.instance, "INSTANCE") for line in lines])
    assert [line.partition("start_time")[0] for line in descriptions[1]] == [
        line.partition("start_time")[0] for line in descriptions[0]
    ]
    assert "cmdline: python3 -m faultbed.inject.node.holder " in descriptions[1]
    assert "1" in descriptions[1], "its parent is PID 1"


@pytest.mark.slow
@pytest.mark.parametrize("armed", [False, True], ids=["prepared", "active"])
@pytest.mark.parametrize("victim", ["fork", "unit", "watchdog"])
def test_killed_or_stopped_fork_is_reverted_by_pid_1(lab, tmp_path, victim, armed):
    fault = case(lab, "throttle", for_s=300.0)
    node = lab.carrier(fault.planned.place.node)
    with Journal(tmp_path / "j") as journal, Injector(lab, journal, ttl_s=TTL_S) as injector:
        prepared = injector.prepare(fault.planned)
        if armed:
            assert prepared.arm().ok
        unit = f"{prepared.lease.unit}.service"
        _, pid = described_unit(node, unit)
        signal = "STOP" if victim == "watchdog" else "KILL"
        by = ["stop"] if victim == "unit" else ["kill", f"--signal={signal}", "--kill-whom=main"]
        node.run(["systemctl", *by, unit])
        if victim != "watchdog" or armed:  # before there is anything to revert, its watchdog has a minute
            until(lambda: node.run(["systemctl", "is-active", "-q", unit], check=False).rc, within_s=TTL_S + 2)
            until(lambda: node.run(["test", "-e", f"/proc/{pid}"], check=False).rc, within_s=2)
        else:
            node.run(["systemctl", "kill", "--signal=CONT", unit])
        until(lambda: fault.is_restored(lab), within_s=TTL_S + 2)
        receipt = prepared.clear()
    if armed:
        assert receipt.cleared.ok, receipt.cleared.error
        assert receipt.cleared.by == "lease"


@pytest.mark.slow
def test_parent_that_is_killed_ends_no_holder_and_its_fault_is_cleared_as_usual(lab, tmp_path):
    fault = case(lab, "throttle", for_s=300.0)
    node = lab.carrier(fault.planned.place.node)
    with Journal(tmp_path / "j") as journal, Injector(lab, journal, ttl_s=TTL_S) as injector:
        prepared = injector.prepare(fault.planned)
        node.run(["kill", "-KILL", str(lab.warm_parent(node.name)["pid"])])
        assert prepared.arm().ok
        assert not fault.is_restored(lab)
        receipt = prepared.clear()
        assert receipt.cleared.ok, receipt.cleared.error
        assert receipt.cleared.by == "holder"
        assert fault.is_restored(lab)
    warm_start.prepare(node)
    lab._cold.discard(node.name)
    assert lab.warm_parent(node.name) is not None


def test_two_restores_draw_different_random_bytes(lab, host):
    """A snapshot has the kernel's entropy pool in it: without VMGENID, every restore would draw the same keys."""
    drawn = []
    for _ in range(2):
        lifecycle.reset(lab.inventory_model, lambda _: None, lab=lab)
        drawn.append(lab.node(host).run(["od", "-An", "-tx1", "-N32", "/dev/urandom"]).stdout.split())
    assert len(drawn[0]) == 32
    assert drawn[0] != drawn[1]
