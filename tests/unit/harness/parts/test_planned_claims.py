"""Claims are made from the plan: what a run has no record of is unknown, and a bound depends on what it is about."""

import dataclasses

import msgspec
import pytest
from house import DEMO
from judged_runs import plan_of
from synthetic_run import changed, synthetic_run

from faultbed.harness.experiment import experiment_file, run_plan
from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.experiment.metrics import lookup
from faultbed.harness.judge import judge, observed_of, planned_ledger
from faultbed.harness.ledger.claims import NOT_SETTLED, Broken, Claim, Holds, Unknown
from faultbed.harness.ledger.ledger import fold
from faultbed.harness.ledger.sealed import Sealed
from faultbed.harness.ledger.settle import Finding, settle
from faultbed.harness.parts.capture.packet_summary import PacketSummary
from faultbed.harness.parts.part import Planned
from faultbed.harness.verdict import Verdict
from faultbed.testbed.observe.telemetry import Change, Machine

DEMO_EXPERIMENT = experiment_file.load(DEMO)
LATER = 50_000_000
MACHINE = Machine(name="fabric", samples=100, busy_ns=1, clock_error_ns=0)
PLAN = run_plan.plan(DEMO_EXPERIMENT, inventory_digest="00", version="0")


def judged(run, plan, *expectations, packets=None):
    return judge(
        before=Planned(plan=plan, expectations=expectations),
        run=run,
        observed=observed_of(run, Sealed().having(packets) if packets else Sealed()),
    )


def at_most(name, bound):
    return Expectation(metric=lookup(name, ["uplink", "loss", "slow-gpu"]), maximum=bound)


def test_planned_ledger_has_every_row_of_the_demo_before_it_begins():
    ledger = planned_ledger(Planned(plan=PLAN, expectations=DEMO_EXPERIMENT.expectations))
    names = [entry.claim.name for entry in ledger.entries]
    assert {"workload", "fired.uplink", "fired.loss", "fired.slow-gpu", "lab_restored", "wrong_elements max 0"} <= {
        *names
    }
    assert {entry.status for entry in ledger.entries} == {NOT_SETTLED}
    assert fold(ledger) is Verdict.INCONCLUSIVE
    (recovery,) = [entry.claim for entry in ledger.entries if entry.claim.name.startswith("recovery.uplink")]
    assert recovery.depends == ("fired.uplink",)


def test_bound_against_the_twin_depends_on_it_and_on_every_fault():
    ledger = planned_ledger(Planned(plan=PLAN, expectations=[at_most("jct_ratio", 2.0)]))
    claims = {entry.claim.name: entry.claim for entry in ledger.entries}
    assert {"twin", "fired.uplink", "fired.loss"} <= {*claims["jct_ratio max 2.0"].depends}
    assert "twin" in claims


def test_bound_on_the_worst_fault_needs_a_value_of_each():
    """Counter-examples 1 and 2: no route left the dead port under one of two faults, and the bound was a PASS."""
    run = synthetic_run()
    fired = {fault.plan.id: fault.receipt.fired.first_ns for fault in run.injected.faults}
    at_ns = fired["uplink"]

    def backs(*times):
        return PacketSummary(frames=9, missed=0, broken=0, goings_back=times)

    def moved(*times):
        return tuple(Change(at_ns=at_ns, node="rtsw1", subject="route 10.0.0.0/31", text="dev x") for at_ns in times)

    one = changed(run, changes=moved(at_ns + LATER), watched=(MACHINE,))
    packets = backs((at_ns + LATER, at_ns + 2 * LATER))
    times = [time_ns + LATER for time_ns in fired.values()]
    every = changed(one, changes=moved(*times))
    all_packets = backs(*((at, at + LATER) for at in times))
    flaps = plan_with(run, loss="link.flap")
    for name in ("recovery.detect", "recovery.retransmit", "routing.converged"):
        (status,) = statuses_of(judged(one, flaps, at_most(name, 9.0), packets=packets), name)
        assert isinstance(status, Unknown), name
        assert {reason.subject for reason in status.reasons} == {"loss"}
        (status,) = statuses_of(judged(one, flaps, at_most(name, 0.0), packets=packets), name)
        assert isinstance(status, Broken), name
        (status,) = statuses_of(judged(every, flaps, at_most(name, 9.0), packets=all_packets), name)
        assert isinstance(status, Holds), name
    # Losing packets moves no route, and nobody on the fabric notices a slow GPU: neither has a value of its own.
    (status,) = statuses_of(judged(one, plan_of(run), at_most("routing.converged", 9.0)), "routing.converged")
    assert isinstance(status, Holds)


def plan_with(run, **kinds):
    """Return the plan of a run with other kinds of faults, by the fault's id."""
    plan = plan_of(run)
    faults = tuple(dataclasses.replace(fault, kind=kinds.get(fault.id, fault.kind)) for fault in plan.faults)
    return msgspec.structs.replace(plan, faults=faults)


def test_restarts_are_members_of_one_claim():
    """A restart that the plan could not name counts as well."""
    claim = Claim(name="restarts", says="")
    assert isinstance(settle(claim, Finding(members={"restart 1": ()}), {}), Holds)
    unknown = settle(claim, Finding(members={"restart 1": (), "restart 2": ("it did not end",)}), {})
    assert [reason.subject for reason in unknown.reasons] == ["restart 2"]


def test_bound_against_a_twin_that_was_wrong_is_unknown_and_the_twin_is_broken():
    run = changed(synthetic_run(), twin=None, twin_failure="rank 1: 4 elements are wrong")
    result = judged(run, plan_of(run), at_most("jct_ratio", 9.0))
    assert result.verdict.verdict is Verdict.FAIL
    assert isinstance(result.ledger.statuses["twin"], Broken)
    (status,) = statuses_of(result, "jct_ratio")
    assert status.reasons[-1].subject == "twin"


def statuses_of(result, name):
    return [status for claim, status in result.ledger.statuses.items() if claim.split(" ")[0] == name]


def test_fault_without_any_record_is_unknown():
    """A planned fault that the record had lost was no row at all, and the run a PASS."""
    run = synthetic_run()
    fewer = changed(run, faults=run.injected.faults[1:])
    result = judged(fewer, plan_of(run))
    assert result.verdict.verdict is Verdict.INCONCLUSIVE
    (check,) = [check for check in result.verdict.checks if check.name == f"fired.{run.injected.faults[0].plan.id}"]
    assert (check.verdict, check.detail) == (Verdict.INCONCLUSIVE, "nothing is known about it")


def test_bound_under_an_unproven_routing_scheme_is_unknown():
    """Counter-example 10: `mmr.rtsw1` was FAIL under a scheme that was not proven."""
    run = changed(synthetic_run(), faults=())
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
    empty = {"twin": None, "routing": None, "counters_after": {}}.get(lost, ())
    fewer = changed(run, **{lost: empty})
    for name, status in judged(fewer, plan_of(run), *expectations).ledger.statuses.items():
        assert status == whole.get(name) or not isinstance(status, Broken), name
        assert status == whole.get(name) or type(status).__name__ == "Unknown", name
