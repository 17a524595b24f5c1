"""Queue pairs of programs are paired only where that is certain; everything else has an unknown path."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from faultbed.traffic.engine.run_results import Endpoint
from faultbed.traffic.programs.foreign_connections import Connections

ENDS = tuple(Endpoint(host=f"host{number}", rnic="rxe0", address=f"10.0.{number}.1") for number in (3, 1, 2))


def qp(own, other, transport="rc"):
    return [own, other, 100, 200, transport, 3]


def known(connections):
    return [(one.src, one.dst, one.lqpn, one.rqpn) for one in connections if one.src_ip]


def unknown(connections):
    return [one.src for one in connections if not one.src_ip]


def test_two_ends_that_name_each_other_are_a_connection_from_the_later_role():
    seen = Connections(ENDS[:2])
    seen.update(0, [qp(17, 18)])
    assert known(seen.now) == []
    assert unknown(seen.now) == ["host3:rxe0", "host1:rxe0"]
    seen.update(1, [qp(18, 17)])
    assert known(seen.now) == [("host1:rxe0", "host3:rxe0", 18, 17)]
    assert unknown(seen.now) == []
    (one,) = seen.now
    assert (one.src_ip, one.dst_ip) == ("10.0.1.1", "10.0.3.1")


def test_end_with_two_possible_peers_has_an_unknown_path():
    seen = Connections(ENDS)
    seen.update(0, [qp(17, 17), qp(18, 17)])
    seen.update(1, [qp(17, 17)])
    seen.update(2, [qp(17, 17)])
    assert known(seen.now) == []
    assert set(unknown(seen.now)) == {end.name for end in ENDS}


def test_end_that_two_others_name_is_not_paired_with_the_first():
    seen = Connections(ENDS)
    seen.update(0, [qp(17, 18)])
    seen.update(1, [qp(18, 17)])
    seen.update(2, [qp(18, 17)])
    assert known(seen.now) == []


def test_datagram_queue_pairs_have_an_unknown_path():
    seen = Connections(ENDS[:2])
    seen.update(0, [qp(17, 18, "ud")])
    seen.update(1, [qp(18, 17, "ud")])
    assert known(seen.now) == []
    assert set(unknown(seen.now)) == {"host3:rxe0", "host1:rxe0"}


def test_process_without_a_queue_pair_is_unknown_and_not_unused():
    assert unknown(Connections(ENDS[:2]).all_seen) == ["host3:rxe0", "host1:rxe0"]


def test_unreadable_list_makes_the_process_unknown_for_the_whole_run():
    seen = Connections(ENDS[:2])
    seen.update(0, [qp(17, 18)])
    seen.update(1, [qp(18, 17)])
    seen.update(0, None)
    assert unknown(seen.all_seen) == ["host3:rxe0"]
    assert len(known(seen.all_seen)) == 1


def test_index_stays_while_the_ends_exist_and_a_new_pair_gets_a_new_one():
    seen = Connections(ENDS[:2])
    seen.update(0, [qp(17, 18)])
    seen.update(1, [qp(18, 17)])
    first = [one.index for one in seen.now if one.src_ip]
    seen.update(0, [qp(17, 18), qp(19, 20)])
    seen.update(1, [qp(18, 17), qp(20, 19)])
    second = [one.index for one in seen.now if one.src_ip]
    seen.update(0, [])
    seen.update(1, [])
    assert first == second[:1]
    assert [one.index for one in seen.all_seen if one.src_ip] == second
    assert len(set(second)) == 2


@given(st.lists(st.lists(st.tuples(st.integers(17, 20), st.integers(17, 20)), max_size=4), min_size=3, max_size=3))
def test_every_listed_queue_pair_is_in_exactly_one_connection(listed):
    """No queue pair is lost, and no pair is made of two that do not name each other."""
    seen = Connections(ENDS)
    unique = [sorted(dict(several).items()) for several in listed]
    for rank, several in enumerate(unique):
        seen.update(rank, [qp(own, other) for own, other in several])
    names = [end.name for end in ENDS]
    ends = [(one.src, one.lqpn) for one in seen.now if one.lqpn]
    ends += [(one.dst, one.rqpn) for one in seen.now if one.src_ip]
    assert sorted(ends) == sorted((names[rank], own) for rank, several in enumerate(unique) for own, _ in several)
