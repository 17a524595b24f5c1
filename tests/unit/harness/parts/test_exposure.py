"""A fault counts only on something that the workload used."""

import msgspec
import pytest
from judged_runs import plan_of
from synthetic_run import synthetic_run

from faultbed.harness.analysis.observe import observe
from faultbed.harness.judge import judge
from faultbed.harness.parts.exposure import why_not_exposed
from faultbed.harness.verdict import Verdict

RUN = synthetic_run()
FAULT = RUN.faults[0]


def at(target, run=RUN, exposed="workload"):
    plan = msgspec.structs.replace(FAULT.plan, target=target, exposed=exposed)
    return why_not_exposed(run, msgspec.structs.replace(FAULT, plan=plan))


def with_paths(*paths):
    connections = tuple(
        msgspec.structs.replace(RUN.connections[0], path=path, ack_path=tuple(reversed(path))) for path in paths
    )
    return msgspec.structs.replace(RUN, connections=connections)


CROSSING = with_paths(("host1", "rtsw1", "ctsw1", "rtsw2", "host3"))


@pytest.mark.parametrize(
    "target", ["rtsw1:ctsw1", "ctsw1:rtsw1", "ctsw1", "rtsw2", "host1:rxe0", "rtsw1:host1:rxe0", "host1"]
)
def test_exposed_target_is_on_a_path_or_has_a_rank(target):
    assert at(target, CROSSING) == ()


@pytest.mark.parametrize("target", ["rtsw1:ctsw2", "ctsw2", "host1:rxe1", "rtsw1:host1:rxe1"])
def test_exposed_target_that_no_queue_pair_crosses_is_not(target):
    """Counter-example 6: a link.down there was PASS, with a recovery of 0 s."""
    (why,) = at(target, CROSSING)
    assert f"the workload did not use {target}" in why
    assert 'exposed = "none"' in why


def test_exposed_is_unknown_if_the_path_of_a_queue_pair_is():
    run = with_paths(("host1", "rtsw1", "ctsw1", "rtsw2", "host3"), ())
    assert at("rtsw1:ctsw1", run) == ()
    (why,) = at("rtsw1:ctsw2", run)
    assert why.startswith("it is unknown whether the workload used rtsw1:ctsw2")
    assert at("rtsw1:ctsw2", run, exposed="none") == (why,)
    assert at("rtsw1:ctsw2", msgspec.structs.replace(RUN, connections=()))


def test_exposed_none_requires_that_the_workload_used_nothing_there():
    assert at("rtsw1:ctsw2", CROSSING, exposed="none") == ()
    assert "although the experiment says" in at("rtsw1:ctsw1", CROSSING, exposed="none")[0]


def test_exposed_unknown_target_is_unknown():
    assert at("rtsw9:ctsw1", CROSSING)


def test_run_with_a_fault_beside_the_workload_is_inconclusive():
    faults = (msgspec.structs.replace(FAULT, plan=msgspec.structs.replace(FAULT.plan, target="rtsw1:ctsw2")),)
    run = msgspec.structs.replace(CROSSING, faults=faults)
    verdict = judge(plan=plan_of(run), expectations=(), run=run, observed=observe(run)).verdict
    check = next(check for check in verdict.checks if check.name == f"fired.{FAULT.plan.id}")
    assert (verdict.verdict, check.verdict) == (Verdict.INCONCLUSIVE, Verdict.INCONCLUSIVE)
    assert "the workload did not use rtsw1:ctsw2" in check.detail
