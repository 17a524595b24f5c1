"""Tables, rules and marks of switches for each routing scheme, worked out by hand for the lab of three racks."""

import pytest

from faultbed.testbed.errors import Unsupported, UsageError
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.routing.jenkins_hash import nft_jhash
from faultbed.testbed.routing.schemes import SCHEMES, Routing
from faultbed.testbed.routing.switch_tables import scheme_tables
from faultbed.testbed.shipped import inventory_named

THREE_RACKS = lab_inventory.load(inventory_named("soft-3rack")).topology
ZONES = lab_inventory.load(inventory_named("soft-zones")).topology
MINI = lab_inventory.load(inventory_named("soft-mini")).topology
HOST3, HOST4, HOST5 = "10.77.2.0/31", "10.77.2.4/31", "10.77.3.0/31"


def tables_of(scheme, topology=THREE_RACKS, **parameters):
    return scheme_tables(topology, scheme, Routing(**parameters))


def test_switch_tables_static_parity_sends_odd_hosts_over_the_first_uplink():
    """On rtsw1: host3 and host5 by ctsw1 (table 1001), host4 by ctsw2 (1002); hosts of its own rack have no rule."""
    request = tables_of("static-parity").request("rtsw1", "rtsw1")

    assert request["tables"] == {"1001": "ctsw1", "1002": "ctsw2"}
    table_by_prefix = {
        prefix: table
        for priority, table, prefix, mark, port in request["rules"]
        if (priority, mark, port) == (1000, 0, "")
    }
    assert (table_by_prefix[HOST3], table_by_prefix[HOST4], table_by_prefix[HOST5]) == (1001, 1002, 1001)
    assert len(table_by_prefix) == len(request["rules"]) == 8
    assert not any(prefix.startswith("10.77.1.") for prefix in table_by_prefix)
    assert request["marks"] == []


def test_switch_tables_e_ecmp_marks_by_the_precomputed_hash():
    tables = tables_of("e-ecmp", seed=7)
    request = tables.request("rtsw1", "rtsw1")

    assert request["rules"] == [[1000, 1001, None, 1001, ""], [1000, 1002, None, 1002, ""]]
    (line,) = request["marks"]
    assert "udp dport 4791 counter meta mark set jhash @th,104,24 mod 2 seed 0x7 map { 0 : 1001, 1 : 1002 }" in line
    for number in range(17, 65):
        chosen = nft_jhash(number.to_bytes(3, "big"), modulus=2, seed=7)
        assert tables.mark("rtsw1", "10.77.2.1", number) == 1001 + chosen
    assert tables.mark("rtsw1", "10.77.1.5", 17) == 0, "a host of its own rack has one next hop"
    assert tables.mark("ctsw1", "10.77.2.1", 17) == 0, "a spine has one next hop to each rack"


def test_switch_tables_spray_marks_packets_in_turn():
    tables = tables_of("spray")

    assert "numgen inc mod 2 map { 0 : 1001, 1 : 1002 }" in tables.request("rtsw1", "rtsw1")["marks"][0]
    assert tables.sprays("rtsw1", "10.77.2.1")
    assert not tables.sprays("rtsw1", "10.77.1.5")
    assert tables.mark("rtsw1", "10.77.2.1", 17) == 0


def test_switch_tables_weighted_and_resilient_use_one_table_and_rule():
    weighted = tables_of("weighted", weights={"rtsw1:ctsw1": 3.0}).request("rtsw1", "rtsw1")
    resilient = tables_of("resilient", buckets=64).request("rtsw2", "rtsw2")

    assert (weighted["weights"], weighted["buckets"]) == ({"ctsw1": 3, "ctsw2": 1}, 0)
    assert resilient["buckets"] == 64
    for request in (weighted, resilient):
        assert request["rules"] == [[1000, 1000, None, 0, ""]]
        assert request["tables"] == {}


def test_switches_have_nothing_to_install_for_ecmp():
    request = tables_of("ecmp").request("rtsw1", "rtsw1")

    assert [request[part] for part in ("tables", "rules", "marks", "weights", "buckets")] == [{}, [], [], {}, 0]
    assert request["prefixes"][HOST3] == ["ctsw1", "ctsw2"]


def test_switch_tables_in_two_zones_use_each_tiers_own_uplinks():
    tables = tables_of("e-ecmp", ZONES)

    assert {name[:4] for name in tables.switches} == {"rtsw", "ctsw", "atsw"}
    atsw = tables.request("atsw1", "atsw1")
    assert len(atsw["marks"]) == 2, "one statement for the spines of each zone"
    assert sorted(map(int, atsw["tables"])) == [1001, 1002, 1003, 1004]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_switch_tables_of_a_lab_with_one_spine_are_unsupported(scheme):
    with pytest.raises(Unsupported, match="no switch of this lab has two next hops"):
        tables_of(scheme, MINI)


def test_switch_tables_unknown_scheme_names_the_nearest_one():
    with pytest.raises(UsageError, match="did you mean spray"):
        tables_of("sprai")


def test_routing_scheme_fidelity_is_emulated_for_e_ecmp_only():
    assert {scheme for scheme in SCHEMES if SCHEMES[scheme].fidelity == "emulated"} == {"e-ecmp"}
