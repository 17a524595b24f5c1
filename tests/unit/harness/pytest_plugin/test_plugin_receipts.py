"""A pytest test fails if the receipt of its fault proves nothing. Only QEMU is a stand-in."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import msgspec
import pytest
from house import HOUSE, SUPPORT
from qmp_server import Qemu
from synthetic_run import PATHS, synthetic_run

from faultbed.harness.pytest_plugin import receipts
from faultbed.harness.pytest_plugin.keys import RUNNING
from faultbed.harness.record.evidence.fault_evidence import FaultRun
from faultbed.harness.report.step_summary import JobResults, markdown, read_junit
from faultbed.inject.evidence.workload_use import Exposure
from faultbed.inject.kinds.fault_spec import FaultSpec

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.process

CONFTEST = """
import itertools, os, pathlib, time, types
import pytest
from local_lab import counters_of, lab_at
from faultbed.harness.pytest_plugin.keys import RUNNING
from faultbed.testbed.observe import counters

@pytest.fixture
def lab():
    return lab_at(pathlib.Path(os.environ["FAULTBED_TEST_LAB"]))

@pytest.fixture
def traffic(lab, request):
    \"\"\"Workloads that ran from and to so many seconds from now.\"\"\"
    running = request.node.stash[RUNNING] = []
    def ran(begin_s, end_s, host="host1"):
        now_ns = time.monotonic_ns()
        endpoint = types.SimpleNamespace(name=f"{host}:rxe0", host=host)
        task = types.SimpleNamespace(name="rank0", endpoint=endpoint, spec={}, stops_after=None)
        running.append(types.SimpleNamespace(
            started_ns=now_ns + int(begin_s * 1e9), ended_ns=now_ns + int(end_s * 1e9), is_over=end_s < 0, what="w",
            plan=types.SimpleNamespace(tasks=(task,), connections=()), connections=(), done={},
        ))
    return ran

@pytest.fixture
def still(lab, monkeypatch):
    \"\"\"Counters that no fault moves.\"\"\"
    monkeypatch.setattr(counters, "read", lambda *_, **__: counters_of(0))
    monkeypatch.setattr("faultbed.inject.evidence.witnesses.SETTLE_S", 0.1)
"""


@pytest.fixture
def session(pytester, monkeypatch, forked):
    """Run tests in a separate process; return each test's properties by name, and pytest's result.

    The lab's folder has a short name: the path of a UNIX socket has at most 107 characters.
    """
    folder = tempfile.TemporaryDirectory(prefix="faultbed-")
    server = Qemu(Path(folder.name) / "qmp")
    monkeypatch.setenv("FAULTBED_TEST_LAB", folder.name)
    path = os.pathsep.join(map(str, (pytester.path, HOUSE, SUPPORT)))
    pytester.makeconftest(CONFTEST)

    def run(text, *options):
        pytester.makepyfile(test_it=text)
        done = forked.faultbed(
            ["-p", "no:cacheprovider", "--junitxml=junit.xml", *options],
            env={**os.environ, "PYTHONPATH": path}, cwd=pytester.path, program="pytest_session",
        )  # fmt: skip
        result = pytest.RunResult(done.returncode, done.stdout.splitlines(), done.stderr.splitlines(), 0.0)
        cases = ET.parse(pytester.path / "junit.xml").iter("testcase")
        actual = {
            case.get("name"): {each.get("name"): each.get("value") for each in case.iter("property")} for case in cases
        }
        return actual, result

    yield run
    server.close()
    folder.cleanup()


def receipt_of(properties):
    (content,) = (json.loads(value) for name, value in properties.items() if name.startswith("receipt."))
    return content


def test_proven_fault_passes_with_the_receipt_of_the_command_line(session):
    results, result = session("def test_it(inject):\n    inject('link.flap', 'host1:rxe0').arm()\n")
    result.assert_outcomes(passed=1)
    assert results["test_it"]["faultbed_exit_code"] == "0"
    receipt = receipt_of(results["test_it"])
    assert receipt["unproven"] == []
    assert receipt["on_time"]["planned_ns"] > 0


NOOP = """
import pytest

@pytest.fixture
def fault_mutation():
    return "HOW"

@pytest.mark.parametrize("params", [{}, {"for_s": 0.2}, {"period": "0.2s", "count": 2}], ids=str)
@pytest.mark.parametrize("kind", ["link.flap", "link.down"])
def test_it(still, inject, kind, params):
    if kind == "link.down":
        params.pop("period", None), params.pop("count", None)
    fault = inject(kind, "host1:rxe0", **params)
    fault.arm()
"""


@pytest.mark.parametrize("how", ["noop", "lie"])
def test_every_test_fails_whose_fault_has_no_action(session, how):
    """All these tests used to pass, because no code evaluated the receipt."""
    results, result = session(NOOP.replace("HOW", how))
    result.assert_outcomes(passed=6, errors=6)
    assert len(results) == 6
    assert {result["faultbed_exit_code"] for result in results.values()} == {"2"}
    assert all(receipt_of(result)["unproven"] for result in results.values())
    result.stdout.fnmatch_lines(["*on host1:rxe0 is not proven: *"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_fault_that_is_prepared_and_never_armed_fails_its_test(session):
    results, result = session("def test_it(inject):\n    inject('link.flap', 'host1:rxe0')\n")
    result.assert_outcomes(passed=1, errors=1)
    assert "never armed" in receipt_of(results["test_it"])["unproven"][0]


def test_fault_that_need_not_be_proven_is_reported(session):
    text = "def test_it(inject):\n    inject('link.flap', 'host1:rxe0', prove=False)\n"
    results, result = session(text)
    result.assert_outcomes(passed=1)
    assert [name for name in results["test_it"] if name.startswith("prove.")]
    assert receipt_of(results["test_it"])["unproven"]
    result.stdout.fnmatch_lines(["faults that need not be proven (prove=False): test_it.py::test_it*link.flap*"])


RERUN = """
import pytest
from _pytest.runner import runtestprotocol

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for _ in range(2):
        item._initrequest()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    return True
"""
"""What pytest-rerunfailures does: the same item is run again, and the last attempt counts."""
FAILS_FIRST = """
import pathlib, pytest

@pytest.fixture
def fault_mutation():
    return "noop" if MUTATED and pathlib.Path("tried").exists() else None

def test_it(still, inject):
    inject("link.flap", "host1:rxe0", for_s=0.2).arm()
    if not pathlib.Path("tried").exists():
        pathlib.Path("tried").touch()
        assert False
"""


def test_rerun_test_whose_fault_did_nothing_fails_although_its_first_attempt_failed(session, pytester):
    """The first attempt's failure used to excuse the no-op fault of the second attempt, which then passed."""
    pytester.makepyfile(rerun=RERUN)
    results, result = session(FAILS_FIRST.replace("MUTATED", "True"), "-p", "rerun")
    result.assert_outcomes(passed=1, errors=1)
    assert results["test_it"]["faultbed_exit_code"] == "2"


def test_rerun_test_has_the_properties_of_its_last_attempt_alone(session, pytester):
    pytester.makepyfile(rerun=RERUN)
    session(FAILS_FIRST.replace("MUTATED", "False").replace("(still, ", "("), "-p", "rerun")
    names = [one.get("name") for one in ET.parse(pytester.path / "junit.xml").iter("property")]
    assert sum(name.startswith("receipt.") for name in names) == 1
    assert names.count("faultbed_exit_code") == 1


TIMES = """
def test_during(inject, traffic):
    traffic(-5, 60)
    inject("link.flap", "host1:rxe0").arm()

def test_first(inject, traffic):
    inject("link.flap", "host1:rxe0").arm()
    traffic(0, 60)

def test_after(inject, traffic):
    traffic(-60, -8)
    inject("link.flap", "host1:rxe0").arm()

def test_before(inject, traffic):
    fault = inject("link.flap", "host1:rxe0")
    fault.arm()
    fault.clear()
    traffic(5, 60)
"""


def test_fault_that_fired_when_no_traffic_of_the_test_ran_fails_it(session):
    results, result = session(TIMES)
    result.assert_outcomes(passed=4, errors=3)
    codes = {name: one["faultbed_exit_code"] for name, one in results.items()}
    assert codes == {"test_during": "0", "test_first": "2", "test_after": "2", "test_before": "2"}
    assert "after the workload ended" in receipt_of(results["test_after"])["unproven"][0]
    assert "before the workload started" in receipt_of(results["test_before"])["unproven"][0]


EXPOSED = """
def test_unused(inject, traffic):
    traffic(-5, 60, "host3")
    inject("link.flap", "host1:rxe0").arm()

def test_none(inject, traffic):
    traffic(-5, 60, "host3")
    fault = inject("link.flap", "host1:rxe0", exposed="none", for_s=1.0)
    fault.arm(); fault.wait()

def test_none_of_a_used_one(inject, traffic):
    traffic(-5, 60)
    inject("link.flap", "host1:rxe0", exposed="none").arm()

def test_none_without_traffic(inject):
    inject("link.flap", "host1:rxe0", exposed="none").arm()

def test_misspelt(inject):
    inject("link.flap", "host1:rxe0", exposed="nothing")
"""


def test_fault_on_what_the_traffic_of_the_test_does_not_use_fails_it(session):
    results, result = session(EXPOSED)
    result.assert_outcomes(passed=4, errors=3, failed=1)
    codes = {name: one.get("faultbed_exit_code") for name, one in results.items()}
    assert codes.pop("test_none") == "0"
    assert codes.pop("test_misspelt") != "0"
    assert set(codes.values()) == {"2"}
    assert "the workload did not use host1:rxe0" in receipt_of(results["test_unused"])["unproven"][0]
    used = receipt_of(results["test_none_of_a_used_one"])["unproven"]
    assert used == ['the workload used host1:rxe0, although the fault has exposed = "none"']
    assert "it is unknown whether" in receipt_of(results["test_none_without_traffic"])["unproven"][0]
    result.stdout.fnmatch_lines(["*exposed: 'nothing' is none of workload, none*"])


@pytest.mark.parametrize(("target", "code"), [("rtsw1:ctsw1", 0), ("rtsw1:ctsw2", 2)])
def test_fault_on_an_uplink_that_no_queue_pair_of_the_test_crosses_fails_it(target, code):
    run = synthetic_run()
    receipt = run.injected.faults[0].receipt
    use = msgspec.structs.replace(receipt.exposed.uses[0], paths=PATHS[:3])
    fault = FaultRun(
        plan=FaultSpec(kind=receipt.kind, target=target, for_s=1.0),
        receipt=msgspec.structs.replace(receipt, target=target, exposed=Exposure(uses=(use,))),
    )
    ran = SimpleNamespace(started_ns=run.workload.t0_ns, ended_ns=run.workload.end_ns)
    item = SimpleNamespace(stash={RUNNING: [ran]}, user_properties=[], config=SimpleNamespace(stash={}), nodeid="it")
    with pytest.raises(receipts.Unproven, match="did not use") if code else contextlib.nullcontext():
        receipts.conclude(item, [fault], run.lab.topology)
    assert dict(item.user_properties)["faultbed_exit_code"] == code


OVERLAP = """
def test_fault_outlives_the_workload(inject, traffic):
    fault = inject("link.down", "host1:rxe0", for_s=2.0)
    traffic(-30, 0.35)
    fault.arm(); fault.wait(); fault.clear()

def test_workload_begins_when_the_fault_is_nearly_over(inject, traffic):
    fault = inject("link.flap", "host1:rxe0", for_s=2.0, period="0.5s", count=4)
    fault.arm(); fault.wait(); fault.clear()
    traffic(-0.3, 30)
"""


def test_fault_that_overlaps_the_workload_by_too_little_fails_its_test(session):
    """The workload saw 0.35 s of a fault of 2 s: by the rule of `run` that is INCONCLUSIVE, and the test passed."""
    results, result = session(OVERLAP)
    result.assert_outcomes(passed=2, errors=2)
    assert {properties["faultbed_exit_code"] for properties in results.values()} == {"2"}
    cut = receipt_of(results["test_fault_outlives_the_workload"])["unproven"]
    assert "of the planned 2.00 s while the workload ran" in cut[0]


NOT_STARTED = """
import contextlib
import pytest
from faultbed.harness.pytest_plugin.fixtures import workloads_on

@pytest.fixture
def traffic(lab, request):
    yield from workloads_on(lab, request)

def test_swallowed(inject, traffic):
    with contextlib.suppress(Exception):
        traffic.collective(ranks=("host1:rxe0", "host3:rxe0"), size_bytes=1 << 16, iterations=10)
    fault = inject("link.down", "host1:rxe0", for_s=0.3)
    fault.arm(); fault.wait(); fault.clear()

def test_without_a_fault(traffic):
    with pytest.raises(Exception):
        traffic.flow("nowhere", "host3:rxe0")
"""


def test_workload_that_did_not_start_leaves_the_faults_of_its_test_unproven(session):
    """The test swallowed the error, so that no workload ran, and "while it ran" was not judged: exit code 0."""
    results, result = session(NOT_STARTED)
    result.assert_outcomes(passed=2, errors=1)
    assert results["test_swallowed"]["faultbed_exit_code"] == "2"
    assert "no workload ran: collective: " in receipt_of(results["test_swallowed"])["unproven"][0]


NOT_AWAITED = """
import time
import pytest
from engine_labs import RANK_OF, RankLab
from faultbed.harness.pytest_plugin.fixtures import workloads_on

@pytest.fixture
def traffic(lab, request):
    yield from workloads_on(lab, request)

def failing(engine):
    if engine.host == "host2":
        engine.emit("error", task="rank1", where="iteration 3", error="local protection error")

def ending(engine, wrong, over=True):
    now, rank = time.monotonic_ns(), RANK_OF[engine.host]
    engine.emit(
        "iteration", task=f"rank{rank}", index=0, start_ns=now - 2000, end_ns=now, compute_ns=0, comm_ns=1000,
        wait_ns=0, wrong=wrong, phases_ns=[1000],
    )
    if over:
        engine.emit("done", task=f"rank{rank}", start_ns=now - 3000, end_ns=now, checked=4096)

HOW = {
    "failing": failing, "wrong": lambda engine: ending(engine, 4096), "right": lambda engine: ending(engine, 0),
    "running": lambda engine: ending(engine, 0, over=False),
    "wrong-and-running": lambda engine: ending(engine, 7, over=False),
}

@pytest.fixture
def lab(request):
    return RankLab(HOW[request.node.callspec.params["how"]])

@pytest.mark.parametrize("awaits", [False, True])
@pytest.mark.parametrize("how", HOW)
def test_it(traffic, how, awaits):
    ranks = tuple(f"{host}:rxe0" for host in RANK_OF)
    job = traffic.collective(ranks=ranks, algorithm="ring", size_bytes=1 << 16, iterations=1)
    if awaits and "running" not in how:
        job.wait(30.0)
    elif "running" in how:
        while len([event for event in job.events if event.name == "iteration"]) < len(RANK_OF):
            time.sleep(0.01)
    else:
        while not job.is_over:
            time.sleep(0.01)
"""


def test_workload_that_failed_or_had_wrong_data_fails_a_test_that_did_not_wait_for_it(session):
    """A job that failed, and one with 16,384 wrong elements: both tests passed, because they slept instead."""
    results, result = session(NOT_AWAITED)
    failed = {name for name, properties in results.items() if properties.get("faultbed_exit_code") == "1"}
    wrong = {f"test_it[wrong-and-running-{awaits}]" for awaits in (False, True)}
    assert failed == {"test_it[failing-False]", "test_it[wrong-False]", *wrong}
    result.assert_outcomes(passed=10, errors=4)
    result.stdout.fnmatch_lines(
        ["*for which the test did not wait, failed: host2, iteration 3: local protection error*"]
    )
    result.stdout.fnmatch_lines(["*for which the test did not wait, had 16384 wrong elements*"])


def test_workload_that_has_ended_and_still_closes_its_engines_no_longer_runs():
    """A fault that fired in these seconds counted as one that fired while the workload ran."""
    ended, running = (SimpleNamespace(started_ns=5, ended_ns=end_ns, is_over=False) for end_ns in (9, 0))
    spans = receipts._workloads(SimpleNamespace(stash={RUNNING: [ended, running]}))
    assert spans[0] == (5, 9)
    assert spans[1][1] > 9


WINDOWS = """
def test_cut(inject):
    fault = inject("link.flap", "host1:rxe0", for_s=30.0)
    fault.arm()
    fault.clear()

def test_full(inject):
    fault = inject("link.flap", "host1:rxe0", for_s=0.5)
    fault.arm()
    fault.wait()
    fault.clear()

def test_open(inject):
    fault = inject("link.flap", "host1:rxe0")
    fault.arm()
    fault.clear()
"""


def test_window_that_a_test_names_and_cuts_short_is_not_proven(session):
    """A test that requests a fault of half a minute and clears it at once has not tested that fault."""
    results, result = session(WINDOWS)
    result.assert_outcomes(passed=3, errors=1)
    assert "of the planned 30 s" in receipt_of(results["test_cut"])["unproven"][0]
    assert {name: one["faultbed_exit_code"] for name, one in results.items()} == {
        "test_cut": "2", "test_full": "0", "test_open": "0",
    }  # fmt: skip


NOT_CLEARED = """
from faultbed.inject.prepared_fault import PreparedFault
from faultbed.inject.evidence.receipt import Cleared

def test_it(inject, monkeypatch):
    fault = inject("link.flap", "host1:rxe0", prove=PROVE)
    fault.arm()
    real = PreparedFault._clear
    def failed(self):
        _, observed = real(self)
        return Cleared(ok=False, error="the port is still down"), observed
    PreparedFault._clear = failed
"""


@pytest.mark.parametrize("prove", ["True", "False"])
def test_uncleared_fault_fails_its_test_even_with_prove_false(session, prove):
    results, result = session(NOT_CLEARED.replace("PROVE", prove))
    result.assert_outcomes(passed=1, errors=1)
    assert results["test_it"]["faultbed_exit_code"] == "5"
    result.stdout.fnmatch_lines(["*link.flap on host1:rxe0 is not cleared: the port is still down*"])


def test_failed_test_gets_no_second_failure_from_an_unproven_fault(session):
    results, result = session("def test_it(inject):\n    inject('link.flap', 'host1:rxe0')\n    assert False\n")
    result.assert_outcomes(failed=1)
    assert results["test_it"]["faultbed_exit_code"] == "2"


SUBTESTS = """
import pytest

@pytest.fixture
def fault_mutation():
    return "noop"

def test_excused(still, inject, subtests):
    inject("link.flap", "host1:rxe0", for_s=0.2).arm()
    with subtests.test("known"):
        pytest.xfail("a known defect")

def test_failed(still, inject, subtests):
    inject("link.flap", "host1:rxe0", for_s=0.2).arm()
    with subtests.test("new"):
        assert False
    with subtests.test("known"):
        pytest.xfail("a known defect")
"""


def test_expected_failure_of_a_subtest_does_not_excuse_a_fault_that_did_nothing(session):
    """A test passed whose fault had no action, because one of its subtests had failed as expected."""
    results, result = session(SUBTESTS)
    result.assert_outcomes(passed=1, failed=2, errors=1)
    assert {result["faultbed_exit_code"] for result in results.values()} == {"2"}
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_excused*", "*on host1:rxe0 is not proven: *"])


def test_interrupted_session_reports_what_is_unproven(session):
    """After Ctrl-C during a fault, pytest used to end with an internal error of the plugin."""
    text = "def test_it(still, inject):\n    inject('link.flap', 'host1:rxe0').arm()\n    raise KeyboardInterrupt\n"
    _, result = session(text)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert "Traceback" not in result.stdout.str() + result.stderr.str()
    assert "INTERNALERROR" not in result.stdout.str()
    result.stdout.fnmatch_lines(["interrupted: *::test_it: link.flap on host1:rxe0 is not proven: *"])


INTERRUPTED = """
import pytest

@pytest.fixture
def f():
    WHERE

def test_first(): pass

def test_second(f): pass

def test_third_of_a_hundred_never_ran(): assert False
"""


@pytest.mark.parametrize(
    "where", ["yield\n    raise KeyboardInterrupt", "raise KeyboardInterrupt", "yield\n    pytest.exit('enough')"]
)
def test_interrupted_session_has_an_error_in_junit_for_each_test_that_did_not_end(session, pytester, where):
    """Ctrl-C in a fixture: two of three tests were in the file, both passed, and the page for CI was green."""
    _, result = session(INTERRUPTED.replace("WHERE", where))
    assert result.ret == pytest.ExitCode.INTERRUPTED
    cases = {case.name.rpartition("::")[2]: case for case in read_junit([pytester.path / "junit.xml"])}
    assert {name: case.outcome for name, case in cases.items()} == {
        "test_first": "passed", "test_second": "error", "test_third_of_a_hundred_never_ran": "error",
    }  # fmt: skip
    assert "the session was interrupted during this test" in cases["test_second"].message
    assert "did not run" in cases["test_third_of_a_hundred_never_ran"].message
    assert markdown("x", JobResults(cases=tuple(cases.values()))).startswith("## ❌")


def test_session_interrupted_before_its_first_test_is_an_error_in_junit(session, pytester):
    pytester.makepyfile(
        early="def pytest_runtestloop(session):\n    session.items.clear()\n    raise KeyboardInterrupt\n"
    )
    session("def test_it(): pass\n", "-p", "early")
    (case,) = read_junit([pytester.path / "junit.xml"])
    assert (case.outcome, case.name.rpartition("::")[2]) == ("error", "session")
