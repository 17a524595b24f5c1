"""How routing followed a fault, from what the kernels told."""

from __future__ import annotations

from harness.measurements import NetworkChange
from harness.routing import routing

S = 1_000_000_000


def change(at_s, subject, node="rtsw1"):
    return NetworkChange(at_ns=int(at_s * S), node=node, subject=subject, text="x")


CHANGES = (
    change(1.0, "route before"),
    change(10.01, "link ctsw1"),
    change(10.2, "route 10.77.2.0/31"),
    change(10.9, "route 10.77.3.0/31", node="rtsw2"),
    change(12.1, "link ctsw1"),
    change(13.5, "route 10.77.2.0/31"),
    change(20.5, "route of another fault"),
)


def test_each_step_is_timed_from_its_own_cause():
    """Detected by the link, converged with the last route under the fault, restored with the last one after it."""
    one = routing(CHANGES, {"flap": (10 * S, 12 * S), "other": (20 * S, 21 * S)})["flap"]
    assert (one.detected_ns, one.converged_ns, one.restored_ns) == (S // 100, 900_000_000, 1_500_000_000)
    assert one.detected_by == "rtsw1: link ctsw1"
    assert one.changes == 5


def test_what_comes_after_the_next_fault_is_the_next_ones():
    """And a fault for which nothing changed says nothing."""
    found = routing(CHANGES, {"flap": (10 * S, 12 * S), "other": (20 * S, 21 * S), "quiet": (40 * S, 41 * S)})
    assert found["other"].detected_by == "rtsw1: route of another fault"
    assert (found["quiet"].detected_ns, found["quiet"].converged_ns, found["quiet"].restored_ns) == (None, None, None)


def test_a_change_that_comes_only_after_the_removal_was_not_detected_under_the_fault():
    """BGP may need longer than the fault lasts."""
    one = routing((change(12.5, "route x"),), {"flap": (10 * S, 12 * S)})["flap"]
    assert (one.detected_ns, one.restored_ns) == (None, S // 2)
