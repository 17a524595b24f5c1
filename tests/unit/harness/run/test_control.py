"""Control runs inject no fault: they measure the harness, and decide nothing about faults."""

from __future__ import annotations

import msgspec
import pytest
from synthetic_run import synthetic_run

from faultbed.harness.analysis.observations import Observation
from faultbed.harness.analysis.observe import observe
from faultbed.harness.confidence import Interval
from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.experiment.metrics import METRICS
from faultbed.harness.experiment.run_plan import Plan
from faultbed.harness.judge import judge
from faultbed.harness.record import measurements, rundir
from faultbed.harness.run.control import CHECK, as_control
from faultbed.harness.verdict import Check, ExcludedHost, Verdict, VerdictFile


def verdict_of(*verdicts):
    checks = tuple(
        Check(name=f"c{at}", verdict=one, observed=1, bound=1, unit="", comparison="equals")
        for at, one in enumerate(verdicts)
    )
    return VerdictFile(
        experiment="x", seed=1, lab="soft", verdict=Verdict.PASS, checks=checks, faults=(), lab_state="CLEAN"
    )


COST = Observation(value=1.012, detail="60.7 s for 90 iterations", interval=Interval(low=0.99, high=1.03, method="m"))


@pytest.mark.parametrize(
    ("verdicts", "whole"),
    [
        ([Verdict.PASS, Verdict.PASS], Verdict.INCONCLUSIVE),
        ([Verdict.PASS, Verdict.FAIL], Verdict.FAIL),
        ([Verdict.ERROR], Verdict.ERROR),
        ([], Verdict.INCONCLUSIVE),
    ],
)
def test_as_control_is_never_a_pass(verdicts, whole):
    verdict = as_control(verdict_of(*verdicts), COST)

    assert verdict.verdict is whole
    assert verdict.checks[0].name == CHECK
    assert verdict.checks[0].verdict is Verdict.INCONCLUSIVE


def test_as_control_keeps_everything_else_of_the_verdict():
    """The verdict of a control run used to lose the receipt of the routing scheme."""
    verdict = msgspec.structs.replace(
        verdict_of(Verdict.PASS), routing=None, left_out=(ExcludedHost(host="h", why="w"),)
    )
    control = as_control(verdict, COST)
    assert msgspec.structs.replace(control, verdict=verdict.verdict, checks=verdict.checks) == verdict


def test_as_control_reports_harness_cost_with_its_interval():
    (check,) = as_control(verdict_of(), COST).checks

    assert check.observed == 1.012
    assert "armed, zero intensity: no fault did anything; the harness alone cost 1.012" in check.detail
    assert "99 % interval 0.99..1.03" in check.detail


@pytest.mark.parametrize("cost", [None, Observation(value=None, detail="this run has no fault-free twin")])
def test_as_control_without_a_measurement_reports_an_unknown_cost(cost):
    (check,) = as_control(verdict_of(), cost).checks

    assert check.observed is None
    assert "its cost is unknown" in check.detail


def test_control_run_with_good_numbers_is_inconclusive():
    """A control run is judged like any run whose faults did not fire, and marked as a control run."""
    run = msgspec.structs.replace(synthetic_run(fired=False), is_control=True)
    plan = Plan(
        experiment="x",
        seed=1,
        faultbed="0",
        inventory="0",
        workload=run.workload,
        faults=tuple(fault.plan for fault in run.faults),
    )
    observed = observe(run)
    bounds = [
        Expectation(metric=METRICS["wrong_elements"], maximum=0),
        Expectation(metric=METRICS["iterations"], minimum=1),
    ]
    verdict = as_control(
        judge(plan=plan, expectations=bounds, run=run, observed=observed).verdict, observed.metrics["jct_ratio"]
    )

    assert verdict.verdict is Verdict.INCONCLUSIVE
    assert {check.verdict for check in verdict.checks if check.name.startswith("fired.")} == {Verdict.INCONCLUSIVE}
    assert measurements.decode(measurements.encode(run)).is_control


def test_repro_script_of_a_control_run_does_a_control_run():
    """Otherwise repeating a copy of the directory would inject the faults."""
    assert b"--control" in rundir.repro_script(seed=1, lab="x.yml", control=True)
    assert b"--control" not in rundir.repro_script(seed=1, lab="x.yml")
