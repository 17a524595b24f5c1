"""The three lines about an INCONCLUSIVE run."""

from __future__ import annotations

import pytest

from faultbed.harness.report.undecided import explain, first_reason
from faultbed.harness.verdict import Check, Verdict, VerdictFile
from faultbed.testbed.observe.machine_load import MachineLoad

QUIET = MachineLoad(wall_ns=10**9, cpu=0.1, io=0.0, memory=0.0, steal=0.0)
BUSY = MachineLoad(wall_ns=10**9, cpu=0.8, io=0.3, memory=0.0, steal=0.0)
LONG = "goodput varies too much; " * 40


def check(name, verdict=Verdict.INCONCLUSIVE, detail=LONG):
    return Check(name=name, verdict=verdict, observed=None, bound=1, unit="s", rule="observed <= bound", detail=detail)


def made(*checks, verdict=Verdict.INCONCLUSIVE):
    return VerdictFile(experiment="x", seed=1, lab="soft", verdict=verdict, checks=checks, faults=(), lab_state="CLEAN")


def test_three_lines_say_what_why_and_what_to_do():
    lines = explain(made(check("recovery.uplink"), check("after_clear.total"), check("x", Verdict.PASS)), BUSY)
    waits = "tasks waited for CPU 80 % of the time, tasks waited for disk 30 % of the time"
    assert lines == [
        "not decided: recovery.uplink, after_clear.total (2 of 3 checks)",
        "why: recovery.uplink: goodput varies too much",
        f"do: run it again when this machine has less other work ({waits})",
    ]


def test_condition_is_the_reason_of_the_numbers_that_need_it():
    lines = explain(made(check("jct_ratio"), check("fired.loss", detail="never armed; no witness")), QUIET)
    assert lines[1] == "why: fired.loss: never armed"
    assert "report" in lines[2]


def test_health_gate_is_the_reason_of_faults_that_were_not_armed():
    gate = check("healthy_start", detail="no fault was armed: 2 queue pairs were lost before the first fault")
    lines = explain(made(check("fired.loss", detail="not armed: the run was stopped"), gate), None)
    assert lines[1] == "why: healthy_start: no fault was armed: 2 queue pairs were lost before the first fault"


def test_quiet_machine_gets_more_runs_as_advice():
    assert "--until-decided" in explain(made(check("jct_ratio")), QUIET)[2]


def test_control_run_is_told_that_it_never_passes():
    assert "control" in explain(made(check("fired.loss"), check("control_run")), BUSY)[2]


@pytest.mark.parametrize("verdict", [Verdict.PASS, Verdict.FAIL, Verdict.ERROR])
def test_other_verdicts_have_no_such_lines(verdict):
    assert explain(made(check("x", verdict), verdict=verdict), BUSY) == []


def test_many_checks_and_long_reasons_stay_three_short_lines():
    lines = explain(made(*(check(f"check{number}", detail="x" * 5000) for number in range(60))), BUSY)
    assert len(lines) == 3
    assert max(map(len, lines)) < 300


@pytest.mark.parametrize("checks", [(), (check("x", detail=""),)])
def test_missing_details_still_make_sentences(checks):
    lines = explain(made(*checks), None)
    assert 2 <= len(lines) <= 3
    assert all(line.strip() for line in lines)


def test_first_reason_is_one_clause():
    assert first_reason("a: b; c. d") == "a: b"
    assert first_reason("") == ""
