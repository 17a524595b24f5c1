"""Healing: leftovers are found by their marks, machines are healed in parallel, and rebooted ones are reprovisioned."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest
from waiting import until

from faultbed.inject import heal as heal_module
from faultbed.inject.heal import PANIC_S, heal, script
from faultbed.inject.node.holder import REVERT_DIR
from faultbed.inject.node.network.steer import PRIORITY, TABLE
from faultbed.testbed.errors import RevertFailed
from faultbed.testbed.inventory.lab_inventory import load
from faultbed.testbed.remote.remote_node import Completed
from faultbed.testbed.shipped import inventories

SOFT = load(inventories() / "soft.yml").topology

TOOLS = {
    "nft": """case "$*" in
        "list tables netdev") printf 'table netdev faultbed_12ab\\ntable netdev somebodys\\n';;
        esac""",
    "tc": """case "$*" in
        "qdisc show") printf 'qdisc noqueue 0: dev lo root refcnt 2\\nqdisc clsact ffff: dev p1 parent ffff:fff1\\n'
            printf 'qdisc clsact ffff: dev p2 parent ffff:fff1\\nqdisc pfifo 1: dev p3 root\\n'
            printf 'qdisc clsact ffff: dev p4 parent ffff:fff1\\n';;
        "-batch -") while read -r line; do tc $line; done;;
        "filter show dev p1 egress") echo 'filter protocol ip pref 1 u32 match mark 0xfb000001/0xffffffff';;
        "filter show dev p2 egress") echo 'filter protocol ip pref 1 u32 match mark 0x1';;
        "filter show dev p4 egress") echo 'filter protocol ip pref 2 u32 match mark 0xfb000001/0xffffffff';;
        esac""",
    "ip": f"""case "$*" in "rule show priority {PRIORITY}") echo '{PRIORITY}: from all lookup {TABLE}';; esac""",
}


def test_sweep_changes_only_what_is_marked(tmp_path):
    """The tools list what exists and record what they would change.
    A clsact made for a detour is removed; of an existing one, only the detour's filter.
    """
    for name, does in TOOLS.items():
        tool = tmp_path / name
        tool.write_text(f'#!/bin/sh\ncase "$*" in *del*|*flush*) echo "{name} $*" >>{tmp_path}/done;; esac\n{does}\n')
        tool.chmod(0o755)
    subprocess.run(
        ["sh", "-c", heal_module._SWEEP], check=True, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, timeout=30
    )
    assert (tmp_path / "done").read_text().splitlines() == [
        "nft delete table netdev faultbed_12ab",
        "tc qdisc del dev p1 clsact",
        "tc filter del dev p4 egress protocol ip prio 2",
        f"ip rule del priority {PRIORITY}",
        f"ip route flush table {TABLE}",
    ]


class Machine:
    """A node whose reply is the result of `does`."""

    def __init__(self, name, does):
        self.name, self._does = name, does

    def run(self, argv, *, check=True, timeout_s=60.0):
        return Completed(argv=tuple(argv), rc=0, stdout=self._does(argv[-1], timeout_s), stderr="")


def lab_of(tmp_path, does):
    (tmp_path / "faults").mkdir(exist_ok=True)
    names = ("host1", "host2", "fabric")
    return SimpleNamespace(
        name="soft", kind="soft", topology=SOFT, state_dir=tmp_path, nodes=lambda: names,
        node=lambda name: Machine(name, lambda text, timeout_s: does(name, text, timeout_s)),
        carrier=lambda name: SimpleNamespace(name=name if name.startswith("host") else "fabric"),
        netns=lambda name: None if name.startswith("host") else name,
    )  # fmt: skip


def test_heal_panic_reverts_everywhere_at_once(tmp_path):
    """A stopped VM answers only after the revert beside QEMU has run, which here waits for all other machines."""
    everybody = threading.Barrier(3)

    def does(name, text, timeout_s):
        assert timeout_s >= PANIC_S, "it is not cut off"
        everybody.wait(PANIC_S)
        (tmp_path / "asked").touch()
        until((tmp_path / "reverted").exists, within_s=PANIC_S)
        return "healed: stopped unit faultbed-fault-x\n" if name == "host2" else ""

    lab = lab_of(tmp_path, does)
    for name in ("a", "b"):
        wait = f"until [ -e {tmp_path}/asked ]; do sleep 0.01; done; touch {tmp_path}/reverted"
        (tmp_path / "faults" / f"{name}.revert").write_text(wait)
    begin = time.monotonic()
    assert heal(lab, panic=True) == [
        "here: ran stored revert a.revert",
        "here: ran stored revert b.revert",
        "host2: stopped unit faultbed-fault-x",
    ]
    assert time.monotonic() - begin < PANIC_S
    assert list((tmp_path / "faults").iterdir()) == []


@pytest.mark.parametrize("panic", [False, True])
def test_heal_of_a_machine_whose_script_did_not_end_is_no_success(tmp_path, monkeypatch, panic):
    """sudo refused, or the shell was killed: nothing printed does not mean that nothing was left."""
    monkeypatch.setattr(heal_module, "_restore_carriers", lambda _: [])
    error = "sudo: a password is required"
    lab = lab_of(tmp_path, lambda *_: "")
    whole = lab.node

    def refuses(name):
        one = whole(name)
        if name == "host2":
            one.run = lambda argv, **_: Completed(argv=tuple(argv), rc=1, stdout="", stderr=f"{error}\n")
        return one

    lab.node = refuses
    with pytest.raises(
        RevertFailed, match=f"host2: failed: the healing script did not run to its end \\(status 1\\): {error}"
    ):
        heal(lab, panic=panic)


def test_heal_reports_a_switch_whose_namespace_cannot_be_entered(tmp_path):
    (tmp_path / "rtsw1").touch()
    (tmp_path / "somebodys").touch()
    (tmp_path / "nsenter").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "nsenter").chmod(0o755)
    text = script(lab_of(tmp_path, None), "fabric")
    begin = text.index("switches=")
    part = text[begin : text.index("for x in ")].replace("/run/netns", str(tmp_path))
    done = subprocess.run(
        ["sh", "-c", part.replace('sh -c "$sweep"\n', "", 1)], capture_output=True, text=True, check=False,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.stdout.splitlines() == ["failed: namespace rtsw1 could not be entered"]


def test_heal_failed_revert_does_not_prevent_the_others(tmp_path):
    lab = lab_of(tmp_path, lambda *_: "")
    (tmp_path / "faults" / "a.revert").write_text("echo no QEMU >&2; exit 1")
    (tmp_path / "faults" / "b.revert").write_text("true")
    with pytest.raises(RevertFailed, match=r"a\.revert: no QEMU"):
        heal(lab, panic=True)
    assert [path.name for path in (tmp_path / "faults").iterdir()] == ["a.revert"]


def test_heal_reprovisions_what_a_boot_has_removed(tmp_path, monkeypatch):
    """The machine reports what it lacks and is not blamed for ports it no longer has; no other machine changes."""
    provisioned = []
    monkeypatch.setattr(heal_module.reprovision, "provision_machines", lambda _, names: provisioned.extend(names))
    monkeypatch.setattr(heal_module, "_restore_carriers", lambda _: [])

    def does(name, text, _):
        if name != "host1":
            return ""
        only = text[text.index("for x in ") :]
        return subprocess.run(["sh", "-c", only], capture_output=True, text=True, check=True).stdout

    assert heal(lab_of(tmp_path, does)) == ["host1: provisioned again after a reboot"]
    assert provisioned == ["host1"]


def test_heal_script_checks_what_provisioning_makes_on_each_machine(tmp_path):
    lab = lab_of(tmp_path, None)
    assert "/sys/class/infiniband/rxe0 /sys/class/infiniband/rxe1;" in script(lab, "host1")
    assert all(f"/run/netns/{switch.name}" in script(lab, "fabric") for switch in SOFT.switches)
    assert "/run/netns/" not in script(lab, "host1").partition("for x in")[2]


PROCESSES = {
    10: ("faultbed-hog", "R", ""),
    11: ("bgpd", "T", "/usr/lib/frr/bgpd"),
    12: ("bgpd", "S", "/usr/lib/frr/bgpd"),
    13: ("python3.13", "T", "python3\0-m\0faultbed.traffic.node.engine\0"),
    14: ("python3", "T", "python3\0somebodys.py\0"),
    15: ("bash", "T", "bash"),
}


def processes_healed(tmp_path, kind):
    """Return the signals sent to each process and the messages; files stand for the processes."""
    for pid, (name, state, arguments) in PROCESSES.items():
        (tmp_path / "proc" / str(pid)).mkdir(parents=True)
        (tmp_path / "proc" / str(pid) / "stat").write_text(f"{pid} ({name}) {state} 1 1 1\n")
        (tmp_path / "proc" / str(pid) / "cmdline").write_text(arguments)
    (tmp_path / "proc" / "99").mkdir()  # it has just ended
    text = heal_module._faults(SimpleNamespace(kind=kind))
    text = text[text.index("for f in /proc/") :].replace("/proc/", f"{tmp_path}/proc/")
    done = subprocess.run(
        ["sh", "-c", f'kill() {{ echo "$*"; }}\n{text}'], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    return [line for line in lines if line.startswith("-")], [line for line in lines if not line.startswith("-")]


def test_heal_ends_busy_processes_and_continues_stopped_ones(tmp_path):
    sent, reported = processes_healed(tmp_path, "soft")
    assert sent == ["-KILL 10", "-CONT 11", "-CONT 13", "-CONT 14"]
    assert reported[0] == "healed: ended busy process 10"
    assert reported[1:] == [f"healed: process {pid} ({PROCESSES[pid][0]}) continues" for pid in (11, 13, 14)]


def test_heal_leaves_and_reports_foreign_stopped_processes_on_a_rack(tmp_path):
    sent, reported = processes_healed(tmp_path, "rack")
    assert sent == ["-KILL 10", "-CONT 13"]
    assert [line for line in reported if line.startswith("not ours:")] == [
        "not ours: process 11 (bgpd) is stopped; left as it is",
        "not ours: process 14 (python3) is stopped; left as it is",
    ]


def test_heal_leaves_unnamed_machines_alone(tmp_path):
    """On a rack, other users may have reserved them."""
    requests = []

    def does(name, _text, _timeout_s):
        requests.append(name)
        return ""

    lab = lab_of(tmp_path, does)
    lab.kind = "rack"
    assert heal(lab, only=("host2",)) == []
    assert requests == ["host2"]


def test_heal_reports_a_unit_that_is_still_running_and_reverts_after_the_units(tmp_path):
    """The units end before any revert runs; one whose processes do not end is no success."""
    units, faults, cgroups = (tmp_path / name for name in ("transient", "faults", "slice"))
    for name in ("gone", "stuck"):
        for folder in (units, cgroups / f"faultbed-fault-{name}.service"):
            folder.mkdir(parents=True, exist_ok=True)
        (units / f"faultbed-fault-{name}.service").touch()
    (cgroups / "faultbed-fault-gone.service" / "cgroup.procs").write_text("")
    (cgroups / "faultbed-fault-stuck.service" / "cgroup.procs").write_text("42\n")
    faults.mkdir()
    (faults / "a.revert").write_text(f"echo revert >>{tmp_path}/order")
    (faults / "a.claim").touch()
    text = heal_module._faults(SimpleNamespace(kind="soft")).partition("for g in ")[0]
    text = text.replace("/run/systemd/transient", str(units)).replace(heal_module._SYSTEM_SLICE, str(cgroups))
    text = f'systemctl() {{ echo "$1" >>{tmp_path}/order; }}\n{text.replace(REVERT_DIR, str(faults))}'
    done = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=True, timeout=30)
    assert (tmp_path / "order").read_text().split() == ["kill", "stop", "revert"]
    assert done.stdout.splitlines() == [
        "healed: stopped unit faultbed-fault-gone.service",
        "failed: unit faultbed-fault-stuck.service still has process 42",
        f"healed: ran stored revert {faults}/a.revert",
    ]
    assert list(faults.iterdir()) == []
