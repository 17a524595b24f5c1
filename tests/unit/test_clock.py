"""Clock offsets between the controller and its nodes."""

from hypothesis import given
from hypothesis import strategies as st

from testbed.clock import Exchange, estimate

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
