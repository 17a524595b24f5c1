"""An injector of another author: confirmed only if the lab changed, traffic was there, and counters of loss moved."""

from __future__ import annotations

import pytest
from planned_faults import SOFT

from faultbed.inject.evidence.outside_fault import OutsideFault, opinion_of, reach_of

PORT = ("rtsw1", "ctsw1")
REACH = reach_of(SOFT, [PORT], {"rtsw1:ctsw1": frozenset({"10.77.1.1", "10.77.2.1"})})
PORT_OF_HOST1 = {f"{SOFT.rnic_link('host1', 'rxe0').a.node}/{SOFT.rnic_link('host1', 'rxe0').a.netdev}"}
CHANGED = {PORT: "rtsw1: qdisc ctsw1 is new (netem loss 5%)"}
TRAFFIC = {"rtsw1/ctsw1.tx_packets": 50_000, "host1/rxe0.out_of_seq_request": 0}
LOSS = {**TRAFFIC, "rtsw1/ctsw1.queue_drops": 900, "host1/rxe0.out_of_seq_request": 300}
IDLE = {"rtsw1/ctsw1.tx_packets": 12, "rtsw1/ctsw2.tx_packets": 50_000, "host1/rxe0.out_of_seq_request": 0}


def opinion(**changes):
    given = {"changed": CHANGED, "left": (), "before": TRAFFIC, "during": LOSS, "before_s": 5.0, "during_s": 5.0}
    return opinion_of(OutsideFault(**{"looks": 3, "reach": REACH, **given, **changes}))


def test_loss_where_traffic_is_is_confirmed_with_counters_and_undone():
    found = opinion()
    assert (found.result, found.undone) == ("confirmed", True)
    assert (
        found.why
        == "rtsw1: qdisc ctsw1 is new (netem loss 5%); traffic crossed it; rtsw1/ctsw1.queue_drops grew by 900"
    )
    assert found.moved == {"rtsw1/ctsw1.queue_drops": 900, "host1/rxe0.out_of_seq_request": 300}


def test_port_that_no_traffic_crosses_is_a_mismatch():
    assert opinion(before=IDLE, during=IDLE).result == "mismatch"


def test_loss_elsewhere_does_not_confirm_a_port_without_traffic():
    found = opinion(before=IDLE, during={**IDLE, "host1/rxe0.out_of_seq_request": 300})
    assert found.result == "mismatch"
    assert "host1/rxe0.out_of_seq_request moved, and nothing shows that this is its effect" in found.why


def test_loss_of_an_rnic_whose_packets_do_not_cross_the_place_does_not_confirm_it():
    elsewhere = {**TRAFFIC, "host2/rxe1.out_of_seq_request": 300, "rtsw1/ctsw2.queue_drops": 900}
    found = opinion(during=elsewhere)
    assert found.result == "inconclusive"
    assert "rtsw1/ctsw2.queue_drops moved, and nothing shows that this is its effect" in found.why
    assert opinion(during={**elsewhere, "host3/rxe0.out_of_seq_request": 1}).result == "confirmed"


def test_loss_of_an_rnic_confirms_nothing_if_the_link_could_not_be_watched():
    assert opinion(reach=reach_of(SOFT, [PORT], {}), during={**TRAFFIC, "host1/rxe0.out_of_seq_request": 9}).result == (
        "inconclusive"
    )


def test_effects_count_at_the_place_that_is_used_and_not_at_an_idle_one_that_changed_too():
    both = {("rtsw1", "ctsw2"): "rtsw1: qdisc ctsw2 is new", **CHANGED}
    reach = reach_of(SOFT, both, {})
    dropped_there = {**TRAFFIC, "rtsw1/ctsw2.tx_packets": 3, "rtsw1/ctsw2.queue_drops": 3}
    assert opinion(changed=both, reach=reach, during=dropped_there).result == "inconclusive"


def test_reach_is_the_link_of_an_interface_and_all_links_of_a_node():
    assert reach_of(SOFT, [PORT], {})[PORT] == {"rtsw1/ctsw1", "ctsw1/rtsw1"}
    host = ("host1", "be0")
    assert reach_of(SOFT, [host], {})[host] == {"host1/be0", "host1/rxe0", *PORT_OF_HOST1}
    assert reach_of(SOFT, [("host1", "rxe0")], {})[("host1", "rxe0")] == {"host1/be0", "host1/rxe0", *PORT_OF_HOST1}
    whole = reach_of(SOFT, [("ctsw1", "")], {})[("ctsw1", "")]
    assert {"ctsw1/rtsw1", "rtsw1/ctsw1", "ctsw1/rtsw2", "rtsw2/ctsw1"} < whole


def test_interface_that_changed_decides_before_the_routes_that_follow_from_it():
    """BGP withdraws the routes of an idle link everywhere; a loss at another place must not confirm it."""
    routes = {("rtsw2", ""): "rtsw2: route 10.77.1.0/31 bgp is gone", **CHANGED}
    lost = {**IDLE, "rtsw2/ctsw2.tx_packets": 50_000, "host3/rxe0.out_of_seq_request": 300}
    assert opinion(changed=routes, reach=reach_of(SOFT, routes, {}), before=IDLE, during=lost).result == "mismatch"


def test_netdev_of_a_hardware_rnic_does_not_show_whether_rdma_crosses_it():
    assert opinion(before=IDLE, during=IDLE, hidden=frozenset({PORT})).result == "inconclusive"


def test_command_that_is_over_before_a_look_is_inconclusive():
    found = opinion(changed={}, during=TRAFFIC, looks=0)
    assert (found.result, "over before the lab was looked at" in found.why) == ("inconclusive", True)


def test_command_that_changes_nothing_is_a_mismatch():
    found = opinion(changed={}, during=TRAFFIC)
    assert (found.result, found.undone) == ("mismatch", True)


def test_loss_without_a_change_is_inconclusive():
    assert opinion(changed={}).result == "inconclusive"


def test_delay_without_loss_is_inconclusive():
    assert opinion(during=TRAFFIC).result == "inconclusive"


def test_link_that_is_down_is_judged_by_the_traffic_before():
    down = {"rtsw1/ctsw1.tx_packets": 3, "rtsw1/ctsw1.carrier_changes": 1, "host1/rxe0.completer_retry_err": 9}
    assert opinion(during=down).result == "confirmed"
    assert opinion(before=IDLE, during=down).result == "mismatch"


@pytest.mark.parametrize("before", [150, 400])
def test_counters_that_moved_as_much_before_confirm_nothing(before):
    noisy = {**TRAFFIC, "host1/rxe0.out_of_seq_request": before}
    assert opinion(before=noisy, during={**TRAFFIC, "host1/rxe0.out_of_seq_request": 300}).result == "inconclusive"


@pytest.mark.parametrize("changes", [{}, {"changed": {}}, {"before": IDLE, "during": IDLE}])
def test_what_could_not_be_read_makes_every_result_inconclusive(changes):
    found = opinion(unknown=("host2: did not answer",), **changes)
    assert (found.result, found.undone) == ("inconclusive", None)


def test_change_of_something_without_counters_is_inconclusive():
    assert opinion(changed={("host1", "net.core.rmem_max"): "host1: sysctl was 1, is 2"}).result == "inconclusive"


def test_difference_that_stays_is_not_undone():
    assert opinion(left=("rtsw1: qdisc ctsw1 is new",)).undone is False


def test_quiet_time_of_zero_length_confirms_nothing_by_rates():
    assert opinion(before_s=0.0, before={}).result == "confirmed"
