"""Clock offsets between the controller and its nodes."""

from hypothesis import given
from hypothesis import strategies as st

from testbed.clock import ClockOffset, Exchange, drifted_ns, estimate

DELAYS = st.integers(min_value=0, max_value=50_000_000)


@given(
    offset=st.integers(min_value=-(10**15), max_value=10**15),
    rounds=st.lists(st.tuples(st.integers(min_value=0, max_value=10**12), DELAYS, DELAYS), min_size=1, max_size=8),
)
def test_the_true_offset_is_within_the_stated_error(offset, rounds):
    """Whatever the delays of both ways, the estimate is off by no more than it says."""
    exchanges = [
        Exchange(sent_ns=at, node_ns=at + there - offset, received_ns=at + there + back) for at, there, back in rounds
    ]
    found = estimate(exchanges)
    assert abs(found.offset_ns - offset) <= found.error_ns
    assert found.to_controller(5) == 5 + found.offset_ns


def test_the_shortest_round_trip_decides():
    slow = Exchange(sent_ns=0, node_ns=0, received_ns=1_000_000)
    quick = Exchange(sent_ns=100, node_ns=150, received_ns=200)
    assert estimate([slow, quick]).offset_ns == 0
    assert estimate([slow, quick]).error_ns == 50


OFFSETS = st.integers(min_value=-(10**9), max_value=10**9)


@given(
    before=OFFSETS, moved=OFFSETS, errors=st.tuples(DELAYS, DELAYS), wrong=st.tuples(st.floats(-1, 1), st.floats(-1, 1))
)
def test_only_a_clock_that_has_moved_is_said_to_have_drifted(before, moved, errors, wrong):
    """And by no more than it has, however wrong both measurements were within their errors."""
    first, second = (
        ClockOffset(offset_ns=true + int(share * error), error_ns=error)
        for true, share, error in zip((before, before + moved), wrong, errors, strict=True)
    )
    assert drifted_ns(first, second) <= abs(moved)
    assert drifted_ns(first, second) >= abs(moved) - 2 * sum(errors)
