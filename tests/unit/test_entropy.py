"""UDP source ports of RoCEv2, and paths."""

from hypothesis import given
from hypothesis import strategies as st

from traffic.entropy import udp_sport

QPN = st.integers(min_value=1, max_value=(1 << 24) - 1)


def test_a_port_seen_on_the_wire():
    """QP 65 to QP 65 used 0xd081 (captured on Linux 6.12)."""
    assert udp_sport(65, 65) == 0xD081


@given(QPN, QPN)
def test_ports_are_in_the_dynamic_range_and_the_same_both_ways(one, two):
    assert 0xC000 <= udp_sport(one, two) <= 0xFFFF
    assert udp_sport(one, two) == udp_sport(two, one)
