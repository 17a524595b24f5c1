"""Restarts of a job: phases, their cost compared with the published formula, and that wrong state never passes."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
from finished_run import finished, parsed
from samples import some_of
from synthetic_run import MS, T0, S, changed, reread, synthetic_run

from faultbed.harness import judge
from faultbed.harness.analysis.ettr import ettr
from faultbed.harness.analysis.observe import observe
from faultbed.harness.analysis.prediction import predictions
from faultbed.harness.analysis.restarts import PHASES, TimedRestart, restart_metrics, timed_restarts
from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.experiment.metrics import METRICS
from faultbed.harness.experiment.run_plan import Plan
from faultbed.harness.parts.part import Planned
from faultbed.harness.record.evidence.workload_evidence import Iteration, RankSeries, ResilienceRun
from faultbed.harness.report import run_page
from faultbed.harness.report.comparison.compare import compare
from faultbed.harness.report.plots.restart_bars import restart_bars
from faultbed.harness.run.restart_lines import restart_lines
from faultbed.harness.verdict import Verdict
from faultbed.traffic.workloads.elastic.elastic_results import RankState, Restart, iterations_by_rank

ITERATION_NS, EVERY = 100 * MS, 10


def loss(iterations, **changes):
    """Return a restart: a host is lost after these iterations, noticed 4 s later; then phases of 1 s each and half a
    second."""
    at = T0 + iterations * ITERATION_NS
    made = Restart(
        number=1, reason="host3: no message from its traffic engine for 4.0 s", cause="host", hosts=("host3",),
        before=("host1:rxe0", "host3:rxe0"), after=("host1:rxe0", "host4:rxe0"), connections=2, progress_ns=at,
        noticed_ns=at + 4 * S, diagnosed_ns=at + 5 * S, rescheduled_ns=at + 6 * S, initialised_ns=at + 7 * S,
        restored_ns=at + 8 * S, caught_up_ns=at + 8 * S + S // 2, iterations=iterations, restored_iterations=40,
    )  # fmt: skip
    return replace(made, **changes)


PLAIN = loss(45)


def resilience(*restarts, wrong=0):
    states = tuple(RankState(rank=rank, iterations=100, elements=500, wrong=wrong, sha256="ab") for rank in (0, 1))
    return ResilienceRun(restarts=restarts, states=states, repeated_iterations=10, initialised_ns=2 * S, connections=2)


def job(*restarts, count=100, wrong=0, lengths_ns=lambda: ITERATION_NS):
    """Two ranks, usually with iterations of 100 ms; after each restart they go on from its checkpoint."""
    steps, now = {}, T0
    left = [restart for restart in restarts if restart.restored_ns is not None]
    index = 0
    while index < count:
        if left and index == left[0].iterations:
            one = left.pop(0)
            now, index = max(now, one.restored_ns), one.restored_iterations
            continue
        length_ns = lengths_ns()
        steps[index] = Iteration(index=index, start_ns=now, compute_ns=length_ns * 6 // 10,
                                 comm_ns=length_ns * 3 // 10, wait_ns=length_ns // 10)  # fmt: skip
        now, index = steps[index].end_ns, index + 1
    series = tuple(RankSeries(rank=rank, iterations=tuple(steps.values())) for rank in (0, 1))
    workload = {
        "grid": [["dp", 2]],
        "phases": [{"along": "dp", "collective": "all-reduce", "size_bytes": 4096, "algorithm": "ring"}],
        "iterations": count,
        "storage": {"host": "host4", "every": EVERY},
    }
    plain = synthetic_run(fired=False)
    return changed(
        plain, ranks=plain.workload.ranks[:2], series=series, end_ns=now, workload=workload, faults=(),
        resilience=resilience(*restarts, wrong=wrong),
    )  # fmt: skip


def test_restart_phases_begin_at_the_firing_that_caused_the_loss():
    (timed,) = timed_restarts(resilience(PLAIN), {"early": (T0 + S, T0 + 2 * S), "loss": (T0 + 5 * S + S // 2, 0)})
    assert [phase.name for phase in timed.phases] == list(PHASES)
    assert [phase.length_ns / S for phase in timed.phases] == [3.0, 1.0, 1.0, 1.0, 1.0, 0.5]
    (timed,) = timed_restarts(resilience(PLAIN), {})
    assert timed.phases[0].length_ns == 4 * S, "without a fault, from the last progress"


def test_outage_is_not_charged_to_a_fault_that_fired_when_the_job_stood_still_already():
    """The last iteration was reported just after the first fault fired: the outage began with the second one."""
    run = job(PLAIN)
    first_ns, second_ns = PLAIN.progress_ns - 20 * MS, PLAIN.progress_ns + 3 * S
    metrics = restart_metrics(run, {"freeze": (first_ns, 0), "kill": (second_ns, 0)})
    assert metrics["restart.detect"].value == pytest.approx(4.02)
    assert metrics["restart.total"].value == pytest.approx(8.52)
    metrics = restart_metrics(run, {"mark": (first_ns, 0), "kill": (PLAIN.progress_ns + 50 * MS, 0)})
    assert metrics["restart.detect"].value == pytest.approx(3.95)


def test_restart_interrupted_by_a_second_loss_has_only_its_first_phases():
    first = replace(PLAIN, initialised_ns=None, restored_ns=None, caught_up_ns=None, restored_iterations=None)
    second = replace(PLAIN, number=2, noticed_ns=T0 + 12 * S, diagnosed_ns=T0 + 13 * S, rescheduled_ns=T0 + 14 * S,
                     initialised_ns=T0 + 15 * S, restored_ns=T0 + 16 * S, caught_up_ns=T0 + 17 * S)  # fmt: skip
    restarts = timed_restarts(resilience(first, second), {})
    assert [phase.name for phase in restarts[0].phases] == ["detect", "diagnose", "reschedule"]
    assert restarts[1].phases[0].start_ns == first.noticed_ns
    metrics = observe(job(first, second)).metrics
    assert metrics["restart.catch_up"].value == 1.0
    assert metrics["lost_iterations"].value == 5
    assert "restart 1 restored nothing, because another loss interrupted it" in metrics["lost_iterations"].detail


@pytest.mark.parametrize("known", [0, 1])
def test_judge_last_restart_without_a_restored_state_passes_no_maximum_of_lost_iterations(known):
    """A job has no spare left and ends, so the number of iterations that it would have repeated is unknown."""
    last = replace(PLAIN, number=known + 1, initialised_ns=None, restored_ns=None, caught_up_ns=None,
                   restored_iterations=None)  # fmt: skip
    run = job(*[PLAIN] * known, last)
    one = observe(run).metrics["lost_iterations"]
    assert (one.value, one.censored) == (5 * known, True)
    assert f"restart {known + 1} restored nothing; " in one.detail
    assert "interrupted" not in one.detail
    assert "not restarted" not in one.detail
    bounds = {5: Verdict.INCONCLUSIVE, 4: Verdict.FAIL if known else Verdict.INCONCLUSIVE}
    for bound, expected in bounds.items():
        verdict = verdict_of(run, Expectation(metric=METRICS["lost_iterations"], maximum=bound))
        assert {check.name: check.verdict for check in verdict.checks}["lost_iterations"] is expected


def test_restart_metrics_equal_its_phases():
    metrics = observe(job(PLAIN)).metrics
    observed = {name: metrics[f"restart.{name}"].value for name in (*PHASES, "total")}
    assert observed == {
        "detect": 4.0, "diagnose": 1.0, "reschedule": 1.0, "initialise": 1.0, "restore": 1.0, "catch_up": 0.5,
        "total": 8.5,
    }  # fmt: skip
    assert (metrics["lost_iterations"].value, metrics["state_errors"].value) == (5, 0)
    assert metrics["initialise.time"].value == 2.0


def test_restart_times_from_the_firing_and_by_the_ranks_clocks_have_intervals():
    run = changed(job(PLAIN), clock_error_ns=200 * MS)
    metrics = observe(run).metrics
    for name in ("detect", "restore", "catch_up", "total"):
        one = metrics[f"restart.{name}"]
        assert (one.interval.low, one.interval.high) == pytest.approx((max(0, one.value - 0.2), one.value + 0.2))
    assert metrics["restart.initialise"].interval is None


def test_restart_that_the_end_of_the_run_cuts_short_passes_no_maximum_of_the_total():
    """The first outage took 8.5 s. The second one was not over at the end of the run, so its length is unknown."""
    second = replace(PLAIN, number=2, progress_ns=T0 + 40 * S, noticed_ns=T0 + 41 * S, diagnosed_ns=T0 + 42 * S,
                     rescheduled_ns=None, initialised_ns=None, restored_ns=None, caught_up_ns=None,
                     restored_iterations=None)  # fmt: skip
    run = job(PLAIN, second)
    one = observe(run).metrics["restart.total"]
    open_s = (run.workload.end_ns - T0) / 1e9 - 40
    assert (one.value, one.censored) == (pytest.approx(max(8.5, open_s)), True)
    for bound, expected in ((1000.0, Verdict.INCONCLUSIVE), (1.0, Verdict.FAIL)):
        verdict = verdict_of(run, Expectation(metric=METRICS["restart.total"], maximum=bound))
        checks = {check.name: check.verdict for check in verdict.checks}
        assert checks["restart.total"] is expected


_REACHED = {"noticed_ns": 1, "diagnosed_ns": 2, "rescheduled_ns": 3, "initialised_ns": 4}


def hung_restart(*done):
    """Return restart 2, whose loss is at 40 s: it reached these phases after one second each, and then no other."""
    ends = {name: T0 + (40 + at) * S if name in done else None for name, at in _REACHED.items()}
    return replace(
        PLAIN, number=2, progress_ns=T0 + 40 * S, restored_ns=None, caught_up_ns=None, restored_iterations=None, **ends
    )


@pytest.mark.parametrize(("maximum", "expected"), [(30.0, Verdict.FAIL), (300.0, Verdict.INCONCLUSIVE)])
@pytest.mark.parametrize("metric", ["restart.total", "restart.restore"])
def test_judge_unfinished_restart_fails_a_maximum_that_it_has_exceeded_already(metric, maximum, expected):
    """The first restart was short and has an interval. It hid the second one, which lasted until the run ended."""
    hung = hung_restart(*_REACHED)
    run = changed(job(PLAIN, hung), end_ns=T0 + 100 * S, clock_error_ns=200 * MS)
    verdict = verdict_of(run, Expectation(metric=METRICS[metric], maximum=maximum))
    (check,) = [check for check in verdict.checks if check.name == metric]
    length = {"restart.total": 60, "restart.restore": 56}[metric]
    assert (check.verdict, check.observed) == (expected, pytest.approx(length))
    assert f"more than {length} s: restart 2" in check.detail
    assert "not over when the run ended" in check.detail


def test_judge_phase_that_was_not_over_when_the_run_ended_passes_no_maximum():
    """The first restart initialised within 1 s. The second one had initialised for less when the run ended."""
    hung = hung_restart("noticed_ns", "diagnosed_ns", "rescheduled_ns")
    run = changed(job(PLAIN, hung), end_ns=T0 + 43 * S + S // 2)
    one = observe(run).metrics["restart.initialise"]
    assert (one.value, one.censored) == (1.0, True)
    assert "more than 500 ms: restart 2" in one.detail
    checks = verdict_of(run, Expectation(metric=METRICS["restart.initialise"], maximum=10)).checks
    by_name = {check.name: check for check in checks}
    assert by_name["restart.initialise"].verdict is Verdict.INCONCLUSIVE
    assert "initialise more than 500 ms (not over when the run ended)" in by_name["restarts"].detail


@pytest.mark.parametrize(("failure", "expected"), [(None, 2.0), ("host2: the engine is gone", None)])
def test_checkpoint_wait_counts_the_wait_for_the_last_checkpoint_at_the_end_of_the_job(failure, expected):
    """A rank that stores in the background waited only there, and the metric had no value."""
    run = job()
    last_ns = run.workload.series[0].iterations[-1].end_ns
    stored = ((T0, T0 + 50 * MS), (last_ns - 100 * MS, last_ns + 2 * S))
    series = tuple(msgspec.structs.replace(rank, stored_ns=stored) for rank in run.workload.series)
    one = observe(changed(run, series=series, failure=failure)).metrics["checkpoint.wait"]
    assert one.value == (expected and pytest.approx(expected))
    assert ("at the end of the job" in one.detail) is (expected is not None)


def test_restart_metrics_of_a_job_without_restarts_are_none():
    assert observe(synthetic_run()).metrics["restart.detect"].value is None
    quiet = observe(job()).metrics
    assert (quiet["restart.detect"].value, quiet["restart.detect"].detail) == (None, "the job was not restarted")
    assert (quiet["lost_iterations"].value, quiet["state_errors"].value) == (None, 0)


def test_ettr_is_shown_with_the_published_formula_and_its_inputs():
    run = job(PLAIN)
    one = ettr(run, None, (), first_fault_ns=T0 + 4 * S)
    assert one.ratio == pytest.approx(100 * 0.1 / ((run.workload.end_ns - T0) / S))
    formula = one.formula
    assert (formula.interruptions, formula.recovery_ns, formula.interval_ns) == (1, 8 * S, EVERY * ITERATION_NS)
    assert formula.checkpoint_share == 0
    assert formula.predicted == pytest.approx(1 - (8 + 0.5) / one.wall_ns * S)
    assert formula.low <= one.ratio <= formula.high
    assert formula.high - formula.low == pytest.approx(0.95 * S / one.wall_ns)
    detail = observe(run).metrics["ettr"].detail
    assert "published formula 0.541 (95 %: 0.515 to 0.566): 1 interruptions" in detail
    assert "1 interruptions of 8 s, a checkpoint every 1 s that costs 0.0%" in detail


@pytest.mark.parametrize("lost", range(10))
def test_ettr_formula_covers_every_moment_of_a_loss_but_the_outermost(lost):
    measured = ettr(job(loss(40 + lost)), None, (), first_fault_ns=T0 + 4 * S)
    assert (measured.formula.low <= measured.ratio <= measured.formula.high) == (lost > 0)


@pytest.mark.parametrize("lost", range(1, EVERY))
def test_ettr_formula_covers_a_loss_with_staggered_checkpoints(lost):
    """The second of two ranks stores the state after 40 iterations after the 45th: a loss before repeats from 30."""
    at = 45 + lost
    run = job(loss(at, restored_iterations=40))
    staggered = changed(run, workload=run.workload.planned | {"storage": {"every": EVERY, "mode": "staggered"}})
    one = ettr(staggered, None, (), first_fault_ns=T0 + 4 * S)
    assert one.formula.holds(one.ratio)
    assert one.formula.predicted < ettr(run, None, (), first_fault_ns=T0 + 4 * S).formula.predicted


def schedule(chance, losses, deviation, memory, count=160):
    """Return a job that loses hosts after random iterations, and takes 4 to 10 s each time to restore its state.

    Its iterations are an AR(1) series with this relative `deviation`.
    """
    value = chance.gauss(0, deviation)

    def length_ns():
        nonlocal value
        value = memory * value + chance.gauss(0, deviation) * (1 - memory**2) ** 0.5
        return int(ITERATION_NS * (1 + value))

    made, now, index = [], T0, 0
    lengths = []
    for at in sorted(chance.sample(range(60, count - 12), losses)):
        lengths += [length_ns() for _ in range(at - index)]
        progress_ns = now + sum(length // 10 * 10 for length in lengths[len(lengths) - (at - index) :])
        index = at // EVERY * EVERY
        now = progress_ns + int(chance.uniform(4, 10) * S)
        made.append(loss(at, progress_ns=progress_ns, restored_ns=now, restored_iterations=index))
    lengths += [length_ns() for _ in range(count - index)]
    return job(*made, count=count, lengths_ns=iter(lengths).__next__)


@pytest.mark.parametrize(("deviation", "memory"), [(0.0, 0.0), (0.1, 0.5)])
@pytest.mark.parametrize("losses", some_of([1, 3, 2, 5], 2))
def test_ettr_of_random_schedules_is_in_the_formulas_interval(losses, deviation, memory):
    """The interval holds slightly fewer than 95 %: a loss repeats 0 to 9 iterations, on average less than D / 2."""
    chance = random.Random(losses)
    inside, known = 0, 0
    for _ in range(100):
        run = schedule(chance, losses, deviation, memory)
        one = ettr(run, None, (), first_fault_ns=run.workload.end_ns)
        assert one.formula.interruptions == losses
        holds = one.formula.holds(one.ratio)
        known += holds is not None
        inside += holds is True
    print(f"{losses} losses, iterations that vary by {deviation:.0%}: {inside} of {known} schedules")
    assert known >= 60
    assert inside >= 0.85 * known


def test_ettr_formula_of_a_job_that_is_lost_at_once_has_no_interval():
    """Four fault-free iterations are too few to estimate their variation."""
    one = ettr(job(loss(4, restored_iterations=0)), None, (), first_fault_ns=T0 + 4 * ITERATION_NS)
    assert one is None or one.formula.holds(one.ratio) is None


def test_ettr_formula_counts_an_outage_once_if_the_next_loss_comes_before_progress():
    """No iteration finished between the losses, so the second loss has the progress from before the first outage."""
    first = loss(100, restored_ns=T0 + 40 * S, restored_iterations=100)
    second = replace(first, number=2, noticed_ns=T0 + 41 * S, restored_ns=T0 + 70 * S)
    run = changed(job(count=400), resilience=resilience(first, second), end_ns=T0 + 100 * S)
    formula = ettr(run, None, (), first_fault_ns=T0 + 10 * S).formula
    assert (formula.interruptions, formula.interruptions * formula.recovery_ns) == (2, 60 * S)


def test_ettr_formula_is_a_row_of_the_predictions():
    rows = [
        prediction
        for prediction in predictions(job(PLAIN), observe(job(PLAIN)))
        if "job with restarts" in prediction.what
    ]
    assert [row.predicted for row in rows] == ["0.541 (95 %: 0.515 to 0.566)"]


def verdict_of(run, *expectations):
    plan = _plan_of(run)
    return judge.judge(before=Planned(plan=plan, expectations=expectations), run=run, observed=observe(run)).verdict


def _plan_of(run):
    return Plan(faultbed="0", experiment="job", seed=1, inventory="x", workload=run.workload.planned, faults=())


def test_judge_restarts_and_state_are_checks_of_the_verdict():
    checks = {check.name: check for check in verdict_of(job(PLAIN)).checks}
    assert (checks["restarts"].verdict, checks["restarts"].observed) == (Verdict.PASS, 1)
    output = checks["restarts"].detail
    assert "lost host: host3; reason: host3: no message" in output
    assert "host3:rxe0 -> host4:rxe0" in output
    assert "detect 4 s, diagnose 1 s" in output
    assert "5 iterations repeated, resumed after 40 iterations" in output
    assert checks["state"].verdict is Verdict.PASS


def test_judge_wrong_state_fails_without_any_expectation():
    """The mutation: a restart that restores nothing."""
    verdict = verdict_of(job(PLAIN, wrong=499))
    assert verdict.verdict is Verdict.FAIL
    assert {check.name: check.verdict for check in verdict.checks}["state"] is Verdict.FAIL


@pytest.mark.parametrize(("reporting", "wrong", "expected"), [
    ((0, 1), 0, Verdict.PASS), ((0,), 0, Verdict.INCONCLUSIVE), ((), 0, Verdict.INCONCLUSIVE), ((1,), 3, Verdict.FAIL),
])  # fmt: skip
def test_judge_rank_without_final_state_is_no_pass(reporting, wrong, expected):
    run = job(PLAIN, wrong=wrong)
    states = tuple(state for state in run.workload.resilience.states if state.rank in reporting)
    run = changed(run, resilience=msgspec.structs.replace(run.workload.resilience, states=states))
    checks = {
        check.name: check for check in verdict_of(run, Expectation(metric=METRICS["state_errors"], equals=0)).checks
    }
    assert (checks["state"].verdict, checks["state_errors"].verdict) == (expected, expected)
    missing = [f"{rank}" for rank in (0, 1) if rank not in reporting]
    assert checks["state"].detail.partition("no state from rank ")[2] == ", ".join(missing)


@pytest.mark.parametrize(("changes", "reason"), [
    ({"elements": 0}, "no element of a final state was compared"),
    ({"iterations": 10}, "rank 0 reported its state after 10 of 100 iterations"),
])  # fmt: skip
def test_judge_missing_or_premature_final_state_is_no_pass(changes, reason):
    """Such a state has no wrong element, but only because nothing was compared or the job was not over."""
    run = job(PLAIN)
    states = tuple(replace(state, **changes) for state in run.workload.resilience.states)
    run = changed(run, resilience=msgspec.structs.replace(run.workload.resilience, states=states))
    checks = {
        check.name: check for check in verdict_of(run, Expectation(metric=METRICS["state_errors"], equals=0)).checks
    }
    assert (checks["state"].verdict, checks["state_errors"].verdict) == (Verdict.INCONCLUSIVE,) * 2
    assert reason in checks["state"].detail


def test_judge_unfinished_restart_fails():
    run = job(replace(PLAIN, restored_ns=None, caught_up_ns=None, restored_iterations=None))
    run = changed(
        run, failure="no spare is left", resilience=msgspec.structs.replace(run.workload.resilience, states=())
    )
    verdict = verdict_of(run, Expectation(metric=METRICS["state_errors"], equals=0))
    by_name = {check.name: check.verdict for check in verdict.checks}
    assert (by_name["restarts"], by_name["state_errors"]) == (Verdict.FAIL, Verdict.INCONCLUSIVE)


def test_judge_restart_that_the_end_of_the_job_cut_short_is_inconclusive():
    """A stop condition ends the job before it has caught up: nothing failed, and nothing was shown."""
    check = next(
        check for check in verdict_of(job(replace(PLAIN, caught_up_ns=None))).checks if check.name == "restarts"
    )
    assert (check.verdict, check.observed) == (Verdict.INCONCLUSIVE, 1)
    assert check.meaning == "The job caught up after each restart, or another loss interrupted it"


def test_judge_restart_that_another_loss_interrupted_passes():
    first = replace(PLAIN, initialised_ns=None, restored_ns=None, caught_up_ns=None, restored_iterations=None)
    checks = {check.name: check.verdict for check in verdict_of(job(first, loss(45, number=2))).checks}
    assert checks["restarts"] is Verdict.PASS


def test_judge_names_rejected_checkpoints():
    one = replace(PLAIN, rejected=(("g0-rank1-after00000050.checkpoint", "corrupt: checksum mismatch"),))
    described = TimedRestart(restart=one, phases=()).describe()
    assert "checkpoint g0-rank1-after00000050.checkpoint rejected: corrupt: checksum mismatch" in described


def test_measurements_with_restarts_round_trip():
    run = job(PLAIN)
    assert reread(run).workload.resilience == run.workload.resilience


def test_measurements_with_restarts_twice_or_out_of_order_are_refused():
    """A restart's phases end at the next restart's loss, so with this order they would belong to another restart."""
    run = job(PLAIN, replace(PLAIN, number=2))
    assert reread(run) == run
    for restarts in ((PLAIN, PLAIN), run.workload.resilience.restarts[::-1], (replace(PLAIN, number=2),)):
        with pytest.raises(ValueError, match=r"resilience\.restarts: numbered"):
            reread(changed(run, resilience=resilience(*restarts)))
    again = msgspec.structs.replace(run.workload.resilience, states=run.workload.resilience.states[:1] * 2)
    with pytest.raises(ValueError, match=r"resilience\.states: rank 0 appears twice"):
        reread(changed(run, resilience=again))


def test_report_shows_each_restart_with_its_phases(tmp_path):
    run = finished(tmp_path, job(PLAIN))
    html = run_page.render_html(run)
    parsed(html)
    section = html[html.index('id="h-restarts"') :]
    assert "lost host: host3" in section
    for name in PHASES:
        assert f"<span>{name}</span>" in section
    assert "published formula" in section


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_report_phase_that_was_cut_short_has_an_open_bar_and_a_label(tmp_path, is_interrupted):
    """The phase in which a restart hung used to have no bar: the figure ended with the phase before it."""
    hung = hung_restart(*_REACHED)
    later = [replace(PLAIN, number=3, progress_ns=T0 + 90 * S, noticed_ns=T0 + 100 * S)] if is_interrupted else []
    run = changed(job(PLAIN, hung, *later), end_ns=T0 + 100 * S)
    bars = restart_bars(observe(run).restarts, ())
    names = [bar.phase.name for bar in bars[1].phases]
    assert names == ["detect", "diagnose", "reschedule", "initialise", "restore"]
    assert (bars[0].is_open, bars[1].is_open) == (False, True)
    assert [bar.is_open for bar in bars[1].phases] == [False] * 4 + [True]
    last = bars[1].phases[-1]
    assert last.left + last.width == pytest.approx(100), "it ends with the run, and the scale includes it"
    html = run_page.render_html(finished(tmp_path, run))
    assert '<i class="open" style="left:6' in html
    assert "<span>restore</span>" in html
    assert "> 56 s" in html.replace("&gt;", ">")


def test_progress_lines_name_the_loss_the_new_places_and_the_end():
    lines = []
    listen = restart_lines(lines.append)
    for phase in ("diagnose", "reschedule", "initialise", "restore", "catch_up", "running"):
        listen({"event": "restart", "phase": phase, "restart": PLAIN})
    listen({"event": "spare_lost", "host": "host4"})
    listen({"event": "iteration"})
    assert lines == [
        "job: restart 1 after 45 iterations: host3: no message from its traffic engine for 4.0 s",
        "job: restart 1: ranks on host1:rxe0, host4:rxe0",
        "job: restart 1: restored, from iteration 40 on",
        "job: restart 1: caught up, from iteration 40 on",
        "job: the spare on host4 is lost",
    ]


def test_restart_total_of_an_outage_with_two_losses_counts_both():
    """The second loss interrupts the first restart, so the outage lasts from the first loss on."""
    first = loss(45, initialised_ns=None, restored_ns=None, caught_up_ns=None)
    second = loss(45, number=2, noticed_ns=T0 + 20 * S, diagnosed_ns=T0 + 21 * S, rescheduled_ns=T0 + 22 * S,
                  initialised_ns=T0 + 23 * S, restored_ns=T0 + 24 * S, caught_up_ns=T0 + 25 * S)  # fmt: skip
    run = changed(job(PLAIN), resilience=resilience(first, second))
    assert restart_metrics(run, {"f": (T0 + 5 * S, T0 + 6 * S)})["restart.total"].value == pytest.approx(20)


def test_restart_is_not_charged_to_an_unrelated_fault_that_fired_later():
    fired = {"loss": (T0 + 5 * S, 0), "flap": (T0 + 8 * S, T0 + 8 * S + MS)}
    (timed,) = timed_restarts(resilience(PLAIN), fired)
    assert timed.phases[0].start_ns == T0 + 5 * S


def test_job_time_of_a_job_that_restarted_from_nothing_begins_with_its_workload():
    """Series hold only the last execution of each iteration. If job time began with them, the worst restart would have
    the best job time."""
    run = job(loss(45, restored_iterations=0))
    twin = job().workload.series
    metrics = observe(changed(run, twin=twin)).metrics
    lost_s = (run.workload.end_ns - T0) / 1e9
    assert metrics["jct_ratio"].value == pytest.approx(lost_s / 10, rel=0.01)
    assert metrics["jct_ratio"].value > 2


def test_iterations_of_a_job_that_shrank_count_in_proportion_to_its_ranks():
    """40 iterations of two ranks and 60 of one are the work of 70: they were counted as 100, and a job that had lost
    half of its hosts had nearly the job time of its twin."""
    run = job(loss(45, after=("host1:rxe0",)))
    run = changed(run, twin=job().workload.series)
    metrics, wall_s = observe(run).metrics, (run.workload.end_ns - T0) / S
    assert metrics["ettr"].value == pytest.approx(70 * 0.1 / wall_s)
    assert "of 70% of the work, because the job went on with fewer ranks" in metrics["ettr"].detail
    assert metrics["ettr"].interval is None or metrics["ettr"].interval.high < 90 * 0.1 / wall_s
    assert metrics["jct_ratio"].value is None
    assert metrics["jct_ratio"].interval is None
    assert "70% of the work of the twin's" in metrics["jct_ratio"].detail
    row = compare(changed(run, twin=None), job())[0]
    assert (row.metric, row.says) == ("job time", "not comparable")


@pytest.mark.parametrize("lost", [0, 20, 44])
def test_job_time_compares_equal_iterations_if_the_record_of_one_is_lost(lost):
    """A killed engine takes its last record along: the run's n-th iteration was compared with an earlier one of the
    twin, and a job that had finished all iterations had one too few."""
    run, twin = job(PLAIN), job().workload.series
    series = tuple(
        msgspec.structs.replace(rank, iterations=tuple(step for step in rank.iterations if step.index != lost))
        for rank in run.workload.series
    )
    whole, holed = (observe(changed(run, twin=twin, series=of_run)).metrics for of_run in (run.workload.series, series))
    assert holed["jct_ratio"].value == pytest.approx(whole["jct_ratio"].value)
    assert holed["jct_ratio"].value > 1
    assert holed["iterations"].value == whole["iterations"].value
    assert holed["ettr"].value == pytest.approx(whole["ettr"].value, rel=0.02 if lost == 0 else 1e-6)


def test_wrong_elements_of_a_repeated_iteration_count():
    run = job(PLAIN)
    repeated = msgspec.structs.replace(run.workload.resilience, wrong_elements=1024)
    assert observe(run).metrics["wrong_elements"].value == 0
    assert observe(changed(run, resilience=repeated)).metrics["wrong_elements"].value == 1024


def test_iteration_without_one_ranks_record_is_excluded_for_all_ranks():
    """The job did not repeat the iteration, because its state was stored. All ranks must still be compared by index."""

    def steps(*indices, at=0):
        return [SimpleNamespace(index=index, at=at) for index in indices]

    killed = [steps(0, 1), steps(3, 4, at=1)]  # the state after iteration 2 was stored, but its record was lost
    alive = [steps(0, 1, 2, 3), steps(3, 4, at=1)]
    ranks = iterations_by_rank([killed, alive])
    assert [[one.index for one in rank] for rank in ranks] == [[0, 1, 3, 4]] * 2
    assert ranks[1][2].at == 1, "the last execution counts"
    assert iterations_by_rank([[[]], [steps(0)]]) == ((), ())


def test_iterations_that_a_restart_lost_do_not_count_as_finished_before_they_are_repeated():
    """Six were finished, the restart continued after the third, and the job ended after the fourth."""

    def steps(*indices, at=0):
        return [SimpleNamespace(index=index, at=at) for index in indices]

    rank = [steps(0, 1, 2, 3, 4, 5), steps(3, at=1)]
    for resumed, expected in (((None, 3), [0, 0, 0, 1]), ((None, None), [0, 0, 0, 1, 0, 0])):
        (kept,) = iterations_by_rank([rank], resumed)
        assert [one.at for one in kept] == expected
        assert [one.index for one in kept] == list(range(len(expected)))
    assert iterations_by_rank([[steps(0, 1), []]], (None, 0)) == ((),), "restarted from nothing, and ended at once"


def test_phase_that_another_loss_cut_short_took_at_least_that_long():
    """The first restart hung in `initialise` until it timed out after 60 s; the second one needed 1 s."""
    hung = loss(45, initialised_ns=None, restored_ns=None, caught_up_ns=None, restored_iterations=None)
    later_ns = 62 * S
    again = {name: getattr(PLAIN, name) + later_ns for name in PLAIN.__slots__ if name.endswith("_ns")}
    second = replace(PLAIN, number=2, **again)
    run = job(hung, second)
    observed = observe(run)
    initialise = observed.metrics["restart.initialise"]
    assert (initialise.value, initialise.censored) == (pytest.approx(60), True)
    assert "restart 1" in initialise.detail
    assert (observed.metrics["restart.restore"].value, observed.metrics["restart.restore"].censored) == (1, False)
    expectation = Expectation(metric=METRICS["restart.initialise"], maximum=10)
    check = next(check for check in verdict_of(run, expectation).checks if check.name == "restart.initialise")
    assert check.verdict is not Verdict.PASS


@pytest.mark.parametrize(("metric", "field"), [("ingest.wait", "ingest_ns"), ("checkpoint.wait", "checkpoint_ns")])
def test_longest_wait_for_storage_counts_executions_that_a_restart_repeated(metric, field):
    """The series hold the last execution of each iteration, whose short wait hid that of the first one."""
    run = job(PLAIN)
    series = tuple(
        msgspec.structs.replace(
            rank, iterations=tuple(msgspec.structs.replace(step, **{field: 5 * MS}) for step in rank.iterations)
        )
        for rank in run.workload.series
    )
    waited = msgspec.structs.replace(run.workload.resilience, **{f"longest_{field}": 4 * S})
    run = changed(run, series=series)
    assert observe(run).metrics[metric].value == pytest.approx(0.005)
    seen = observe(changed(run, resilience=waited)).metrics[metric]
    assert seen.value == pytest.approx(4.0)
    assert seen.detail == "in an iteration that a restart repeated: the longest of all executions on all ranks"
