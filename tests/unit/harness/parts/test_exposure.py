"""A run counts a fault only on something that its workload used, or with `exposed = "none"` on nothing of it."""

import dataclasses

import msgspec
from judged_runs import plan_of
from synthetic_run import PATHS, changed, synthetic_run

from faultbed.harness.analysis.observe import observe
from faultbed.harness.attribution.confusion import truths_of
from faultbed.harness.cli.experiments import attribution
from faultbed.harness.judge import judge
from faultbed.harness.parts.part import Planned
from faultbed.harness.proof import why_not_exposed_in
from faultbed.harness.verdict import Verdict
from faultbed.inject.evidence.workload_use import Exposure

RUN = synthetic_run()
FAULT = RUN.injected.faults[0]


USE = msgspec.structs.replace(FAULT.receipt.exposed.uses[0], paths=PATHS[:3])
"""Nothing crosses ctsw2."""


def run_with(target, exposed="workload"):
    plan = dataclasses.replace(FAULT.plan, target=target, exposed=exposed)
    receipt = msgspec.structs.replace(FAULT.receipt, target=target, exposed=Exposure(uses=(USE,)))
    return changed(RUN, faults=(msgspec.structs.replace(FAULT, plan=plan, receipt=receipt),))


UNUSED = run_with("rtsw1:ctsw2")


def test_run_with_a_fault_beside_the_workload_is_inconclusive():
    verdict = judge(before=Planned(plan=plan_of(UNUSED), expectations=()), run=UNUSED, observed=observe(UNUSED)).verdict
    check = next(check for check in verdict.checks if check.name == f"fired.{FAULT.plan.id}")
    assert (verdict.verdict, check.verdict) == (Verdict.INCONCLUSIVE, Verdict.INCONCLUSIVE)
    assert "the workload did not use rtsw1:ctsw2" in check.detail


def test_campaign_does_not_count_a_fault_beside_the_workload():
    judged = judge(before=Planned(plan=plan_of(UNUSED), expectations=()), run=UNUSED, observed=observe(UNUSED)).verdict
    for verdict in (judged, msgspec.structs.replace(judged, verdict=Verdict.FAIL)):
        assert attribution._counted(verdict) is Verdict.INCONCLUSIVE


def test_fault_beside_the_workload_is_no_truth_for_attribution():
    assert truths_of(RUN)
    assert truths_of(UNUSED) == ()


def test_run_without_a_receipt_does_not_know_what_the_fault_touched():
    (why,) = why_not_exposed_in(RUN, msgspec.structs.replace(FAULT, receipt=None))
    assert why.startswith("it is unknown whether the workload used rtsw1:ctsw1")


def test_run_with_exposed_none_judges_the_opposite():
    run = run_with("rtsw1:ctsw1", exposed="none")
    assert "although the fault has exposed" in why_not_exposed_in(run, run.injected.faults[0])[0]


def test_target_of_a_fault_is_the_chosen_one_only_if_the_plan_leaves_it_open():
    receipt = msgspec.structs.replace(FAULT.receipt, target="rtsw2:ctsw2")
    named = msgspec.structs.replace(FAULT, receipt=receipt)
    assert named.target == named.target_text == FAULT.plan.target
    assert why_not_exposed_in(RUN, named) == ("it acted on rtsw2:ctsw2, planned was rtsw1:ctsw1",)
    left_open = msgspec.structs.replace(named, plan=dataclasses.replace(FAULT.plan, target="used-uplink[*]"))
    assert left_open.target == "rtsw2:ctsw2"
    assert left_open.target_text == "rtsw2:ctsw2 (used-uplink[*])"
