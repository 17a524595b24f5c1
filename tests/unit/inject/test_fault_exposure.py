"""A fault counts only on something that workloads used while it was on."""

import msgspec
import pytest
from synthetic_run import PATHS, T0, USE, S, synthetic_run

from faultbed.inject.evidence.exposure import MAX_GAP_S, is_used, why_not_exposed
from faultbed.inject.evidence.workload_use import Exposure, WorkloadUse
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.selectors import choose

RUN = synthetic_run()
SOFT = RUN.lab.topology
RECEIPT = RUN.injected.faults[0].receipt
ARMED_NS, CLEARED_NS = RECEIPT.armed.at_ns, RECEIPT.cleared.at_ns
PATH = ("host1", "rtsw1", "ctsw1", "rtsw2", "host3")
FLOW = WorkloadUse(
    at_ns=ARMED_NS - S, rnics=("host1:rxe0", "host3:rxe0"), gpus=("host1:gpu0",), paths=(PATH, PATH[::-1])
)
UNKNOWN = msgspec.structs.replace(FLOW, unknown_paths="a switch did not answer")


def at(target, *uses, planned=None, **more):
    receipt = msgspec.structs.replace(RECEIPT, target=target, exposed=Exposure(uses=uses))
    return why_not_exposed(receipt, FaultSpec(kind=receipt.kind, target=planned or target, for_s=1.0, **more), SOFT)


def later(use, at_ns):
    return msgspec.structs.replace(use, at_ns=at_ns)


@pytest.mark.parametrize(
    "target",
    ["rtsw1:ctsw1", "ctsw1:rtsw1", "ctsw1", "rtsw2", "host1:rxe0", "rtsw1:host1:rxe0", "host1", "host1:gpu0"],
)
def test_exposed_target_is_on_a_path_or_has_a_rank(target):
    assert at(target, FLOW) == ()
    assert "although the fault has exposed" in at(target, FLOW, exposed="none")[0]


@pytest.mark.parametrize(
    "target", ["rtsw1:ctsw2", "ctsw2", "host1:rxe1", "rtsw1:host1:rxe1", "host2", "host2:rxe0", "host3:gpu0"]
)
def test_exposed_target_that_no_queue_pair_crosses_is_not(target):
    """Counter-example 6: a link.down there was PASS, with a recovery of 0 s."""
    (why,) = at(target, FLOW)
    assert f"the workload did not use {target}" in why
    assert 'exposed = "none"' in why
    assert at(target, FLOW, later(FLOW, ARMED_NS), exposed="none") == ()


def test_exposed_is_unknown_if_a_path_is():
    assert at("rtsw1:ctsw1", UNKNOWN) == ()
    for expected in ("workload", "none"):
        (why,) = at("rtsw1:ctsw2", UNKNOWN, exposed=expected)
        assert why == "it is unknown whether the workload used rtsw1:ctsw2: a switch did not answer"


def test_exposed_is_unknown_without_any_reading():
    for target in ("rtsw1:ctsw1", "host1", "host1:gpu0"):
        assert "it is unknown" in at(target)[0]
        assert "it is unknown" in at(target, exposed="none")[0]


@pytest.mark.parametrize("target", ["host2", "host2:rxe0", "host2:gpu0"])
def test_exposed_is_unknown_on_a_host_whose_queue_pairs_were_not_listed(target):
    unread = msgspec.structs.replace(FLOW, unread=("host2",))
    assert "the queue pairs of host2 could not be listed" in at(target, unread)[0]
    assert at("host1", unread) == ()


def test_workload_that_came_to_the_target_while_the_fault_was_on_counts():
    elsewhere = later(msgspec.structs.replace(FLOW, paths=(PATHS[0],)), ARMED_NS - S)
    assert at("rtsw1:ctsw1", elsewhere)
    assert at("rtsw1:ctsw1", elsewhere, later(FLOW, CLEARED_NS - 1)) == ()
    assert at("rtsw1:ctsw1", elsewhere, later(FLOW, CLEARED_NS + 1))


def test_exposed_none_requires_readings_while_the_fault_was_on():
    (why,) = at("rtsw1:ctsw2", FLOW, exposed="none")
    assert "what it used was not read while the fault was on" in why
    long = msgspec.structs.replace(RECEIPT.cleared, at_ns=ARMED_NS + int((MAX_GAP_S + 5) * S))
    receipt = msgspec.structs.replace(RECEIPT, target="rtsw1:ctsw2", cleared=long)

    def judged(*times_s):
        uses = tuple(later(FLOW, ARMED_NS + int(time_s * S)) for time_s in times_s)
        changed = msgspec.structs.replace(receipt, exposed=Exposure(uses=uses))
        spec = FaultSpec(kind=changed.kind, target="rtsw1:ctsw2", for_s=1.0, exposed="none")
        return why_not_exposed(changed, spec, SOFT)

    assert judged(1, 8, 15) == ()
    assert "what it used was not read for 19 s of the fault" in judged(1)[0]
    assert judged(19) != ()


def test_watched_link_without_packets_is_not_used_although_paths_are_unknown():
    foreign = msgspec.structs.replace(UNKNOWN, paths=(), watched={"rtsw1:ctsw1": True, "rtsw1:ctsw2": False})
    assert at("ctsw1:rtsw1", foreign) == ()
    assert "did not use" in at("rtsw1:ctsw2", foreign)[0]
    assert "it is unknown" in at("rtsw2:ctsw2", foreign)[0]
    assert is_used(foreign, SOFT.resolve("ctsw1"), SOFT)
    assert is_used(foreign, SOFT.resolve("ctsw2"), SOFT) is None


def test_sprayed_packets_take_every_uplink_of_their_racks():
    sprayed = msgspec.structs.replace(FLOW, paths=(), sprayed=(("host1:rxe0", "host3:rxe0"),))
    assert at("rtsw1:ctsw2", sprayed) == () == at("rtsw2:ctsw1", sprayed)
    near = msgspec.structs.replace(FLOW, paths=(), sprayed=(("host1:rxe0", "host2:rxe0"),))
    assert "it is unknown" in at("rtsw1:ctsw2", near)[0]


def test_fault_on_another_target_than_the_planned_one_is_not_exposed():
    assert at("host1", FLOW, planned="host3") == ("it acted on host1, planned was host3",)
    assert "it is unknown" in at("rtsw9:ctsw1", FLOW)[0]


BOTH_WAYS = WorkloadUse(at_ns=T0, rnics=USE.rnics, paths=(PATH, ("host3", "rtsw2", "ctsw2", "rtsw1", "host1")))


@pytest.mark.parametrize(
    ("selector", "target"), [("used-uplink[0]", "rtsw1:ctsw1"), ("rtsw2:used-uplink[-1]", "rtsw2:ctsw2")]
)
def test_chosen_target_is_judged_by_the_paths_when_it_was_armed(selector, target):
    assert at(target, BOTH_WAYS, planned=selector) == ()
    assert "although the fault has exposed" in at(target, BOTH_WAYS, planned=selector, exposed="none")[0]


PAIRS = msgspec.structs.replace(
    BOTH_WAYS, by_pair={"host1:rxe0>host3:rxe0": (0,), "host3:rxe0>host1:rxe0": (1,), "host1:rxe1>host3:rxe1": (1,)}
)


@pytest.mark.parametrize(
    ("selector", "target", "is_right"),
    [
        ("path[host1:rxe0>host3:rxe0]", "rtsw1:ctsw1", True),
        ("path[host1:rxe0>host3:rxe0]", "rtsw1:ctsw2", False),
        ("path[host3:rxe0>host1:rxe0]", "rtsw2:ctsw2", True),
        ("path[host1:rxe0>host3:rxe0]", "ctsw1", True),
        ("path[host1:rxe0>host3:rxe0]", "ctsw2", False),
        ("path[host1:rxe1>host3:rxe0]", "rtsw1:ctsw1", False),
        ("path[host9:rxe0>host3:rxe0]", "rtsw1:ctsw1", False),
    ],
)
def test_target_on_a_path_is_judged_by_the_packets_between_its_ends(selector, target, is_right):
    assert (at(target, PAIRS, planned=selector) == ()) == is_right
    assert at(target, msgspec.structs.replace(PAIRS, by_pair={}), planned=selector) != ()


@pytest.mark.parametrize("selector", ["used-uplink[0]", "used-uplink[3]", "used-uplink[*]"])
@pytest.mark.parametrize("target", ["rtsw1:ctsw1", "rtsw1:ctsw2", "rtsw2:ctsw1", "rtsw2:ctsw2"])
@pytest.mark.parametrize("kept", [(0, 1), (0,), (1,), (), None])
def test_wrong_place_of_a_chosen_target_is_never_proven(selector, target, kept):
    """The choice is made again from the recorded paths: another target, or a lost path, never proves more."""
    paths = [BOTH_WAYS.paths[index] for index in kept or ()]
    uses = () if kept is None else (msgspec.structs.replace(BOTH_WAYS, paths=tuple(paths)),)
    near = [("rtsw1", "ctsw1", 0), ("rtsw1", "ctsw2", 1), ("rtsw2", "ctsw1", 0), ("rtsw2", "ctsw2", 1)]
    names = [f"{one}:{other}" for one, other, index in near if kept and index in kept]
    try:
        meant = choose(selector, names, seed=7)
    except UsageError:
        meant = None
    assert (at(target, *uses, planned=selector, seed=7) == ()) == (target == meant)


def test_target_that_was_not_chosen_is_unknown():
    (why,) = at("used-uplink[0]")
    assert why == "it is unknown what it should have acted on: no target was chosen for used-uplink[0]"
