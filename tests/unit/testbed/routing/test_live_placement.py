"""Which links are live by BGP's next hops at both ends, what is placed on them, and demands from counters of ports."""

from __future__ import annotations

import math

import pytest
from fake_switches import TOPOLOGY, Switches
from hypothesis import given
from hypothesis import strategies as st

from faultbed.testbed.errors import UsageError
from faultbed.testbed.routing.live_placement import every_key, failed_links, place_on_live_links
from faultbed.testbed.routing.measured_demands import measured_demands

UPLINKS = sorted({link.name for link in TOPOLOGY.uplinks})
BETWEEN_RACKS = {("host1:rxe0", "host3"): 1.0, ("host2:rxe0", "host4"): 1.0}


def next_hops(failed):
    switches = Switches()
    switches.failed = frozenset(failed)
    return {switch.name: switches.main(switch.name) for switch in TOPOLOGY.switches}


@given(st.sets(st.sampled_from(UPLINKS), max_size=3))
def test_failed_links_are_those_that_bgp_uses_at_neither_end(failed):
    found = failed_links(TOPOLOGY, next_hops(failed))

    assert failed <= found
    if len({name.split(":")[0] for name in failed}) < 2:
        assert found == failed, "a rack that lost one spine leaves the others alone"


def test_failed_links_a_link_that_one_end_does_not_use_is_dead():
    """The spine has lost the rack's prefixes, and the rack does not know it yet."""
    hops = next_hops(())
    hops["ctsw1"] = {prefix: [] if ports == ["rtsw1"] else ports for prefix, ports in hops["ctsw1"].items()}

    assert failed_links(TOPOLOGY, hops) == {"rtsw1:ctsw1"}


def test_failed_links_a_route_to_something_else_makes_no_link_live():
    hops = next_hops({"rtsw1:ctsw1"})
    hops["rtsw1"]["192.0.2.0/24"] = ["ctsw1"]
    hops["ctsw1"]["192.0.2.0/24"] = ["rtsw1"]

    assert failed_links(TOPOLOGY, hops) == {"rtsw1:ctsw1"}


def test_placement_on_live_links_avoids_a_dead_uplink_of_either_rack():
    healthy = place_on_live_links(TOPOLOGY, BETWEEN_RACKS, frozenset())
    assert sorted(healthy.placement.uplink.values()) == ["rtsw1:ctsw1", "rtsw1:ctsw2"]
    for dead in ("rtsw1:ctsw1", "rtsw2:ctsw1"):
        live = place_on_live_links(TOPOLOGY, BETWEEN_RACKS, frozenset({dead}))
        assert set(live.placement.uplink.values()) == {"rtsw1:ctsw2"}
        assert live.without_path == ()


def test_placement_leaves_out_keys_without_a_path_and_places_the_others():
    cut = frozenset({"rtsw3:ctsw1", "rtsw3:ctsw2"})
    demands = {**BETWEEN_RACKS, ("host1:rxe0", "host5"): 1.0}

    live = place_on_live_links(TOPOLOGY, demands, cut)

    assert live.without_path == (("host1:rxe0", "host5"),)
    assert set(live.placement.uplink) == set(BETWEEN_RACKS)


def test_placement_is_the_same_in_whatever_order_demands_come():
    demands = {**every_key(TOPOLOGY), ("host1:rxe0", "host3"): 7.0}
    backwards = dict(reversed(demands.items()))

    first = place_on_live_links(TOPOLOGY, demands, frozenset())
    assert place_on_live_links(TOPOLOGY, backwards, frozenset()).placement.uplink == first.placement.uplink


@pytest.mark.parametrize("size_bytes", [math.nan, math.inf, -1.0])
def test_placement_refuses_a_demand_that_is_no_amount(size_bytes):
    with pytest.raises(UsageError, match="demand from host1:rxe0 to host3: "):
        place_on_live_links(TOPOLOGY, {("host1:rxe0", "host3"): size_bytes}, frozenset())


def test_placement_refuses_a_key_that_the_lab_does_not_have():
    with pytest.raises(UsageError, match="no such RNIC, or no such host"):
        place_on_live_links(TOPOLOGY, {("host9:rxe0", "host3"): 1.0}, frozenset())


def test_measured_demands_divide_what_a_source_sends_by_what_hosts_receive():
    port_of = {f"{link.b.node}:{link.rnic}": f"{link.a.node}/{link.a.netdev}" for link in TOPOLOGY.links if link.rnic}
    increments = {
        f"{port_of['host1:rxe0']}.rx_bytes": 9000,
        f"{port_of['host3:rxe0']}.tx_bytes": 6000,
        f"{port_of['host4:rxe1']}.tx_bytes": 3000,
        f"{port_of['host2:rxe0']}.rx_bytes": 1,  # a router advertisement
    }
    assert measured_demands(TOPOLOGY, increments) == {("host1:rxe0", "host3"): 6000, ("host1:rxe0", "host4"): 3000}
    assert measured_demands(TOPOLOGY, {}) == {}
    assert measured_demands(TOPOLOGY, {f"{port_of['host1:rxe0']}.rx_bytes": 9000}) == {}, "nobody received it"
