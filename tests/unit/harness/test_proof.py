"""Proof by time: a fault must fire while the workload runs, and stay active for as long as planned."""

from __future__ import annotations

import dataclasses
import json
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from judged_runs import plan_of
from planned_faults import SAMPLES, soft
from synthetic_run import FLAP, LOSS, MS, T0, S, changed, synthetic_run

from faultbed.harness import proof
from faultbed.harness.analysis.observe import observe
from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.experiment.metrics import lookup
from faultbed.harness.judge import judge
from faultbed.harness.parts.part import Planned
from faultbed.harness.verdict import Verdict
from faultbed.inject.evidence.firing_times import (
    OnTime,
    drop_unmade_edges,
    measured_spans,
    on_time_of,
    planned_spans,
    tolerance_ns,
    why_not_as_planned,
    why_outside,
)
from faultbed.inject.evidence.receipt import Armed, Cleared

MINUTE = 60 * S


def on(*spans_s, planned=None, switch_ms=1.0, **rest) -> OnTime:
    """Return the times of a fault that was active during these spans (s); each change takes `switch_ms`."""
    switch_ns = int(switch_ms * MS)
    changes = []
    for begin, end in spans_s:
        changes.append((int(begin * S) - switch_ns, int(begin * S), True))
        if end is not None:
            changes.append((int(end * S), int(end * S) + switch_ns, False))
    spans = tuple((int(begin * S), int(end * S)) for begin, end in planned or [(0, spans_s[0][1] - spans_s[0][0])])
    return on_time_of(spans, changes, **rest)


@pytest.mark.parametrize(
    ("edges", "window_s", "spans_s"),
    [
        ([[0.0, True]], 60.0, [(0, 60)]),
        ([[0.0, True], [0.5, False], [1.0, True], [1.5, False]], 2.0, [(0, 0.5), (1, 1.5)]),
        ([[0.0, True], [0.5, False], [1.0, True]], 1.25, [(0, 0.5), (1, 1.25)]),
        ([[0.0, True], [0.5, False], [1.0, True]], 0.25, [(0, 0.25)]),
        ([[0.0, True], [0.5, False], [1.0, True]], 1.0, [(0, 0.5)]),
    ],
)
def test_planned_spans_follow_the_edges_until_the_window_ends(edges, window_s, spans_s):
    spans = planned_spans(edges, int(window_s * S))
    assert spans == tuple((int(begin * S), int(end * S)) for begin, end in spans_s)


@pytest.mark.parametrize(("made", "phases"), [(2, 2), (3, 3)])
def test_flaps_cleared_at_an_edge_include_the_edge_only_if_it_was_made(made, phases):
    edges = [[k * 0.6 + (0.0 if up else 0.3), up] for k in range(9) for up in (True, False)]
    changes = [(int((k * 0.6 + late) * S), int((k * 0.6 + late) * S) + MS, up) for k in range(made) for late, up in
               ((0.0, True), (0.05 if k == 2 else 0.3, False))]  # fmt: skip
    window_ns = int(1.25 * S)
    planned = planned_spans(drop_unmade_edges(edges, window_ns, changes), window_ns)
    assert len(planned) == phases
    assert why_not_as_planned(on_time_of(planned, changes)) == ()


def test_measured_spans_hold_no_time_of_switching():
    """A span lasts from the confirmed change to the start of its removal. Without a readback of that, it has no end."""
    changes = [(0, 10, True), (100, 130, False), (200, 220, True)]
    assert measured_spans(changes) == (((10, 100),), 60)


@pytest.mark.parametrize(
    ("on_s", "planned_s", "good"),
    [
        (60, 60, True),
        (57.1, 60, True),
        (56.9, 60, False),
        (63.1, 60, False),
        (0.95, 1.0, True),
        (0.89, 1.0, False),
        (1.25, 60, False),
        (0.0016, 2.0, False),
    ],
)
def test_on_time_beyond_100_ms_or_5_percent_is_not_as_planned(on_s, planned_s, good):
    reasons = why_not_as_planned(on((5, 5 + on_s), planned=[(0, planned_s)]))
    assert (reasons == ()) is good
    if not good:
        assert f"of the planned {planned_s:.4g}"[:16] in reasons[0]


def test_why_not_as_planned_names_the_times():
    assert why_not_as_planned(on((0, 1.25), planned=[(0, 60)])) == ("was on for 1.25 s of the planned 60 s",)
    assert why_outside((int(20 * S), int(20 * S)), (0, 12 * S)) == "fired 8.00 s after the workload ended"


@pytest.mark.parametrize(
    ("spans_s", "word"),
    [
        ([(0, 0.5), (1, 1.5), (2, 2.5)], None),
        ([(0, 0.5), (1, 1.5)], "was on 2 of 3 planned times"),
        (
            [(0, 0.5), (1, 1.2), (2, 2.5)],
            "was on too long or too short 1 of 3 times; the first: on for 0.20 s of the planned 0.50 s",
        ),
        (
            [(0, 0.5), (1, 1.5), (1.8, 2.3)],
            "was off too long or too short 1 of 2 times; the first: off for 0.30 s of the planned 0.50 s",
        ),
        ([(0, 0.5), (1, 1.5), (2, None)], "was on 2 of 3 planned times"),
    ],
)
def test_every_edge_of_a_train_counts(spans_s, word):
    reasons = why_not_as_planned(on(*spans_s, planned=[(0, 0.5), (1, 1.5), (2, 2.5)]))
    assert (reasons[0] if reasons else None) == word or word in reasons[0]


@pytest.mark.parametrize(("on_s", "good"), [(0.0, False), (0.0016, False), (0.02, False), (0.03, True), (0.12, True)])
def test_fault_shorter_than_the_tolerance_must_be_on_for_half_of_its_window(on_s, good):
    """The tolerance of 100 ms exceeds a window of 50 ms. A fault active for 1.6 ms of it used to count as proven."""
    reasons = why_not_as_planned(on((5, 5 + on_s), planned=[(0, 0.05)]))
    assert (reasons == ()) is good
    if not good:
        assert "of the planned 0.05 s, which is less than 50%" in reasons[0]
    assert why_not_as_planned(on((5, 5 + on_s), planned=[(0, 0.05)], until_cleared=True)) == ()


def test_short_flaps_consumed_by_switching_are_not_as_planned():
    """Each of 25 flaps of 100 ms was active for 4 ms. Slow switching used to excuse the difference."""
    planned = [(k * 0.2, k * 0.2 + 0.1) for k in range(25)]
    spans = [(k * 0.2, k * 0.2 + 0.004) for k in range(25)]
    (reason,) = why_not_as_planned(on(*spans, planned=planned, switch_ms=55))
    assert reason == "was on for 0.10 s of the planned 2.50 s, which is less than 50%"


def test_fault_planned_without_on_time_is_not_as_planned():
    assert why_not_as_planned(on_time_of((), [])) == ("was never planned to be on",)


def test_train_whose_flaps_are_all_a_little_short_is_not_as_planned():
    """Each flap is within the tolerance of 100 ms, but their sum is not within 5 %."""
    planned = [(k, k + 0.5) for k in range(20)]
    spans = [(k, k + 0.42) for k in range(20)]
    assert "was on for 8.40 s of the planned 10 s in all" in why_not_as_planned(on(*spans, planned=planned))[-1]


def test_slow_switching_beyond_what_the_mechanism_needs_leaves_the_on_time_unknown():
    """If a removal hangs for half a minute, the fault's end is unknown."""
    hung = on((0, 10), switch_ms=15_000)
    assert "30 s to switch on and off" in why_not_as_planned(hung)[0]
    assert why_not_as_planned(on((0, 10), switch_ms=1_900)) == ()
    assert why_not_as_planned(on((0, 10), switch_ms=15_000, switching_ns=14 * S)) == ()


def test_complete_fault_has_no_on_time():
    """One dropped packet, a reset or a dead rank is complete when it has happened, whenever it is cleared."""
    assert why_not_as_planned(on((0, 1.25), planned=[(0, 60)], complete=True)) == ()


def test_time_outside_the_workload_does_not_count():
    long = on((0, 60))
    assert why_not_as_planned(long, (-S, MINUTE)) == ()
    (reason,) = why_not_as_planned(long, (-S, int(12.5 * S)))
    assert reason == "was on for 12.5 s of the planned 60 s while the workload ran"
    assert why_not_as_planned(long, (-9 * S, -S)) == ("was on for 0.00 s of the planned 60 s while the workload ran",)


@pytest.mark.parametrize(
    ("between_s", "word"),
    [
        ((1, 1), None),
        ((10.1, 10.3), "fired 0.10 s after the workload ended"),
        ((9.9, 10.3), "may have fired after the workload ended: up to 0.30 s later"),
        ((-2, -1), "fired 1.00 s before the workload started"),
        ((-1, 1), "may have fired before the workload started: up to 1.00 s earlier"),
    ],
)
def test_firing_outside_the_workload_is_reported(between_s, word):
    first, last = (int(at * S) for at in between_s)
    assert why_outside((first, last), (0, 10 * S)) == word


@given(planned_s=st.floats(0.05, 1000), share=st.floats(0, 3))
def test_on_time_that_is_accepted_is_within_the_tolerance(planned_s, share):
    planned_ns = int(planned_s * S)
    believed = not why_not_as_planned(on((0, planned_s * share), planned=[(0, planned_s)]))
    is_near = abs(int(planned_s * share * S) - planned_ns) <= tolerance_ns(planned_ns)
    assert believed == (is_near and int(planned_s * share * S) >= planned_ns / 2)


ONE_SHOT = {"rnic.qp-error", "switch.bgp-reset", "host.reboot", "host.rank-kill", "gpu.xid", "packet.forge"}


@pytest.mark.parametrize("kind", SAMPLES)
def test_one_shot_kind_is_complete_after_its_hits_and_others_last_for_their_window(kind):
    """All other kinds last for their window, and a shorter time is not as planned."""
    target, params = SAMPLES[kind]
    planned = soft(kind, target, for_s=5.0, **params)
    one_packet = planned.spec.params.get("psn") is not None
    assert (planned.mechanism.complete_after is not None) is (planned.kind in ONE_SHOT or one_packet)


# The judge


def judged(run, *metrics):
    expectations = [Expectation(metric=lookup(name, ["uplink", "loss", "slow-gpu"]), maximum=9.0) for name in metrics]
    return judge(before=Planned(plan=plan_of(run), expectations=expectations), run=run, observed=observe(run)).verdict


def checks_of(verdict):
    return {check.name: check for check in verdict.checks}


def with_uplink(run, *, plan=None, fired=None, **receipt):
    """Return the run with another first fault."""
    first = run.injected.faults[0]
    replaced = msgspec.structs.replace(first.receipt, **receipt)
    if fired:
        replaced = msgspec.structs.replace(replaced, fired=msgspec.structs.replace(replaced.fired, **fired))
    first = msgspec.structs.replace(first, receipt=replaced, plan=dataclasses.replace(first.plan, **(plan or {})))
    return changed(run, faults=(first, *run.injected.faults[1:]))


WORKLOADS = {
    "duration": {"collective": "all-reduce", "duration_ns": 52 * S},
    "iterations": {"collective": "all-reduce", "iterations": 40, "duration_ns": None},
    "job": {"grid": [["dp", 4]], "iterations": 40},
    "inference": {"requests": 20},
    "ranking": {"batches": 20},
    "replay": {"replay": "trace.json"},
}


@pytest.mark.parametrize("workload", WORKLOADS)
def test_judge_fault_outside_workload_is_inconclusive(workload):
    """A fault that fired 8 s after the end of the workload proves nothing, and neither do checks that depend on it."""
    run = changed(synthetic_run(), workload=WORKLOADS[workload])
    at_ns = run.workload.end_ns + 8 * S
    armed, cleared = Armed(ok=True, at_ns=at_ns), Cleared(ok=True, at_ns=at_ns + S)
    late = with_uplink(run, armed=armed, cleared=cleared, fired={"first_ns": at_ns, "last_ns": at_ns})
    verdict = judged(late, "recovery.uplink", "recovery.loss", "wrong_elements")
    checks = checks_of(verdict)
    assert verdict.verdict is Verdict.INCONCLUSIVE
    assert checks["fired.uplink"].verdict is Verdict.INCONCLUSIVE
    assert "fired 8.00 s after the workload ended" in checks["fired.uplink"].detail
    assert "100 ms or 5%" in checks["fired.uplink"].meaning
    assert checks["recovery.uplink"].verdict is Verdict.INCONCLUSIVE
    assert checks["fired.loss"].verdict is checks["wrong_elements"].verdict is Verdict.PASS
    assert "fired 8.00 s after" in verdict.faults[0].unproven[0]
    assert verdict.faults[1].unproven == ()


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("recorded", [True, False])
def test_judge_fault_on_for_a_part_of_its_window_is_inconclusive(workload, recorded):
    """The active time comes from the holder. Older runs use the longest time that their receipt allows."""
    run = changed(synthetic_run(), workload=WORKLOADS[workload])
    begin = FLAP.start + T0 / S
    on_time = on((begin, begin + 1.08), planned=[(0, 60)]) if recorded else None
    short = with_uplink(run, plan={"for_s": 60.0}, on_time=on_time)
    check = checks_of(judged(short))["fired.uplink"]
    assert check.verdict is Verdict.INCONCLUSIVE
    assert "of the planned 60 s" in check.detail


def test_judge_workload_that_ends_under_the_fault_is_inconclusive():
    """The holder kept the fault for its whole window, but the job had ended before."""
    run = synthetic_run(seconds=21.0)
    start = T0 / S + LOSS.start
    begun = msgspec.structs.replace(run.injected.faults[1].receipt, on_time=on((start, start + 3.0)))
    run = changed(
        run,
        faults=(run.injected.faults[0], msgspec.structs.replace(run.injected.faults[1], receipt=begun)),
        end_ns=T0 + 21 * S,
    )
    check = checks_of(judged(run))["fired.loss"]
    assert check.verdict is Verdict.INCONCLUSIVE
    assert check.detail == "was on for 1.62 s of the planned 3.00 s while the workload ran"


def test_judge_on_time_of_a_proven_fault_is_in_its_detail_and_in_the_verdict():
    run = synthetic_run()
    begin = T0 / S + FLAP.start
    verdict = judged(with_uplink(run, on_time=on((begin, begin + 1.02), planned=[(0, 1)])))
    check = checks_of(verdict)["fired.uplink"]
    assert check.verdict is Verdict.PASS
    assert "on for 1.02 s of 1.00 s (tolerance 0.10 s)" in check.detail
    output = json.loads(msgspec.json.encode(verdict))["faults"][0]["on_time"]
    assert (output["planned_ns"], output["measured_ns"], output["tolerance_ns"]) == (S, 1_020_000_000, 100 * MS)


@given(st.integers(0, 2**32))
def test_judge_never_accepts_a_fault_that_does_not_fit_workload_and_plan(seed):
    """At random times, every fault that passes lies within the workload and lasts as planned."""
    draw = random.Random(seed)
    run = synthetic_run()
    begin, length, planned = T0 / S + draw.uniform(-20, 70), draw.uniform(0.01, 40), draw.uniform(0.01, 40)
    at_ns = int(begin * S)
    fault = with_uplink(
        run,
        plan={"for_s": planned},
        fired={"first_ns": at_ns, "last_ns": at_ns, "between_ns": (at_ns, at_ns + MS)},
        on_time=on((begin, begin + length), planned=[(0, planned)]),
    ).injected.faults[0]
    if not proof.why_unproven_in(run, fault):
        assert run.workload.t0_ns <= at_ns <= run.workload.end_ns
        within_s = min(begin + length, run.workload.end_ns / S) - begin
        assert abs(within_s - planned) <= tolerance_ns(int(planned * S)) / S + 0.001


def test_fault_within_one_of_several_workloads_is_proven():
    receipt = synthetic_run().injected.faults[0].receipt
    first_ns = receipt.fired.first_ns
    before, during = (first_ns - 9 * S, first_ns - 5 * S), (first_ns - S, first_ns + 30 * S)
    assert proof.why_unproven(receipt, workloads=[before, during]) == ()
    assert "after the workload ended" in proof.why_unproven(receipt, workloads=[before])[0]
    assert proof.why_unproven(receipt) == ()


def test_fault_complete_by_hits_needs_all_hits_while_the_workload_runs():
    """The last of three forged packets came after the job's end, so the fault was not complete while the job ran."""
    run = synthetic_run()
    first_ns, beyond_ns = run.workload.end_ns - S, run.workload.end_ns + 2 * S
    complete = on((first_ns / S, first_ns / S + 3), complete=True)
    fired = {"count": 3, "first_ns": first_ns, "last_ns": beyond_ns}
    check = checks_of(judged(with_uplink(run, on_time=complete, fired=fired)))["fired.uplink"]
    assert check.verdict is Verdict.INCONCLUSIVE
    assert "its last hits came up to 2.00 s after the workload ended" in check.detail
    within = with_uplink(run, on_time=complete, fired={**fired, "last_ns": run.workload.end_ns - 1})
    assert checks_of(judged(within))["fired.uplink"].verdict is Verdict.PASS


def test_train_that_was_off_while_the_workload_ran_is_not_proven():
    """Hits before and after a workload do not prove that the fault acted in between."""
    receipt = synthetic_run().injected.faults[0].receipt
    fired = msgspec.structs.replace(receipt.fired, count=2, first_ns=10 * S, last_ns=100 * S, between_ns=None)
    train = on((10, 11), (99, 100), planned=[(0, 1), (89, 90)])
    receipt = msgspec.structs.replace(receipt, fired=fired, on_time=train)
    pause, first, second = (50 * S, 51 * S), (10 * S + 1, 12 * S), (98 * S, 99 * S + 1)
    for workloads in ([pause], [first], [second], [pause, first, second]):
        assert proof.why_unproven(receipt, workloads=workloads)


@pytest.mark.parametrize("part", ["armed", "cleared"])
def test_judge_fault_of_unknown_on_time_is_inconclusive(part):
    """A receipt without any times used to count as active for the planned time."""
    check = checks_of(
        judged(with_uplink(synthetic_run(), **{part: {"armed": Armed, "cleared": Cleared}[part](ok=True)}))
    )["fired.uplink"]
    assert check.verdict is Verdict.INCONCLUSIVE
    assert "it is unknown how long it was on" in check.detail


@pytest.mark.parametrize("delta", [0, -3, float("nan"), None])
def test_judge_witness_that_did_not_grow_is_none(delta):
    check = checks_of(judged(with_uplink(synthetic_run(), fired={"must_move": {"host1/x": delta}})))["fired.uplink"]
    assert check.verdict is Verdict.INCONCLUSIVE
    assert "what must move did not (host1/x)" in check.detail
