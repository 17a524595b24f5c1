"""Commands mark a lab before their first change, so that leftovers of a killed command, and only those, are found."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from house import HOUSE
from shared_lab import CLEAN, Command, change, lab_at

from faultbed.harness.pytest_plugin.session_lab import SessionLab
from faultbed.testbed.errors import DirtyLab, LabError, Unreachable
from faultbed.testbed.observe import fingerprint
from faultbed.testbed.observe.fingerprint import Fingerprint
from faultbed.testbed.tenancy import dirty, durable, in_progress


@pytest.fixture
def lab(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "capture", fingerprint.capture)
    monkeypatch.setattr(fingerprint, "SETTLE_S", 0.0)
    monkeypatch.setattr(fingerprint, "QUIET_S", 0.0)
    # No fault's lease runs here, so a comparison need not wait, unless a test sets a lease.
    monkeypatch.setattr(dirty.begin, "__kwdefaults__", dirty.begin.__kwdefaults__ | {"lease_s": 0.0})
    return lab_at(tmp_path)


@pytest.fixture
def command(tmp_path):
    """Start commands that work on the lab; the fixture ends those that still run."""
    with contextlib.ExitStack() as stack:

        def start(why):
            one = Command(tmp_path, why)
            stack.callback(one.kill)
            return one

        yield start


def test_begin_writes_a_mark_that_end_replaces_by_the_answer(lab, tmp_path):
    work = dirty.begin(lab, "run demo")
    (mark,) = in_progress.live(tmp_path)
    assert (mark.why, mark.before.nodes) == ("run demo", CLEAN)
    outcome = dirty.end(lab, work)
    assert (outcome.state, outcome.sentence) == ("CLEAN", "the lab is as it was before")
    assert dirty.unfinished(tmp_path) == ()
    assert not dirty.is_marked(tmp_path)


def test_end_with_a_difference_marks_the_lab_dirty(lab, tmp_path):
    work = dirty.begin(lab, "run demo")
    change(tmp_path, "host1", "DOWN")
    outcome = dirty.end(lab, work)
    assert outcome.state == "DIRTY"
    assert dirty.reasons(tmp_path) == ("host1: link be0 was UP, is DOWN",)
    assert dirty.baseline(tmp_path).nodes == CLEAN
    assert dirty.unfinished(tmp_path) == ()


def test_end_with_a_fault_that_is_not_cleared_is_dirty_although_nothing_differs(lab, tmp_path):
    outcome = dirty.end(lab, dirty.begin(lab, "run demo"), not_cleared=["gpu.clocks on host1:gpu0 is not cleared: x"])
    assert outcome.state == "DIRTY"
    assert dirty.reasons(tmp_path) == ("gpu.clocks on host1:gpu0 is not cleared: x",)


@pytest.mark.parametrize(
    "error", [Unreachable("host1 does not answer"), OSError(errno.EIO, "I/O error"), ValueError(3)]
)
def test_end_with_a_comparison_that_fails_is_dirty_with_the_reason(lab, tmp_path, monkeypatch, error):
    def fails(_):
        raise error

    work = dirty.begin(lab, "run demo")
    monkeypatch.setattr(fingerprint, "capture", fails)
    outcome = dirty.end(lab, work)
    assert outcome.state == "DIRTY"
    assert outcome.reasons[0].startswith("could not compare: ")
    assert dirty.is_marked(tmp_path)


def test_end_that_is_interrupted_leaves_the_comparison_to_the_next_command(lab, tmp_path, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    work = dirty.begin(lab, "run demo")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(fingerprint, "capture", interrupted)
        dirty.end(lab, work)
    assert "was killed" in dirty.unfinished(tmp_path)[0]
    dirty.admit(lab)
    assert dirty.unfinished(tmp_path) == ()
    assert not dirty.is_marked(tmp_path)


def test_admit_after_a_kill_that_left_nothing_lets_work_go_on(lab, tmp_path, command):
    command("run demo").kill()
    assert "`run demo`" in dirty.unfinished(tmp_path)[0]
    dirty.admit(lab)
    assert dirty.unfinished(tmp_path) == ()
    assert not dirty.is_marked(tmp_path)


def test_begin_after_a_kill_that_left_something_refuses_and_marks_dirty(lab, tmp_path, command):
    """The leftovers of a killed run never become part of the next run's baseline."""
    command("run demo").kill()
    change(tmp_path, "host1", "DOWN")
    with pytest.raises(DirtyLab, match=r"`run demo` \(process \d+\) was killed; host1: link be0 was UP, is DOWN"):
        dirty.begin(lab, "run other")
    assert dirty.baseline(tmp_path).nodes == CLEAN
    change(tmp_path, "host1", "UP")
    assert dirty.settle(lab) == []
    assert dirty.end(lab, dirty.begin(lab, "run other")).state == "CLEAN"


def test_begin_after_a_kill_waits_until_the_leases_have_run_out(lab, tmp_path, command, monkeypatch):
    """The target reverts by itself within its lease, so the comparison waits for that before it marks the lab DIRTY."""
    command("run demo").kill()
    (mark,) = in_progress.dead(tmp_path)
    mark.path.write_text(json.dumps({**json.loads(mark.path.read_text()), "lease_s": 60.0}))
    change(tmp_path, "host1", "DOWN")
    looks = iter([{**CLEAN, "host1": {"link be0": "DOWN"}}] * 2)
    monkeypatch.setattr(fingerprint, "capture", lambda _: Fingerprint(nodes=next(looks, CLEAN), heard_s=60.0))
    dirty.admit(lab)
    assert not dirty.is_marked(tmp_path)


def test_heal_after_a_kill_compares_with_the_state_before_it(lab, tmp_path, command):
    command("run demo").kill()
    change(tmp_path, "host1", "DOWN")
    assert dirty.baseline(tmp_path).nodes == CLEAN
    assert "was killed; host1" in dirty.settle(lab)[0]
    change(tmp_path, "host1", "UP")
    assert dirty.settle(lab) == []
    assert not dirty.is_marked(tmp_path)


def test_reset_removes_marks_of_dead_commands_only(lab, tmp_path, command):
    command("run demo").kill()
    own = dirty.begin(lab, "run other") if not dirty.clean(tmp_path) else None
    dirty.clean(tmp_path)
    assert [mark.why for mark in in_progress.live(tmp_path)] == ["run other"]
    assert dirty.end(lab, own).state == "CLEAN"


@pytest.mark.parametrize("first", ["A", "B"])
def test_commands_that_overlap_leave_the_comparison_to_the_last(lab, tmp_path, command, first):
    """A's fault is active when B begins. Neither may count the other's fault as baseline or as its own leftover."""
    a = command("inject A")
    change(tmp_path, "host1", "DOWN by A")
    b = command("inject B")
    change(tmp_path, "host2", "DOWN by B")
    order = [(a, "host1"), (b, "host2")] if first == "A" else [(b, "host2"), (a, "host1")]
    change(tmp_path, order[0][1], "UP")
    early = order[0][0].end()
    assert early["state"] == "CLEAN"
    assert "which still run" in early["said"]
    change(tmp_path, order[1][1], "UP")
    late = order[1][0].end()
    assert (late["state"], late["said"]) == ("CLEAN", "the lab is as it was before")
    assert dirty.unfinished(tmp_path) == ()


@pytest.mark.parametrize("first", ["A", "B"])
def test_overlapping_commands_compare_with_the_first_ones_baseline(lab, tmp_path, command, first):
    a = command("inject A")
    change(tmp_path, "host1", "DOWN by A")
    b = command("inject B")
    change(tmp_path, "host2", "DOWN by B")
    order = [(a, "host1"), (b, "host2")] if first == "A" else [(b, "host2"), (a, "host1")]
    order[0][0].end()
    change(tmp_path, order[1][1], "UP")
    late = order[1][0].end()
    assert late["state"] == "DIRTY"
    assert late["reasons"][0].startswith(f"{order[0][1]}: link be0 was UP")
    assert dirty.is_marked(tmp_path)


def test_killed_command_is_compared_by_the_last_one_running(lab, tmp_path, command):
    a = command("inject A")
    change(tmp_path, "host1", "DOWN by A")
    b = command("inject B")
    a.kill()
    assert b.end()["state"] == "DIRTY"
    assert dirty.baseline(tmp_path).nodes == CLEAN


def test_marks_of_the_session_above_are_not_other_commands(lab, tmp_path):
    """A test session holds a mark while the commands that its tests start compare for themselves."""
    session = dirty.begin(lab, "pytest")
    inner = Command(tmp_path, "inject A")
    change(tmp_path, "host1", "DOWN by A")
    assert inner.end()["state"] == "DIRTY"
    session.mark.remove()


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device", "there")


def test_begin_without_room_for_the_mark_changes_nothing(lab, tmp_path, monkeypatch):
    monkeypatch.setattr(in_progress, "write", full)
    with pytest.raises(LabError, match="there: No space left on device; nothing was changed"):
        dirty.begin(lab, "run demo")
    assert dirty.unfinished(tmp_path) == ()


def test_end_without_room_for_the_dirty_mark_is_dirty_and_reports_it(lab, tmp_path, monkeypatch):
    """Without room for a new file, the progress mark becomes the dirty mark, so heal still knows the earlier state."""
    work = dirty.begin(lab, "run demo")
    change(tmp_path, "host1", "DOWN")
    with monkeypatch.context() as patch:
        patch.setattr(durable, "write_new", full)
        outcome = dirty.end(lab, work)
    assert outcome.state == "DIRTY"
    assert "could not be recorded (No space left on device): free disk space" in outcome.sentence
    with pytest.raises(DirtyLab, match="did not finish"):
        dirty.refuse(tmp_path, "shared")
    assert dirty.baseline(tmp_path).nodes == CLEAN


@pytest.mark.parametrize("why", ["full disk", "mark of another command"])
def test_session_whose_lab_cannot_be_marked_dirty_keeps_its_running_mark(lab, tmp_path, monkeypatch, why):
    """If the session's mark were removed, all knowledge of a test's leftovers would be lost."""
    keeper = SessionLab(lab=lab, work_mark=dirty.begin(lab, "pytest"))
    change(tmp_path, "host1", "DOWN")
    if why == "full disk":
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
            patch.setattr(durable, "write_new", full)
            keeper.mark_dirty(["host1: link be0 was UP, is DOWN"], keeper.work_mark.before)
    else:
        dirty.mark(tmp_path, ["host2: x"], Fingerprint(nodes={"host2": CLEAN["host2"]}, covers=("host2",)))
        keeper.mark_dirty(["host1: link be0 was UP, is DOWN"], keeper.work_mark.before)
    keeper.remove_session_mark()
    assert "host1: link be0 was UP, is DOWN" in dirty.settle(lab)[0]


def test_killed_commands_leftovers_survive_a_dirty_mark_by_another_command(lab, tmp_path, command, monkeypatch):
    """While the comparison waits for leases, a command on another part of the rack may end DIRTY."""
    command("inject A").kill()
    change(tmp_path, "host1", "DOWN")
    settle = fingerprint.settle

    def marked_meanwhile(*args, **options):
        dirty.mark(tmp_path, ["host2: x"], Fingerprint(nodes={"host2": CLEAN["host2"]}, covers=("host2",)))
        return settle(*args, **options)

    with monkeypatch.context() as patch, pytest.raises(DirtyLab, match="host2: x"):
        patch.setattr(fingerprint, "settle", marked_meanwhile)
        dirty.begin(lab, "inject B")
    assert "host1: link be0 was UP, is DOWN" in dirty.settle(lab)[0]
    change(tmp_path, "host1", "UP")
    assert dirty.settle(lab) == []
    assert dirty.unfinished(tmp_path) == ()


def test_end_is_clean_and_reports_a_mark_that_cannot_be_removed(lab, tmp_path, monkeypatch):
    """The mark cannot be removed because the file system is read-only, but the lab was compared and is unchanged."""

    def read_only(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system", "there")

    work = dirty.begin(lab, "run demo")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", read_only)
        outcome = dirty.end(lab, work)
    assert outcome.state == "CLEAN"
    assert outcome.sentence.startswith("the lab is as it was before; ")
    assert outcome.sentence.endswith("Read-only file system: the next command compares it again")
    assert not dirty.is_marked(tmp_path)
    dirty.admit(lab)
    assert dirty.unfinished(tmp_path) == ()


def test_progress_mark_that_cannot_be_read_makes_the_lab_dirty(lab, tmp_path):
    (tmp_path / "working").mkdir()
    (tmp_path / "working" / "1-1.json").write_text('{"wh')
    with pytest.raises(DirtyLab, match="cannot be read"):
        dirty.admit(lab)


def test_two_dirty_commands_are_both_compared_by_heal(lab, tmp_path):
    """The second mark must not be lost, because on a rack it may cover other hosts."""
    work = dirty.begin(lab, "inject here")
    dirty.mark(tmp_path, ["host2: x"], Fingerprint(nodes={"host2": CLEAN["host2"]}, covers=("host2",)))
    change(tmp_path, "host1", "DOWN")
    assert dirty.end(lab, work).state == "DIRTY"
    assert "host1" in dirty.settle(lab)[0]
    change(tmp_path, "host1", "UP")
    assert dirty.settle(lab) == []


def test_begin_excludes_the_fault_of_a_command_killed_meanwhile_from_the_baseline(lab, tmp_path, command, monkeypatch):
    """The target reverts later, so a baseline taken during the fault would differ for ever."""
    a = command("inject A")
    change(tmp_path, "host1", "DOWN by A")
    look = fingerprint.capture

    def killed_meanwhile(lab):
        a.kill()
        return look(lab)

    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "capture", killed_meanwhile)
        work = dirty.begin(lab, "inject B")
    assert work.before.nodes == CLEAN
    change(tmp_path, "host1", "UP")
    assert dirty.end(lab, work).state == "CLEAN"
    dirty.admit(lab)
    assert dirty.unfinished(tmp_path) == ()


def test_begin_excludes_the_fault_of_a_dead_uncompared_command_from_the_baseline(lab, tmp_path, command, monkeypatch):
    """A live command on another part of the lab prevents the comparison, and the dead one's lease may still run."""
    monkeypatch.setattr(fingerprint, "part", lambda nodes, _, covers: {n: f for n, f in nodes.items() if n in covers})
    (tmp_path / "working").mkdir()
    both = Fingerprint(nodes=CLEAN, covers=("host1", "host2"))
    in_progress.write(tmp_path, why="inject A", before=both, lease_s=0.0).abandon()
    one = Fingerprint(nodes={"host2": CLEAN["host2"]}, covers=("host2",))
    beside = in_progress.write(tmp_path, why="inject C", before=one, lease_s=0.0)
    monkeypatch.setattr(in_progress, "ancestors", dict)
    change(tmp_path, "host1", "DOWN by A")
    lab.reserved = ("host1",)
    work = dirty.begin(lab, "inject B")
    work.mark.remove()
    beside.remove()
    assert work.before.nodes == {"host1": CLEAN["host1"]}


def test_two_simultaneous_dirty_marks_are_both_compared_by_heal(lab, tmp_path, monkeypatch):
    """The marks are written at the same time, and neither may replace the other."""
    work = dirty.begin(lab, "inject here")
    change(tmp_path, "host1", "DOWN")
    write_new, others = durable.write_new, [Fingerprint(nodes={"host2": CLEAN["host2"]}, covers=("host2",))]

    def written_by_both(path, *args):
        done = write_new(path, *args)
        if others:
            dirty.mark(tmp_path, ["host2: x"], others.pop())
        return done

    monkeypatch.setattr(durable, "write_new", written_by_both)
    assert dirty.end(lab, work).state == "DIRTY"
    assert dirty.reasons(tmp_path) == ("host2: x",)
    assert "host1" in dirty.settle(lab)[0]
    assert list(tmp_path.glob("dirty*.new")) == []
    change(tmp_path, "host1", "UP")
    assert dirty.settle(lab) == []


@pytest.mark.parametrize(
    "strange",
    [
        {"pid": None, "before": CLEAN}, {"pid": 1, "lease_s": "10 s", "before": CLEAN}, {"before": []},
        {"before": {"host1": ["link be0"]}}, {"before": {"host1": {"link be0": {"is": "UP"}}}},
        {"before": CLEAN, "covers": 2},
    ],
)  # fmt: skip
def test_marks_of_a_different_version_are_reported_and_never_count_as_clean(lab, tmp_path, strange):
    """If fields have other types, the lab's state is unknown; valid parts are still compared."""
    (tmp_path / "working").mkdir()
    (tmp_path / "working" / "1-1.json").write_text(json.dumps(strange))
    change(tmp_path, "host1", "DOWN")
    with pytest.raises(DirtyLab):
        dirty.begin(lab, "run demo")
    assert dirty.settle(lab) != []
    (tmp_path / "dirty.json").write_text(json.dumps(strange))
    assert dirty.settle(lab) != []
    assert dirty.reasons(tmp_path) == ("its state is unknown",)


def test_command_in_a_different_container_with_our_process_id_is_distinct(lab, tmp_path):
    """Another container may use the same process id. Its fault is no part of the baseline, and its mark stays."""
    theirs = dirty.begin(lab, "inject there")
    decoded = json.loads(theirs.mark.path.read_text())
    theirs.mark.path.write_text(json.dumps({**decoded, "started": decoded["started"] + 1}))
    change(tmp_path, "host1", "DOWN by them")
    ours = dirty.begin(lab, "inject here")
    assert ours.before.nodes == CLEAN
    assert ours.mark.path.name.split("-")[0] == theirs.mark.path.name.split("-")[0]
    theirs.mark.abandon()  # killed
    change(tmp_path, "host1", "UP")
    assert dirty.end(lab, ours).state == "CLEAN"
    dirty.admit(lab)
    assert dirty.unfinished(tmp_path) == ()


def test_marks_of_two_processes_with_one_id_have_two_files(tmp_path):
    """Two containers may share the state folder, and each numbers its marks from the beginning."""
    code = (
        "import os, pathlib, sys; os.getpid = lambda: 7\n"
        "from faultbed.testbed.observe import fingerprint\nfrom faultbed.testbed.tenancy import in_progress\n"
        "in_progress.write(pathlib.Path(sys.argv[1]), why='x', before=fingerprint.Fingerprint(nodes={}), lease_s=0.0)"
    )
    for _ in range(2):
        env = {**os.environ, "PYTHONPATH": str(HOUSE)}
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=env, timeout=60)
    assert len(list((tmp_path / "working").glob("7-*.json"))) == 2
