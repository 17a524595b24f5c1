"""Planning a fault: valid targets, refusals and their messages, and identical bytes for identical input."""

from __future__ import annotations

import json
import shlex

import other_process
import pytest
from hypothesis import given
from planned_faults import SAMPLES, SOFT, SOFT_KINDS, assert_shell, flaps, soft, specs

from faultbed.inject.fault_plan import plan
from faultbed.inject.kinds.catalogue import CATALOGUE, kind_named
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.node.actuator import make
from faultbed.inject.param_units import why_no_quantity
from faultbed.testbed.errors import Unsupported, UsageError
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.shipped import inventories


def dumped(planned):
    return json.dumps(planned.to_json(), sort_keys=True)


@given(specs)
def test_plan_of_the_same_spec_has_the_same_bytes(spec):
    """A plan is a function of its input alone, and plain JSON."""
    first = dumped(plan(spec, SOFT, lab_kind="soft"))
    assert first == dumped(plan(spec, SOFT, lab_kind="soft"))
    assert json.loads(first)["kind"] == spec.kind


@pytest.mark.process
def test_plan_in_another_process_has_the_same_bytes():
    """No hash order and no clock affects a plan."""
    code = (
        "import json;from faultbed.testbed.inventory.lab_inventory import load;"
        "from faultbed.testbed.shipped import inventories;from faultbed.inject.fault_plan import *;"
        "from faultbed.inject.kinds.fault_spec import FaultSpec;"
        "t=load(inventories()/'soft.yml').topology;"
        "p=plan(FaultSpec(kind='packet.drop',target='host1:rxe0',for_s=2.0,params={'share':0.01}),t,lab_kind='soft');"
        "print(json.dumps(p.to_json(),sort_keys=True))"
    )
    assert other_process.printed(code, hash_seed=77) == dumped(soft("packet.drop", "host1:rxe0", for_s=2.0, share=0.01))


@given(specs)
def test_plan_of_any_spec_is_valid_and_reversible(spec):
    """Each change has its revert, each fault a witness, and ids are valid unit and table names."""
    check_plan(plan(spec, SOFT, lab_kind="soft"))


@pytest.mark.parametrize("kind", SAMPLES)
def test_plan_of_every_kind_is_valid_and_reversible(kind):
    """Every kind is covered, independent of hypothesis' draws."""
    target, params = SAMPLES[kind]
    check_plan(plan(FaultSpec(kind=kind, target=target, for_s=5.0, params=params), SOFT, lab_kind="soft"))


def check_plan(planned):
    assert all(step.do and step.undo for step in planned.mechanism.steps)
    assert planned.mechanism.must_move or planned.mechanism.while_on
    assert planned.mechanism.shows
    assert planned.reads
    assert planned.id.replace("-", "").isalnum()
    assert planned.request["edges"][0] == [0.0, True]


@given(flaps)
def test_flap_train_edges_alternate_and_end_inside_the_window(spec):
    """A flap train goes down, up, down, ... in order, and starts no flap after its window."""
    edges = plan(spec, SOFT, lab_kind="soft").request["edges"]
    assert [on for _, on in edges] == [index % 2 == 0 for index in range(len(edges))]
    times = [at for at, _ in edges]
    assert times == sorted(times)
    assert times[-1] < spec.for_s


def test_flap_train_has_the_flaps_that_fit():
    """Period 2 s, 25 % down, in 5 s: down at 0, 2 and 4."""
    planned = soft("link.flap", "rtsw1:ctsw1", for_s=5.0, period=2, duty=0.25)
    assert planned.request["edges"] == [[0.0, True], [0.5, False], [2.0, True], [2.5, False], [4.0, True], [4.5, False]]
    assert planned.mechanism.must_move[0].at_least == 3


def test_uplink_flap_is_witnessed_at_its_other_end():
    """The port that goes down is on rtsw1; the counter that proves it is ctsw1's."""
    planned = soft("link.flap", "rtsw1:ctsw1")
    assert (planned.place.node, planned.place.netns) == ("fabric", "rtsw1")
    assert planned.mechanism.must_move[0].any_of == ("ctsw1/rtsw1.carrier_down_count",)
    assert planned.mechanism.steps[0].do == "ip -n rtsw1 link set dev ctsw1 down"


def test_rnic_flap_acts_beside_qemu():
    """An RNIC's carrier is QEMU's: a local holder, and the guest's own counter."""
    planned = soft("link.flap", "host1:rxe0")
    assert (planned.place.local, planned.binding) == (True, "local")
    assert planned.mechanism.must_move[0].any_of == ("host1/be0.carrier_changes",)


def test_gpu_throttle_quota_has_a_short_period():
    """The quota is 50 % of 10 ms. For small shares, the kernel's minimum quota of 1 ms makes the period longer."""
    assert soft("gpu.throttle", "host1:gpu0", percent=50).request["args"]["value"] == "5000 10000"
    assert soft("gpu.throttle", "host1:gpu0", percent="99").request["args"]["value"] == "1000 100000"


@pytest.mark.parametrize(
    ("kind", "target", "params", "words"),
    [
        ("link.flop", "rtsw1:ctsw1", {}, ["fault.kind", "link.flap"]),
        ("link.flap", "rtsw1:ctsw9", {}, ["fault.target", "did you mean rtsw1:ctsw"]),
        ("link.flap", "host1:gpu0", {}, ["fault.target", "cannot target a gpu"]),
        ("link.flap", "rtsw1:ctsw1", {"perod": 1}, ["fault.perod", "did you mean period"]),
        ("link.flap", "rtsw1:ctsw1", {"duty": 2}, ["fault.duty", "0.01..0.99"]),
        ("link.flap", "rtsw1:ctsw1", {"count": 3}, ["fault.count", "period"]),
        ("packet.drop", "host1:rxe0", {}, ["one of share, every and psn"]),
        ("packet.drop", "host1:rxe0", {"share": 0.1, "psn": 4, "qp": 17}, ["one of share, every and psn"]),
        ("packet.drop", "host1:rxe0", {"share": 0.1, "opcode": "cnq"}, ["fault.opcode", "read-response"]),
        ("packet.drop", "host1:rxe0", {"share": 0.1, "round": 2}, ["fault.round", "psn"]),
        ("packet.drop", "host1:rxe0", {"every": 10, "burst": 4}, ["fault.burst", "share"]),
        ("packet.drop", "host1:rxe0", {"share": 0.9, "burst": 1.5}, ["fault.burst", "is impossible with bursts"]),
        ("packet.mark", "host1:rxe0", {"share": 0.1, "every": 4}, ["only one of share, every and psn"]),
        ("packet.corrupt", "host1:rxe0", {"share": 1}, ["fault.share", "never ends"]),
        ("packet.corrupt", "host1:rxe0", {}, ["needs share, every or psn"]),
        ("packet.delay", "host1:rxe0", {"delay": 5, "jitter": 9}, ["fault.jitter"]),
        ("packet.delay", "host1:rxe0", {}, ["needs delay"]),
        ("packet.reorder", "host1:rxe0", {}, ["some packets in place"]),
        ("link.rate", "rtsw1:ctsw1", {}, ["needs rate"]),
        ("switch.freeze", "rtsw1", {}, ["fault.for", "3 s"]),
        ("data.corrupt", "host1:rxe0", {}, ["needs share, every or psn"]),
        ("data.corrupt", "rtsw1:ctsw1", {"every": 9}, ["fault.target", "RNIC"]),
        ("packet.forge", "rtsw1:ctsw1", {"what": "nak"}, ["fault.target", "RNIC"]),
        ("packet.forge", "host1:rxe0", {"what": "rst"}, ["fault.what", "cnp"]),
        ("congestion.hash-collision", "rtsw1:host1:rxe0", {}, ["fault.target", "uplink"]),
        ("congestion.hash-collision", "ctsw1:rtsw1", {}, ["fault.target", "from the RTSW's end"]),
        ("switch.drain", "rtsw1", {}, ["fault.target", "only path"]),
        ("switch.withdraw", "ctsw1", {}, ["fault.target", "RTSW"]),
        ("switch.bgp-kill", "host1", {}, ["cannot target a host"]),
        ("host.cpu-steal", "host1", {"share": 1}, ["fault.share", "0.05..0.9"]),
        ("gpu.thermal", "host1:gpu0", {"low": 50, "high": 50}, ["fault.high", "gpu.throttle"]),
        ("link.down", "rtsw1:ctsw1", {"period": 1}, ["fault.period", "no parameter"]),
        ("packet.drop", "host1:rxe0", {"psn": 4}, ["fault.psn", "qp"]),
        ("packet.drop", "host1:rxe0", {"psn": "-4", "qp": 17}, ["fault.psn", "0..16777215"]),
        ("packet.drop", "rtsw1:ctsw1", {"psn": "+4", "qp": 17}, ["one receiving RNIC"]),
        ("packet.drop", "host1:rxe0", {"share": True}, ["fault.share"]),
        ("packet.drop", "host1:rxe0", {"share": "nan"}, ["fault.share"]),
        ("packet.drop", "rtsw1:ctsw1", {"share": 1, "src": "host9:rxe0"}, ["fault.src", "did you mean"]),
        ("packet.drop", "rtsw1:ctsw1", {"share": 1, "dst": "host1"}, ["fault.dst", "not an RNIC"]),
        ("packet.drop", "rtsw1:ctsw1", {"share": 1, "dst": 3}, ["fault.dst", "no target"]),
        ("packet.drop", "host3:rxe0", {"share": 1, "dst": "host1:rxe0"}, ["fault.dst", "link of host3:rxe0"]),
        (
            "packet.drop",
            "rtsw2:host3:rxe0",
            {"share": 1, "src": "host1:rxe0", "direction": "from"},
            ["fault.src", "no packet of host1:rxe0"],
        ),
        (
            "packet.mark",
            "rtsw1:ctsw1",
            {"src": "host1:rxe0", "dst": "host1:rxe0"},
            ["fault.dst", "nothing to itself"],
        ),
        ("packet.drop", "host3:rxe0", {"psn": "+9", "qp": "any", "src": "host1:rxe0"}, ["fault.src", "set qp"]),
        ("packet.forge", "host1:rxe0", {"what": "nak", "src": "host2:rxe0"}, ["fault.src", "no parameter"]),
        ("gpu.throttle", "host1:gpu0", {}, ["needs percent"]),
        ("gpu.throttle", "host1:gpu0", {"percent": 100}, ["fault.percent", "1..99"]),
    ],
)
def test_plan_error_names_its_path(kind, target, params, words):
    """A usage error names the path, the problem and the remedy."""
    with pytest.raises(UsageError) as caught:
        soft(kind, target, **params)
    assert all(word in str(caught.value) for word in words), caught.value


def test_plan_of_a_kind_the_lab_does_not_support_is_unsupported():
    """Each kind of lab has fault kinds that the other does not have."""
    with pytest.raises(Unsupported, match="rack lab"):
        plan(FaultSpec(kind="gpu.thermal", target="host1:gpu0", for_s=1.0), SOFT, lab_kind="rack")
    with pytest.raises(Unsupported, match="soft lab"):
        plan(
            FaultSpec(kind="gpu.power-cap", target="host1:gpu0", for_s=1.0, params={"percent": 30}),
            SOFT,
            lab_kind="soft",
        )


@pytest.mark.parametrize("kind", SOFT_KINDS)
def test_plan_of_every_kind_makes_its_actuator(kind):
    """Each kind of the catalogue has a sample here, and the node knows its actuator with exactly these arguments."""
    target, params = SAMPLES[kind]
    planned = soft(kind, target, for_s=5.0, **params)
    args = dict(planned.request["args"])
    if planned.request["actuator"] == "qmp":
        args |= {"socket": "/none", "nic": "nic-be0", "python": ["python3"]}
    if planned.request["actuator"] == "vm_reset":
        args |= {
            "socket": "/none",
            "reprovision": ["python3", "-m", "faultbed.inject.reprovision", "soft.yml", "host1"],
        }
    actuator = make(planned.request["actuator"], args)
    assert planned.target.kind in CATALOGUE[kind].targets
    assert actuator.hits() in (None, 0)
    assert_shell(actuator.revert_script())


@pytest.mark.parametrize("kind", SOFT_KINDS)
def test_plan_of_another_target_differs_in_place_or_readback(kind):
    """The expected readback distinguishes this target from others of its type."""
    here, params = SAMPLES[kind]
    there = next(
        name
        for name in ("host2", "host2:rxe1", "host2:gpu0", "rtsw2", "ctsw2", "rtsw2:ctsw2", "rtsw2:host3:rxe0")
        if SOFT.resolve(name).kind == SOFT.resolve(here).kind
        and not (kind == "switch.withdraw" and name.startswith("ctsw"))
        and not (kind == "switch.drain" and name.startswith("rtsw"))
    )
    one, two = (soft(kind, target, for_s=5.0, **params) for target in (here, there))
    reported = (one.place, dict(one.mechanism.shows)) != (two.place, dict(two.mechanism.shows))
    assert reported
    assert one.request["claims"] != two.request["claims"] or one.place != two.place


def test_catalogue_entries_are_complete():
    """No field that a user or a plot needs is empty."""
    for kind in CATALOGUE.values():
        assert kind is kind_named(kind.name)
        assert all(
            [kind.summary, kind.binding, kind.fidelity, kind.armed_by, kind.must_move, kind.must_not_move, kind.colour]
        )
        assert all(param.summary and param.range for param in kind.params)


RACK = lab_inventory.load(inventories() / "rack-h100.example.yml").topology


@pytest.mark.parametrize("name", CATALOGUE)
def test_example_command_of_each_kind_can_be_planned(name):
    kind = CATALOGUE[name]
    lab_kind = "soft" if "soft" in kind.fidelity else "rack"
    words = shlex.split(kind.command)
    params = dict(word.split("=") for word in words[words.index("--for") + 2 :] if word != "--set")
    assert words[:3] == ["faultbed", "inject", name]
    assert all(why_no_quantity(name, key, value) is None for key, value in params.items())
    topology = SOFT if lab_kind == "soft" else RACK
    written, meant = (
        plan(FaultSpec(kind=name, target=words[3], for_s=5.0, params=dict(one)), topology, lab_kind=lab_kind)
        for one in (params, kind.example.params)
    )
    assert written.kind == name
    assert written.spec.params == meant.spec.params
    assert params.keys() == kind.example.params.keys()
