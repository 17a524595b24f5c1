"""Claims are made from the plan: what a run has no record of is unknown, and a bound depends on what it is about."""

import msgspec
import pytest
from house import DEMO
from judged_runs import plan_of
from synthetic_run import synthetic_run

from faultbed.harness.analysis.observe import observe
from faultbed.harness.experiment import experiment_file, run_plan
from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.experiment.metrics import lookup
from faultbed.harness.judge import judge, planned_ledger
from faultbed.harness.ledger.claims import NOT_SETTLED, Broken
from faultbed.harness.ledger.ledger import fold
from faultbed.harness.verdict import Verdict

DEMO_EXPERIMENT = experiment_file.load(DEMO)
PLAN = run_plan.plan(DEMO_EXPERIMENT, inventory_digest="00", version="0")


def judged(run, plan, *expectations):
    return judge(plan=plan, expectations=expectations, run=run, observed=observe(run))


def at_most(name, bound):
    return Expectation(metric=lookup(name, ["uplink", "loss", "slow-gpu"]), maximum=bound)


def test_planned_ledger_has_every_row_of_the_demo_before_it_begins():
    ledger = planned_ledger(PLAN, DEMO_EXPERIMENT.expectations)
    names = [entry.claim.name for entry in ledger.entries]
    assert {"workload", "fired.uplink", "fired.loss", "fired.slow-gpu", "lab_restored", "wrong_elements max 0"} <= {
        *names
    }
    assert {entry.status for entry in ledger.entries} == {NOT_SETTLED}
    assert fold(ledger) is Verdict.INCONCLUSIVE
    (recovery,) = [entry.claim for entry in ledger.entries if entry.claim.name.startswith("recovery.uplink")]
    assert recovery.depends == ("fired.uplink",)


def test_fault_without_any_record_is_unknown():
    """A planned fault that the record had lost was no row at all, and the run a PASS."""
    run = synthetic_run()
    fewer = msgspec.structs.replace(run, faults=run.faults[1:])
    result = judged(fewer, plan_of(run))
    assert result.verdict.verdict is Verdict.INCONCLUSIVE
    (check,) = [check for check in result.verdict.checks if check.name == f"fired.{run.faults[0].plan.id}"]
    assert (check.verdict, check.detail) == (Verdict.INCONCLUSIVE, "nothing is known about it")


def test_bound_under_an_unproven_routing_scheme_is_unknown():
    """Counter-example 10: `mmr.rtsw1` was FAIL under a scheme that was not proven."""
    run = msgspec.structs.replace(synthetic_run(), faults=())
    fabric = run_plan.PlannedFabric(routing="static-parity", fidelity="real")
    plan = msgspec.structs.replace(plan_of(run), fabric=fabric)
    result = judged(run, plan, at_most("recovery.total", 0.0), at_most("ettr", 0.01), at_most("qp_errors", -1.0))
    verdicts = {check.name: check.verdict for check in result.verdict.checks}
    assert verdicts["routing.static-parity"] is Verdict.INCONCLUSIVE
    assert verdicts["ettr"] is Verdict.INCONCLUSIVE
    assert verdicts["qp_errors"] is Verdict.FAIL, "a count is what it is under any routing"


@pytest.mark.parametrize("lost", ["faults", "connections", "ranks", "series", "twin", "counters_after", "routing"])
def test_losing_a_record_of_a_run_only_loses_knowledge(lost):
    """Every claim keeps its status, or becomes unknown; none appears that says the opposite."""
    run = synthetic_run()
    expectations = [at_most(name, 1e9) for name in ("recovery.total", "jct_ratio", "wrong_elements", "goodput.mean")]
    whole = judged(run, plan_of(run), *expectations).ledger.statuses
    empty = None if lost in ("twin", "routing") else type(getattr(run, lost))()
    fewer = msgspec.structs.replace(run, **{lost: empty})
    for name, status in judged(fewer, plan_of(run), *expectations).ledger.statuses.items():
        assert status == whole.get(name) or not isinstance(status, Broken), name
        assert status == whole.get(name) or type(status).__name__ == "Unknown", name
