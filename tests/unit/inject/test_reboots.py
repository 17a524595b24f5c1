"""A rebooting host: reset through QMP, brought back by a program that may take long, and proved by its boot id.

The QMP server and the program are stand-ins with the real interfaces; the holder and its guardian are real.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from held import holder_pid, send_request
from waiting import until

from faultbed.inject.evidence.observation import Observation
from faultbed.inject.evidence.reboots import Boots, boot_of
from faultbed.inject.evidence.receipt import Cleared
from faultbed.inject.fault_plan import plan
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.leases.channels import local_args, patience_s
from faultbed.inject.policy.safety import Forbidden, check
from faultbed.inject.prepared_fault import PreparedFault
from faultbed.inject.reprovision import boot_before_reset, provision_after_reboot
from faultbed.testbed.errors import CommandFailed, RevertFailed, Unreachable, UsageError
from faultbed.testbed.inventory import lab_inventory as inventory
from faultbed.testbed.inventory.schema import SafetyVars
from faultbed.testbed.lab import Lab
from faultbed.testbed.remote.ssh import Address
from faultbed.testbed.shipped import inventories

SOFT = inventory.load(inventories() / "soft.yml")


def prepare(channel, tmp_path, *, back="true", **rest):
    """`back` is the shell command that brings the host back; each of its runs is recorded."""
    done = shlex.quote(str(tmp_path / "reprovisioned"))
    script = f'case "$1" in --print-boot) echo "boot-1";; *) {back} && echo "$@" >>{done};; esac'
    args = {"host": "host1", "socket": str(tmp_path / "qmp"), "reprovision": ["sh", "-c", script, "reprovision"]}
    return send_request(
        channel, "prepare", id="t", actuator="vm_reset", args=args, edges=[[0.0, True]], window_s=60.0, ttl_s=1.5,
        revert_dir=str(tmp_path), **rest,
    )  # fmt: skip


def reprovisioned(tmp_path):
    path = tmp_path / "reprovisioned"
    return path.read_text().splitlines() if path.exists() else []


def test_reboot_is_armed_by_qemus_event_and_over_when_the_host_is_back(held, qemu, tmp_path):
    """The return takes twice as long as a holder may be silent: it sends heartbeats and is not killed."""
    assert prepare(held, tmp_path, back="sleep 2.5")["before"]["boot"] == "boot-1"
    assert qemu.resets == 0
    armed = send_request(held, "arm")
    assert (armed["readback"]["applied"], armed["readback"]["resets"]) == (True, 1)
    assert (tmp_path / "t.revert").exists()
    cleared = send_request(held, "clear")
    assert cleared["ok"]
    assert cleared["observed"]["count"] == 1
    assert not (tmp_path / "t.revert").exists()
    assert reprovisioned(tmp_path) == ["--unless boot-1"]


@pytest.mark.parametrize("how", ["SIGKILL of the holder", "end of the controller"])
def test_reboot_host_is_brought_back_whichever_process_dies(held, qemu, tmp_path, how):
    """The stored revert runs once, and does nothing if the host is still in its old boot."""
    prepare(held, tmp_path)
    send_request(held, "arm")
    assert (qemu.resets, reprovisioned(tmp_path)) == (1, [])
    assert (tmp_path / "t.revert").exists()
    if how == "end of the controller":
        held.close()
    else:
        os.kill(holder_pid(held), signal.SIGKILL)
    until(lambda: reprovisioned(tmp_path) and not (tmp_path / "t.revert").exists(), within_s=5)
    held.close()
    assert reprovisioned(tmp_path) == ["--unless boot-1"]
    assert qemu.resets == 1


def test_reboot_host_that_does_not_come_back_is_not_cleared(held, tmp_path):
    """The revert stays on disk for `heal`, and the error says why it failed."""
    prepare(held, tmp_path, back="{ echo no answer; exit 1; }")
    send_request(held, "arm")
    cleared = send_request(held, "clear")
    assert not cleared["ok"]
    assert "no answer" in cleared["error"]
    assert (tmp_path / "t.revert").exists()
    (tmp_path / "t.revert").write_text("true\n")  # otherwise the guardian would continue to retry


def test_reboot_of_a_paused_vm_is_refused(held, qemu, tmp_path):
    qemu.status = "paused"
    assert "is paused" in prepare(held, tmp_path)["error"]


@pytest.mark.parametrize("held", [patience_s(10.0)], indirect=True)
def test_reboot_without_qemus_reset_event_is_not_armed(held, qemu, tmp_path):
    qemu.tells = False
    prepare(held, tmp_path)
    assert send_request(held, "arm")["event"] == "error"
    assert reprovisioned(tmp_path) == ["--unless boot-1"]


@pytest.mark.parametrize(("how", "applied"), [("noop", False), ("lie", True)])
def test_reboot_mutant_resets_nothing(held, qemu, tmp_path, how, applied):
    prepare(held, tmp_path, mutate=how)
    assert send_request(held, "arm")["readback"]["applied"] is applied
    assert send_request(held, "clear")["ok"]
    assert qemu.resets == 0


class Machine:
    """A node that returns the given answers in turn, and raises those that are errors."""

    name = "host1"

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    def run(self, argv, **_):
        self.asked.append(argv[0])
        if argv[0] == "sync":
            return SimpleNamespace(stdout="")
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(stdout=answer)


def lab_of(machine):
    forgotten = []
    return SimpleNamespace(node=lambda _: machine, forget=forgotten.append, accelerator="kvm", forgotten=forgotten)


@pytest.mark.parametrize(("error", "closed"), [
    (None, []), (Unreachable("the SSH connection is gone"), ["host1"]), (CommandFailed("did not end"), ["host1"]),
])  # fmt: skip
def test_connection_to_a_rebooted_host_is_closed_unless_the_host_answers(monkeypatch, error, closed):
    """A job that restarted on the host may have opened it after the reboot."""
    address = Address(host="127.0.0.1", port=1, user="root", identity=Path("key"), host_key="ssh-ed25519 AAAA")
    lab, closed_connections = Lab(SOFT, {"host1": address}, accelerator="kvm"), []

    def run(*_, **__):
        if error is not None:
            raise error

    monkeypatch.setattr("faultbed.testbed.lab.SshNode.run", run)
    monkeypatch.setattr(
        "faultbed.testbed.lab.SshConnection.close", lambda connection: closed_connections.append(connection.name)
    )
    lab.forget_dead("host1")
    assert closed_connections == closed


def test_clearing_a_reboot_keeps_a_connection_to_the_host_that_answers():
    """The process that clears the fault cannot know which job has opened the connection since."""
    forgotten = []
    planned = plan(FaultSpec(kind="host.reboot", target="host1", for_s=2.0), SOFT.topology, lab_kind="soft")
    fault = SimpleNamespace(planned=planned, _lab=SimpleNamespace(forget_dead=forgotten.append))
    cleared, _, doubts = PreparedFault._judge(fault, Cleared(ok=True), Observation(state="over", count=1))
    assert forgotten == ["host1"]
    assert (cleared.ok, len(doubts)) == (False, 1), "its evidence cannot be read here"


def test_boots_counts_a_new_id_with_a_short_uptime():
    boots = Boots(lab_of(Machine("a\n900.5 1.0\n", "a\n901.5 1.0\n", "b\n0.0 0.0\n")), ["host1"])
    assert [boots.read()["host1"]["boots"] for _ in range(3)] == [0, 0, 1]


def test_boots_ignores_a_new_id_with_an_old_uptime():
    boots = Boots(lab_of(Machine("a\n900.5 1.0\n", "b\n900.5 1.0\n")), ["host1"])
    assert [boots.read()["host1"]["boots"] for _ in range(2)] == [0, 0]


def test_boot_of_rejects_invalid_output():
    with pytest.raises(CommandFailed, match="expected a boot id"):
        boot_of(Machine("nothing"))


def test_reprovision_waits_for_the_host_and_provisions_it_once():
    machine = Machine(Unreachable("no answer"), Unreachable("no answer"), "b\n1.0 1.0\n")
    lab, done = lab_of(machine), []
    assert provision_after_reboot(lab, "host1", unless="a", provision_it=lambda _, hosts: done.extend(hosts))
    assert done == ["host1"]
    assert lab.forgotten == ["host1", "host1"]


def test_reprovision_does_nothing_to_a_host_that_has_not_rebooted():
    done = []
    assert not provision_after_reboot(
        lab_of(Machine("a\n1.0 1.0\n")), "host1", unless="a", provision_it=lambda *_: done.append(1)
    )
    assert done == []


def test_reprovision_reports_a_host_that_does_not_come_back(monkeypatch):
    monkeypatch.setattr("faultbed.inject.reprovision.BOOT_DEADLINE_S", {"kvm": 0.0})
    with pytest.raises(RevertFailed, match="host1 did not answer within 0 s after its reboot: no answer"):
        provision_after_reboot(
            lab_of(Machine(Unreachable("no answer"))), "host1", unless="a", provision_it=lambda *_: None
        )


def test_reboot_syncs_disks_and_rejects_the_controllers_own_machine():
    machine = Machine("a\n1.0 1.0\n")
    assert boot_before_reset(lab_of(machine), "host1", own="b") == "a"
    assert machine.asked == ["cat", "sync"]
    with pytest.raises(UsageError, match="faultbed itself runs on"):
        boot_before_reset(lab_of(Machine("a\n1.0 1.0\n")), "host1", own="a")


@pytest.mark.process
def test_reprovision_program_runs_from_any_directory_and_environment(tmp_path, monkeypatch):
    """`heal` runs it later without our folder or environment; here the lab is not up, and the program says so."""
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path / "home"))
    planned = plan(FaultSpec(kind="host.reboot", target="host2", for_s=1.0), SOFT.topology, lab_kind="soft")
    lab = SimpleNamespace(inventory=inventories() / "soft.yml", qmp_socket=lambda _: tmp_path / "qmp")
    args = local_args(lab, planned.request)
    assert args["socket"] == str(tmp_path / "qmp")
    monkeypatch.delenv("FAULTBED_HOME")
    done = subprocess.run([*args["reprovision"], "--print-boot"], cwd="/", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("host2: soft is not up")


def test_reboot_runs_next_to_qemu_and_is_proven_by_the_boot_id():
    planned = plan(FaultSpec(kind="host.reboot", target="host2", for_s=1.0), SOFT.topology, lab_kind="soft")
    assert (planned.place.local, planned.binding, planned.fidelity) == (True, "local", "real")
    assert planned.mechanism.must_move[0].any_of == ("host2/boots",)
    assert not [key for key in planned.mechanism.must_not_move if key.startswith("host2/")]
    assert "host2" in planned.reads
    assert planned.request["patience_s"] > 300


def test_reboot_needs_the_confirmation_that_the_policy_requires():
    planned = plan(FaultSpec(kind="host.reboot", target="host2", for_s=1.0), SOFT.topology, lab_kind="soft")
    check(planned, SOFT)
    policy = SafetyVars(may_disrupt=["*"], longest_fault_s=60.0, irreversible="confirm")
    asks = dataclasses.replace(SOFT, safety=policy)
    with pytest.raises(Forbidden, match="nothing can revert it; confirm it by hand"):
        check(planned, asks)
    check(planned, asks, confirmed=["host.reboot"])
