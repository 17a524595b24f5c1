"""With a full disk, faults are still cleared, and records that could not be written are reported."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from local_lab import SOFT, Here, lab_at
from qmp_server import Qemu

from faultbed.harness.cli.experiments import faults
from faultbed.harness.verdict import ExitCode
from faultbed.inject.fault_plan import plan
from faultbed.inject.injector import Injector
from faultbed.inject.journal import Journal, read
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.testbed.errors import FaultbedError, FaultError
from faultbed.testbed.observe import counters, fingerprint
from faultbed.testbed.tenancy import audit_log, dirty

FULL = OSError(errno.ENOSPC, "No space left on device")


class FullDisk:
    """`os.write` to the descriptors of `of` fails while `is_full`."""

    def __init__(self, monkeypatch):
        self.is_full, self.of, self._write = False, None, os.write
        monkeypatch.setattr(os, "write", self._try)

    def _try(self, fd, data):
        if self.is_full and (self.of is None or fd == self.of._fd):
            self._write(fd, data[:3])
            raise FULL
        return self._write(fd, data)


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Restore the attributes that `lab_at` replaces, because it is written for its own process."""
    monkeypatch.setattr(counters, "read", counters.read)
    monkeypatch.setattr(fingerprint, "capture", fingerprint.capture)


@pytest.fixture
def disk(monkeypatch):
    """As on a real disk, half a line is written before the disk is full."""
    return FullDisk(monkeypatch)


def test_journal_on_a_full_disk_refuses_a_change_and_lets_a_revert_through(tmp_path, disk):
    done = []
    with Journal(tmp_path / "journal") as journal:
        disk.of, disk.is_full = journal, True
        with pytest.raises(OSError, match="No space left"), journal.doing("arm"):
            done.append("arm")
        with journal.reverting("clear"):
            done.append("clear")
        journal.note("lab", state="CLEAN")
        assert journal.failure is FULL
    assert done == ["clear"]


def test_journal_continues_after_a_full_disk_without_a_partial_line(tmp_path, disk):
    with Journal(tmp_path / "journal") as journal:
        journal.note("first")
        disk.of, disk.is_full = journal, True
        journal.note("lost")
        disk.is_full = False
        journal.note("last")
    assert [(record.seq, record.op) for record in read(tmp_path / "journal")] == [(0, "first"), (1, "last")]


def test_journal_completion_on_a_full_disk_does_not_undo_the_block(tmp_path, disk):
    with Journal(tmp_path / "journal") as journal:
        with journal.doing("arm"):
            disk.of, disk.is_full = journal, True
        assert journal.failure is FULL


def flapping():
    return plan(FaultSpec(kind="link.flap", target="host1:rxe0", for_s=60.0), SOFT.topology, lab_kind="soft")


@pytest.mark.parametrize("full_disk", ["the journal", "every file"])
def test_clear_with_a_disk_that_fills_up_after_arming_clears_and_gives_a_receipt(qemu, tmp_path, disk, full_disk):
    """Real holder and guardian; the controller's writes fail from the moment the fault is in place."""
    with Journal(tmp_path / "journal") as journal, Injector(lab_at(tmp_path), journal) as injector:
        prepared = injector.prepare(flapping())
        assert prepared.arm().ok
        assert qemu.links[-1] is False
        disk.of = journal if full_disk == "the journal" else None
        disk.is_full = True
        receipt = prepared.clear()
        disk.is_full = False
    assert receipt.cleared.ok
    assert qemu.links[-1] is True
    assert not list((tmp_path / "faults").iterdir())
    assert injector.not_cleared == ()


def test_arm_with_an_audit_that_cannot_be_written_changes_nothing(qemu, tmp_path, monkeypatch):
    def full(*_, **__):
        raise FULL

    with Journal(tmp_path / "journal") as journal, Injector(lab_at(tmp_path), journal) as injector:
        prepared = injector.prepare(flapping())
        monkeypatch.setattr(audit_log, "append", full)
        with pytest.raises(FaultError, match=r"No space left.*free disk space"):
            prepared.arm()
    assert False not in qemu.links


def test_audit_on_a_disk_that_takes_a_part_of_a_line_is_written_whole_or_refused(tmp_path, monkeypatch):
    """A short write is not an error by itself, but a change whose record is incomplete must not be made."""
    write, takes = os.write, [5, 5]
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: takes.pop() if takes else None]))
    audit_log.append(tmp_path, "arming", id="x")
    assert [entry["id"] for entry in audit_log.entries(tmp_path)] == ["x"]
    takes.append(5)

    def then_full(fd, data):
        if not takes:
            raise FULL
        return write(fd, data[: takes.pop()])

    monkeypatch.setattr(os, "write", then_full)
    with pytest.raises(OSError, match="No space left"):
        audit_log.append(tmp_path, "arming", id="y")


def test_injects_of_one_kind_in_the_same_second_have_a_journal_each(tmp_path):
    """Two writers of one file overwrite each other's records."""
    lab = lab_at(tmp_path)
    assert len({faults._journal_of(lab, "link.down") for _ in range(20)}) == 20


def test_clear_with_witnesses_that_raise_is_not_cleared_and_gives_a_receipt(qemu, tmp_path, monkeypatch):
    """The fault is reverted, but whether all states were restored is unknown, and the receipt reports that."""

    def broken(*_, **__):
        raise ValueError("no such counter")

    with Journal(tmp_path / "journal") as journal, Injector(lab_at(tmp_path), journal) as injector:
        prepared = injector.prepare(flapping())
        prepared.arm()
        monkeypatch.setattr("faultbed.inject.evidence.witnesses.Witnesses.settle", broken)
        receipt = prepared.clear()
    assert qemu.links[-1] is True
    assert not receipt.cleared.ok
    assert not receipt.proved
    assert "no such counter" in injector.not_cleared[0]


class FullFromTheNth:
    """Every write of this process fails from the n-th on, as on a disk that has become full; `count` counts them."""

    def __init__(self, monkeypatch, nth):
        self.count, self.nth = 0, nth
        for owner, name in ((os, "write"), (Path, "write_text"), (Path, "write_bytes"), (Path, "open")):
            monkeypatch.setattr(owner, name, self._failing(getattr(owner, name), name))

    def _failing(self, real, name):
        def one(*args, **options):
            mode = str((*args[1:], options.get("mode", ""))[0])
            is_elsewhere = threading.current_thread() is not threading.main_thread()  # the stand-in for QEMU
            reads = is_elsewhere or (name == "open" and not set("wax") & set(mode))
            if not reads:
                self.count += 1
            if not reads and self.count >= self.nth:
                raise OSError(errno.ENOSPC, "No space left on device", "disk")
            return real(*args, **options)

        return one


def injected(folder):
    """Run `faultbed inject` in this process on the lab in `folder`; return its exit code and its error message."""
    words = ["link.flap", "host1:rxe0", "--for", "100ms"]
    try:
        return int(faults.inject.main(words, obj=Here(folder), standalone_mode=False) or 0), ""
    except FaultbedError as error:
        return error.exit_code, str(error)
    except OSError as error:  # the command line's error sentence (`faultbed.harness.cli.ending`)
        return ExitCode.ERROR, str(error)


def test_inject_on_a_disk_full_at_any_write_clears_and_claims_nothing_false(monkeypatch, tmp_path):
    """For every n, the n-th write and all after it fail. The fault is cleared, and no false success is reported."""
    monkeypatch.setattr(fingerprint, "SETTLE_S", 0.0)
    monkeypatch.setattr(fingerprint, "QUIET_S", 0.0)
    ends = {}
    for nth in range(1, 100):
        folder = tmp_path / str(nth)
        folder.mkdir()
        qemu = Qemu(folder / "qmp")
        with monkeypatch.context() as patch:
            disk = FullFromTheNth(patch, nth)
            rc, output = injected(folder)
        is_up = not qemu.links or qemu.links[-1]
        left = [path.name for path in (folder / "faults").glob("*.revert")]
        ends[nth] = (rc, is_up, left, dirty.is_marked(folder), dirty.unfinished(folder), output)
        qemu.close()
        if disk.count < nth:
            break
    else:
        pytest.fail("there is no end to what it writes")
    assert len(ends) > 6
    for nth, (rc, is_up, left, is_marked, unfinished, output) in ends.items():
        about = f"write {nth} of {len(ends)}: {ends[nth]}"
        assert is_up, about
        assert not left, about
        assert not is_marked, about  # the lab is unchanged
        assert not unfinished, about
        assert rc in (0, 2, 3), about  # 2: the change was not made, because it could not be recorded
        assert "No space left" in output or rc != ExitCode.ERROR, about
