"""Control runs inject no fault: they measure the harness, and decide nothing about faults."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from judged_runs import plan_of
from synthetic_run import changed, synthetic_run

from faultbed.harness.analysis.observations import Observation
from faultbed.harness.analysis.observe import observe
from faultbed.harness.confidence import Interval
from faultbed.harness.experiment import run_plan
from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.experiment.metrics import METRICS
from faultbed.harness.judge import judge, planned_ledger
from faultbed.harness.ledger.ledger import fold
from faultbed.harness.parts.part import Planned
from faultbed.harness.record import rundir
from faultbed.harness.verdict import Verdict

COST = Observation(value=1.012, detail="60.7 s for 90 iterations", interval=Interval(low=0.99, high=1.03, method="m"))
WRONG = Expectation(metric=METRICS["wrong_elements"], maximum=0)
BROKEN = Expectation(metric=METRICS["iterations"], maximum=1)


def judged(*expectations, cost=COST, control=True):
    """Return the verdict of a synthetic run without faults, and its check of a control run."""
    run = changed(synthetic_run(), faults=())
    plan = msgspec.structs.replace(plan_of(run), control=control or msgspec.UNSET)
    observed = observe(run)
    observed = replace(observed, metrics={**observed.metrics, "jct_ratio": cost})
    result = judge(before=Planned(plan=plan, expectations=expectations), run=run, observed=observed)
    assert fold(result.ledger) is result.verdict.verdict
    return result.verdict.verdict, [check for check in result.verdict.checks if check.name == "control_run"]


def test_control_run_is_never_a_pass():
    assert judged(WRONG, control=False) == (Verdict.PASS, [])
    verdict, (check,) = judged(WRONG)
    assert verdict is check.verdict is Verdict.INCONCLUSIVE
    assert judged(BROKEN)[0] is Verdict.FAIL


def test_control_run_is_inconclusive_before_it_begins():
    plan = msgspec.structs.replace(plan_of(synthetic_run()), control=True)
    names = [entry.claim.name for entry in planned_ledger(Planned(plan=plan, expectations=())).entries]
    assert {"control_run", "twin"} <= {*names}


def test_plan_of_a_control_run_says_so_and_that_of_another_run_does_not():
    plan = plan_of(synthetic_run())
    assert b"control" not in run_plan.encode(plan)
    control = run_plan.decode(run_plan.encode(msgspec.structs.replace(plan, control=True)))
    assert control.is_control
    assert not run_plan.decode(run_plan.encode(plan)).is_control


def test_control_run_reports_harness_cost_with_its_interval():
    _, (check,) = judged()
    assert check.observed == 1.012
    assert "armed, zero intensity: no fault did anything; the harness alone cost 1.012" in check.detail
    assert "99 % interval 0.99..1.03" in check.detail


def test_control_run_without_a_measurement_reports_an_unknown_cost():
    _, (check,) = judged(cost=Observation(value=None, detail="this run has no fault-free twin"))
    assert check.observed is None
    assert "its cost is unknown" in check.detail


def test_repro_script_of_a_control_run_does_a_control_run():
    """Otherwise repeating a copy of the directory would inject the faults."""
    assert b"--control" in rundir.repro_script(seed=1, lab="x.yml", control=True)
    assert b"--control" not in rundir.repro_script(seed=1, lab="x.yml")
