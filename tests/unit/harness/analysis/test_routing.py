"""How routing followed a fault, from the kernels' reports."""

from __future__ import annotations

import pytest

from faultbed.harness.analysis.routing import routing
from faultbed.testbed.observe.telemetry import Change as NetworkChange

S = 1_000_000_000


def change(at_s, subject, node="rtsw1"):
    return NetworkChange(at_ns=int(at_s * S), node=node, subject=subject, text="x")


CHANGES = (
    change(1.0, "route before"),
    change(10.01, "link ctsw1"),
    change(10.2, "route 10.77.2.0/31"),
    change(10.9, "route 10.77.3.0/31", node="rtsw2"),
    change(12.1, "link ctsw1"),
    change(12.9, "route 10.77.3.0/31", node="rtsw2"),
    change(13.5, "route 10.77.2.0/31"),
    change(20.5, "route of another fault"),
)


def test_routing_times_each_step_from_its_own_cause():
    """Detection is the link event, convergence the last route change during the fault, restoration the last one
    after it.
    """
    one = routing(CHANGES, {"flap": (10 * S, 12 * S), "other": (20 * S, 21 * S)})["flap"]
    assert (one.detected_ns, one.converged_ns, one.restored_ns) == (S // 100, 900_000_000, 1_500_000_000)
    assert one.detected_by == "rtsw1: link ctsw1"
    assert one.changes == 6
    assert one.left == ()


def test_routing_times_do_not_depend_on_the_order_of_the_record():
    fired = {"flap": (10 * S, 12 * S), "other": (20 * S, 21 * S)}
    assert routing(CHANGES[::-1], fired) == routing(CHANGES, fired)


def test_routing_assigns_changes_to_the_fault_before_them():
    """A fault without changes has no times."""
    result = routing(CHANGES, {"flap": (10 * S, 12 * S), "other": (20 * S, 21 * S), "quiet": (40 * S, 41 * S)})
    assert result["other"].detected_by == "rtsw1: route of another fault"
    assert (result["quiet"].detected_ns, result["quiet"].converged_ns, result["quiet"].restored_ns) == (
        None,
        None,
        None,
    )


def test_routing_change_only_after_removal_is_no_detection():
    """BGP may need longer than the fault lasts."""
    one = routing((change(12.5, "route x"),), {"flap": (10 * S, 12 * S)})["flap"]
    assert (one.detected_ns, one.restored_ns) == (None, S // 2)


def change_at(at_s, node, subject, text):
    return NetworkChange(at_ns=int(at_s * S), node=node, subject=subject, text=text)


@pytest.mark.parametrize(
    ("texts", "is_left"),
    [
        (("via b", "via a, via b"), False),
        (("via b",), True),
        (("via b", "via a, via b", "via b"), True),  # withdrawn a second time
        ((None, "via a, via b", None), True),
        (("via b", None, "via a, via b"), False),
    ],
)
def test_routing_route_that_ends_as_the_fault_made_it_is_left(texts, is_left):
    """An odd and an even number of changes used to decide: three of them were a route that had come back."""
    times = (10.5, *(12.5 + number for number in range(len(texts) - 1)))
    changes = [change_at(at, "rtsw1", "route 10.77.2.0/31", text) for at, text in zip(times, texts, strict=True)]
    one = routing(changes, {"flap": (10 * S, 12 * S)})["flap"]
    assert one.left == (("rtsw1: route 10.77.2.0/31",) if is_left else ())
    assert (one.restored_ns is None) is is_left


def test_routing_route_is_compared_with_what_it_was_before_the_fault():
    key = "rtsw1", "route 10.77.2.0/31"
    before, under = change_at(1, *key, "via a, via b"), change_at(10.5, *key, "via b")
    for last, left in (("via a, via b", ()), ("via a", (": ".join(key),))):
        one = routing([before, under, change_at(13, *key, last)], {"flap": (10 * S, 12 * S)})["flap"]
        assert one.left == left


def test_routing_route_that_another_fault_had_changed_comes_back():
    """The first fault withdrew a path, the second one withdrew the other path, and both came back."""
    key = "rtsw1", "route 10.77.2.0/31"
    texts = ((5, "via b"), (10.5, None), (12.5, "via b"), (20.5, "via a, via b"))
    one = routing([change_at(at, *key, text) for at, text in texts], {"a": (4 * S, 20 * S), "b": (10 * S, 12 * S)})
    assert one["b"].left == ()


def test_routing_stages_of_a_lost_link_are_carrier_next_hop_withdrawn():
    """Recorded on a soft lab when an uplink went down: both ends lose it, both reroute, BGP informs the others."""
    changes = (
        change_at(9.0, "rtsw1", "route 10.77.9.0/31", "via dev ctsw1"),
        change_at(10.06, "rtsw2", "link ctsw2", "down mtu 4200 qdisc noqueue"),
        change_at(10.15, "ctsw2", "link rtsw2", "UP mtu 4200 qdisc noqueue"),
        change_at(10.30, "rtsw2", "route 10.77.7.0/31", "via 169.254.0.1 dev ctsw1, via 169.254.0.1 dev ctsw2"),
        change_at(10.48, "rtsw2", "route 10.77.1.0/31", "via 169.254.0.1 dev ctsw1"),
        change_at(10.56, "ctsw2", "route 10.78.0.101/32", None),
        change_at(10.78, "rtsw1", "route 10.78.0.2/32", "via 169.254.0.1 dev ctsw1"),
        change_at(13.0, "rtsw2", "link ctsw2", "LOWER_UP UP mtu 4200 qdisc noqueue"),
        change_at(13.2, "ctsw1", "route 10.77.1.0/31", "via x"),
    )
    one = routing(changes, {"cut": (10 * S, 12 * S)})["cut"]
    assert [(stage.name, stage.node, round(stage.after_ns / S, 2)) for stage in one.stages] == [
        ("carrier", "rtsw2", 0.06),
        ("next hop", "rtsw2", 0.48),
        ("withdrawn", "rtsw1", 0.78),
    ]
    assert one.stage_ns("withdrawn") == 780_000_000


def test_routing_changes_without_a_lost_link_have_no_stages():
    """If a daemon is killed, no carrier is lost, and the first change need not come from BGP."""
    one = routing((change_at(10.5, "rtsw1", "route x", None),), {"kill": (10 * S, 12 * S)})["kill"]
    assert one.stages == ()
    assert one.stage_ns("next hop") is None


def test_routing_route_not_changed_back_is_left_and_not_restored():
    """A route that did not change back is not restored, even after its last change. The number of a next hop is
    irrelevant."""
    changes = (*(one for one in CHANGES if one.at_ns != int(12.9 * S)), change(11.0, "nexthop 17"))
    one = routing(sorted(changes, key=lambda change: change.at_ns), {"flap": (10 * S, 12 * S)})["flap"]
    assert one.left == ("rtsw2: route 10.77.3.0/31",)
    assert one.restored_ns is None
    assert one.converged_ns == S


def test_routing_change_before_the_observed_firing_belongs_to_the_fault():
    """A hop is read at most every 20 ms, and a switch may be faster. The change still belongs to this fault, not the
    previous."""
    changes = (change(9.99, "link ctsw1"), change(10.5, "route x"), change(19.99, "route y"))
    fired = {"cut": (10 * S, 12 * S), "next": (20 * S, 22 * S)}
    by_fault = routing(changes, fired, {"cut": 20_000_000, "next": 20_000_000})
    assert (by_fault["cut"].detected_by, by_fault["cut"].detected_ns, by_fault["cut"].changes) == (
        "rtsw1: link ctsw1",
        0,
        2,
    )
    assert (by_fault["next"].detected_by, by_fault["next"].detected_ns) == ("rtsw1: route y", 0)
    assert routing(changes, fired)["cut"].detected_by == "rtsw1: route x"
