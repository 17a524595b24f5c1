"""Pooled runs are decided by the differences between runs, and interim analyses do not raise the error rate."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from error_limits import most_errors

from faultbed.harness.analysis.observations import Observation
from faultbed.harness.confidence import Interval
from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.experiment.metrics import METRICS, lookup
from faultbed.harness.run.repeats.pooled import (
    Trial,
    decode,
    encode,
    is_open,
    pool,
    pooled_observation,
    why_left_out,
)
from faultbed.harness.verdict import Check, Verdict, VerdictFile
from faultbed.testbed.errors import UsageError

PASS, FAIL, INCONCLUSIVE, ERROR = Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.ERROR
SPREAD = 0.027
"""Deviation of the logarithm of jct_ratio between fault-free runs on a soft lab (docs/numbers.md)."""
JCT = [Expectation(metric=METRICS["jct_ratio"], maximum=1.05)]


def check(name, verdict, observed=0, bound=0, comparison="max", detail="as said"):
    return Check(
        name=name, verdict=verdict, observed=observed, bound=bound, unit="count", comparison=comparison, detail=detail
    )


def trial(number, metrics=(), *checks, lab_state="CLEAN", said=INCONCLUSIVE):
    made = (check("fired.uplink", PASS), *checks)
    verdict = VerdictFile(
        experiment="x", seed=number, lab="soft", verdict=said, checks=made, faults=(), lab_state=lab_state
    )
    values = {name: Observation(value=value, detail="", interval=own) for name, value, own in metrics}
    return Trial(run_dir=f"runs/{number}", verdict=verdict, metrics=values)


def trials(ratios):
    return [trial(number, [("jct_ratio", float(value), None)]) for number, value in enumerate(ratios)]


def ratios(rng, truth, runs):
    return truth * np.exp(SPREAD * rng.normal(size=runs))


def named(judgement, name):
    return next(check for check in judgement.checks if check.name == name)


QUIET = [1.0, 1.001, 0.999, 1.002, 0.998, 1.003, 0.997, 1.0005, 1.0015, 0.9985, 1.0025, 0.9975]
SLOW = [1.5 * value for value in QUIET]


def unproven(number):
    bad = trial(number, [("jct_ratio", 0.5, None)], check("fired.loss", INCONCLUSIVE, detail="it never fired"))
    return replace(bad, verdict=msgspec.structs.replace(bad.verdict, checks=bad.verdict.checks[1:]))


def test_pool_of_pairs_is_decided_by_sign_flips():
    assert named(pool(trials(QUIET), JCT), "jct_ratio").verdict is PASS
    slow = named(pool(trials(SLOW), JCT), "jct_ratio")
    assert (slow.verdict, slow.estimand, slow.rule.kind, slow.rule.runs) == (FAIL, "setting", "sign-flips", 12)
    assert slow.rule.unseen_share == pytest.approx(1 - 0.005 ** (1 / 12))


@pytest.mark.parametrize("runs", [2, 3, 7])
def test_pool_of_fewer_than_eight_pairs_decides_nothing(runs):
    result = named(pool(trials(SLOW[:runs]), JCT), "jct_ratio")
    assert (result.verdict, result.why) == (INCONCLUSIVE, "too-few-runs")


def test_pool_of_few_runs_that_each_decide_alone_decides():
    alone = check("jct_ratio", FAIL, 3.0, 1.05)
    runs = [trial(number, [("jct_ratio", 3.0, None)], alone) for number in range(3)]
    assert named(pool(runs, JCT), "jct_ratio").verdict is FAIL
    mixed = [*runs, trial(9, [("jct_ratio", 1.3, None)], check("jct_ratio", INCONCLUSIVE, 1.3, 1.05))]
    assert named(pool(mixed, JCT), "jct_ratio").verdict is INCONCLUSIVE


def test_pool_whose_slow_half_is_unproven_is_no_pass():
    """Ten runs, of which the five slow ones were unproven, used to be PASS and exit code 0."""
    pooled = pool([*trials(QUIET[:5]), *(unproven(number) for number in range(20, 25))], JCT)
    result = named(pooled, "jct_ratio")
    assert (pooled.verdict, result.verdict, result.rule.missing) == (INCONCLUSIVE, INCONCLUSIVE, 5)
    assert [run.left_out for run in pooled.runs][-1] == "loss is not proven: it never fired"


def test_pool_of_many_runs_outweighs_one_unproven_run():
    result = named(pool([*trials([*QUIET, *QUIET]), unproven(99)], JCT), "jct_ratio")
    assert (result.verdict, result.rule.missing) == (PASS, 1)
    assert named(pool([*trials(QUIET[:8]), unproven(99)], JCT), "jct_ratio").verdict is INCONCLUSIVE


def test_exact_bound_of_a_pool_is_no_pass_without_the_runs_that_are_left_out():
    both = [*JCT, Expectation(metric=METRICS["recovery.total"], maximum=5.0)]
    held = check("recovery.total", PASS, 1.0, 5.0)
    runs = [trial(number, [("jct_ratio", value, None)], held) for number, value in enumerate([*QUIET, *QUIET])]
    assert named(pool(runs, both), "recovery.total").verdict is PASS
    result = named(pool([*runs, unproven(99)], both), "recovery.total")
    assert (result.verdict, result.why) == (INCONCLUSIVE, "missing-runs")


def test_pool_with_more_load_than_the_emulation_forwards_may_be_replaced():
    """That is known before the workload begins, so that the run is not missing."""
    overloaded = trial(99, [("jct_ratio", 9.0, None)], check("emulation", INCONCLUSIVE))
    result = named(pool([*trials(QUIET), overloaded], JCT), "jct_ratio")
    assert (result.verdict, result.rule.missing) == (PASS, 0)


def test_pool_of_pairs_at_their_bound_rarely_decides():
    rng = np.random.default_rng(3)
    for most in (None, 12):
        actual = [named(pool(trials(ratios(rng, 1.05, 12)), JCT, most=most), "jct_ratio").verdict for _ in range(300)]
        assert max(actual.count(FAIL), actual.count(PASS)) <= most_errors(300, 0.005)


def test_pool_looks_at_nine_and_twelve_pairs():
    assert named(pool(trials(SLOW[:8]), JCT, most=12), "jct_ratio").verdict is INCONCLUSIVE
    early = named(pool(trials(SLOW[:9]), JCT, most=12), "jct_ratio")
    assert (early.verdict, early.rule.tail) == (FAIL, pytest.approx(0.002))
    assert [(look.runs, look.tail) for look in early.rule.looks] == [
        (9, pytest.approx(0.002)),
        (12, pytest.approx(0.003)),
    ]
    assert is_open(pool(trials([1.06, 1.02, 1.09, 1.05, 1.06, 1.02, 1.09, 1.05, 1.05]), JCT, most=12))
    assert not is_open(pool(trials(SLOW[:9]), JCT, most=12))


def test_pool_looks_decide_a_ratio_of_ten_percent_beyond_the_bound():
    rng = np.random.default_rng(5)
    actual = [pool(trials(ratios(rng, 1.155, 12)), JCT, most=12).verdict for _ in range(200)]
    assert actual.count(FAIL) >= 190
    assert actual.count(PASS) == 0


def test_pool_without_twins_is_decided_by_the_median_of_runs():
    metric = METRICS["goodput.mean"]

    def of(values, **bound):
        runs = [trial(number, [("goodput.mean", float(value), None)]) for number, value in enumerate(values)]
        return named(pool(runs, [Expectation(metric=metric, **bound)]), "goodput.mean")

    rng = np.random.default_rng(8)
    values = 1 + 0.02 * rng.normal(size=30)
    assert of(values, minimum=0.9).verdict is PASS
    assert of(values, minimum=1.1).verdict is FAIL
    assert of(values, minimum=1.1).rule.kind == "signs"
    assert of(values[:8], minimum=1.1).verdict is INCONCLUSIVE
    drifting = 1 + 0.02 * np.sign(np.arange(30) - 1)
    assert of(drifting, minimum=1.01).verdict is INCONCLUSIVE


def test_pool_of_several_sampled_bounds_shares_the_risk():
    four = [Expectation(metric=METRICS[name], minimum=0.5, maximum=2.0) for name in ("jct_ratio", "goodput.mean")]
    metrics = [("jct_ratio", 1.0, None), ("goodput.mean", 0.9, None)]
    pooled = pool([trial(n, metrics) for n in range(12)], four)
    assert named(pooled, "jct_ratio").rule.tail == named(pooled, "goodput.mean").rule.tail == 0.0025


def test_pool_of_runs_faster_than_their_twins_is_no_pass():
    """No fault makes a job faster, so the machine must have been disturbed while the twins ran."""
    result = named(pool(trials([0.8 * value for value in QUIET]), JCT), "jct_ratio")
    assert (result.verdict, result.why) == (INCONCLUSIVE, "faster-than-twin")
    assert "the machine was disturbed" in result.detail


def test_pooled_observation_of_few_runs_has_no_interval():
    runs = [Observation(value=value, detail="") for value in (1.782, 3.25, 3.596)]
    assert pooled_observation(METRICS["ingest.p99_ratio"], runs).interval is None
    many = [Observation(value=value, detail="") for value in QUIET]
    interval = pooled_observation(METRICS["jct_ratio"], many).interval
    assert 0.997 < interval.low < 1 < interval.high < 1.003


def of_links(values, name):
    metric = lookup(name, ())
    runs = [trial(number, [(name, float(value), None)]) for number, value in enumerate(values)]
    return named(pool(runs, [Expectation(metric=metric, minimum=0.5)]), name)


def test_pool_counts_exact_checks_of_excluded_runs_too():
    wrong = trial(9, [], check("fired.loss", INCONCLUSIVE), check("wrong_elements", FAIL, observed=7))
    pooled = pool([*trials(QUIET), wrong], JCT)
    assert pooled.verdict is FAIL
    assert named(pooled, "wrong_elements").detail == "worst of 1 runs, seed 9: as said"
    assert not is_open(pooled)


def test_pool_with_a_run_in_error_is_an_error():
    broken = trial(9, [], check("harness", ERROR))
    assert pool([*trials(QUIET), broken], JCT).verdict is ERROR


def test_pool_with_a_dirty_run_is_dirty():
    dirty = trial(9, [], check("lab_restored", INCONCLUSIVE), lab_state="DIRTY")
    pooled = pool([*trials(QUIET), dirty], JCT)
    assert (pooled.lab_state, pooled.verdict) == ("DIRTY", INCONCLUSIVE)
    assert not is_open(pooled)


def test_pooled_file_round_trip():
    pooled = pool(trials(SLOW), JCT, most=10)
    assert decode(encode(pooled)) == pooled


@pytest.mark.parametrize("most", [None, 10])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_pool_with_a_value_that_is_no_number_is_no_pass(value, most):
    """An earlier interim analysis used to decide, as if the last run did not exist."""
    check = named(pool(trials([1.0, 1.001, 1.0, 1.001, value]), JCT, most=most), "jct_ratio")
    assert check.verdict is INCONCLUSIVE
    assert "1 runs have no value" in check.detail


def test_pool_with_one_outlier_is_not_decided_by_it():
    """Nine runs equal the bound and one is far above: the outlier widens the interval more than it shifts it."""
    assert named(pool(trials([1.05] * 9 + [3.0]), JCT), "jct_ratio").verdict is INCONCLUSIVE


def test_exact_bound_counts_beside_a_noisy_one_of_the_same_number():
    """A share has an exact bound (`min = 1`), which each run decides, and a noisy one. Both must be checked."""
    share = [Expectation(metric=METRICS["slo_attainment"], minimum=1.0, maximum=1.0)]
    own = Interval(low=0.4, high=0.6, method="")
    exact = check("slo_attainment", FAIL, 0.5, 1.0, comparison="min")
    assert pool([trial(n, [("slo_attainment", 0.5, own)], exact) for n in range(4)], share).verdict is FAIL


def test_pool_without_a_noisy_check_needs_every_fault_proven():
    """The fault never fired in one of two runs. That run is INCONCLUSIVE, and so is the pool."""
    exact = [Expectation(metric=METRICS["wrong_elements"], maximum=0)]
    good = trial(0, [], check("wrong_elements", PASS))
    bad = trial(1, [], check("wrong_elements", PASS), check("fired.loss", INCONCLUSIVE))
    assert pool([good, bad], exact).verdict is INCONCLUSIVE
    assert pool([good, good], exact).verdict is PASS


def test_exact_check_whose_bound_is_measured_in_each_run_is_one_check():
    """The load that the emulation forwards is measured again: four runs had four checks, each the worst of 1 run."""
    loads = [
        check("emulation", verdict, 10.0, bound, comparison="max")
        for verdict, bound in ((PASS, 20.0), (PASS, 21.0), (INCONCLUSIVE, 9.0), (PASS, 22.0))
    ]
    one = [Expectation(metric=METRICS["wrong_elements"], maximum=0)]
    result = pool([trial(number, (), load, check("wrong_elements", PASS)) for number, load in enumerate(loads)], one)
    (emulation,) = [one for one in result.checks if one.name == "emulation"]
    assert (emulation.verdict, emulation.bound) == (PASS, 20.0), (
        "the run that the emulation could not carry is left out"
    )
    assert emulation.detail.startswith("worst of 3 runs, seed 0, each by its own bound")
    lost = check("wrong_elements", FAIL, 1, 0)
    result = pool([trial(0, (), loads[0], check("wrong_elements", PASS)), trial(1, (), loads[1], lost)], one)
    assert named(result, "wrong_elements").detail == "worst of 2 runs, seed 1: as said"


def test_two_bounds_of_one_metric_are_two_checks_of_the_pool():
    exact = [Expectation(metric=METRICS["qp_errors"], minimum=1.0, maximum=5.0)]
    both = (
        check("qp_errors", PASS, 2, 1.0, comparison="min"),
        check("qp_errors", PASS, 2, 5.0, comparison="max"),
    )
    result = pool([trial(number, (), *both) for number in range(3)], exact)
    assert [one.bound for one in result.checks if one.name == "qp_errors"] == [1.0, 5.0]


@pytest.mark.parametrize("bound", [1.5, 1.01, None])
def test_pool_of_runs_that_were_judged_by_another_bound_is_refused(bound):
    """The pooled bound decided for them, and their own check stood beside it as if no interval decided it."""
    runs = [trial(number, [("jct_ratio", 1.0, None)], check("jct_ratio", PASS, 1.0, 1.05)) for number in range(3)]
    assert named(pool(runs, JCT), "jct_ratio").verdict is PASS
    other = trial(3, [("jct_ratio", 1.0, None)], check("jct_ratio", PASS, 1.0, bound))
    with pytest.raises(UsageError, match=r"runs/3: jct_ratio was judged by the max"):
        pool([*runs, other], JCT)
    turned = trial(3, [("jct_ratio", 1.0, None)], check("jct_ratio", PASS, 1.0, 1.05, comparison="min"))
    with pytest.raises(UsageError, match="judged by the min"):
        pool([*runs, turned], JCT)


@pytest.mark.parametrize("change", [{"experiment": "y"}, {"lab": "soft-mini"}])
def test_pool_of_runs_of_several_experiments_or_labs_is_refused(change):
    runs = trials([1.0, 1.0, 1.0])
    other = replace(runs[2], verdict=msgspec.structs.replace(runs[2].verdict, **change))
    with pytest.raises(UsageError, match=r"runs/2: of .* not of x on soft; pool runs of one experiment on one lab"):
        pool([*runs[:2], other], JCT)


def test_metric_of_routing_is_no_condition_of_a_run():
    """`routing.converged` is a metric, although its name starts like a scheme's check: its run is not left out."""
    missing = check("routing.converged", INCONCLUSIVE)
    assert why_left_out(trial(1, (), missing).verdict) is None
    assert why_left_out(trial(1, (), check("routing.spray", INCONCLUSIVE)).verdict) is not None
