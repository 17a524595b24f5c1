"""A fault counts only on something that the workload used."""

import msgspec
import pytest
from judged_runs import plan_of
from synthetic_run import changed, synthetic_run

from faultbed.harness.analysis.observe import observe
from faultbed.harness.judge import judge
from faultbed.harness.parts.exposure import why_not_exposed
from faultbed.harness.parts.part import Planned
from faultbed.harness.verdict import Verdict
from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.selectors import choose

RUN = synthetic_run()
FAULT = RUN.injected.faults[0]


def at(target, run=RUN, exposed="workload"):
    plan = msgspec.structs.replace(FAULT.plan, target=target, exposed=exposed)
    return why_not_exposed(run, msgspec.structs.replace(FAULT, plan=plan))


def with_paths(*paths):
    connections = tuple(
        msgspec.structs.replace(RUN.workload.connections[0], path=path, ack_path=tuple(reversed(path)))
        for path in paths
    )
    return changed(RUN, connections=connections)


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
    assert at("rtsw1:ctsw2", changed(RUN, connections=()))


def test_exposed_none_requires_that_the_workload_used_nothing_there():
    assert at("rtsw1:ctsw2", CROSSING, exposed="none") == ()
    assert "although the experiment says" in at("rtsw1:ctsw1", CROSSING, exposed="none")[0]


def test_exposed_unknown_target_is_unknown():
    assert at("rtsw9:ctsw1", CROSSING)


def test_run_with_a_fault_beside_the_workload_is_inconclusive():
    faults = (msgspec.structs.replace(FAULT, plan=msgspec.structs.replace(FAULT.plan, target="rtsw1:ctsw2")),)
    run = changed(CROSSING, faults=faults)
    verdict = judge(before=Planned(plan=plan_of(run), expectations=()), run=run, observed=observe(run)).verdict
    check = next(check for check in verdict.checks if check.name == f"fired.{FAULT.plan.id}")
    assert (verdict.verdict, check.verdict) == (Verdict.INCONCLUSIVE, Verdict.INCONCLUSIVE)
    assert "the workload did not use rtsw1:ctsw2" in check.detail


WAYS = {
    0: (("host1", "rtsw1", "ctsw1", "rtsw2", "host3"), ("host3", "rtsw2", "ctsw2", "rtsw1", "host1")),
    1: (("host2", "rtsw1", "host1"), ()),
}


WITHOUT_PATHS = changed(
    RUN,
    connections=tuple(
        msgspec.structs.replace(RUN.workload.connections[0], index=index, path=(), ack_path=()) for index in WAYS
    ),
)


def chosen(selector, target, paths, seed=7):
    plan = msgspec.structs.replace(FAULT.plan, target=selector, seed=seed)
    receipt = msgspec.structs.replace(FAULT.receipt, target=target)
    fault = msgspec.structs.replace(FAULT, plan=plan, receipt=receipt, paths=paths)
    return why_not_exposed(WITHOUT_PATHS, fault)


@pytest.mark.parametrize(
    ("selector", "target"), [("used-uplink[0]", "rtsw1:ctsw1"), ("rtsw2:used-uplink[-1]", "rtsw2:ctsw2")]
)
def test_exposed_chosen_target_is_judged_by_the_paths_when_it_was_armed(selector, target):
    assert chosen(selector, target, WAYS) == ()


@pytest.mark.parametrize("selector", ["used-uplink[0]", "used-uplink[3]", "used-uplink[*]"])
@pytest.mark.parametrize("target", ["rtsw1:ctsw1", "rtsw1:ctsw2", "rtsw2:ctsw1", "rtsw2:ctsw2"])
@pytest.mark.parametrize(
    "paths", [WAYS, {0: WAYS[0]}, {0: (WAYS[0][0], ())}, {0: ((), WAYS[0][1])}, {1: WAYS[1]}, {}, None]
)
def test_wrong_place_of_a_chosen_target_is_never_proven(selector, target, paths):
    """The choice is made again from the recorded paths: another target, or a lost path, never proves more."""
    names = select_used(paths)
    try:
        meant = choose(selector, names, seed=7)
    except UsageError:
        meant = None
    assert (chosen(selector, target, paths) == ()) == (target == meant)


def select_used(paths):
    known = {path for of_pair in (paths or {}).values() for path in of_pair}
    near = [("rtsw1", "ctsw1", WAYS[0][0]), ("rtsw1", "ctsw2", WAYS[0][1]), ("rtsw2", "ctsw1", WAYS[0][0])]
    return [f"{one}:{other}" for one, other, path in (*near, ("rtsw2", "ctsw2", WAYS[0][1])) if path in known]


def test_target_that_was_not_chosen_is_unknown():
    (why,) = chosen("used-uplink[0]", "used-uplink[0]", None)
    assert why == "it is unknown what it should have acted on: no target was chosen for used-uplink[0]"


def test_exposed_none_of_a_chosen_target_is_refused():
    plan = msgspec.structs.replace(FAULT.plan, target="used-uplink[0]", exposed="none")
    fault = msgspec.structs.replace(
        FAULT, plan=plan, receipt=msgspec.structs.replace(FAULT.receipt, target="rtsw1:ctsw1"), paths=WAYS
    )
    assert "although the experiment says" in why_not_exposed(WITHOUT_PATHS, fault)[0]


def test_target_of_a_fault_is_the_chosen_one_only_if_the_plan_leaves_it_open():
    receipt = msgspec.structs.replace(FAULT.receipt, target="rtsw2:ctsw2")
    named = msgspec.structs.replace(FAULT, receipt=receipt)
    assert named.target == named.target_text == FAULT.plan.target
    left_open = msgspec.structs.replace(named, plan=msgspec.structs.replace(FAULT.plan, target="used-uplink[*]"))
    assert left_open.target == "rtsw2:ctsw2"
    assert left_open.target_text == "rtsw2:ctsw2 (used-uplink[*])"
