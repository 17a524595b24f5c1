"""However a run ends, its faults are cleared or left to their leases, and the lab is compared or marked DIRTY."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import guarded_run
import pytest
from local_lab import SOFT
from local_lab import lab_at as soft_lab_at
from pass_stand_ins import pass_of
from shared_lab import change, lab_at

from faultbed.harness.parts.passes import Active
from faultbed.harness.run import loop
from faultbed.harness.run.conclude import not_recorded
from faultbed.harness.run.run_record import RunRecord
from faultbed.inject.fault_plan import plan
from faultbed.inject.injector import Injector
from faultbed.inject.journal import Journal, read
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.testbed.errors import DirtyLab, Interrupted, LabError
from faultbed.testbed.observe import counters, fingerprint
from faultbed.testbed.tenancy import dirty, in_progress

FULL = OSError(errno.ENOSPC, "No space left on device", "samples.parquet")


@pytest.fixture
def lab(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "capture", fingerprint.capture)
    monkeypatch.setattr(fingerprint, "SETTLE_S", 0.0)
    monkeypatch.setattr(fingerprint, "QUIET_S", 0.0)
    lab = lab_at(tmp_path)
    lab.guard = lambda: None
    return lab


def run(lab, tmp_path, monkeypatch, with_faults):
    lab.inventory_model = getattr(lab, "inventory_model", None)
    (tmp_path / "run").mkdir()
    return guarded_run.run(lab, tmp_path / "run" / "journal.jsonl", monkeypatch, with_faults)


ERRORS = [LabError("host1 does not answer"), FULL, ValueError("no such sample"), RuntimeError(), KeyError("x")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("state", ["UP", "DOWN"])
def test_run_that_an_error_ends_compares_the_lab_and_keeps_the_error(lab, tmp_path, monkeypatch, error, state):
    def with_faults(*_):
        assert in_progress.live(tmp_path)[0].why == "run run"
        change(tmp_path, "host1", state)
        raise error

    result = run(lab, tmp_path, monkeypatch, with_faults)
    assert result.lab_state == ("CLEAN" if state == "UP" else "DIRTY")
    assert dirty.is_marked(tmp_path) == (state == "DOWN")
    assert dirty.unfinished(tmp_path) == ()
    assert len(result.errors) == 1
    assert [record.op for record in read(tmp_path / "run" / "journal.jsonl")] == ["error", "lab"]


@pytest.mark.parametrize(("state", "code"), [("UP", 3), ("DOWN", 5)])
def test_run_ended_by_ctrl_c_compares_the_lab_and_reports_the_result(lab, tmp_path, monkeypatch, state, code):
    def with_faults(*_):
        change(tmp_path, "host1", state)
        raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        run(lab, tmp_path, monkeypatch, with_faults)
    assert caught.value.exit_code == code
    output = (
        "the lab is as it was before"
        if code == 3
        else "the lab is DIRTY: host1: link be0 was UP, is DOWN; run `faultbed heal`"
    )
    assert str(caught.value) == output
    assert dirty.is_marked(tmp_path) == (state == "DOWN")


class Left(Active):
    """A part that says that something of it may still be on the lab."""

    def left(self):
        return ("routing scheme pinned not removed: its removal was not read back",)


def test_run_ended_by_ctrl_c_with_a_routing_scheme_left_is_dirty(lab, tmp_path, monkeypatch):
    """The fingerprint may not show the scheme, but the scheme's receipt says that it was not removed."""

    def with_faults(run):
        run.active["routing"] = Left()
        raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="routing scheme pinned not removed") as caught:
        run(lab, tmp_path, monkeypatch, with_faults)
    assert caught.value.exit_code == 5
    assert dirty.reasons(tmp_path)[0].startswith("routing scheme pinned not removed: its removal was not read back")


def test_run_second_ctrl_c_during_the_comparison_reports_a_missing_comparison(lab, tmp_path, monkeypatch):
    def with_faults(*_):
        monkeypatch.setattr(fingerprint, "settle", with_faults)
        raise KeyboardInterrupt

    with pytest.raises(Interrupted, match=r"was not compared .* the next command does that first") as caught:
        run(lab, tmp_path, monkeypatch, with_faults)
    assert caught.value.exit_code == 5
    assert "was killed" in dirty.unfinished(tmp_path)[0]


def test_run_on_an_unreachable_lab_is_not_clean(lab, tmp_path, monkeypatch):
    def silent(_):
        raise LabError("host1 does not answer")

    monkeypatch.setattr(fingerprint, "capture", silent)
    result = run(lab, tmp_path, monkeypatch, lambda *_: pytest.fail("nothing may be changed"))
    assert result.errors == ["host1 does not answer"]
    assert result.lab_state == "DIRTY"


@pytest.fixture
def soft(qemu, tmp_path, monkeypatch):
    """A lab whose fault acts on the stand-in for QEMU, which no fingerprint shows."""
    monkeypatch.setattr(counters, "read", counters.read)
    monkeypatch.setattr(fingerprint, "capture", fingerprint.capture)
    monkeypatch.setattr("faultbed.inject.evidence.witnesses.SETTLE_S", 0.0)
    lab = soft_lab_at(tmp_path)
    lab.reserved = ("*",)
    monkeypatch.setattr(loop, "_to_known_state", lambda *_: None)
    monkeypatch.setattr("faultbed.testbed.backends.soft.lifecycle.panics", lambda _: [])
    return SimpleNamespace(lab=lab, qemu=qemu)


def armed(run):
    """Take a link down, with an injector of the pass."""
    planned = plan(FaultSpec(kind="link.down", target="host1:rxe0", for_s=60.0), SOFT.topology, lab_kind="soft")
    run.injected.injector = Injector(run.setting.lab, run.setting.journal)
    prepared = run.injected.injector.prepare(planned)
    assert prepared.arm().ok
    return prepared


def refuse_the_revert(qemu):
    """Make the revert fail once. The stored revert, which runs when the holder is gone, succeeds."""
    answer, refusals = qemu._answer, [[{"error": {"desc": "no"}}]]

    def refusing(command, arguments):
        is_revert = command == "set_link" and arguments["up"]
        return refusals.pop() if is_revert and refusals else answer(command, arguments)

    qemu._answer = refusing


def test_run_with_a_fault_that_is_not_cleared_is_dirty_whatever_the_fingerprint_shows(soft, tmp_path, monkeypatch):
    def with_faults(run):
        prepared = armed(run)
        refuse_the_revert(soft.qemu)
        with run.injected.injector:
            run.injected.receipts["x"] = prepared.clear(keep_holder=True)

    result = run(soft.lab, tmp_path, monkeypatch, with_faults)
    assert result.lab_state == "DIRTY"
    assert result.lab_diff[0].startswith("link.down on host1:rxe0 is not cleared: ")
    assert dirty.reasons(tmp_path) == result.lab_diff


def test_run_ctrl_c_during_a_fault_reports_that_the_fault_is_cleared(soft, tmp_path, monkeypatch):
    def with_faults(run):
        armed(run)
        with run.injected.injector:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        run(soft.lab, tmp_path, monkeypatch, with_faults)
    assert str(caught.value) == "1 fault cleared and verified; the lab is as it was before"
    assert soft.qemu.links[-1] is True


def test_run_with_a_second_ctrl_c_while_it_clears_is_marked_and_claims_nothing(soft, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    def with_faults(run):
        armed(run)
        monkeypatch.setattr("faultbed.inject.prepared_fault.PreparedFault._clear", interrupted)
        with run.injected.injector:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        run(soft.lab, tmp_path, monkeypatch, with_faults)
    assert caught.value.exit_code == 5
    assert "link.down on host1:rxe0 reverts when its lease of 10 s expires; the lab is DIRTY" in str(caught.value)
    assert "cleared" not in str(caught.value)
    assert "its end was not observed" in dirty.reasons(tmp_path)[0]


def test_run_with_two_ctrl_c_before_its_fault_is_armed_is_not_dirty(soft, tmp_path, monkeypatch):
    """Nothing has changed, and the released holder cannot change anything any more."""

    def interrupted(*_):
        raise KeyboardInterrupt

    def with_faults(run):
        planned = plan(FaultSpec(kind="link.down", target="host1:rxe0", for_s=60.0), SOFT.topology, lab_kind="soft")
        run.injected.injector = Injector(run.setting.lab, run.setting.journal)
        run.injected.injector.prepare(planned)
        monkeypatch.setattr("faultbed.inject.prepared_fault.PreparedFault._clear", interrupted)
        with run.injected.injector:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        run(soft.lab, tmp_path, monkeypatch, with_faults)
    assert (str(caught.value), caught.value.exit_code) == ("the lab is as it was before", 3)
    assert soft.qemu.links == []
    assert not dirty.is_marked(tmp_path)
    assert list((tmp_path / "faults").iterdir()) == []


@pytest.mark.parametrize(("state", "kind"), [("CLEAN", LabError), ("DIRTY", DirtyLab)])
def test_run_that_cannot_be_recorded_reports_the_final_state_of_faults_and_lab(tmp_path, state, kind):
    receipt = SimpleNamespace(cleared=SimpleNamespace(ok=True))
    diff = () if state == "CLEAN" else ("host1: link be0 is DOWN",)
    measured = pass_of()
    result = RunRecord(setting=measured.setting, passes=[measured], lab_state=state, lab_diff=diff)
    with Journal(tmp_path / "journal") as journal:
        measured.injected.injector = Injector(SimpleNamespace(state_dir=tmp_path), journal)
    measured.injected.injector.receipts = (receipt, receipt)
    decided = SimpleNamespace(plan=SimpleNamespace(experiment="demo", seed=1))
    error = not_recorded(decided, SimpleNamespace(name="soft"), loop.RunDir(tmp_path), result, FULL)
    assert type(error) is kind
    output = f"{tmp_path}: the run could not be recorded: samples.parquet: No space left on device; "
    assert str(error).startswith(f"{output}2 faults cleared and verified; the lab is {state}")
    assert loop.RunDir(tmp_path).read_verdict().lab_state == state
