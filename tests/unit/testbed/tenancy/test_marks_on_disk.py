"""Marks of a lab outlive a kill of the command and a power failure of the controller."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from house import HOUSE

from faultbed.harness.cli.experiments import faults
from faultbed.harness.cli.main import cli
from faultbed.testbed import provision
from faultbed.testbed.backends import rack_backend
from faultbed.testbed.backends.lab_backend import Access
from faultbed.testbed.directories import lab_dir
from faultbed.testbed.errors import DirtyLab, HalfProvisioned, LabError, RevertFailed
from faultbed.testbed.observe.fingerprint import Fingerprint
from faultbed.testbed.shipped import inventories
from faultbed.testbed.tenancy import dirty, in_progress, lab_lease
from faultbed.testbed.tenancy.reservation_store import local_store

BEFORE = Fingerprint(nodes={"host1": {"link be0": "UP"}})


@pytest.fixture
def synced(monkeypatch):
    """Return the files and folders that were synced, in order."""
    done, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(stat.S_IFMT(os.fstat(fd).st_mode)), sync(fd)))
    return done


def test_dirty_mark_is_synced_with_its_folder(tmp_path, synced):
    assert dirty.mark(tmp_path, ["x"], BEFORE)
    assert synced == [stat.S_IFREG, stat.S_IFDIR]
    assert [path.name for path in tmp_path.iterdir()] == ["dirty.json"]


def test_progress_mark_is_synced_with_its_folder(tmp_path, synced):
    own = in_progress.write(tmp_path, why="run", before=BEFORE, lease_s=1.0)
    assert synced == [stat.S_IFREG, stat.S_IFDIR]
    own.remove()


def test_mark_whose_folder_cannot_be_synced_is_removed(tmp_path, monkeypatch):
    """The command may then change nothing, so no mark may stay for a later command to compare."""

    def fail(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(in_progress, "sync_folder", fail)
    with pytest.raises(OSError, match="Input/output"):
        in_progress.write(tmp_path, why="run", before=BEFORE, lease_s=1.0)
    assert list((tmp_path / "working").glob("*")) == []


KILLED = """
import sys, time
from pathlib import Path
from faultbed.testbed.tenancy import dirty
with dirty.changing(Path(sys.argv[1]), sys.argv[2]):
    print("changing", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("command", ["heal", "provision"])
def test_command_killed_midway_leaves_the_lab_dirty_until_repeated(tmp_path, command):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path), command], stdout=subprocess.PIPE, cwd=HOUSE
    )
    with process:
        assert process.stdout.readline() == b"changing\n"
        process.send_signal(signal.SIGKILL)
    with pytest.raises(DirtyLab, match=rf"`{command}` \(process \d+\) did not finish; run it again"):
        dirty.refuse(tmp_path, "rack")
    with dirty.changing(tmp_path, command):
        assert dirty.is_marked(tmp_path)
    dirty.refuse(tmp_path, "rack")


def test_change_on_a_dirty_lab_keeps_its_mark_and_baseline(tmp_path):
    dirty.mark(tmp_path, ["host1: link be0 was UP, is DOWN"], BEFORE)
    with dirty.changing(tmp_path, "heal"):
        pass
    assert dirty.reasons(tmp_path) == ("host1: link be0 was UP, is DOWN",)
    assert dirty.baseline(tmp_path) == BEFORE


@pytest.mark.parametrize(
    ("error", "stays"), [(LabError("no"), False), (RevertFailed("left"), True), (ValueError(), True)]
)
def test_change_that_fails_leaves_a_mark_if_leftovers_are_possible(tmp_path, error, stays):
    with pytest.raises(type(error)), dirty.changing(tmp_path, "heal"):
        raise error
    assert dirty.is_marked(tmp_path) is stays


@pytest.mark.parametrize("error", [None, LabError("no")])
def test_change_keeps_a_mark_written_meanwhile_by_another_command(tmp_path, error):
    """`reset` removed the mark of a slow `heal`, and a run ended DIRTY. Then `heal` ended and marked the lab clean."""
    with contextlib.suppress(LabError), dirty.changing(tmp_path, "heal"):
        dirty.clean(tmp_path)
        dirty.mark(tmp_path, ["host1: link be0 was UP, is DOWN"], BEFORE)
        if error:
            raise error
    assert dirty.reasons(tmp_path) == ("host1: link be0 was UP, is DOWN",)


@pytest.fixture
def healing(tmp_path, monkeypatch):
    """Run `faultbed heal` on a soft lab without machines."""
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path))
    folder = lab_dir("soft")
    folder.mkdir(parents=True)

    def call(does):
        lab = SimpleNamespace(state_dir=folder)
        monkeypatch.setattr(faults, "open_lab", lambda _: contextlib.nullcontext(lab))
        monkeypatch.setattr(faults, "heal_lab", does)
        return CliRunner().invoke(cli, ["heal"], standalone_mode=False)

    return SimpleNamespace(call=call, folder=folder)


def test_heal_that_is_interrupted_leaves_an_unmarked_lab_dirty(healing):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    healing.call(interrupted)
    assert "`heal`" in dirty.reasons(healing.folder)[0]
    assert healing.call(lambda *_, **__: []).return_value == 0
    assert not dirty.is_marked(healing.folder)


def test_heal_that_does_not_revert_everything_leaves_an_unmarked_lab_dirty(healing):
    def fails(*_, **__):
        raise RevertFailed("host1: failed: port be0")

    assert isinstance(healing.call(fails).exception, RevertFailed)
    assert dirty.is_marked(healing.folder)


@pytest.fixture
def rack(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(rack_backend.BACKEND, "access", lambda _: Access(addresses={}, accelerator=None))
    monkeypatch.setattr(lab_lease, "store_of", lambda one: local_store(tmp_path / "book", lab=one.name))
    shutil.copytree(inventories() / "group_vars", tmp_path / "group_vars")
    path = tmp_path / "rack.yml"
    path.write_text((inventories() / "rack-h100.example.yml").read_text())
    return path


def test_interrupted_provision_leaves_the_rack_dirty_until_repeated(rack, monkeypatch):
    done = provision.ProvisionResult(
        changed={}, ok=("host1",), failed=(), unreachable=(), changes={}, notes={}, results={}, seconds=1.0
    )

    def call(does):
        monkeypatch.setattr(provision, "play", does)
        return CliRunner().invoke(cli, ["--lab", str(rack), "provision", "host1"], standalone_mode=False)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    call(interrupted)
    assert "`provision`" in dirty.reasons(lab_dir("rack-h100"))[0]
    assert call(lambda *_, **__: done).exception is None
    assert not dirty.is_marked(lab_dir("rack-h100"))


def test_failed_provision_leaves_the_rack_dirty_until_repeated_or_torn_down(rack, monkeypatch):
    """Some machines may have changed, and the next run used to take their state as the baseline."""
    calls = []

    def fails(*_, **__):
        calls.append("play")
        raise HalfProvisioned("host2: no space left on device")

    monkeypatch.setattr(provision, "play", fails)
    for words in (("provision", "host1"), ("provision", "host1"), ("provision", "--teardown", "host1")):
        done = CliRunner().invoke(cli, ["--lab", str(rack), *words], standalone_mode=False)
        assert "no space left" in str(done.exception)
        assert dirty.is_marked(lab_dir("rack-h100"))
    assert len(calls) == 3


def test_provision_of_a_rack_that_a_fault_left_dirty_is_refused(rack, monkeypatch):
    monkeypatch.setattr(provision, "play", lambda *_, **__: pytest.fail("nothing may be changed"))
    dirty.mark(lab_dir("rack-h100"), ["host1: link be0 was UP, is DOWN"], BEFORE)
    done = CliRunner().invoke(cli, ["--lab", str(rack), "provision", "host1"], standalone_mode=False)
    assert isinstance(done.exception, DirtyLab)
