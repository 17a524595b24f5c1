"""The verdict: an unproven fault is never a PASS, a dirty lab is never a PASS, and the worst check wins."""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgspec
import pytest
from judged_runs import plan_of, served
from synthetic_run import changed, reread, synthetic_run, with_doubts

from faultbed.harness.analysis.observations import Observation, straggler
from faultbed.harness.analysis.observe import observe
from faultbed.harness.bounds import check_expectation as check_in_one_run
from faultbed.harness.bounds import sampled_bounds
from faultbed.harness.confidence import Interval, level_for
from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.experiment.metrics import METRICS, lookup
from faultbed.harness.judge import judge, observed_of
from faultbed.harness.ledger.sealed import Sealed
from faultbed.harness.ledger.statistics.contrasts import Member
from faultbed.harness.ledger.statistics.level_tolerance import DECLARED
from faultbed.harness.parts.part import Planned
from faultbed.harness.proof import unproven
from faultbed.harness.verdict import ExitCode, Verdict, decode, encode, exit_code, worst
from faultbed.inject.evidence.receipt import Armed, Cleared
from faultbed.testbed.observe.telemetry import CHANGES_LOST, Change, Machine

PASS, INCONCLUSIVE, FAIL, ERROR = Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.FAIL, Verdict.ERROR

ELEMENTS = "wrong_elements"


def verdict_of(run, *expectations):
    return judge(before=Planned(plan=plan_of(run), expectations=expectations), run=run, observed=observe(run)).verdict


def at_most(name, bound):
    metric = lookup(name, ["uplink", "loss", "slow-gpu"])
    return Expectation(metric=metric, maximum=bound)


@pytest.mark.parametrize("pair", list(itertools.product(Verdict, repeat=2)))
def test_worst_verdict_is_the_later_in_the_order(pair):
    order = [PASS, INCONCLUSIVE, FAIL, ERROR]

    assert worst(pair) is order[max(order.index(verdict) for verdict in pair)]


@pytest.mark.parametrize("several", list(itertools.product(Verdict, repeat=3)))
def test_worst_verdict_is_independent_of_the_order(several):
    assert len({worst(order) for order in itertools.permutations(several)}) == 1


def check_expectation(expectation, observation, problems):
    return check_in_one_run(expectation, observation, problems, tolerance=DECLARED["rack"])


@pytest.mark.parametrize(("bound", "verdict"), [(1.5, PASS), (1.25, INCONCLUSIVE), (0.95, INCONCLUSIVE), (0.9, FAIL)])
def test_judge_range_and_level_tolerance_decide_a_setting_and_are_shown(bound, verdict):
    """The range 1.0 to 1.2 and a tolerance of 1.1 leave 0.91 to 1.32."""
    interval = Interval(low=1.0, high=1.2, method="made up")
    observation = Observation(value=1.1, detail="52 s", sampling=interval)
    (check,) = check_expectation(at_most("jct_ratio", bound), observation, ())
    assert check.verdict is verdict
    assert (check.comparison, check.estimand) == ("max", "setting")
    assert (check.rule.kind, check.rule.tolerance.factor, check.rule.tail) == ("tolerance", 1.1, 0.005)
    assert check.why == ("within-tolerance" if verdict is INCONCLUSIVE else None)
    assert "1..1.2 (made up)" in check.detail


@pytest.mark.parametrize("value", [0.5, 1.5])
@pytest.mark.parametrize("name", [metric.name for metric in METRICS.values() if metric.is_noisy])
def test_judge_single_performance_value_is_inconclusive(name, value):
    """Two iterations at half of the twin's time used to pass, and seven iterations that were 10 % slower to fail."""
    (check,) = check_expectation(at_most(name, 1.0), Observation(value=value, detail="2 iterations"), ())
    assert check.verdict is INCONCLUSIVE
    assert check.why in ("no-interval", "no-value")


@pytest.mark.parametrize(
    ("metric", "bound", "requests", "expected"),
    [
        ("ttft.p50", 3.0, 40, PASS),
        ("ttft.p50", 1.0, 40, INCONCLUSIVE),
        ("ttft.p50", 0.4, 40, FAIL),
        ("ttft.p50", 3.0, 4, INCONCLUSIVE),
        ("ttft.p99", 3.0, 40, INCONCLUSIVE),
        ("ttft.p99", 0.4, 40, FAIL),
        ("ttft.p99", 3.0, 700, PASS),
        ("tpot.p50", 0.3, 40, PASS),
        ("tpot.p99", 0.3, 40, INCONCLUSIVE),
    ],
)
def test_judge_percentile_needs_enough_requests(metric, bound, requests, expected):
    """With few requests of 0.5 to 1.5 s, the median is known, and the tail has only a lower bound."""
    run = served(*(0.5 + number / (requests - 1) for number in range(requests)))
    checks = {check.name: check.verdict for check in verdict_of(run, at_most(metric, bound)).checks}
    assert checks[metric] is expected


@pytest.mark.parametrize(
    ("least", "kept", "requests", "of", "expected"),
    [
        (1.0, 1.0, 16, None, PASS),
        (1.0, 15 / 16, 16, None, FAIL),
        (0.9, 1.0, 16, None, INCONCLUSIVE),
        (0.9, 1.0, 60, None, INCONCLUSIVE),
        (0.5, 1.0, 60, None, PASS),
        (0.9, 0.2, 60, None, FAIL),
        (0.9, 1.0, 16, "run", PASS),
        (0.9, 0.5, 16, "run", FAIL),
    ],
)
def test_judge_share_of_requests_is_about_the_setting_unless_all_are_required(least, kept, requests, of, expected):
    run = served(*([1.0] * requests), kept=kept)
    (check,) = (
        check
        for check in verdict_of(run, Expectation(metric=lookup("slo_attainment", []), minimum=least, of=of)).checks
        if check.name == "slo_attainment"
    )
    assert check.verdict is expected, check.detail


@pytest.mark.parametrize(
    ("metric", "bound", "error_ms", "of", "expected"),
    [
        ("ttft.p50", {"maximum": 2.0}, 300, "run", PASS),
        ("ttft.p50", {"maximum": 2.0}, 600, "run", INCONCLUSIVE),
        ("ttft.p50", {"maximum": 0.4}, 300, "run", INCONCLUSIVE),
        ("ttft.p50", {"maximum": 2.9}, 300, "setting", PASS),
        ("ttft.p50", {"maximum": 2.9}, 600, "setting", INCONCLUSIVE),
        ("tpot.p50", {"maximum": 0.2}, 600, "run", PASS),
        ("slo_attainment", {"minimum": 0.9}, 100, "run", PASS),
        ("slo_attainment", {"minimum": 0.9}, 300, "run", INCONCLUSIVE),
    ],
)
def test_judge_time_to_first_token_is_known_to_the_clocks_of_two_hosts(metric, bound, error_ms, of, expected):
    """Prefill begins on one host and the token arrives on another, so 0.6 s of 1 s may be the error of their clocks."""
    run = served(*([1.0] * 60), kept=1.0)
    workload = {**run.workload.planned, "slo_ttft_ms": 1500.0}
    run = changed(run, workload=workload, clock_error_ns=error_ms * 1_000_000)
    checks = verdict_of(run, Expectation(metric=lookup(metric, []), of=of, **bound)).checks
    (check,) = (check for check in checks if check.name == metric)
    assert check.verdict is expected, check.detail


@pytest.mark.parametrize(
    ("late_ms", "error_ms", "tpot_ms", "expected"),
    [
        (-50, 0, 0, PASS),
        (+50, 0, 0, FAIL),
        (-50, 30, 0, INCONCLUSIVE),  # two clocks are wrong by 60 ms together
        (+50, 30, 0, INCONCLUSIVE),
        (-50, 20, 0, PASS),
        (+50, 20, 0, FAIL),
        (+50, 30, 90, FAIL),  # its tokens were late, and those begin and end on one host
    ],
)
def test_judge_full_share_is_inconclusive_if_the_clocks_leave_one_request_open(late_ms, error_ms, tpot_ms, expected):
    """15 of 16 requests keep an objective of 1 s; one is 50 ms from it, as a clock of either host may be."""
    missed = late_ms > 0 or bool(tpot_ms)
    run = served(*([0.5] * 15), 1 + late_ms / 1e3, kept=15 / 16 if missed else 1.0)
    workload = {**run.workload.planned, "slo_ttft_ms": 1000.0, "slo_tpot_ms": float(tpot_ms)}
    run = changed(run, workload=workload, clock_error_ns=error_ms * 1_000_000)
    checks = verdict_of(run, Expectation(metric=lookup("slo_attainment", []), minimum=1.0)).checks
    (check,) = (check for check in checks if check.name == "slo_attainment")
    assert check.verdict is expected, check.detail
    if expected is INCONCLUSIVE:
        assert "1 requests are within the clocks' error of slo_ttft" in check.detail


def test_judge_full_share_fails_if_one_request_missed_and_another_is_left_open():
    run = served(*([0.5] * 14), 0.99, 3.0, kept=15 / 16)
    run = changed(run, workload={**run.workload.planned, "slo_ttft_ms": 1000.0}, clock_error_ns=30_000_000)
    checks = verdict_of(run, Expectation(metric=lookup("slo_attainment", []), minimum=1.0)).checks
    assert next(check for check in checks if check.name == "slo_attainment").verdict is FAIL


def test_judge_censored_value_is_not_decided_by_an_interval():
    interval = Interval(low=4.9, high=5.1, method="made up")
    observation = Observation(value=5.0, detail="", censored=True, interval=interval)
    (check,) = check_expectation(at_most("recovery.total", 6.0), observation, ())
    assert check.verdict is INCONCLUSIVE


def test_worst_of_nothing_is_inconclusive():
    assert worst(()) is INCONCLUSIVE


@pytest.mark.parametrize(("verdict", "code"), [(PASS, 0), (FAIL, 1), (INCONCLUSIVE, 2), (ERROR, 3)])
def test_exit_codes_match_the_contract(verdict, code):
    assert exit_code(verdict, "CLEAN") == code
    assert exit_code(verdict, "DIRTY") == ExitCode.DIRTY == 5


LE, GE, EQ = {"maximum": 3.0}, {"minimum": 3.0}, {"equals": "host2"}


@pytest.mark.parametrize(
    ("bound", "value", "censored", "expected"),
    [
        (LE, 2.0, False, PASS),
        (LE, 3.0, False, PASS),
        (LE, 3.1, False, FAIL),
        (LE, 2.0, True, INCONCLUSIVE),
        (LE, 3.1, True, FAIL),
        (LE, None, False, INCONCLUSIVE),
        (GE, 3.0, False, PASS),
        (GE, 2.9, False, FAIL),
        (GE, 2.9, True, INCONCLUSIVE),
        (GE, 3.0, True, PASS),
        (GE, None, False, INCONCLUSIVE),
        (EQ, "host2", False, PASS),
        (EQ, "host3", False, FAIL),
        (EQ, None, False, INCONCLUSIVE),
    ],
)
@pytest.mark.parametrize("about_faults", [False, True])
@pytest.mark.parametrize("problems", [(), ("uplink: it never fired",)])
def test_judge_one_bound_against_one_value(bound, value, censored, expected, about_faults, problems):
    name = "recovery.total" if about_faults else "rebuilds"
    observation = Observation(value=value, detail="d", censored=censored)

    (check,) = check_expectation(Expectation(metric=METRICS[name], **bound), observation, problems)

    assert check.verdict is (INCONCLUSIVE if about_faults and problems else expected)
    assert check.observed == value


def test_judge_metric_without_measurement_is_inconclusive():
    (check,) = check_expectation(Expectation(metric=METRICS["rebuilds"], maximum=1), None, ())

    assert check.verdict is INCONCLUSIVE


def test_judge_two_bounds_are_two_checks():
    both = Expectation(metric=METRICS["dip"], minimum=0.1, maximum=0.5)

    fault = Member(name="f", value=0.3, before=(0.3, 0.3), after=(0.3, 0.3))
    checks = check_expectation(both, Observation(value=0.7, detail="", members=(fault,)), ())

    assert [check.verdict for check in checks] == [PASS, FAIL]


def broken(receipt, **changes):
    fired = {name: value for name, value in changes.items() if name not in ("armed", "cleared")}
    rest = {name: value for name, value in changes.items() if name in ("armed", "cleared")}
    return msgspec.structs.replace(receipt, fired=msgspec.structs.replace(receipt.fired, **fired), **rest)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"armed": Armed(ok=False)}, "armed"),
        ({"armed": Armed()}, "armed"),
        ({"count": 0}, "never fired"),
        ({"first_ns": None}, "never fired"),
        ({"must_move": {"a": 0, "b": None}}, "did not (a, b)"),
        ({"must_move": {}}, "only its holder has seen it"),
        ({"must_move": {}, "witness": "host4/processes.stopped"}, "only its holder has seen it"),
        ({"must_not_move": {"send_err": 2}}, "moved by 2"),
        ({"must_not_move": {"send_err": None}}, "could not be read"),
        ({"cleared": Cleared()}, "cleared"),
    ],
)
def test_judge_each_missing_proof_is_inconclusive(changes, message):
    run = synthetic_run()
    first = run.injected.faults[0]
    receipt = broken(first.receipt, **changes)
    faults = (msgspec.structs.replace(first, receipt=receipt), *run.injected.faults[1:])

    problems = unproven(receipt)
    verdict = verdict_of(changed(run, faults=faults), at_most("wrong_elements", 0))

    assert len(problems) == 1
    assert message in problems[0]
    assert verdict.verdict is INCONCLUSIVE


def test_judge_late_fault_reports_how_late():
    run = synthetic_run()
    first = run.injected.faults[0]
    armed = msgspec.structs.replace(first.receipt.armed, at_ns=run.workload.t0_ns + first.plan.at_ns + 11_000_000_000)
    late = msgspec.structs.replace(first, receipt=msgspec.structs.replace(first.receipt, armed=armed))
    verdict = verdict_of(changed(run, faults=(late, *run.injected.faults[1:])))
    details = [check.detail for check in verdict.checks if check.name.startswith("fired.")]
    assert "11.0 s later than planned" in details[0]
    assert not any("later" in detail for detail in details[1:])


def test_judge_state_seen_while_active_is_a_proof():
    """A stopped process moves no counter, but a second reading shows it stopped."""
    key = "host4/processes.stopped"
    receipt = broken(synthetic_run().injected.faults[0].receipt, must_move={}, witness=key)
    armed = msgspec.structs.replace(receipt.armed, while_on={key: 1})
    assert unproven(msgspec.structs.replace(receipt, armed=armed)) == ()


def test_judge_proven_run_within_its_bounds_passes():
    verdict = verdict_of(
        synthetic_run(),
        at_most("wrong_elements", 0),
        at_most("recovery.uplink", 5.0),
        at_most("after_clear.total", 5.0),
        at_most("jct_ratio", 2.5),
        Expectation(metric=METRICS["straggler"], equals="host2"),
        Expectation(metric=METRICS["nak_episodes"], minimum=1),
    )

    assert {check.name: check.verdict for check in verdict.checks if check.verdict is not PASS} == {}
    assert verdict.verdict is PASS
    assert verdict.lab_state == "CLEAN"


def test_judge_doubt_of_the_injector_is_inconclusive():
    run = synthetic_run()
    doubted = with_doubts(run.injected.faults[0], "no independent witness")

    verdict = verdict_of(changed(run, faults=(doubted, *run.injected.faults[1:])))

    assert verdict.verdict is INCONCLUSIVE
    assert next(check for check in verdict.checks if check.name == "fired.uplink").detail == "no independent witness"


def test_judge_run_without_fired_faults_is_inconclusive():
    run = synthetic_run(fired=False)

    verdict = verdict_of(run, at_most("wrong_elements", 0), at_most("recovery.total", 100.0))

    assert verdict.verdict is INCONCLUSIVE
    assert [check.verdict for check in verdict.checks if check.name.startswith("fired.")] == [INCONCLUSIVE] * 3


def test_judge_wrong_data_fails_even_if_a_fault_did_not_fire():
    run = synthetic_run(fired=False)
    step = msgspec.structs.replace(run.workload.series[0].iterations[0], wrong=3)
    series = msgspec.structs.replace(run.workload.series[0], iterations=(step, *run.workload.series[0].iterations[1:]))

    verdict = verdict_of(changed(run, series=(series, *run.workload.series[1:])), at_most("wrong_elements", 0))

    assert verdict.verdict is FAIL


def test_judge_unproven_fault_taints_only_its_own_recovery():
    run = synthetic_run()
    loss = msgspec.structs.replace(
        run.injected.faults[1], receipt=broken(run.injected.faults[1].receipt, must_move={"x": 0})
    )
    run = changed(run, faults=(run.injected.faults[0], loss, run.injected.faults[2]))

    verdict = verdict_of(run, at_most("recovery.uplink", 9.0), at_most("recovery.loss", 9.0))

    actual = {check.name: check.verdict for check in verdict.checks}
    assert actual["recovery.uplink"] is PASS
    assert actual["recovery.loss"] is INCONCLUSIVE


def test_judge_dead_job_is_a_fail_with_its_place_and_not_an_error():
    verdict = verdict_of(
        changed(synthetic_run(), failure="host3: the traffic engine is gone"),
        at_most("wrong_elements", 0),
    )

    assert verdict.verdict is FAIL
    (check,) = [check for check in verdict.checks if check.name == "workload"]
    assert "host3: the traffic engine is gone" in check.detail


def test_judge_dirty_lab_is_inconclusive_with_the_differences():
    verdict = verdict_of(synthetic_run(lab_state="DIRTY"), at_most("wrong_elements", 0))

    assert verdict.verdict is INCONCLUSIVE
    assert "qdisc netem" in verdict.checks[-1].detail


def test_judge_harness_error_outranks_everything():
    run = changed(synthetic_run(), errors=("the controller ran out of memory",))

    assert verdict_of(run, at_most("wrong_elements", 0)).verdict is ERROR


def test_judge_fault_never_tried_has_an_empty_receipt():
    run = synthetic_run()
    run = changed(run, faults=(msgspec.structs.replace(run.injected.faults[0], receipt=None),))

    verdict = verdict_of(run)

    assert verdict.verdict is INCONCLUSIVE
    assert verdict.faults[0].fired.count == 0


def test_verdict_json_matches_the_contract():
    content = encode(verdict_of(synthetic_run(), at_most("jct_ratio", 2.0)))
    raw = msgspec.json.decode(content)

    contract = ["schema", "experiment", "seed", "lab", "started_utc", "verdict", "checks", "faults", "lab_state"]
    assert list(raw) == [*contract, "attribution", "left_out"]
    assert list(raw["attribution"][0]) == ["cause", "place", "name", "confidence", "evidence"]
    assert list(raw["checks"][0]) == [
        "name", "verdict", "observed", "bound", "unit", "estimand", "rule", "detail", "comparison", "why", "meaning",
    ]  # fmt: skip
    of_fault = ["id", "kind", "target", "fidelity", "armed", "fired", "exposed", "cleared", "on_time"]
    of_fault += ["edges", "doubts", "unproven"]
    assert list(raw["faults"][0]) == of_fault
    assert list(raw["faults"][0]["fired"]) == [
        "count",
        "first_ns",
        "last_ns",
        "witness",
        "must_move",
        "must_not_move",
    ]
    assert encode(decode(content)) == content


def test_observe_has_every_metric_in_every_run():
    observed = observed_of(synthetic_run(fired=False), Sealed())

    assert set(METRICS) <= set(observed.metrics)
    assert observed.metrics["recovery.total"].value is None
    assert "never fired" in observed.metrics["recovery.uplink"].detail


def test_observe_sums_counters_over_rnics():
    observed = observe(synthetic_run())

    assert observed.metrics["nak_episodes"].value == 61
    assert observed.metrics["go_back_n"].value == 65
    assert observed.metrics["straggler"].value == "host2"


def test_judge_with_four_sampled_bounds_shares_the_risk_between_them():
    run = synthetic_run()
    bounds = [at_most(name, 2.0) for name in ("jct_ratio", "goodput.mean", "dip", "latency.p50")]
    exact = [at_most("wrong_elements", 0), at_most("ettr", 1.0)]
    assert (sampled_bounds(bounds), sampled_bounds([*bounds, *exact]), sampled_bounds(exact)) == (4, 4, 0)
    level = level_for(sampled_bounds(bounds))
    assert level == pytest.approx(0.995)
    result = judge(
        before=Planned(plan=plan_of(run), expectations=[*bounds, *exact]), run=run, observed=observe(run, level=level)
    ).verdict
    tails = {check.name: check.rule.tail for check in result.checks}
    assert {tails[name] for name in ("jct_ratio", "goodput.mean", "dip", "latency.p50")} == {0.0025}
    assert tails["wrong_elements"] is tails["ettr"] is None


def test_sampled_bounds_are_those_on_settings_and_contrasts():
    assert sampled_bounds([Expectation(metric=METRICS["jct_ratio"], minimum=0.9, maximum=1.1)]) == 2
    assert sampled_bounds([Expectation(metric=METRICS["slo_attainment"], minimum=1.0)]) == 0
    assert sampled_bounds([Expectation(metric=METRICS["slo_attainment"], minimum=0.9)]) == 1
    assert sampled_bounds([Expectation(metric=METRICS["slo_attainment"], minimum=0.9, of="run")]) == 0
    assert sampled_bounds([Expectation(metric=METRICS["jfi"], minimum=0.9)]) == 0
    assert sampled_bounds([Expectation(metric=METRICS["jfi"], minimum=0.9, of="setting")]) == 1


def test_judge_draw_of_hashes_is_decided_by_no_single_run():
    """`mmr` of random hashes used to be 56 % FAIL and 44 % PASS at its median, and never INCONCLUSIVE."""
    mmr = lookup("mmr.rtsw1", ())
    (check,) = check_expectation(
        Expectation(metric=mmr, maximum=9.0, of="setting"), Observation(value=1.5, detail=""), ()
    )
    assert (check.verdict, check.why, check.estimand) == (INCONCLUSIVE, "too-few-runs", "setting")
    (check,) = check_expectation(Expectation(metric=mmr, maximum=1.4), Observation(value=1.5, detail=""), ())
    assert (check.verdict, check.estimand) == (FAIL, "fact")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("bound", [{"maximum": 3.0}, {"minimum": 3.0}])
def test_judge_non_finite_value_is_inconclusive(value, bound):
    """NaN is not above any maximum, so it used to be within every bound."""
    (check,) = check_expectation(
        Expectation(metric=METRICS["recovery.total"], **bound), Observation(value=value, detail="d"), ()
    )
    assert (check.verdict, check.observed) == (INCONCLUSIVE, None)
    assert "is no value" in check.detail


def until(run, end_s):
    """Return the run cut off at this time."""
    end_ns = run.workload.t0_ns + int(end_s * 1e9)
    series = [
        msgspec.structs.replace(
            one,
            samples=tuple(sample for sample in one.samples if sample.t_ns < end_ns),
            iterations=tuple(step for step in one.iterations if step.end_ns < end_ns),
        )
        for one in run.workload.series
    ]
    return changed(run, end_ns=end_ns, series=tuple(series))


@pytest.mark.parametrize(
    "metric",
    ["goodput_min_ratio", "goodput.after_ratio", "dip", "recovery.qp_error", "recovery.rebuild", "recovery.hold"],
)
def test_worst_recovery_is_unknown_if_one_fault_has_too_little_data(metric):
    """The run ends right after its last fault began. The two faults before it used to decide for all three."""
    observation = observe(until(synthetic_run(), 33.0))
    assert set(observation.impacts) == {"uplink", "loss"}
    assert observation.metrics[metric].value is None
    assert observation.metrics[metric].detail.startswith("slow-gpu: ")
    assert observe(synthetic_run()).metrics[metric].value is not None


def slower_from(run, start_s, factor):
    """Return the run whose ranks move less data from this time on."""
    start_ns = run.workload.t0_ns + int(start_s * 1e9)

    def scaled(sample):
        return msgspec.structs.replace(sample, bytes=round(sample.bytes * (factor if sample.t_ns >= start_ns else 1)))

    series = [msgspec.structs.replace(one, samples=tuple(map(scaled, one.samples))) for one in run.workload.series]
    return changed(run, series=tuple(series))


def test_rate_after_the_last_fault_is_compared_with_that_before_the_first():
    """A library that comes back slower recovers by our rule (90 %), and this ratio shows by how much it is slower."""
    healthy = observe(synthetic_run()).metrics["goodput.after_ratio"]
    assert healthy.value == pytest.approx(1.0, abs=0.08)
    slower = observe(slower_from(synthetic_run(), 42.0, 0.5)).metrics["goodput.after_ratio"]
    assert slower.value < 0.8 * healthy.value
    assert slower.detail.startswith("after slow-gpu")
    assert [member.name for member in slower.members] == ["uplink", "loss", "slow-gpu"]


def watched(run, *machines):
    return changed(
        run,
        watched=tuple(Machine(name=name, samples=1, busy_ns=1, clock_error_ns=1, lost=lost) for name, lost in machines),
    )


@pytest.mark.parametrize(
    ("machines", "expected"),
    [((), INCONCLUSIVE), ((("host1", None),), PASS), ((("host1", None), ("host2", "gone")), INCONCLUSIVE)],
)
def test_kernel_errors_of_unfollowed_logs_are_unknown(machines, expected):
    run = watched(synthetic_run(), *machines)
    assert verdict_of(run, at_most("kernel.errors", 0)).checks[-2].verdict is expected


def test_kernel_errors_of_a_log_that_could_not_be_opened_are_unknown():
    """The machine's /dev/kmsg could not be read, so its 0 errors prove nothing."""
    run = watched(synthetic_run(), ("host1", None), ("host2", None))
    first, second = run.telemetry.watched
    run = changed(run, watched=(first, replace(second, no_log="Permission denied")))
    check = verdict_of(run, at_most("kernel.errors", 0)).checks[-2]
    assert check.verdict is INCONCLUSIVE
    assert "host2: its log was not followed: Permission denied" in check.detail
    assert "logs of 1 machines" in check.detail


def test_kernel_errors_count_even_if_a_machine_is_lost():
    run = watched(synthetic_run(), ("host1", None), ("host2", "gone"))
    output = Change(node="host1", subject="kernel", at_ns=run.workload.t0_ns, text="3 mlx5: it broke")
    run = changed(run, kernel=(output,))
    assert verdict_of(run, at_most("kernel.errors", 0)).checks[-2].verdict is FAIL


def test_routing_times_are_unknown_if_the_switches_were_lost():
    run = synthetic_run()
    changes = tuple(
        Change(
            node="rtsw1",
            subject="route 10.77.2.0/24",
            at_ns=run.injected.faults[0].receipt.fired.first_ns + after,
            text=text,
        )
        for after, text in ((10_000_000, "dev ctsw2"), (700_000_000, "dev ctsw1"))
    )
    run = changed(run, changes=changes)
    assert observe(watched(run, ("host1", "gone"))).metrics["routing.converged"].value is not None
    kernel_line = Change(node="rtsw1", subject="kernel", at_ns=changes[1].at_ns + 10**9, text="3 mlxsw: a port is hot")
    talks = observe(watched(changed(run, changes=(*changes, kernel_line)), ("host1", None)))
    assert talks.metrics["routing.converged"] == observe(watched(run, ("host1", None))).metrics["routing.converged"]
    dropped = Change(node="rtsw1", subject=CHANGES_LOST, at_ns=changes[1].at_ns + 1, text="lost: No buffer space")
    many = observe(watched(changed(run, changes=(*changes, dropped)), ("host1", None)))
    assert many.metrics["routing.converged"].value is None
    assert "changes on rtsw1 were lost" in many.metrics["routing.converged"].detail
    lost = observe(watched(run, ("fabric", "it does not answer"))).metrics["routing.converged"]
    assert lost.value is None
    assert "fabric sent no more data from some time on: it does not answer" in lost.detail


def test_wrong_elements_are_unknown_if_a_rank_checked_no_iteration():
    run = synthetic_run()
    first, *others = run.workload.series
    part = changed(run, series=(first, *(msgspec.structs.replace(one, iterations=()) for one in others)))
    for less in (part, changed(run, series=(first,))):
        check = verdict_of(less, at_most("wrong_elements", 0)).checks[-2]
        assert check.verdict is INCONCLUSIVE
        assert "nothing was checked on rank 1" in check.detail
    assert verdict_of(run, at_most("wrong_elements", 0)).checks[-2].verdict is PASS


@pytest.mark.parametrize(("after", "expected"), [(7, PASS), (2, INCONCLUSIVE), (None, INCONCLUSIVE)])
def test_counter_that_was_reset_or_removed_is_a_lower_bound(after, expected):
    """If an RNIC is removed or its counters restart at 0, its earlier NAKs are unknown."""
    run = synthetic_run()
    name = "rxe0.out_of_seq_request"
    left = {"host1": {} if after is None else {name: after}, "host2": {name: 0}}
    run = changed(
        run,
        ranks=run.workload.ranks[:2],
        counters_before={"host1": {name: 5}, "host2": {name: 0}},
        counters_after=left,
    )
    assert verdict_of(run, at_most("nak_episodes", 5)).checks[-2].verdict is expected


def test_straggler_is_unknown_with_too_few_iterations_under_a_fault():
    run = synthetic_run()
    fired = {
        "uplink": (run.workload.t0_ns, run.workload.t0_ns + 10),
        "loss": (run.workload.t0_ns + 20_000_000_000, run.workload.t0_ns + 24_000_000_000),
    }
    result = straggler(run, fired)
    assert result.value is None
    assert "uplink" in result.detail


@pytest.mark.parametrize("of", ["run", "twin"])
def test_job_time_of_iterations_before_the_faults_is_inconclusive(of):
    """The twin finished only a fifth of the iterations, and the first fault came later than that."""
    run = synthetic_run()
    short = tuple(msgspec.structs.replace(one, iterations=one.iterations[:20]) for one in run.workload.series)
    run = changed(run, **({"series": short} if of == "run" else {"twin": short}))
    check = verdict_of(run, at_most("jct_ratio", 1.6)).checks[-2]
    assert (check.name, check.verdict, check.observed) == ("jct_ratio", INCONCLUSIVE, None)
    assert "both runs finished 20 iterations, which ended before uplink was over" in check.detail


def test_judge_workload_that_moved_nothing_is_inconclusive_although_its_faults_are_proved():
    """Queue pairs of a silent job do not fail, so a bound on errors would hold."""
    run = changed(synthetic_run(), qp_errors=0)
    assert verdict_of(run, at_most("qp_errors", 0)).verdict is PASS
    silent = tuple(msgspec.structs.replace(series, samples=(), iterations=()) for series in run.workload.series)
    result = verdict_of(changed(run, series=silent), at_most("qp_errors", 0))
    assert result.verdict is INCONCLUSIVE
    assert [check.detail for check in result.checks if check.name == "workload"] == [
        "no data arrived and no iteration finished, so the effect of the faults is unknown"
    ]


@pytest.mark.parametrize(
    ("checked", "wrong", "failure", "expected"),
    [
        (None, 0, None, None),
        (4096, 0, None, PASS),
        (0, 0, None, INCONCLUSIVE),
        (4096, 3, None, FAIL),
        (4096, 3, "host3: the traffic engine is gone", FAIL),
    ],
)
def test_judge_wrong_bytes_of_flows_are_a_check_of_their_own(checked, wrong, failure, expected):
    """Wrong bytes used to be only a reason why the workload failed, and a lost host's reason hid them."""
    run = changed(synthetic_run(), checked_bytes=checked, wrong_bytes=wrong, failure=failure)
    result = verdict_of(run)
    assert [check.verdict for check in result.checks if check.name == "wrong_bytes"] == ([expected] if expected else [])
    assert reread(run) == run
    with pytest.raises(ValueError, match="wrong_bytes"):
        reread(changed(run, wrong_bytes=9999))


def test_judge_wrong_elements_fail_although_no_expectation_names_them():
    """An experiment that bounds only times passed with wrong results, and said that the job survived."""
    run = synthetic_run()
    first, *others = run.workload.series
    step, *later = first.iterations
    broken_series = msgspec.structs.replace(first, iterations=(msgspec.structs.replace(step, wrong=4), *later))
    run = changed(run, series=(broken_series, *others))
    for expectations, verdict in (((), FAIL), ((at_most("qp_errors", 100),), FAIL), ((at_most(ELEMENTS, 9),), PASS)):
        result = verdict_of(run, *expectations)
        assert [check.verdict for check in result.checks if check.name == ELEMENTS] == [verdict]
        assert result.verdict is verdict
    assert [check for check in verdict_of(synthetic_run()).checks if check.name == ELEMENTS] == []


def test_judge_wrong_elements_of_the_fault_free_twin_fail():
    """A lab that computes wrong results without any fault passed: only the run with the faults was looked at."""
    run = synthetic_run()
    first, *others = run.fault_free
    step, *later = first.iterations
    broken_series = msgspec.structs.replace(first, iterations=(msgspec.structs.replace(step, wrong=4), *later))
    run = changed(run, twin=(broken_series, *others))
    for expectations in ((), (at_most(ELEMENTS, 9),)):
        result = verdict_of(run, *expectations)
        assert result.verdict is FAIL
        (check,) = [check for check in result.checks if check.verdict is FAIL]
        assert (check.name, check.observed) == ("twin", 4)
    (check,) = [check for check in verdict_of(synthetic_run()).checks if check.name == "twin"]
    assert check.verdict is PASS


def test_judge_flows_without_a_record_of_silent_ones_are_inconclusive():
    """Bytes are counted by RNIC: a flow that never carried one is hidden by another flow of its RNIC."""
    flows = changed(
        synthetic_run(), workload={"flow": "send", "transport": "rc", "size_bytes": 4096, "qps": 1}, silent_flows=None
    )
    check = next(check for check in verdict_of(flows).checks if check.name == "workload")
    assert (check.verdict, check.detail) == (INCONCLUSIVE, "no record says whether each flow carried data")


@pytest.mark.parametrize("transport", ["rc", "uc"])
def test_judge_flow_that_moved_nothing_is_not_hidden_by_another_one_at_its_rnic(transport):
    """Samples are of RNICs: the bytes of the other flows of an incast hid one of which nothing ever arrived."""
    run = synthetic_run()
    flows = changed(
        run,
        workload={"flow": "write", "transport": transport, "size_bytes": 4096, "qps": 1, "pattern": "incast"},
        series=tuple(msgspec.structs.replace(series, iterations=()) for series in run.workload.series),
        silent_flows=("host2:rxe0 > host4:rxe0",),
    )
    result = verdict_of(flows, at_most("qp_errors", 100))
    assert result.verdict is INCONCLUSIVE
    (check,) = [check for check in result.checks if check.name == "workload"]
    assert check.detail.startswith("nothing arrived on host2:rxe0 > host4:rxe0 from beginning to end")
    whole = changed(flows, silent_flows=())
    assert next(check for check in verdict_of(whole).checks if check.name == "workload").verdict is PASS


def test_judge_flow_of_which_no_byte_was_compared_is_not_hidden_by_another_one():
    """Bytes of the other flows were compared and right, so that the check passed for all of them."""
    run = changed(synthetic_run(), checked_bytes=4096, unchecked_flows=("host2:rxe0 > host4:rxe0",))
    (check,) = [check for check in verdict_of(run).checks if check.name == "wrong_bytes"]
    assert check.verdict is INCONCLUSIVE
    assert check.detail == "4,096 bytes compared, but none of host2:rxe0 > host4:rxe0"
    wrong = changed(run, wrong_bytes=3)
    (check,) = [check for check in verdict_of(wrong).checks if check.name == "wrong_bytes"]
    assert check.verdict is FAIL
    assert reread(run) == run


@pytest.mark.parametrize("which", ["counters_before", "counters_after"])
def test_retransmissions_of_an_rnic_whose_counters_were_never_read_are_unknown(which):
    """The other hosts' counters did not move, but this host's are unknown, so 0 must not pass."""
    run = synthetic_run()
    run = changed(run, counters_after=run.telemetry.counters_before)
    assert verdict_of(run, at_most("nak_episodes", 0)).checks[-2].verdict is PASS
    run = changed(run, **{which: {**getattr(run.telemetry, which), "host3": {"be0.rx_packets": 1}}})
    check = verdict_of(run, at_most("nak_episodes", 0)).checks[-2]
    assert check.verdict is INCONCLUSIVE
    assert "host3:rxe0 gave no such counter" in check.detail


def test_verdict_file_better_than_its_checks_is_rejected():
    """Such a file was edited, or assembled from two runs."""
    good = verdict_of(synthetic_run(), at_most("qp_errors", 100))
    assert decode(encode(good)) == good
    assert good.verdict is PASS
    check = msgspec.structs.replace(good.checks[0], verdict=FAIL)
    for verdict in (PASS, INCONCLUSIVE):
        with pytest.raises(ValueError, match=f"verdict: {verdict} although {check.name} is FAIL"):
            decode(encode(msgspec.structs.replace(good, verdict=verdict, checks=(check, *good.checks[1:]))))
    unproven_one = msgspec.structs.replace(good.faults[0], unproven=("it never fired",))
    with pytest.raises(ValueError, match=f"PASS although {unproven_one.id} is not proven: it never fired"):
        decode(encode(msgspec.structs.replace(good, faults=(unproven_one, *good.faults[1:]))))
