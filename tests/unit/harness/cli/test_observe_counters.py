"""RNIC counters of a run: names of different RNICs, resets, and RNICs that appear or disappear."""

from __future__ import annotations

import pytest
from rich.text import Text
from synthetic_run import changed, synthetic_run

from faultbed.harness.analysis.observe import observe
from faultbed.harness.cli.lab.screen import Screen
from faultbed.harness.cli.lab.watching import _growth
from faultbed.harness.record.evidence.telemetry_evidence import counter_deltas
from faultbed.harness.record.evidence.workload_evidence import Rank
from faultbed.inject.mechanisms.rack.rack_mechanism import COUNTERS
from faultbed.testbed.observe.telemetry import Sample

S = 1_000_000_000


def counted(before, after):
    return changed(synthetic_run(), counters_before=before, counters_after=after)


def test_counter_deltas_of_a_reset_rnic_are_not_negative():
    """A counter at 500 was reset and is now 3: the delta is 3, not -497, which the other RNIC's 10 would mask."""
    names = ("rxe0.out_of_seq_request", "rxe0.rcvd_seq_err")
    run = counted(
        {"host1": dict.fromkeys(names, 500), "host2": dict.fromkeys(names, 0)},
        {"host1": dict.fromkeys(names, 3), "host2": dict.fromkeys(names, 10)},
    )
    assert counter_deltas(run.telemetry)["host1"]["rxe0.out_of_seq_request"] == 3
    metrics = observe(run).metrics
    assert (metrics["nak_episodes"].value, metrics["go_back_n"].value) == (13, 13)


@pytest.mark.parametrize(("now", "is_censored"), [(10, True), (900, False)], ids=["booted", "up"])
def test_counter_metrics_of_a_host_that_booted_are_lower_bounds(now, is_censored):
    """The counter was 2 before the boot, and is 5 by now: at least 3 episodes, whatever the boot erased."""
    run = counted(
        {"host1": {"ip.InDelivers": 900, "tcp.ActiveOpens": 40, "rxe0.out_of_seq_request": 2}},
        {"host1": {"ip.InDelivers": now, "tcp.ActiveOpens": now // 10, "rxe0.out_of_seq_request": 5}},
    )
    run = changed(run, ranks=(Rank(rank=0, host="host1", rnic="rxe0"),))
    one = observe(run).metrics["nak_episodes"]
    assert (one.value, one.censored) == (3, is_censored)


@pytest.mark.parametrize(
    ("metric", "name"), [("nak_episodes", "out_of_sequence"), ("go_back_n", "packet_seq_err")], ids=["gap", "nak"]
)
def test_metrics_use_mlx5_counter_names(metric, name):
    run = counted({"host1": {f"mlx5_0.{name}": 5}}, {"host1": {f"mlx5_0.{name}": 12}})
    run = changed(run, ranks=(Rank(rank=0, host="host1", rnic="mlx5_0"),))
    one = observe(run).metrics[metric]
    assert (one.value, one.detail) == (7, f"host1:mlx5_0.{name} +7")


def test_metrics_without_counters_list_both_names():
    one = observe(counted({}, {})).metrics["nak_episodes"]
    assert one.value is None
    assert "out_of_seq_request or out_of_sequence" in one.detail


def test_rack_faults_use_retransmission_counters_only():
    """The table also holds counters of refusals, which prove no lost packet."""
    assert "rcvd_rnr_err" not in COUNTERS
    assert COUNTERS["rcvd_seq_err"] == "packet_seq_err"


def test_top_shows_trouble_of_mlx5_and_reset_counters():
    screen = Screen(began_ns=0)
    for at_ns, value in ((0, 50), (S, 20)):
        screen.sample(
            Sample(at_ns=at_ns, node="host1", values={"mlx5_0.packet_seq_err": value, "be0.tx_bytes": 10 * value})
        )
    table = screen.table(40, now_ns=S, heard_ns={"host1": S})
    assert "mlx5_0.packet_seq_err" in [str(cell) for cell in table.columns[1].cells]
    assert ("+20", "yellow") in [(cell.plain, cell.style) for cell in table.columns[2].cells if isinstance(cell, Text)]
    assert screen.rates["host1", "be0.tx_bytes"] == 200


def test_moved_counters_are_never_negative_except_states():
    before = {"host1": {"be0.mtu": 4200, "rxe0.send_err": 9, "rxe0.sent_pkts": 4}}
    after = {"host1": {"be0.mtu": 1500, "rxe0.send_err": 2, "rxe0.sent_pkts": 4, "rxe1.sent_pkts": 6}}
    assert _growth(before, after) == {"host1": {"be0.mtu": -2700, "rxe0.send_err": 2, "rxe1.sent_pkts": 6}}
