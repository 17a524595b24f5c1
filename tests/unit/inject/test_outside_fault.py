"""An injector of another author: confirmed only if the lab changed, traffic was there, and counters of loss moved."""

from __future__ import annotations

import pytest

from faultbed.inject.evidence.outside_fault import OutsideFault, opinion_of

PORT = ("rtsw1", "ctsw1")
CHANGED = {PORT: "rtsw1: qdisc ctsw1 is new (netem loss 5%)"}
TRAFFIC = {"rtsw1/ctsw1.tx_packets": 50_000, "host1/rxe0.out_of_seq_request": 0}
LOSS = {**TRAFFIC, "rtsw1/ctsw1.queue_drops": 900, "host1/rxe0.out_of_seq_request": 300}
IDLE = {"rtsw1/ctsw1.tx_packets": 12, "rtsw1/ctsw2.tx_packets": 50_000, "host1/rxe0.out_of_seq_request": 0}


def opinion(**changes):
    given = {"changed": CHANGED, "left": (), "before": TRAFFIC, "during": LOSS, "before_s": 5.0, "during_s": 5.0}
    return opinion_of(OutsideFault(**{**given, **changes}))


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
    assert "for another reason" in found.why


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
