"""Stop conditions: values seen live, when a condition holds, and how the run then stops."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judged_runs import plan_of
from pass_stand_ins import pass_of
from planned_faults import planned_at
from synthetic_run import soft_topology, synthetic_run

from faultbed.harness.analysis.observe import observe
from faultbed.harness.experiment.experiment_file import decode
from faultbed.harness.experiment.stop import METRICS, Condition
from faultbed.harness.judge import judge
from faultbed.harness.ledger.ledger import fold
from faultbed.harness.ledger.sealed import Sealed
from faultbed.harness.parts.faults import drive_faults
from faultbed.harness.parts.part import Planned
from faultbed.harness.parts.passes import Active, EarlyEnd
from faultbed.harness.parts.stops.live_values import Live, StopWatcher
from faultbed.harness.parts.stops.stop_guard import Guard
from faultbed.harness.run.lease_watch import LeaseWatch
from faultbed.harness.run.prepare.bind_to_lab import fit
from faultbed.harness.verdict import Verdict
from faultbed.inject.evidence.receipt import Armed, Cleared, Fired, Receipt
from faultbed.inject.fault_plan import plan
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.prepared_fault import PreparedFault
from faultbed.testbed.errors import ConfigError, FaultError, LabError
from faultbed.testbed.observe.telemetry import Change
from faultbed.traffic.engine.run_results import Standstill

S = 1_000_000_000
FILE = """
name = "x"
[workload]
collective = "all-reduce"
size = "1MiB"
duration = "30s"
[[faults]]
kind = "link.flap"
target = "rtsw1:ctsw1"
at = "8s"
for = "9s"
[[stop]]
metric = "goodput_ratio"
min = 0.2
for = "5s"
[[stop]]
metric = "silence"
max = "10s"
verdict = "INCONCLUSIVE"
"""
LOST = Condition(metric=METRICS["qp_errors"], bound=2)
SLOW = Condition(metric=METRICS["goodput_ratio"], bound=0.2, for_ns=5 * S, verdict=Verdict.INCONCLUSIVE)


def begun(faults):
    """Return a pass whose workload has just begun, with its prepared faults."""
    run = pass_of(lab=SimpleNamespace(guard=lambda: None, topology=soft_topology()))
    run.work.t0_ns, run.injected.ready = time.monotonic_ns(), faults
    return run


def test_stop_conditions_are_decoded():
    slow, silent = decode(FILE.encode(), source="x.toml").stops
    assert (slow.metric.name, slow.bound, slow.for_ns, slow.verdict) == ("goodput_ratio", 0.2, 5 * S, Verdict.FAIL)
    assert (silent.bound, silent.for_ns, silent.verdict) == (10.0, 0, Verdict.INCONCLUSIVE)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"silence"', '"silense"', ["stop[1].metric", "did you mean silence"]),
        ("min = 0.2", "max = 0.2", ["stop[0]", "bounded by min alone"]),
        ("min = 0.2", "", ["stop[0]", "bounded by min alone"]),
        ("min = 0.2", "min = 0.2\nmax = 0.9", ["stop[0]", "bounded by min alone"]),
        ('max = "10s"', "max = 10", ["stop[1].max", "unit"]),
        ("min = 0.2", 'min = "20ms"', ["stop[0].min", '"20ms" is not a share']),
        ('for = "5s"\n[[stop]]', 'for = "5"\n[[stop]]', ["stop[0].for"]),
        ('for = "5s"\n[[stop]]', 'fro = "5s"\n[[stop]]', ["stop[0]", "did you mean for"]),
        ('"INCONCLUSIVE"', '"PASS"', ["stop[1].verdict", "PASS"]),
        ('for = "9s"', 'for = "4s"', ["stop[0].for", "it is evaluated for 4 s", "could never stop the run"]),
        ('max = "10s"', 'max = "10s"\nfor = "18s"', ["stop[1].for", "it is evaluated for 17 s"]),
        ('at = "8s"', 'at = "0s"', ["stop[0].metric", "fault-free start"]),
        ('"silence"\nmax = "10s"', '"slow_ranks"\nmax = 0', ["stop[1].metric", "compute_units"]),
        ('"silence"\nmax = "10s"', '"slow_ranks"\nmin = 1', ["stop[1]", "bounded by max alone"]),
    ],
)
def test_stop_condition_error_names_its_path(old, new, words):
    assert old in FILE
    with pytest.raises(ConfigError) as caught:
        fit(decode(FILE.replace(old, new).encode(), source="x.toml"), soft_topology(), "soft")
    assert all(word in str(caught.value) for word in words), caught.value


def test_slow_ranks_are_counted_in_a_job_that_computes():
    text = FILE.replace('"30s"', '"30s"\ncompute_units = 8').replace('"silence"\nmax = "10s"', '"slow_ranks"\nmax = 0')
    _, slow = fit(decode(text.encode(), source="x.toml"), soft_topology(), "soft").stops
    assert (slow.metric.name, slow.bound, slow.for_ns) == ("slow_ranks", 0, 0)
    assert slow.holds(1)
    assert not slow.holds(0)


def test_conditions_without_faults_are_refused():
    head, _, rest = FILE.partition("[[faults]]")
    with pytest.raises(ConfigError, match=r"stop\[0\].*has none"):
        decode((head + rest[rest.index("[[stop]]") :]).encode(), source="x.toml")


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=60))
def test_stop_condition_stops_after_its_holding_time(values):
    """With a value each half second, the run stops at the first one that completes five seconds below the bound."""
    guard, expected, run = Guard([SLOW]), None, 0
    for index, value in enumerate(values):
        run = run + 1 if value is not None and value < 0.2 else 0
        if expected is None and run == 11:  # the first reading, and ten half seconds after it
            expected = index * S // 2
        guard.evaluate(index * S // 2, {"goodput_ratio": value})
    assert (guard.held.at_ns if guard.held else None) == expected
    if guard.held:
        assert guard.held.at_ns - guard.held.since_ns == 5 * S


def judged(guard, *, t0_ns=0, sealed=True):
    """Return the verdict of a synthetic run with these stop conditions, and the checks of the conditions."""
    run = synthetic_run()
    evidence = Sealed().having(guard.sealed(t0_ns=t0_ns)) if sealed else Sealed()
    before = Planned(plan=plan_of(run), expectations=(), stops=guard.conditions)
    result = judge(before=before, run=run, observed=observe(run), sealed=evidence)
    assert fold(result.ledger) is result.verdict.verdict
    names = ("stop.", "healthy_start")
    return result.verdict.verdict, [check for check in result.verdict.checks if check.name.startswith(names)]


def test_stop_condition_evaluated_for_less_than_its_holding_time_is_inconclusive():
    """Goodput was 0, but for two seconds only, and the condition must hold for five. It used to pass."""
    guard = Guard([SLOW])
    for at_s in (100, 101, 102):
        guard.evaluate(at_s * S, {"goodput_ratio": 0.0})
    _, (slow,) = judged(guard, t0_ns=90 * S)
    assert slow.verdict is Verdict.INCONCLUSIVE
    assert slow.detail == "known for 2.0 s only, but the condition must hold for 5 s"


def test_stop_condition_that_only_unknown_values_kept_from_holding_is_inconclusive():
    """Goodput was 0 whenever it was known, for ten seconds, but unknown for half a second in each two."""
    guard = Guard([SLOW])
    for half in range(21):
        guard.evaluate((200 + half) * S // 2, {"goodput_ratio": None if half % 4 == 3 else 0.0})
    assert guard.held is None
    assert guard.missing is None
    _, (slow,) = judged(guard, t0_ns=90 * S)
    assert slow.verdict is Verdict.INCONCLUSIVE
    assert slow.detail == (
        "not refuted from 10.0 s to 15.0 s, and not known all the time in between "
        "(longest gap between two values 1.0 s)"
    )


def test_stop_condition_that_was_better_in_between_did_not_hold():
    guard = Guard([SLOW])
    for half in range(21):
        guard.evaluate((200 + half) * S // 2, {"goodput_ratio": 1.0 if half % 4 == 3 else 0.0})
    _, (slow,) = judged(guard, t0_ns=90 * S)
    assert slow.verdict is Verdict.PASS


def check_of(condition, looks, *, end_s=None, expected_s=None):
    """Return the check of a condition that had these values at these times (s)."""
    guard = Guard([condition])
    if expected_s is not None:
        guard.expect({condition.metric.name: expected_s * S})
    for at_s, value in looks:
        guard.evaluate(int(at_s * S), {condition.metric.name: value})
    if end_s is not None:
        guard.end(int(end_s * S))
    return judged(guard)[1][-1]


def steady(begin_s, end_s, value):
    return [(begin_s + half / 2, value) for half in range(2 * (end_s - begin_s) + 1)]


def test_stop_condition_that_was_not_evaluated_for_longer_than_its_time_is_inconclusive():
    """Nobody looked for 21 s, in which goodput was 0: "never beyond the bound"."""
    check = check_of(SLOW, [*steady(10, 12, 1.0), *steady(33, 34, 1.0)])
    assert check.verdict is Verdict.INCONCLUSIVE
    assert "from 12.0 s to 33.0 s" in check.detail
    assert "longest gap between two values 21.0 s" in check.detail


@pytest.mark.parametrize(
    ("looks", "more", "expected"),
    [
        (steady(10, 30, 1.0), {"end_s": 30.5, "expected_s": 10}, Verdict.PASS),
        ([*steady(10, 12, 1.0), *steady(16, 30, 1.0)], {}, Verdict.PASS),  # 4 s cannot hide a hold of 5 s
        ([*steady(10, 12, 1.0), *steady(13, 14, 0.0), *steady(18, 30, 1.0)], {}, Verdict.INCONCLUSIVE),  # 13 to 18 s
        (steady(10, 20, 1.0), {"end_s": 25.5}, Verdict.INCONCLUSIVE),
        (steady(10, 20, 1.0), {"end_s": 21}, Verdict.PASS),
        (steady(16, 30, 1.0), {"expected_s": 10}, Verdict.INCONCLUSIVE),
    ],
)
def test_stop_condition_is_judged_by_the_gaps_between_its_values(looks, more, expected):
    assert check_of(SLOW, looks, **more).verdict is expected


def test_stop_condition_that_held_before_and_after_a_gap_is_inconclusive():
    """Two values below the bound, 23 s apart, were a hold of 23 s, although goodput may have been good in between."""
    check = check_of(SLOW, [(10, 0.0), (33, 0.0)])
    assert check.verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("looks", "more", "expected"),
    [
        ([(10, 0), (33, 2)], {}, Verdict.PASS),
        ([(10, 0), (33, 3)], {}, Verdict.FAIL),
        ([(10, 0), (11, 2)], {"end_s": 20}, Verdict.INCONCLUSIVE),
    ],
)
def test_stop_condition_on_a_count_of_events_has_no_gap_before_its_last_value(looks, more, expected):
    assert check_of(LOST, looks, **more).verdict is expected


def test_stop_condition_without_a_time_allows_a_gap_of_a_second():
    now = Condition(metric=METRICS["goodput_ratio"], bound=0.2)
    assert check_of(now, [(10, 1.0), (11, 1.0)]).verdict is Verdict.PASS
    assert check_of(now, [(10, 1.0), (11.2, 1.0)]).verdict is Verdict.INCONCLUSIVE


def test_watching_evaluates_conditions_while_the_reservation_store_is_slow():
    """A store that took 3 s per call left conditions unevaluated, and skipped the health gate before the fault."""
    live, guard, answered, ending = Live(), Guard([LOST]), threading.Event(), EarlyEnd()
    now_ns = time.monotonic_ns()
    live.begin(start_ns=now_ns - 60 * S, fault_ns=now_ns + int(1.6 * S))
    live.on_event({"event": "qp_error", "time_ns": now_ns - S})
    with LeaseWatch(lambda: answered.wait(20), ending), StopWatcher(guard, live, ending):
        assert ending.wait(10)
        answered.set()
    assert guard.refused == "1 queue pairs were lost before the first fault"


def test_live_gate_that_was_not_evaluated_in_time_is_named():
    live = Live()
    live.begin(start_ns=0, fault_ns=20 * S)
    live.on_event(sample(0, *[100] * 180))
    for now_s in (18, 19.9, 20.1):
        assert live.unhealthy(int(now_s * S)) is None
        assert "the health of the workload was not checked" in live.why_gate_missed()
    assert live.unhealthy(19 * S) is None
    assert live.why_gate_missed() is None


@pytest.mark.parametrize("missed", ["the health of the workload was not checked", None])
def test_drive_first_fault_without_a_health_gate_is_not_proven(missed):
    """The gate did not happen because the controller was busy, and nothing said so."""
    armed = Receipt(
        id="a", kind="link.down", target="x", fidelity="real", armed=Armed(ok=True), cleared=Cleared(ok=True),
        fired=Fired(count=1, first_ns=1, last_ns=2, witness="w", must_move={}, must_not_move={}),
    )  # fmt: skip
    faults = []
    for name, at_s in (("second", 0.2), ("first", 0.1)):
        fault = Fault()
        spec = SimpleNamespace(id=name, at_s=at_s, for_s=0.0)
        fault.planned = SimpleNamespace(**{**vars(Fault.planned), "spec": spec})
        fault.clear = lambda keep_holder: armed
        fault.reads, fault.is_on = [], False
        faults.append(fault)
    run = begun(faults)
    run.active["stops"] = type("Stops", (Active,), {"doubts": lambda _: (missed,) if missed else ()})()
    drive_faults.drive_all(run, SimpleNamespace(is_over=False))
    assert run.setting.errors == []
    first = run.injected.receipts["first"]
    assert first.doubts == first.unproven == ((missed,) if missed else ())
    assert run.injected.receipts["second"].unproven == ()


def test_stop_condition_that_held_is_reported_with_time_and_value():
    """The condition that held decides the run; the other conditions have passed."""
    guard = Guard([LOST, SLOW])
    for half in range(192, 204):
        guard.evaluate(half * S // 2, {"qp_errors": 1, "goodput_ratio": 0.9})
    guard.evaluate(102 * S, {"qp_errors": 3, "goodput_ratio": 0.1})
    verdict, (lost, slow) = judged(guard, t0_ns=90 * S)
    assert verdict is Verdict.FAIL
    assert (lost.name, lost.observed, lost.bound, lost.verdict) == ("stop.qp_errors", 3, 2, Verdict.FAIL)
    assert "at 12.0 s all faults were cleared" in lost.detail
    assert lost.comparison == "max"
    assert (slow.name, slow.verdict) == ("stop.goodput_ratio", Verdict.PASS)


def test_stop_condition_without_data_proves_nothing():
    guard = Guard([SLOW])
    guard.evaluate(1 * S, {"goodput_ratio": None})
    assert judged(guard)[0] is Verdict.INCONCLUSIVE
    assert judged(Guard([])) == (Verdict.PASS, [])


def test_stop_condition_without_its_evidence_is_unknown():
    guard = Guard([SLOW])
    for half in range(20, 60):
        guard.evaluate(half * S // 2, {"goodput_ratio": 1.0})
    assert judged(guard)[0] is Verdict.PASS
    verdict, (slow,) = judged(guard, sealed=False)
    assert (verdict, slow.verdict, slow.detail) == (
        Verdict.INCONCLUSIVE, Verdict.INCONCLUSIVE, "nothing is known about it",
    )  # fmt: skip


def test_stop_condition_that_ends_the_run_as_inconclusive_breaks_nothing():
    guard = Guard([SLOW])
    for half in range(20, 32):
        guard.evaluate(half * S // 2, {"goodput_ratio": 0.1})
    assert guard.held is not None
    assert judged(guard)[0] is Verdict.INCONCLUSIVE


def test_guard_condition_whose_data_stop_coming_ends_the_run_as_inconclusive():
    """Data exist at first, and then stop for more than a second."""
    guard = Guard([LOST])
    guard.evaluate(10 * S, {"qp_errors": 0})
    guard.evaluate(int(10.5 * S), {"qp_errors": None})
    guard.evaluate(int(11.5 * S), {"qp_errors": None})
    assert guard.missing is None, "no longer than a second yet"
    guard.evaluate(12 * S, {"qp_errors": None})
    assert guard.missing is not None
    verdict, (lost,) = judged(guard)
    assert verdict is Verdict.INCONCLUSIVE
    assert "no data of the metric from 10.5 s on; at 12.0 s all faults were cleared" in lost.detail


def test_guard_gap_shorter_than_a_second_does_not_end_the_run():
    guard = Guard([LOST])
    for at, value in ((10, 0), (10.5, None), (11, None), (11.4, 0), (12, None), (12.6, 0)):
        guard.evaluate(int(at * S), {"qp_errors": value})
    assert guard.missing is None


def test_guard_condition_that_is_due_and_was_never_known_ends_the_run():
    guard = Guard([LOST, SLOW])
    for at in range(5):
        guard.evaluate(at * S, {}, due={"qp_errors"})
    assert guard.missing is not None
    assert guard.missing.condition is LOST


def test_live_silent_ranks_leave_goodput_and_errors_unknown():
    live = Live()
    live.begin(start_ns=0, fault_ns=5 * S)
    live.on_event({**sample(9 * S, *[1] * 10), "time_ns": 10 * S})
    assert live.values(11 * S)["qp_errors"] == 0
    assert live.values(int(11.5 * S))["qp_errors"] is None
    assert live.values(int(11.5 * S))["goodput_ratio"] is None
    assert live.due(12 * S) == {"qp_errors", "goodput_ratio", "silence", "kernel.broken"}
    live.is_over = lambda: True
    assert live.values(12 * S)["qp_errors"] == 0, "a workload that has ended reports nothing, and need not"
    assert live.due(12 * S) == set()


def test_live_broken_kernels_are_unknown_if_the_log_of_a_machine_is_not_followed():
    """Without root on one host, its kernel could break unseen: `kernel.broken` was 0, and its condition PASS."""
    live = Live()
    live.begin(start_ns=0, fault_ns=5 * S)
    assert live.values(6 * S)["kernel.broken"] == 0
    live.without_log = lambda: ["host2"]
    assert live.values(6 * S)["kernel.broken"] is None
    live.on_change(Change(at_ns=6 * S, node="host1", subject="kernel", text="0 kernel BUG at mm/slub.c:1"))
    assert live.values(6 * S)["kernel.broken"] == 1


def test_watching_stops_when_all_ranks_are_silent():
    """In real time: the ranks reported once, long ago, and send nothing more."""
    live = Live()
    now_ns = time.monotonic_ns()
    live.begin(start_ns=now_ns - 60 * S, fault_ns=now_ns - 30 * S)
    live.on_event({**sample(now_ns - 10 * S, 1), "time_ns": now_ns - 9 * S})
    guard, ending = Guard([LOST]), EarlyEnd()
    with StopWatcher(guard, live, ending):
        assert ending.wait(30)
    assert guard.missing is not None
    assert ending.reason == "stopped: no more data of qp_errors, which a stop condition needs"
    assert ending.error is None


def before_fault(sizes, *, now_s=19, events=(), **more):
    """Return the problem seen a second before the first fault (at 20 s), with these bytes in each 100 ms."""
    live = Live()
    live.begin(start_ns=0, fault_ns=20 * S)
    for name, value in more.items():
        setattr(live, name, value)
    for event in (sample(0, *sizes), *events):
        live.on_event(event)
    return live.unhealthy(int(now_s * S))


def test_live_healthy_workload_is_accepted():
    assert before_fault([100] * 180, needs_baseline=True) is None
    assert before_fault([0, 0, 0, 300] * 45, needs_baseline=True) is None


@pytest.mark.parametrize(
    ("sizes", "more", "reason"),
    [
        ([0] * 180, {}, "makes no progress: no byte in the last 18.0 s"),
        ([100] * 100 + [0] * 80, {}, "makes no progress: no byte in the last 8.0 s"),
        ([100] * 180, {"events": [{"event": "qp_error"}]}, "1 queue pairs were lost"),
        ([100] * 60 + [1] * 40 + [100] * 80, {"needs_baseline": True}, "varies too much"),
        (
            [100] * 180,
            {"standstills": lambda: [Standstill(host="host2", start_ns=5 * S, end_ns=10 * S)]},
            "host2 stood still for 5.0 s of the 19.0 s",
        ),
    ],
)
def test_live_unhealthy_start_is_named(sizes, more, reason):
    assert reason in before_fault(sizes, **more)
    assert before_fault(sizes, **more, now_s=12) is None, "it is not time to decide yet"
    assert before_fault(sizes, **more, now_s=21) is None, "the faults are there"


def test_live_dip_in_the_harness_own_reads_is_no_unsteady_start():
    sizes = [100] * 60 + [1] * 40 + [100] * 80
    assert before_fault(sizes, needs_baseline=True, reads=lambda: [(6 * S, 10 * S)]) is None


def test_live_workload_with_long_pauses_makes_progress():
    """Iterations compute for 4 s, so the last pause is as long as those before."""
    assert before_fault(([0] * 40 + [500] * 5) * 4) is None


def test_watching_unhealthy_start_arms_nothing_and_is_inconclusive():
    live, guard = Live(), Guard([])
    now_ns = time.monotonic_ns()
    live.begin(start_ns=now_ns - 60 * S, fault_ns=now_ns + int(1.2 * S))
    ending = EarlyEnd()
    StopWatcher(guard, live, ending).check_conditions()
    assert ending.is_requested
    fault = Fault()
    drive(fault, ending)
    assert fault.calls == []
    verdict, (healthy,) = judged(guard)
    assert verdict is Verdict.INCONCLUSIVE
    assert healthy.name == "healthy_start"
    assert "no fault was armed: the workload makes no progress" in healthy.detail


def sample(start_ns, *sizes):
    return {"event": "sample", "start_ns": start_ns, "sizes": sizes}


def test_live_goodput_is_a_share_of_its_value_before_the_first_fault():
    """Only whole reported seconds count; there is no value before the fault, and 0 where nothing arrived."""
    live = Live()
    live.begin(start_ns=10 * S, fault_ns=12 * S)
    for second in range(9, 14):
        live.on_event(sample(second * S, *[100] * 10))
    live.on_event(sample(14 * S, *[50] * 10))
    assert live.values(13 * S)["goodput_ratio"] is None
    assert live.values(14 * S)["goodput_ratio"] == pytest.approx(1.0)
    assert live.values(16 * S)["goodput_ratio"] == pytest.approx(0.5)
    assert live.values(30 * S)["goodput_ratio"] == 0.0


def test_live_goodput_of_datagrams_is_what_arrives():
    """The sender completes a datagram whether or not the link is up."""
    live = Live()
    live.begin(start_ns=10 * S, fault_ns=12 * S)
    for second in range(9, 15):
        live.on_event({**sample(second * S, *[100] * 10), "has_arrived": False})
        live.on_event(sample(second * S, *[100 if second < 12 else 0] * 10))
    assert live.values(14 * S)["goodput_ratio"] == 0.0


def test_live_values_include_errors_silence_and_slow_ranks():
    live = Live()
    counts = {"qp_errors": 0, "kernel.broken": 0}
    assert live.values(S) == {**counts, "goodput_ratio": None, "silence": None, "slow_ranks": None}
    live.heard_ns = lambda: {"host1": 3 * S, "fabric": 5 * S}
    live.slow_ranks = lambda: 2
    live.on_event({"event": "qp_error"})
    live.on_change(Change(at_ns=S, node="host2", subject="kernel", text="1 BUG: unable to handle page fault"))
    live.on_change(Change(at_ns=S, node="host2", subject="link be0", text="DOWN"))
    counts = {"qp_errors": 1, "kernel.broken": 1, "slow_ranks": 2}
    assert live.values(7 * S) == {**counts, "goodput_ratio": None, "silence": 4.0}
    assert set(live.values(7 * S)) == set(METRICS)


def test_watching_evaluates_conditions_by_itself_and_stops():
    live = Live()
    for _ in range(3):
        live.on_event({"event": "qp_error"})
    ending = EarlyEnd()
    with StopWatcher(Guard([LOST]), live, ending):
        assert ending.wait(10)
    assert ending.reason == "stopped: qp_errors was 3, bound 2"
    assert ending.error is None


def test_watching_stops_when_the_reservation_is_lost():
    """A reservation lost during a fault window used to be noticed only after the window."""

    def lost():
        raise LabError("soft is reserved by another user")

    ending = EarlyEnd()
    LeaseWatch(lost, ending).check()
    assert ending.is_requested
    assert "another user" in ending.error


class Fault:
    """A prepared fault that records its calls."""

    planned = SimpleNamespace(
        kind="link.down",
        target=SimpleNamespace(text="rtsw1:ctsw1"),
        spec=FaultSpec(kind="link.down", target="rtsw1:ctsw1", for_s=3600.0),
    )

    def __init__(self, ending=None):
        self.calls, self.ending, self.reason = [], ending, None

    def cancel(self, reason):
        self.reason = reason

    def baseline(self):
        self.calls.append("baseline")

    def arm(self, *, at_ns, cancel_reason):
        self.calls.append("arm")
        if self.ending is not None:
            assert not cancel_reason()
            self.ending.request("stopped")
            assert cancel_reason()


def drive(fault, ending, *, running=None, at_ns=None):
    run = begun([fault])
    run.ending, run.work.t0_ns = ending, run.work.t0_ns if at_ns is None else at_ns
    drive_faults._drive(run, fault, running or SimpleNamespace(is_over=False))


def test_drive_ends_a_window_when_the_run_stops():
    """An hour's window ends at once; the caller clears the fault."""
    ending = EarlyEnd()
    fault = Fault(ending)
    drive(fault, ending)
    assert fault.calls == ["baseline", "arm"]


def test_drive_arms_nothing_when_the_run_has_stopped():
    ending, fault = EarlyEnd(), Fault()
    ending.request("stopped")
    drive(fault, ending)
    assert fault.calls == []
    assert fault.reason == "the run was stopped"


def test_drive_workload_over_before_the_fault_is_due_arms_nothing():
    """The fault used to be armed a minute early and cleared at once: active for no time, and still proven."""
    fault, now_ns = Fault(), time.monotonic_ns()
    running = SimpleNamespace(is_over=True, ended_ns=now_ns)
    drive(fault, EarlyEnd(), running=running, at_ns=now_ns + 60 * S)
    assert fault.calls == []
    assert fault.reason == "the workload ended 60.0 s before the fault was due"


def test_drive_workload_over_during_the_baseline_arms_nothing():
    fault, running = Fault(), SimpleNamespace(is_over=False, ended_ns=0)

    def baseline():
        running.is_over, running.ended_ns = True, time.monotonic_ns()

    fault.baseline = baseline
    drive(fault, EarlyEnd(), running=running)
    assert fault.calls == []
    assert "could not be armed by then" in fault.reason


def test_drive_drops_a_fault_whose_workload_ends_before_its_time():
    fault, running = Fault(), SimpleNamespace(is_over=False, ended_ns=0)
    lines = []

    def arm(*, at_ns, cancel_reason):
        assert cancel_reason() is None
        running.is_over, running.ended_ns = True, at_ns - 2 * S
        lines.append(cancel_reason())

    fault.arm = arm
    drive(fault, EarlyEnd(), running=running)
    assert lines == ["the workload ended 2.0 s before the fault was due"]


class Hang(Fault):
    """A fault of a workload. Its target refuses the inspection while `target` is stopped by another one."""

    def __init__(self, target, *, at_s, for_s=0.3):
        super().__init__()
        self.target, self.receipt, self.is_on, self.reads = target, Mock(proved=True), False, []
        self.ended_ns = self.inspected_ns = None
        spec = FaultSpec(id=f"at-{at_s:g}", kind="host.rank-hang", target="host1", for_s=for_s)
        self.planned = planned_at(plan(spec, soft_topology(), lab_kind="soft"), at_s)

    def baseline(self):
        self.inspected_ns = time.monotonic_ns()
        if self.target["stopped"]:
            raise FaultError("host1: process 7 (faultbed.traffic.node.engine) is stopped already; run `faultbed heal`")

    def arm(self, *, at_ns, cancel_reason):
        assert not cancel_reason()
        time.sleep(max(0, at_ns - time.monotonic_ns()) / 1e9)
        self.calls.append("arm")
        self.target["stopped"] = self.is_on = True

    def clear(self, *, keep_holder):
        if self.is_on:
            self.target["stopped"] = self.is_on = False
            self.ended_ns = time.monotonic_ns()
        return self.receipt


def hung_twice(again_s):
    """Drive two faults at one place; return them."""
    target = {"stopped": False}
    faults = [Hang(target, at_s=0.5), Hang(target, at_s=again_s)]
    run = begun(faults)
    drive_faults.drive_all(run, SimpleNamespace(is_over=False))
    assert run.setting.errors == []
    return faults


def test_second_fault_of_a_workload_at_one_place_is_refused_with_a_time_at_which_it_is_accepted(monkeypatch):
    """The advice was `heal`, which would have ended the first fault, and did not help the second one."""
    for name, value in (("LEAD_S", 0.4), ("TAIL_S", 0.3), ("REMOVAL_S", 0.4)):
        monkeypatch.setattr(drive_faults, name, value)
    first, second = hung_twice(1.0)
    assert (first.calls, second.calls) == (["arm"], [])
    assert second.reason == (
        "its target is inspected 0.4 s before it begins, and host.rank-hang on host1 still changed "
        "faultbed.traffic.node.engine of host host1 then; begin it at 1.9 s or later"
    )
    first, second = hung_twice(float(second.reason.split()[-4]))
    assert (first.calls, second.calls, second.reason) == (["arm"], ["arm"], None)
    assert second.inspected_ns - first.ended_ns >= 0.3 * S, "else the first one's effects are evidence for the second"


def test_refusal_of_a_target_without_an_earlier_fault_keeps_its_advice():
    fault = Hang({"stopped": True}, at_s=0.0)
    fault.planned = planned_at(fault.planned, 0.0)
    with pytest.raises(FaultError, match="heal"):
        drive(fault, EarlyEnd())
    assert fault.reason is None


def test_drive_arms_nothing_if_the_run_stopped_during_the_baseline():
    """On a busy machine the baseline takes a while, and a stop condition may hold before it ends."""
    ending, fault = EarlyEnd(), Fault()
    fault.baseline = lambda: ending.request("stopped")
    drive(fault, ending)
    assert fault.calls == []


def test_fault_waiting_for_its_time_is_called_off():
    """The holder has the time; the controller calls the fault off before it."""
    spec = FaultSpec(kind="link.down", target="rtsw1:ctsw1", for_s=1.0)
    planned = plan(spec, soft_topology(), lab_kind="soft")
    journal = SimpleNamespace(doing=lambda *_, **__: __import__("contextlib").nullcontext({}))
    injector = SimpleNamespace(
        lab=SimpleNamespace(),
        ttl_s=10.0,
        journal=journal,
        audit_change=Mock(),
        audit=Mock(),
        refuse_after_intervention=Mock(),
        use_of=None,
    )
    prepared = PreparedFault(injector, planned)
    prepared._witnesses.before = {}
    sent = []
    prepared.lease._channel = SimpleNamespace(
        send=sent.append, receive=lambda timeout_s: {"event": "scheduled", "at_ns": 1, "seq": sent[-1]["seq"]}
    )
    with pytest.raises(FaultError, match="cancelled before it was due: stopped"):
        prepared.arm(at_ns=time.monotonic_ns() + 3600 * S, cancel_reason=lambda: "stopped")
    assert [message["do"] for message in sent] == ["arm"]
