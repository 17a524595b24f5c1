"""After `heal`, `reset` or `down` in another shell has ended the lab's faults, a command begins no further fault."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import subprocess
import sys
from types import SimpleNamespace

import guarded_run
import pytest
from house import HOUSE, SUPPORT
from local_lab import SOFT, lab_at
from qmp_server import Qemu
from waiting import until

from faultbed.harness.fuzz import on_lab
from faultbed.harness.run import loop
from faultbed.inject.fault_plan import plan
from faultbed.inject.heal import heal
from faultbed.inject.injector import Injector
from faultbed.inject.journal import Journal
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.testbed.backends.soft import fleet, lifecycle
from faultbed.testbed.errors import FaultError
from faultbed.testbed.observe import counters, fingerprint
from faultbed.testbed.tenancy import durable, interventions
from faultbed.testbed.tenancy.lab_lease import hold

TWO_FAULTS = """
import sys
from pathlib import Path
from local_lab import SOFT, lab_at
from faultbed.inject.fault_plan import plan
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.injector import Injector
from faultbed.inject.journal import Journal
from faultbed.testbed.errors import FaultbedError
from faultbed.testbed.tenancy import interventions

folder = Path(sys.argv[1])
interventions.watch(folder)
fault = plan(FaultSpec(kind="link.flap", target="host1:rxe0", for_s=60.0), SOFT.topology, lab_kind="soft")
with Journal(Path(sys.argv[2])) as journal, Injector(lab_at(folder), journal) as injector:
    first = injector.prepare(fault)
    first.arm()
    print("armed", flush=True)
    sys.stdin.readline()
    print("first:", *first.clear().unproven, flush=True)
    try:
        print("armed again", injector.prepare(fault).arm().ok, flush=True)
    except FaultbedError as error:
        print(error, flush=True)
"""


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Restore the attributes that `lab_at` replaces, because it is written for its own process."""
    monkeypatch.setattr(counters, "read", counters.read)
    monkeypatch.setattr(fingerprint, "capture", fingerprint.capture)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path))
    result = tmp_path / "labs" / "soft"
    result.mkdir(parents=True)
    return result


@pytest.fixture
def qemu(folder):
    server = Qemu(folder / "qmp")
    yield server
    server.close()


def in_another_shell(folder, name, covers=("*",)):
    """Record an intervention as a process that is not a child of this one."""
    before = interventions._read(folder).number
    code = (
        "import sys, pathlib; from faultbed.testbed.tenancy import interventions;"
        f"interventions.record(pathlib.Path({str(folder)!r}), {name!r}, {covers!r})"
    )
    subprocess.run(["setsid", "-f", sys.executable, "-c", code], check=True, cwd=HOUSE, timeout=30)
    until(lambda: interventions._read(folder).number == before + 1, within_s=20)


def healed_by(folder):
    return heal(SimpleNamespace(**vars(lab_at(folder)), nodes=tuple), panic=True)


def down_by(_):
    lifecycle.down(SOFT)


def purged_by(_):
    lifecycle.purge(SOFT)


@pytest.mark.process
@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (healed_by, r"`faultbed heal --panic` \(.*, process PID\) ended the faults of this lab at 20..-.* UTC"),
        (down_by, r"`faultbed down` \(.*, process PID\) ended the faults of this lab at 20..-.* UTC"),
        (purged_by, r"interventions.json was removed since this command began, by `faultbed down --purge`"),
    ],
    ids=["heal", "down", "purge"],
)
def test_command_with_two_faults_begins_no_second_one_after_the_lab_was_put_back(qemu, folder, tmp_path, end, reason):
    """With real holders: a separate process runs the command, and this process restores the lab."""
    path = os.pathsep.join((str(HOUSE), str(SUPPORT)))
    command = subprocess.Popen(
        [sys.executable, "-c", TWO_FAULTS, str(folder), str(tmp_path / "journal")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    with command:
        assert command.stdout.readline() == "armed\n"
        end(folder)
        changes = len(qemu.links)
        out, _ = command.communicate("\n", timeout=60)
    reason = reason.replace("PID", str(os.getpid()))
    assert re.search(reason, out), out
    if end is healed_by:
        assert re.search(f"^first: .*{reason}", out, re.MULTILINE), (
            "the receipt does not say what ended the first fault"
        )
    assert "this command begins no more faults, run it again" in out
    assert False not in qemu.links[changes:], "the second fault took the link down"


def flap():
    return plan(FaultSpec(kind="link.flap", target="host1:rxe0", for_s=60.0), SOFT.topology, lab_kind="soft")


def test_prepared_fault_is_not_armed_after_a_heal_from_a_different_shell(qemu, folder, tmp_path):
    """`heal` did not find the holder, so the holder survives; the recorded intervention must still stop it."""
    with Journal(tmp_path / "journal") as journal, Injector(lab_at(folder), journal) as injector:
        prepared = injector.prepare(flap())
        in_another_shell(folder, "heal --panic")
        with pytest.raises(FaultError, match="`faultbed heal --panic`"):
            prepared.arm()
        receipt = prepared.clear()
    assert "this command begins no more faults" in receipt.armed.error
    assert not receipt.proved
    assert False not in qemu.links


def test_fault_is_armed_after_a_heal_by_the_same_process(qemu, folder, tmp_path):
    """A test session, or a program that it starts, may heal the lab and then inject again."""
    with Journal(tmp_path / "journal") as journal, Injector(lab_at(folder), journal) as injector:
        interventions.watch(folder)
        healed_by(folder)
        code = (
            "import pathlib; from faultbed.testbed.tenancy import interventions;"
            f"interventions.record(pathlib.Path({str(folder)!r}), 'reset')"
        )
        subprocess.run([sys.executable, "-c", code], check=True, cwd=HOUSE, timeout=30)
        assert interventions._read(folder).number == 2
        assert injector.prepare(flap()).arm().ok


def test_command_that_begins_after_a_heal_is_not_refused(folder):
    in_another_shell(folder, "heal")
    interventions.refuse(folder, "soft")


def test_hold_of_a_lab_is_the_beginning_of_a_command(folder):
    """The whole `run --repeat` counts as one command, so a heal between two of its runs stops it."""
    with hold(SOFT, why="run", mode="exclusive"):
        in_another_shell(folder, "heal --panic")
        with pytest.raises(interventions.Intervened, match="soft: `faultbed heal --panic`"):
            interventions.refuse(folder, "soft")


def test_intervention_outside_the_commands_lab_and_part_is_ignored(folder, tmp_path):
    other = tmp_path / "labs" / "other"
    for each in (folder, other):
        interventions.watch(each)
    in_another_shell(other, "reset")
    assert interventions.since_begin(folder) is None
    assert "`faultbed reset`" in interventions.since_begin(other)
    in_another_shell(folder, "heal", ("host1", "link1"))
    assert interventions.since_begin(folder, ("host2",)) is None
    assert "`faultbed heal`" in interventions.since_begin(folder, ("link1",))


def test_own_intervention_does_not_hide_one_from_a_different_shell(folder):
    interventions.watch(folder)
    in_another_shell(folder, "reset")
    interventions.record(folder, "reset")
    assert "`faultbed reset`" in interventions.since_begin(folder)


def test_intervention_on_a_full_disk_removes_the_record_and_stops_older_commands(folder, monkeypatch):
    """`heal` continues without its record. Only its own process may go on: other commands cannot rule out a heal."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    interventions.watch(folder)
    known = interventions._begun[interventions._key(folder)]
    monkeypatch.setattr(durable, "replace", full)
    assert healed_by(folder) == []
    assert not interventions.path_of(folder).exists()
    interventions.refuse(folder, "soft")
    monkeypatch.setitem(interventions._begun, interventions._key(folder), known)
    assert "was removed since this command began" in interventions.since_begin(folder)


def test_purge_of_the_own_lab_starts_a_new_record(folder):
    interventions.watch(folder)
    lifecycle.purge(SOFT)
    assert not folder.exists()
    assert interventions.since_begin(folder) is None


def test_command_older_than_the_intervention_record_is_refused(folder, monkeypatch):
    """The older command cannot know which process made the dropped entries."""
    interventions.watch(folder)
    monkeypatch.setattr(interventions, "_MOST_ENTRIES", 2)
    for _ in range(2):
        interventions.record(folder, "reset")
    assert interventions.since_begin(folder) is None
    interventions.record(folder, "reset")
    assert "more than 2 commands" in interventions.since_begin(folder)


def test_intervention_is_synced_before_the_lab_changes(folder, monkeypatch):
    """Both file and folder are synced, because a power failure may undo a rename, and the record with it."""
    synced, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(stat.S_IFMT(os.fstat(fd).st_mode)), sync(fd)))
    interventions.record(folder, "heal")
    assert synced == [stat.S_IFREG, stat.S_IFDIR]


def test_reset_is_recorded_before_a_vm_is_ended(folder, monkeypatch):
    for name in ("read_state", "read_snapshot"):
        monkeypatch.setattr(
            lifecycle, name, lambda _: SimpleNamespace(key="k", complete=True, vms={}, accelerator="tcg")
        )
    monkeypatch.setattr(lifecycle.image, "cached", object)
    monkeypatch.setattr(lifecycle, "vms", lambda _: ())
    monkeypatch.setattr(lifecycle, "_resume", lambda *_, **__: None)
    entries = []
    monkeypatch.setattr(fleet, "end", lambda *_: entries.append(interventions._read(folder).entries[-1]["what"]))
    lifecycle.reset(SOFT, lambda _: None)
    assert entries == ["reset"]


def run_with(lab, tmp_path, monkeypatch, with_faults):
    monkeypatch.setattr(loop, "_to_known_state", lambda *_: None)
    return guarded_run.run(lab, tmp_path / "journal.jsonl", monkeypatch, with_faults)


def test_run_on_a_lab_that_was_healed_meanwhile_is_an_error_of_the_run(qemu, folder, tmp_path, monkeypatch):
    """This holds even if all faults of the run were over. An error is judged ERROR, so the run cannot pass."""
    interventions.watch(folder)
    result = run_with(lab_at(folder), tmp_path, monkeypatch, lambda *_: in_another_shell(folder, "heal --panic"))
    assert len(result.errors) == 1
    assert "`faultbed heal --panic`" in result.errors[0]
    assert result.lab_state == "CLEAN"


def test_run_on_a_lab_that_is_left_alone_has_no_error(qemu, folder, tmp_path, monkeypatch):
    interventions.watch(folder)
    result = run_with(lab_at(folder), tmp_path, monkeypatch, lambda *_: interventions.record(folder, "reset"))
    assert (result.errors, result.lab_state) == ([], "CLEAN")


def test_guard_of_a_run_raises_after_another_shell_has_healed(folder):
    """The loop that watches a running workload calls this guard twice a second, and clears all faults if it raises."""
    requests = []
    guard = loop._guard_of(lab_at(folder), lambda: requests.append(1))
    guard()
    in_another_shell(folder, "heal --panic")
    with pytest.raises(interventions.Intervened):
        guard()
    assert requests == [1, 1]


def test_run_does_not_begin_after_another_shell_has_healed(folder, monkeypatch):
    """A later run of several does nothing and creates no directory."""
    monkeypatch.setattr(loop, "refusal", lambda *_: None)
    monkeypatch.setattr(loop, "open_lab", lambda _: contextlib.nullcontext(lab_at(folder)))
    interventions.watch(folder)
    in_another_shell(folder, "reset")
    with pytest.raises(interventions.Intervened, match="`faultbed reset`"):
        loop.execute(None, SOFT, out=folder / "runs", progress=lambda _: None)
    assert not (folder / "runs").exists()


def test_fuzz_does_not_take_a_run_on_a_healed_lab_for_a_finding(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(on_lab, "to_toml", lambda _: "")
    monkeypatch.setattr(on_lab.experiment_file, "decode", lambda *_, **__: None)
    monkeypatch.setattr(loop, "resolve", lambda *_: None)

    def execute(*_, **__):
        in_another_shell(folder, "heal --panic")
        return SimpleNamespace(verdict=SimpleNamespace(lab_state="CLEAN"))

    monkeypatch.setattr(loop, "execute", execute)
    interventions.watch(folder)
    runner = on_lab.Runner(inventory=SOFT, out=tmp_path, progress=lambda _: None, guard=lambda: None)
    with pytest.raises(interventions.Intervened):
        runner(None)


def test_intervention_record_that_cannot_be_read_counts_as_lost(folder):
    interventions.watch(folder)
    interventions.path_of(folder).write_text(json.dumps({"id": "x", "number": 3, "entries": []})[:-4])
    assert "was removed" in interventions.since_begin(folder)
