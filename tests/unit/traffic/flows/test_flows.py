"""Pacing, traffic matrices, and the results of concurrent flows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faultbed.testbed.errors import UsageError
from faultbed.traffic.engine import traffic_metrics
from faultbed.traffic.flows import matrix
from faultbed.traffic.node.flows.grants import Grants
from faultbed.traffic.node.flows.pacer import CATCH_UP_NS, Pacer

MS = 1_000_000


def posted(pacer, size, until_ns, late_ns=0):
    """Return the post times of a sender that always has data, and wakes up `late_ns` late."""
    now_ns, times = 0, []
    pacer.start(0)
    while now_ns < until_ns:
        if pacer.take(now_ns, size):
            times.append(now_ns)
        else:
            assert pacer.wake_ns > now_ns
            now_ns = pacer.wake_ns + late_ns
    return times


@given(size=st.integers(64, 100_000), rate_bps=st.integers(1_000_000, 100_000_000), late_ns=st.integers(0, 4 * MS))
def test_pacer_that_wakes_late_keeps_its_rate(size, rate_bps, late_ns):
    times = posted(Pacer(rate_bps=rate_bps, on_ns=0, off_ns=0), size, 2_000 * MS, late_ns)
    interval_ns = size * 8e9 / rate_bps
    most = 2_000 * MS / interval_ns + 1 + CATCH_UP_NS / interval_ns
    assert len(times) <= most
    if late_ns < CATCH_UP_NS:
        assert len(times) >= (2_000 * MS - late_ns) / interval_ns - 1


@given(on_ms=st.integers(1, 50), off_ms=st.integers(1, 50))
def test_pacer_between_bursts_is_silent(on_ms, off_ms):
    pacer = Pacer(rate_bps=8e9, on_ns=on_ms * MS, off_ns=off_ms * MS)  # a byte per ns
    times = posted(pacer, MS // 2, 500 * MS)
    assert all(time % ((on_ms + off_ms) * MS) < on_ms * MS for time in times)
    bursts = {time // ((on_ms + off_ms) * MS) for time in times}
    assert len(bursts) == -(-500 // (on_ms + off_ms))


def test_pacer_without_a_rate_never_delays():
    pacer = Pacer(rate_bps=0, on_ns=0, off_ns=0)
    assert all(pacer.take(0, 1 << 30) for _ in range(1000))


ENDS = ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("pattern", "flows"),
    [
        ("incast", {("b", "a"), ("c", "a"), ("d", "a")}),
        ("outcast", {("a", "b"), ("a", "c"), ("a", "d")}),
        ("permutation", {("a", "c"), ("b", "d"), ("c", "a"), ("d", "b")}),
    ],
)
def test_matrix_patterns_return_their_pairs(pattern, flows):
    assert set(matrix.pairs(pattern, ENDS)) == flows


@given(count=st.integers(2, 20), shift=st.integers(1, 19))
def test_permutation_gives_each_rnic_one_send_and_one_receive(count, shift):
    ends = [str(index) for index in range(count)]
    if shift % count == 0:
        with pytest.raises(UsageError, match="maps each RNIC to itself"):
            matrix.pairs("permutation", ends, shift=shift)
        return
    result = matrix.pairs("permutation", ends, shift=shift)
    assert sorted(src for src, _ in result) == sorted(dst for _, dst in result) == sorted(ends)
    assert all(src != dst for src, dst in result)
    assert len(matrix.pairs("all-pairs", ends)) == count * (count - 1)


@pytest.mark.parametrize(
    ("arguments", "message"), [(("star", ENDS), "choose one of incast"), (("incast", ENDS[:1]), "at least 2")]
)
def test_flow_patterns_reject_invalid_arguments(arguments, message):
    with pytest.raises(UsageError, match=message):
        matrix.pairs(*arguments)


def test_jain_index():
    assert traffic_metrics.jain_index([5.0, 5.0, 5.0]) == pytest.approx(1.0)
    assert traffic_metrics.jain_index([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)


@given(
    admit=st.integers(1, 4),
    senders=st.integers(1, 6),
    choice=st.randoms(use_true_random=False),
)
def test_grants_never_exceed_the_limit_and_reach_every_sender(admit, senders, choice):
    """Chains come in any order, and senders leave and return. Grants are neither lost nor created."""
    grants = Grants(admit)
    under_way, had = [], dict.fromkeys(range(senders), 0)

    def granted(engines):
        for who in engines:
            under_way.append(who)
            had[who] += 1
        assert len(under_way) <= admit
        assert grants.free + len(under_way) == admit

    for who in had:
        granted(grants.join(who))
    for _ in range(20 * senders):
        if under_way and choice.random() < 0.9:
            who = under_way.pop(choice.randrange(len(under_way)))
            granted(grants.arrived(who))
        else:
            who = choice.choice(list(had))
            under_way[:] = [other for other in under_way if other != who]
            granted(grants.leave(who))
            under_way[:] = [other for other in under_way if other != who]
            granted(grants.join(who))
    assert len(under_way) == min(admit, senders), "no sender waits while there are grants"


def test_grants_rotate_between_senders():
    grants, order = Grants(1), []
    for who in "abc":
        order += grants.join(who)
    for _ in range(6):
        order += grants.arrived(order[-1])
    assert "".join(order) == "abcabca"
    assert grants.leave("b") == []
    assert grants.arrived("a") == ["c"]
    assert grants.arrived("b") == [], "who has left is granted nothing"
