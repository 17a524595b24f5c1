"""Claims about programs: how each process ended, and whether the reader of progress found theirs."""

from __future__ import annotations

import msgspec
import pytest
from judged_runs import PLAN
from synthetic_run import T0, S, changed, synthetic_run

from faultbed.harness.analysis.observe import observe
from faultbed.harness.judge import judge
from faultbed.harness.parts.part import Planned
from faultbed.harness.verdict import Verdict
from faultbed.traffic.probes.prober import ProbeSpec
from faultbed.traffic.programs.program_results import ProgramEnd

WORKLOAD = {
    "command": "ib_write_bw {server}",
    "roles": {"server": ["host3:rxe0"], "client": ["host1:rxe0"]},
    "progress": "counters",
}


def end_of(role, rnic, **changes):
    given = {"rank": 0, "attempt": 1, "start_ns": T0, "end_ns": T0 + 30 * S, "code": 0}
    return ProgramEnd(role=role, rnic=rnic, **{**given, **changes})


SERVER, CLIENT = end_of("server", "host3:rxe0", stopped=True, code=-15), end_of("client", "host1:rxe0")


def judged(*ends, plan=PLAN, **changes):
    run = changed(synthetic_run(), workload=WORKLOAD, faults=(), programs=ends or None, **changes)
    before = Planned(plan=msgspec.structs.replace(plan, workload=WORKLOAD), expectations=())
    verdict = judge(before=before, run=run, observed=observe(run)).verdict
    return {check.name: check for check in verdict.checks}


def test_programs_that_end_as_planned_keep_the_claims():
    checks = judged(SERVER, CLIENT)
    assert checks["programs"].verdict is Verdict.PASS
    assert checks["progress"].verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("end", "says"),
    [
        ({"code": 3}, "client on host1:rxe0 ended by itself with 3"),
        ({"code": -11}, "client on host1:rxe0 ended by itself by SIGSEGV"),
        ({"code": -99}, "client on host1:rxe0 ended by itself by signal 99"),
        ({"code": 0, "timed_out": True, "stopped": True}, "client on host1:rxe0 did not end in time"),
    ],
)
def test_program_that_ends_otherwise_breaks_the_claim(end, says):
    check = judged(SERVER, end_of("client", "host1:rxe0", **end))["programs"]
    assert check.verdict is Verdict.FAIL
    assert says in check.detail


def test_last_attempt_decides():
    first = end_of("client", "host1:rxe0", code=1, end_ns=T0 + S)
    again = end_of("client", "host1:rxe0", attempt=2)
    check = judged(SERVER, again, first)["programs"]
    assert check.verdict is Verdict.PASS
    assert "1 restarts" in check.detail


@pytest.mark.parametrize("ends", [(), (SERVER,), (CLIENT,)])
def test_end_that_is_not_recorded_is_unknown(ends):
    assert judged(*ends)["programs"].verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("change", [{"left": 2}, {"removed": False}])
def test_processes_left_behind_are_unknown(change):
    assert judged(SERVER, end_of("client", "host1:rxe0", **change))["programs"].verdict is Verdict.INCONCLUSIVE


def test_reader_that_finds_nothing_is_unknown():
    silent = tuple(
        msgspec.structs.replace(series, samples=(), iterations=()) for series in synthetic_run().workload.series
    )
    checks = judged(SERVER, CLIENT, series=silent)
    assert checks["progress"].verdict is Verdict.INCONCLUSIVE
    assert "counters found no progress" in checks["progress"].detail + str(checks["progress"].why)


def test_counters_beside_probes_are_unknown():
    plan = msgspec.structs.replace(PLAN, probe=ProbeSpec(per_s=1, qps=4))
    assert judged(SERVER, CLIENT, plan=plan)["progress"].verdict is Verdict.INCONCLUSIVE
