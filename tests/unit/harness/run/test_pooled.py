"""Pooled runs are decided by the differences between runs, and interim analyses do not raise the error rate."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from error_limits import most_errors
from finished_run import finished
from judged_runs import served

from faultbed.harness.analysis.observations import Observation
from faultbed.harness.confidence import Interval, level_for
from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.experiment.metrics import LINK_PREFIXES, METRICS, lookup
from faultbed.harness.run.repeats import alpha_spending
from faultbed.harness.run.repeats.pooled import (
    Trial,
    decode,
    encode,
    is_unbiased,
    pool,
    pooled_observation,
    undecided,
    why_left_out,
)
from faultbed.harness.verdict import Check, Verdict, VerdictFile
from faultbed.testbed.errors import UsageError

PASS, FAIL, INCONCLUSIVE, ERROR = Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.ERROR
SPREAD = 0.027
"""Deviation of the logarithm of jct_ratio between fault-free runs on a soft lab (docs/numbers.md)."""
JCT = [Expectation(metric=METRICS["jct_ratio"], maximum=1.05)]


def check(name, verdict, observed=0, bound=0, rule="observed <= bound. Words", detail="as said"):
    return Check(name=name, verdict=verdict, observed=observed, bound=bound, unit="count", rule=rule, detail=detail)


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


def test_pool_of_undecided_runs_decides():
    pooled = pool(trials([1.10, 1.12, 1.09, 1.11, 1.10]), JCT)
    assert (pooled.verdict, named(pooled, "jct_ratio").verdict) == (FAIL, FAIL)
    assert named(pooled, "jct_ratio").observed == pytest.approx(1.104, abs=1e-3)
    assert "Student's t of 5 runs" in named(pooled, "jct_ratio").detail
    assert pool(trials([1.00, 1.01, 0.99, 1.00, 1.01]), JCT).verdict is PASS


def test_pool_has_the_exact_quantile_of_few_runs():
    """t at 0.995 with 2 degrees of freedom is 9.925."""
    detail = named(pool(trials([1.0, 1.01, 1.02]), JCT), "jct_ratio").detail
    logs = np.log([1.0, 1.01, 1.02])
    high = np.exp(logs.mean() + 9.9248 * logs.std(ddof=1) / np.sqrt(3))
    assert f"..{high:.4g} " in detail


def of_links(values, name):
    metric = lookup(name, ())
    runs = [trial(number, [(name, float(value), None)]) for number, value in enumerate(values)]
    return named(pool(runs, [Expectation(metric=metric, minimum=0.5)]), name)


@pytest.mark.parametrize("name", ["bisection", "link_utilisation.mean", "link_utilisation.rtsw1:ctsw1"])
def test_pool_decides_what_links_carry_although_no_run_has_an_interval_of_it(name):
    """An undecided run advises more runs, so more runs must be able to decide every bound."""
    assert of_links([0.71, 0.70, 0.69, 0.70], name).verdict is PASS
    assert of_links([0.31, 0.30, 0.29, 0.30], name).verdict is FAIL
    assert of_links([0.71, 0.30, 0.29, 0.60], name).verdict is INCONCLUSIVE
    assert of_links([0.0, 0.0, 0.0, 0.0], name).verdict is FAIL
    assert of_links([0.7, 0.7], name).verdict is INCONCLUSIVE


def test_every_noisy_metric_is_pooled_by_its_runs_or_has_intervals_of_its_own():
    with_interval = {
        "latency.",
        "split.",
        "ttft.",
        "tpot.",
        "slo_",
        "goodput_m",
        "dip",
        "bystander.goodput_ratio",
        "ingest.p99",
    }
    for metric in (*METRICS.values(), *LINK_PREFIXES.values()):
        if metric.is_noisy:
            has_own = metric.name.startswith(tuple(with_interval))
            assert is_unbiased(metric) != has_own, metric.name


@pytest.mark.parametrize("runs", [3, 20])
def test_pool_at_its_bound_errs_no_more_often_with_more_runs(runs):
    """The verdict of 20 runs used to be that of the worst, which fails wrongly 20 times as often as a single run."""
    rng = np.random.default_rng(3)
    actual = [pool(trials(ratios(rng, 1.05, runs)), JCT).verdict for _ in range(600)]
    assert actual.count(FAIL) <= most_errors(600, 0.005)
    assert actual.count(PASS) <= most_errors(600, 0.005)


@pytest.mark.parametrize("most", [3, 10])
def test_interim_analyses_err_no_more_often_than_one_analysis(most):
    rng = np.random.default_rng(4)
    actual = [pool(trials(ratios(rng, 1.05, most)), JCT, most=most).verdict for _ in range(600)]
    assert actual.count(FAIL) <= most_errors(600, 0.005)
    assert actual.count(PASS) <= most_errors(600, 0.005)


def test_interim_analyses_decide_a_ratio_of_110_against_105_within_ten_runs():
    rng = np.random.default_rng(5)
    actual = [pool(trials(ratios(rng, 1.10, 10)), JCT, most=10).verdict for _ in range(300)]
    assert actual.count(FAIL) >= 260
    assert actual.count(PASS) == 0


def test_interim_analyses_with_a_clear_result_end_early():
    """A ratio of 1.5 does not need ten runs."""
    assert pool(trials([1.5, 1.52, 1.49, 1.5]), JCT, most=10).verdict is FAIL
    assert undecided(pool(trials([1.06, 1.02, 1.09, 1.05]), JCT, most=10))
    assert not undecided(pool(trials([1.5, 1.52, 1.49, 1.5]), JCT, most=10))


def test_interim_analyses_spend_risk_late_and_stay_within_it():
    result = alpha_spending.tails(10, 0.005)
    assert len(result) == 8
    assert list(result) == sorted(result)
    assert 0.003 < result[-1] < 0.005
    with pytest.raises(ValueError, match="analyses are made after 3 to 100 runs"):
        alpha_spending.tails(2, 0.005)
    assert alpha_spending.tails(100, 0.005)[0] == 0, "nothing is spent where it would decide nothing"


def test_interim_analyses_tails_hold_for_normal_increments():
    """The share of random sums that cross a boundary in any interim analysis equals the risk that is spent."""
    tail, most = 0.05, 8
    spent = alpha_spending.tails(most, tail)
    rng = np.random.default_rng(6)
    paths = np.cumsum(rng.normal(size=(20_000, most)), axis=1) / np.sqrt(np.arange(1, most + 1))
    from scipy import special

    crossed = (paths[:, alpha_spending.FIRST - 1 :] > -special.ndtri(np.array(spent))).any(axis=1).mean()
    assert crossed == pytest.approx(0.85 * tail, abs=0.006)


def test_pool_excludes_and_names_a_run_with_an_unproven_fault():
    unproven = Trial(
        run_dir="runs/bad",
        verdict=trial(9, [], check("fired.loss", INCONCLUSIVE, detail="it never fired")).verdict,
        metrics={"jct_ratio": Observation(value=0.5, detail="")},
    )
    pooled = pool([*trials([1.10, 1.12, 1.09, 1.11]), unproven], JCT)
    assert [run.left_out for run in pooled.runs][-1] == "loss is not proven: it never fired"
    assert named(pooled, "jct_ratio").observed == pytest.approx(1.105, abs=1e-3)
    assert (named(pooled, "pooled_runs").observed, named(pooled, "pooled_runs").verdict) == (4, PASS)


def test_pool_of_mostly_unproven_runs_is_inconclusive():
    unproven = [trial(n, [], check("fired.loss", INCONCLUSIVE)) for n in range(10, 15)]
    pooled = pool([*trials([1.0, 1.001, 0.999]), *unproven], JCT)
    assert pooled.verdict is INCONCLUSIVE
    assert named(pooled, "pooled_runs").verdict is INCONCLUSIVE


def test_pool_counts_exact_checks_of_excluded_runs_too():
    wrong = trial(9, [], check("fired.loss", INCONCLUSIVE), check("wrong_elements", FAIL, observed=7))
    pooled = pool([*trials([1.0, 1.001, 0.999]), wrong], JCT)
    assert pooled.verdict is FAIL
    assert named(pooled, "wrong_elements").detail == "worst of 1 runs, seed 9: as said"
    assert not undecided(pooled)


def test_pool_with_a_run_in_error_is_an_error():
    broken = trial(9, [], check("harness", ERROR))
    assert pool([*trials([1.0, 1.001, 0.999]), broken], JCT).verdict is ERROR


def test_pool_with_a_dirty_run_is_dirty():
    dirty = trial(9, [], check("lab_restored", INCONCLUSIVE), lab_state="DIRTY")
    pooled = pool([*trials([1.0, 1.001, 0.999]), dirty], JCT)
    assert (pooled.lab_state, pooled.verdict) == ("DIRTY", INCONCLUSIVE)
    assert not undecided(pooled)


def test_pool_of_two_runs_decides_only_exact_metrics():
    assert pool(trials([1.0, 1.0]), JCT).verdict is INCONCLUSIVE
    exact = [trial(n, [], check("wrong_elements", PASS)) for n in range(2)]
    assert pool(exact, [Expectation(metric=METRICS["wrong_elements"], maximum=0)]).verdict is PASS


def test_pool_of_more_runs_does_not_decide_a_window_minimum_more_often():
    """Noise puts each run's minimum below the true value, so the mean of many runs is biased, too."""
    own = Interval(low=0.85, high=1.02, method="")
    expected = [Expectation(metric=METRICS["goodput_min_ratio"], minimum=0.95)]
    many = [trial(n, [("goodput_min_ratio", 0.9 + 0.001 * (n % 3), own)]) for n in range(30)]
    assert named(pool(many, expected), "goodput_min_ratio").verdict is INCONCLUSIVE
    deep = Interval(low=0.1, high=0.3, method="")
    many = [trial(n, [("goodput_min_ratio", 0.2 + 0.001 * (n % 3), deep)]) for n in range(5)]
    assert named(pool(many, expected), "goodput_min_ratio").verdict is FAIL
    without = [trial(n, [("goodput_min_ratio", 0.2, None)]) for n in range(5)]
    assert named(pool(without, expected), "goodput_min_ratio").verdict is INCONCLUSIVE


def test_pool_of_several_noisy_checks_shares_the_risk():
    four = [Expectation(metric=METRICS[name], minimum=0.5, maximum=2.0) for name in ("jct_ratio", "ettr")]
    metrics = [("jct_ratio", 1.0, None), ("ettr", 0.9, None)]
    pooled = pool([trial(n, metrics) for n in range(3)], four)
    assert "0.25 % for each of 4 noisy checks" in named(pooled, "ettr").rule
    assert "99.5 %" in named(pooled, "ettr").rule


def test_pooled_file_round_trip():
    pooled = pool(trials([1.10, 1.12, 1.09]), JCT, most=10)
    assert decode(encode(pooled)) == pooled


def test_pool_of_runs_faster_than_their_twins_is_no_pass():
    """No fault makes a job faster, so the machine must have been disturbed while the twins ran."""
    result = named(pool(trials([0.79, 0.80, 0.81, 0.80, 0.79]), JCT), "jct_ratio")
    assert result.verdict is INCONCLUSIVE
    assert "the machine was disturbed" in result.detail


@pytest.mark.parametrize("most", [None, 10])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_pool_with_a_value_that_is_no_number_is_no_pass(value, most):
    """An earlier interim analysis used to decide, as if the last run did not exist."""
    check = named(pool(trials([1.0, 1.001, 1.0, 1.001, value]), JCT, most=most), "jct_ratio")
    assert check.verdict is INCONCLUSIVE
    assert "1 runs have no value" in check.detail


def test_pool_with_an_interval_that_is_no_number_is_no_pass():
    own = Interval(low=float("nan"), high=0.95, method="m")
    runs = [trial(number, [("goodput_min_ratio", 0.9, own)]) for number in range(4)]
    expectation = Expectation(metric=METRICS["goodput_min_ratio"], minimum=0.5)
    assert named(pool(runs, [expectation]), "goodput_min_ratio").verdict is INCONCLUSIVE


def test_pooled_ratio_of_few_runs_does_not_reach_below_zero():
    """A sweep printed "2.88 (-2.64 or more)" for a ratio of two times."""
    runs = [
        Observation(value=value, detail="", interval=Interval(low=0.1, high=9.0, method="x"))
        for value in (1.782, 3.25, 3.596)
    ]
    interval = pooled_observation(METRICS["ingest.p99_ratio"], runs).interval
    assert (interval.low, interval.high) == (0.0, pytest.approx(9.0))


def test_pool_with_one_outlier_is_not_decided_by_it():
    """Nine runs equal the bound and one is far above: the outlier widens the interval more than it shifts it."""
    assert named(pool(trials([1.05] * 9 + [3.0]), JCT), "jct_ratio").verdict is INCONCLUSIVE


@pytest.mark.parametrize("most", [None, 10])
def test_pool_with_runs_without_a_value_is_no_pass(most):
    """Four of eight runs could not measure the bounded metric, and the other four used to decide alone."""
    good = [1.0, 1.001, 1.0, 0.999, 1.0, 1.001, 1.0]
    result = named(pool([*trials(good), trial(20)], JCT, most=most), "jct_ratio")
    assert result.verdict is INCONCLUSIVE
    assert "1 runs have no value, so it is no PASS" in result.detail
    assert named(pool(trials(good), JCT, most=most), "jct_ratio").verdict is PASS
    slow = [1.5, 1.51, 1.5, 1.49, 1.5, 1.51, 1.5]
    assert named(pool([*trials(slow), trial(20)], JCT, most=most), "jct_ratio").verdict is FAIL


def test_exact_bound_counts_beside_a_noisy_one_of_the_same_number():
    """A share has an exact bound (`min = 1`), which each run decides, and a noisy one. Both must be checked."""
    share = [Expectation(metric=METRICS["slo_attainment"], minimum=1.0, maximum=1.0)]
    own = Interval(low=0.4, high=0.6, method="")
    exact = check("slo_attainment", FAIL, 0.5, 1.0, rule="observed >= bound. Words")
    assert pool([trial(n, [("slo_attainment", 0.5, own)], exact) for n in range(4)], share).verdict is FAIL


def test_pool_without_a_noisy_check_needs_every_fault_proven():
    """The fault never fired in one of two runs. That run is INCONCLUSIVE, and so is the pool."""
    exact = [Expectation(metric=METRICS["wrong_elements"], maximum=0)]
    good = trial(0, [], check("wrong_elements", PASS))
    bad = trial(1, [], check("wrong_elements", PASS), check("fired.loss", INCONCLUSIVE))
    assert pool([good, bad], exact).verdict is INCONCLUSIVE
    assert pool([good, good], exact).verdict is PASS


def test_intervals_of_a_run_in_the_pool_share_the_risk_of_all_noisy_checks(tmp_path):
    """With several noisy checks, a single run's intervals are wider than 99 %. The pool must use the same level."""
    from faultbed.harness.cli.experiments.runs import _trial

    measured = served(*np.linspace(0.5, 1.5, 40))
    names = ["ttft.p50", "ttft.p99", "tpot.p50", "tpot.p99", "slo_attainment"]
    loaded = SimpleNamespace(expectations=[Expectation(metric=METRICS[name], maximum=2.0) for name in names])
    result = _trial(SimpleNamespace(run_dir=finished(tmp_path, measured), verdict=trial(1).verdict), loaded)
    assert result.metrics["ttft.p50"].interval.level == level_for(len(names)) > 0.99


def test_exact_check_whose_bound_is_measured_in_each_run_is_one_check():
    """The load that the emulation forwards is measured again: four runs had four checks, each the worst of 1 run."""
    loads = [
        check("emulation", verdict, 10.0, bound, rule="observed <= bound. Words")
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
        check("qp_errors", PASS, 2, 1.0, rule="observed >= bound. Words"),
        check("qp_errors", PASS, 2, 5.0, rule="observed <= bound. Words"),
    )
    result = pool([trial(number, (), *both) for number in range(3)], exact)
    assert [one.bound for one in result.checks if one.name == "qp_errors"] == [1.0, 5.0]


@pytest.mark.parametrize("bound", [1.5, 1.01, None])
def test_pool_of_runs_that_were_judged_by_another_bound_is_refused(bound):
    """The pooled bound decided for them, and their own check stood beside it as if no interval decided it."""
    runs = [trial(number, [("jct_ratio", 1.0, None)], check("jct_ratio", PASS, 1.0, 1.05)) for number in range(3)]
    assert pool(runs, JCT).verdict is PASS
    other = trial(3, [("jct_ratio", 1.0, None)], check("jct_ratio", PASS, 1.0, bound))
    with pytest.raises(UsageError, match=r"runs/3: jct_ratio was judged by observed <= bound with the bound"):
        pool([*runs, other], JCT)
    turned = trial(3, [("jct_ratio", 1.0, None)], check("jct_ratio", PASS, 1.0, 1.05, rule="observed >= bound. Words"))
    with pytest.raises(UsageError, match="judged by observed >= bound"):
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
