"""Traffic engineering on real kernels: three racks of network namespaces, with packets of real flows."""

from __future__ import annotations

import pytest
from own_namespace import in_a_fabric


@pytest.fixture(scope="module")
def recorded():
    return in_a_fabric("placed_fabric.py")


def test_placed_fabric_flows_that_collide_under_ecmp_are_even_under_te(recorded):
    assert recorded["collide ecmp"] == pytest.approx(2.0, abs=0.1)
    assert recorded["collide te"] <= 1.1
    agreed, queried, wrong = recorded["decisions"]
    assert (agreed, wrong) == (queried, [])
    assert queried > 0


def test_placed_fabric_odd_hosts_are_even_under_te_where_static_parity_fills_one_uplink(recorded):
    """The job on hosts 1, 2, 3 and 5: from the first rack, odd/even routing sends everything over one uplink."""
    assert recorded["odd-even parity"] == pytest.approx(2.0, abs=0.1)
    assert recorded["odd-even te"] <= 1.1


def test_placed_fabric_a_hundred_moves_under_load_lose_and_reorder_nothing(recorded):
    assert recorded["moves"]["sent"] > 100
    assert recorded["moves"] == {"sent": recorded["moves"]["sent"], "lost": 0, "out_of_order": 0}


def test_placed_fabric_without_its_controller_is_ecmp_and_restarted_has_the_same_rules(recorded):
    assert recorded["after"] == pytest.approx(2.0, abs=0.1)
    assert recorded["byte-equal"] is True


def test_placed_fabric_backdoor_places_flows_long_before_the_cycle_ends(recorded):
    assert recorded["after cut"] == ["change", ["rtsw1:ctsw1"], 1]
