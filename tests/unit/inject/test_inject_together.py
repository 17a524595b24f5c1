"""Concurrent faults: which collide over a resource, which compose, and which bystanders are left out."""

from __future__ import annotations

import pytest
from hypothesis import given
from planned_faults import SAMPLES, SOFT, SOFT_KINDS, samples

from faultbed.inject.fault_plan import plan_all
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.testbed.errors import UsageError


def test_faults_on_the_same_resource_at_once_are_rejected():
    """Two flaps of one port overlap; one after the other they are fine, and so are two drops on one port."""
    flap = FaultSpec(kind="link.flap", target="rtsw1:ctsw1", at_s=1.0, for_s=2.0)
    later = FaultSpec(kind="link.flap", target="rtsw1:ctsw1", at_s=3.0, for_s=1.0)
    drop = FaultSpec(kind="packet.drop", target="host1:rxe0", for_s=9.0, params={"share": 0.1})
    with pytest.raises(UsageError, match=r"faults\[1\].*overlaps faults\[0\]"):
        plan_all([flap, FaultSpec(kind="link.flap", target="rtsw1:ctsw1", at_s=2.0, for_s=2.0)], SOFT, lab_kind="soft")
    assert len({fault.id for fault in plan_all([flap, later, drop, drop], SOFT, lab_kind="soft")}) == 4


COMPOSE = ("packet.drop", "packet.mark", "packet.corrupt", "data.corrupt", "packet.forge", "rnic.qp-error")
"""Each has a rule of its own: the same one twice is two of them. What takes a detour towards a port does not."""


def sample(kind, **more):
    target, params = SAMPLES[kind]
    return FaultSpec(kind=kind, target=target, for_s=5.0, params=params, **more)


def collide(*specs):
    """Return the refusal of two concurrent faults; None if they are accepted."""
    try:
        plan_all(specs, SOFT, lab_kind="soft")
    except UsageError as error:
        return str(error)
    return None


@given(samples, samples)
def test_collision_is_symmetric(one, two):
    """The order of the faults in the file does not matter."""
    assert (collide(one, two) is None) == (collide(two, one) is None)


@pytest.mark.parametrize("kind", SOFT_KINDS)
def test_same_fault_twice_collides_unless_its_kind_composes(kind):
    """Only concurrent faults can collide."""
    refused = collide(sample(kind), sample(kind))
    detour_from_port = kind == "packet.delay"  # each sample is read at the port, with its own table and device
    assert (refused is None) == (kind in COMPOSE or detour_from_port), refused
    assert collide(sample(kind), sample(kind, at_s=5.0)) is None


@pytest.mark.parametrize(
    ("one", "two", "resource"),
    [
        (("switch.reboot", "rtsw1"), ("link.down", "rtsw1:ctsw1"), "link rtsw1:ctsw1"),
        (("switch.reboot", "rtsw1"), ("link.down", "ctsw1:rtsw1"), "link rtsw1:ctsw1"),
        (("switch.reboot", "rtsw1"), ("switch.bgp-kill", "rtsw1"), "bgpd of switch rtsw1"),
        (("switch.reboot", "rtsw1"), ("packet.mark", "host1:rxe0"), "of switch rtsw1"),
        (("link.down", "rtsw1:ctsw1"), ("link.flap", "ctsw1:rtsw1"), "link rtsw1:ctsw1"),
        (("link.down", "rtsw1:ctsw1"), ("link.oneway", "ctsw1:rtsw1"), "link rtsw1:ctsw1"),
        (("switch.bgp-kill", "ctsw1"), ("switch.drain", "ctsw1"), "bgpd/bgp graceful-shutdown of switch ctsw1"),
        (("host.freeze", "host1"), ("host.cpu-steal", "host1"), "hog of host host1"),
        (("host.freeze", "host1"), ("link.down", "host1:rxe0"), "link rtsw1:host1:rxe0"),
        (("host.freeze", "host1"), ("gpu.thermal", "host1:gpu0"), "of host host1"),
        (("host.reboot", "host1"), ("host.disk-full", "host1"), "of host host1"),
        (("rnic.reset", "host1:rxe0"), ("rnic.remove", "host1:rxe0"), "host1:rxe0"),
        (("rnic.reset", "host1:rxe0"), ("link.down", "host1:rxe0"), "link rtsw1:host1:rxe0"),
        (("rnic.remove", "host1:rxe0"), ("link.down", "rtsw1:host1:rxe0"), "link rtsw1:host1:rxe0"),
        (("gpu.lost", "host1:gpu0"), ("gpu.noisy-neighbour", "host1:gpu0"), "hog of host host1"),
        (("host.cpu-steal", "host1"), ("gpu.noisy-neighbour", "host1:gpu0"), "hog of host host1"),
    ],
)
def test_fault_inside_a_claimed_resource_collides(one, two, resource):
    """The conflict names both faults and the resource, whichever comes first."""
    specs = [
        FaultSpec(kind=kind, target=target, for_s=5.0, params=SAMPLES[kind][1] if kind in SAMPLES else {})
        for kind, target in (one, two)
    ]
    for pair in (specs, specs[::-1]):
        refused = collide(*pair)
        assert refused is not None
        assert all(f"{spec.kind} on {spec.target}" in refused for spec in pair)
        assert f"{resource};" in refused


@pytest.mark.parametrize(
    "specs",
    [
        [("packet.drop", "host1:rxe0"), ("packet.drop", "host1:rxe0")],
        [("packet.drop", "host1:rxe0"), ("packet.mark", "host1:rxe0")],
        [("host.cpu-steal", "host1"), ("packet.drop", "host1:rxe0")],
        [("host.freeze", "host1"), ("link.down", "rtsw1:ctsw1"), ("packet.drop", "host1:rxe0")],
        [("gpu.lost", "host1:gpu0"), ("gpu.xid", "host1:gpu0"), ("gpu.thermal", "host2:gpu0")],
        [("link.down", "rtsw1:ctsw1"), ("link.down", "rtsw1:ctsw2"), ("link.mtu", "rtsw1:ctsw1")],
        [("rnic.reset", "host1:rxe0"), ("rnic.remove", "host1:rxe1"), ("switch.bgp-kill", "rtsw1")],
        [("switch.withdraw", "rtsw1"), ("switch.bgp-reset", "rtsw1"), ("switch.hash-policy", "rtsw1")],
        [("switch.reboot", "ctsw1"), ("switch.reboot", "ctsw2"), ("host.rank-hang", "host1")],
    ],
)
def test_faults_on_different_resources_compose(specs):
    """Inside one machine, on one port, at the two uplinks of a switch."""
    faults = [FaultSpec(kind=kind, target=target, for_s=5.0, params=SAMPLES[kind][1]) for kind, target in specs]
    assert collide(*faults) is None


def test_oneway_faults_compose_in_opposite_directions_only():
    """Silence in one direction is independent of the other, whichever end it is named from."""
    there = FaultSpec(kind="link.oneway", target="rtsw1:ctsw1", for_s=5.0)
    back = FaultSpec(kind="link.oneway", target="ctsw1:rtsw1", for_s=5.0)
    same = FaultSpec(kind="link.oneway", target="ctsw1:rtsw1", for_s=5.0, params={"direction": "from"})
    assert collide(there, back) is None
    assert collide(there, same)


def test_gpu_throttled_by_another_fault_is_no_bystander():
    """Each throttle lists the other GPUs as bystanders, except those that another fault throttles."""
    one, two = plan_all(
        [FaultSpec(kind="gpu.throttle", target=f"host{n}:gpu0", for_s=1.0, params={"percent": 50}) for n in (1, 2)],
        SOFT,
        lab_kind="soft",
    )
    assert (
        one.mechanism.must_not_move
        == two.mechanism.must_not_move
        == ("host3/gpu0.nr_throttled", "host4/gpu0.nr_throttled")
    )


def test_resource_removed_by_another_fault_is_no_bystander():
    """A lost GPU has no counters. Their absence is the loss's effect, not the throttle's."""
    lost, throttle = plan_all(
        [
            FaultSpec(kind="gpu.lost", target="host1:gpu0", for_s=1.0),
            FaultSpec(kind="gpu.throttle", target="host2:gpu0", for_s=1.0, params={"percent": 50}),
        ],
        SOFT,
        lab_kind="soft",
    )
    assert throttle.mechanism.must_not_move == ("host3/gpu0.nr_throttled", "host4/gpu0.nr_throttled")
    assert lost.mechanism.must_not_move == throttle.mechanism.must_not_move
