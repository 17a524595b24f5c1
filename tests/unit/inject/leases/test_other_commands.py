"""Faults of other commands: which of them may have moved the counters of this command's faults."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from synthetic_run import soft_topology

from faultbed.inject.leases.other_commands import FaultsOfOthers
from faultbed.testbed.node import holders
from faultbed.testbed.tenancy import audit_log
from faultbed.testbed.tenancy.lab_lease import this_process


@pytest.fixture
def lab(tmp_path):
    return SimpleNamespace(state_dir=tmp_path, topology=soft_topology(), kind="soft")


def dead_process():
    machine, _, _ = this_process().rsplit(":", 2)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        start = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        child.communicate(b"\n")
    return f"{machine}:{child.pid}:{start}"


def record(lab, event, *, seconds_ago, process, for_s=60.0, step_s=0.0, boot=None):
    """Write a line of the audit log. The wall clock has been set back by `step_s` since; `boot` None: an old line."""
    fields = {
        "at": (datetime.now(UTC) - timedelta(seconds=seconds_ago - step_s)).isoformat(), "event": event,
        "id": "0-link.flap", "session": "other", "process": process, "kind": "link.flap", "target": "host1:rxe1",
        "for_s": for_s, "params": {},
    }  # fmt: skip
    if boot is not None:
        fields |= {"boot": boot, "monotonic_s": time.monotonic() - seconds_ago}
    with audit_log.path_of(lab.state_dir).open("a", encoding="utf-8") as file:
        file.write(json.dumps(fields) + "\n")


def others(lab, *, since_s_ago=10.0, reader=None):
    since_ns = time.monotonic_ns() - int(since_s_ago * 1e9)
    faults = reader or FaultsOfOthers(lab, session="mine")
    return [(fault.target.text, is_over) for fault, is_over in faults.since(since_ns, tail_s=5.0)]


def begun(lab):
    faults = FaultsOfOthers(lab, session="mine")
    faults.begin()
    return faults


def test_fault_of_a_living_command_counts_until_its_planned_end(lab):
    record(lab, "arming", seconds_ago=30, process=this_process())
    assert others(lab) == [("host1:rxe1", False)]


@pytest.mark.parametrize("for_s", [300.0, 25.0 - audit_log.UNSEEN_S])
def test_fault_of_a_command_that_was_killed_does_not_count_until_its_planned_end(lab, for_s):
    """The lease has ended the fault, and the lab was compared since. A fault at the planned end was not proven."""
    record(lab, "arming", seconds_ago=30, process=dead_process(), for_s=for_s)
    assert others(lab, reader=begun(lab)) == []


def test_fault_of_a_command_that_is_killed_during_this_one_counts_until_its_lease_is_over(lab):
    """Such a fault used to be skipped once its process was dead, although the target kept it for its lease."""
    reader = begun(lab)
    record(lab, "arming", seconds_ago=8, process=dead_process(), for_s=2.0)
    assert others(lab, reader=reader) == [("host1:rxe1", False)]
    assert others(lab, reader=begun(lab)) == []


@pytest.mark.parametrize(("step_s", "boot", "expected"), [
    (3600.0, holders.boot_id(), [("host1:rxe1", True)]), (-3600.0, holders.boot_id(), [("host1:rxe1", True)]),
    (-3600.0, "another", []), (-3600.0, None, []), (0.0, None, [("host1:rxe1", True)]),
])  # fmt: skip
def test_step_of_the_wall_clock_does_not_move_faults_of_other_commands(lab, step_s, boot, expected):
    """A fault that ended 8 s ago counts. After a step by an hour it had ended long ago, or had not begun."""
    for event, seconds_ago in (("arming", 30), ("cleared", 8)):
        record(lab, event, seconds_ago=seconds_ago, process=this_process(), step_s=step_s, boot=boot)
    assert others(lab) == expected
    if boot not in (None, "another"):
        assert audit_log.last_fault(lab.state_dir).ago_s == pytest.approx(8, abs=1)


def test_audit_log_lines_have_the_clock_that_processes_of_a_boot_share(lab):
    before_s = time.monotonic()
    audit_log.append(lab.state_dir, "arming")
    (line,) = audit_log.entries(lab.state_dir)
    assert line["boot"] == holders.boot_id()
    assert before_s <= line["monotonic_s"] <= time.monotonic()


def test_fault_that_a_command_cleared_before_it_ended_counts(lab):
    process = dead_process()
    record(lab, "arming", seconds_ago=30, process=process)
    record(lab, "cleared", seconds_ago=8, process=process)
    assert others(lab) == [("host1:rxe1", True)]
    assert others(lab, since_s_ago=1.0) == []


def test_fault_that_stays_on_counts_however_many_lines_come_after_it(lab):
    """The last 256 KiB of the log were read: 150 faults of this command hid the one that was on in another shell."""
    record(lab, "arming", seconds_ago=30, process=this_process(), for_s=3600.0)
    reader = begun(lab)
    assert others(lab, reader=reader) == [("host1:rxe1", False)]
    with audit_log.path_of(lab.state_dir).open("a", encoding="utf-8") as file:
        for number in range(2000):
            line = {"at": datetime.now(UTC).isoformat(), "event": "arming", "id": f"{number}", "session": "mine"}
            file.write(json.dumps({**line, "for_s": 1.0, "kind": "link.flap", "params": {"text": "x" * 100}}) + "\n")
    assert audit_log.path_of(lab.state_dir).stat().st_size > 256 << 10
    assert others(lab, reader=reader) == others(lab, reader=begun(lab)) == [("host1:rxe1", False)]
    record(lab, "cleared", seconds_ago=0, process=this_process())
    assert others(lab, reader=reader) == [("host1:rxe1", True)]


def test_log_reader_yields_each_line_once_and_a_torn_line_never(tmp_path):
    path = audit_log.path_of(tmp_path)
    reader = audit_log.LogReader(tmp_path)
    assert list(reader.new_entries()) == []
    path.write_text('{"n": 1}\n[]\n{"n": 2')
    assert list(reader.new_entries()) == [{"n": 1}]
    with path.open("a") as file:
        file.write('}\nnot json\n{"n": 3}\n')
    assert list(reader.new_entries()) == [{"n": 2}, {"n": 3}]
    path.unlink()
    path.write_text('{"n": 4}\n')
    assert list(reader.new_entries()) == [{"n": 4}]
