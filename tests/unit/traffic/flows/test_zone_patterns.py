"""Patterns of flows in zones and across zones: every RNIC sends once and receives once."""

from __future__ import annotations

import dataclasses

import pytest

from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory.lab_inventory import load
from faultbed.testbed.shipped import inventories
from faultbed.traffic.flows.matrix import pairs, pairs_in

ZONES = load(inventories() / "soft-zones.yml").topology
SOFT = load(inventories() / "soft.yml").topology


@pytest.mark.parametrize(("pattern", "same"), [("in-zone", True), ("across-zones", False)])
def test_zone_pattern_every_rnic_sends_once_and_receives_once(pattern, same):
    result = pairs_in(ZONES, pattern)
    every = {f"{host.name}:{rnic.name}" for host in ZONES.hosts for rnic in host.rnics}
    assert {src for src, _ in result} == every == {dst for _, dst in result}
    assert len(result) == len(every)
    hosts = ZONES.host_by_name
    for src, dst in result:
        one, other = hosts[src.partition(":")[0]], hosts[dst.partition(":")[0]]
        assert one.rack != other.rack
        assert (one.zone == other.zone) == same


def test_patterns_without_zones_use_the_first_rnics():
    first = [f"{host.name}:{host.rnics[0].name}" for host in SOFT.hosts]
    assert pairs_in(SOFT, "permutation") == pairs("permutation", first)


def test_zone_pattern_without_equal_zones_is_rejected():
    with pytest.raises(
        UsageError, match="across-zones needs at least two zones with the same number of RNICs; zone1 has 8 RNICs"
    ):
        pairs_in(SOFT, "across-zones")
    uneven = dataclasses.replace(ZONES, hosts=ZONES.hosts[:-1])
    with pytest.raises(UsageError, match="zone1 has 4 RNICs, zone2 has 2 RNICs"):
        pairs_in(uneven, "across-zones")
