"""Counters over time are steps between samples; equal reports by several kernels become one mark."""

from __future__ import annotations

import dataclasses

import pytest
from finished_run import finished
from recorded import DOWN, RECORDED, UP, change, sample
from synthetic_run import T0, S, changed, synthetic_run

from faultbed.harness.record import telemetry_file
from faultbed.harness.report import run_page as report
from faultbed.harness.report.fabric.fabric_states import link_state
from faultbed.harness.report.plots.charts import Band
from faultbed.harness.report.plots.counter_plot import counters_chart
from faultbed.harness.report.plots.counter_timeline import Step, event_marks, series, thinned
from faultbed.testbed.errors import UsageError

NO_CARRIER = "UP mtu 4200 qdisc noqueue 02:fb:03:00:01:02 veth"
END = T0 + 10 * S


def of(*samples):
    return series(samples, t0_ns=T0, end_ns=END)


def marks_of(*changes):
    return [(one.start_s, one.node, one.kind, one.words) for one in event_marks(changes, t0_ns=T0, end_ns=END)]


def test_counter_step_is_the_growth_between_two_samples_of_a_node():
    """A sample without the counter means no change; 6 within 4 s are 1.5 a second."""
    (one,) = of(
        sample(1, rxe0__rcvd_seq_err=4),
        sample(3, be0__rx_bytes=1),
        sample(2, node="host2", be0__rx_bytes=1),
        sample(7, rxe0__rcvd_seq_err=10),
    )

    assert (one.node, one.name, one.grown) == ("host1", "rxe0.rcvd_seq_err", 6)
    assert one.steps == (Step(start_s=1, end_s=3, per_s=0), Step(start_s=3, end_s=7, per_s=1.5))
    assert one.label == "host1:rxe0 NAKs received (rcvd_seq_err)"


def test_counter_steps_are_clipped_to_the_run():
    """12 within 6 s, of which 4 s lie before the start: still 2 a second, drawn from 0."""
    (one,) = of(sample(-4, rxe0__send_err=0), sample(2, rxe0__send_err=12), sample(14, rxe0__send_err=24))

    assert one.steps == (Step(start_s=0, end_s=2, per_s=2), Step(start_s=2, end_s=10, per_s=1))


def test_counter_after_a_reset_counts_from_zero():
    (one,) = of(sample(0, rxe0__rcvd_seq_err=100), sample(1, rxe0__rcvd_seq_err=3))

    assert one.grown == 3


def test_counters_without_growth_in_the_run_are_not_shown():
    assert of(sample(0, rxe0__rcvd_seq_err=7), sample(5, rxe0__rcvd_seq_err=7), sample(6, be0__rx_bytes=99)) == ()
    assert of(sample(-5, rxe0__rcvd_seq_err=0), sample(-1, rxe0__rcvd_seq_err=9), sample(5, be0__rx_bytes=9)) == ()


def test_counters_shown_cover_each_kind_of_trouble_first():
    result = of(
        *(sample(0, node=f"host{n}", rxe0__duplicate_request=0, rxe0__send_err=0) for n in (1, 2)),
        sample(1, node="host1", rxe0__duplicate_request=90, rxe0__send_err=1),
        sample(1, node="host2", rxe0__duplicate_request=95),
    )

    assert [(one.node, one.words) for one in result] == [
        ("host2", "duplicates received"),
        ("host1", "failed to send"),
        ("host1", "duplicates received"),
    ]


@pytest.mark.parametrize(("text", "state"), [(UP, "up"), (NO_CARRIER, "no carrier"), (DOWN, "down"), (None, "gone")])
def test_link_state_is_decoded(text, state):
    assert link_state(text) == state


def test_link_down_and_up_are_reported_once():
    """The second of two equal events is dropped; a changed setting of a link that is up is no link-up event."""
    assert marks_of(
        change(1, "rtsw1", "link ctsw2", DOWN),
        change(2, "rtsw1", "link ctsw2", UP),
        change(2.1, "rtsw1", "link ctsw2", UP),
        change(3, "rtsw1", "link ctsw2", UP.replace("4200", "1500")),
        change(4, "rtsw1", "link ctsw1", UP),
    ) == [
        (1, "rtsw1", "down", "ctsw2 down"),
        (2, "rtsw1", "up", "ctsw2 up"),
        (3, "rtsw1", "link", "ctsw2 mtu 1500 qdisc noqueue"),
        (4, "rtsw1", "link", "ctsw1 mtu 4200 qdisc noqueue"),
    ]


def test_routes_that_change_together_are_one_mark():
    one_way, two_ways = "via 169.254.0.1 dev ctsw1", "via 169.254.0.1 dev ctsw1, via 169.254.0.1 dev ctsw2"
    assert marks_of(
        change(1.0, "rtsw1", "route main unicast 10.77.2.0/31 metric 20 bgp", one_way),
        change(1.2, "rtsw1", "route main unicast 10.77.2.2/31 metric 20 bgp", one_way),
        change(1.4, "rtsw1", "route main unicast 10.77.2.4/31 metric 20 bgp", None),
        change(1.4, "rtsw1", "route main unicast 10.77.2.6/31 metric 20 bgp", None),
        change(1.45, "rtsw1", "route main unicast 10.77.2.8/31 metric 20 bgp", one_way),
        change(5.0, "rtsw1", "route main unicast 10.77.2.0/31 metric 20 bgp", two_ways),
    ) == [
        (1.0, "rtsw1", "routes", "3 routes → ctsw1"),
        (1.4, "rtsw1", "gone", "2 routes gone"),
        (5.0, "rtsw1", "routes", "route → ctsw1, ctsw2"),
    ]


def test_changes_before_the_start_are_known_but_not_shown():
    assert marks_of(change(-1, "rtsw1", "link ctsw2", DOWN), change(1, "rtsw1", "link ctsw2", UP)) == [
        (1, "rtsw1", "up", "ctsw2 up")
    ]


def test_telemetry_file_round_trip(tmp_path):
    telemetry, changes = tmp_path / "telemetry.parquet", tmp_path / "changes.parquet"
    telemetry_file.write(RECORDED, t0_ns=T0, telemetry=telemetry, changes=changes)

    assert telemetry_file.read(telemetry=telemetry, changes=changes) == RECORDED


def test_thinned_merges_short_steps_into_their_mean():
    """One second at 4 and three at 0 become 4 s at 1. A step of 5 s is long enough; the rest is its own step."""
    steps = tuple(
        Step(start_s=start, end_s=end, per_s=rate) for start, end, rate in ((0, 1, 4), (1, 4, 0), (4, 9, 2), (9, 10, 3))
    )

    assert [(one.start_s, one.end_s, one.per_s) for one in thinned(steps, 4)] == [(0, 4, 1), (4, 9, 2), (9, 10, 3)]
    assert thinned(steps, 0.5) == steps
    assert thinned((), 4) == ()


@pytest.mark.usefixtures("drawn_anew")
def test_report_of_ten_minutes_at_ten_samples_a_second_stays_small():
    run = changed(synthetic_run(), end_ns=T0 + 600 * S)
    samples = [
        sample(number / 10, node=f"host{n}", rxe0__rcvd_seq_err=number * number, rxe0__send_err=number // 2)
        for number in range(6000)
        for n in (1, 2, 3, 4)
    ]
    chart = counters_chart(run, series(samples, t0_ns=T0, end_ns=run.workload.end_ns), (), [])

    assert len(chart.wide) + len(chart.narrow) < 600_000


def test_telemetry_file_that_is_not_parquet_is_named(tmp_path):
    directory = finished(tmp_path, synthetic_run())
    directory.write_telemetry(RECORDED, t0_ns=T0)
    (directory.path / "telemetry.parquet").write_bytes(b"not a parquet file")

    with pytest.raises(UsageError, match=r"telemetry\.parquet: cannot be read"):
        report.render(directory.path)


@pytest.mark.usefixtures("drawn_anew")
def test_counters_chart_names_its_rows_and_marks():
    run = synthetic_run()
    inside = {"t0_ns": run.workload.t0_ns, "end_ns": run.workload.end_ns}
    chart = counters_chart(
        run,
        series(RECORDED.samples, **inside),
        event_marks(RECORDED.changes, **inside),
        [Band(start_s=9.4, end_s=10.5, number=1, colour="#d1495b")],
    )

    assert "host1:rxe0 NAKs received (rcvd_seq_err)" in chart.wide
    assert "host1:rxe0 NAKs received" in chart.narrow
    assert "ctsw1 down" in chart.wide
    assert counters_chart(run, (), (), []) is None


def test_report_shows_which_counters_moved_and_when(tmp_path):
    directory = finished(tmp_path, synthetic_run())
    directory.write_telemetry(RECORDED, t0_ns=T0)

    page = " ".join(report.render(directory.path).read_text(encoding="utf-8").split())

    assert "Growth per second of the error counters that moved, between two samples" in page
    assert "Nodes were sampled 0.1 times a second" in page
    assert "2 changes as text" in page
    assert "9.500 s" in page


def test_report_without_telemetry_reports_its_absence(tmp_path):
    page = report.render(finished(tmp_path, synthetic_run()).path).read_text(encoding="utf-8")

    assert "No telemetry was kept of this run" in page


def test_report_of_a_quiet_run_shows_that_no_counter_moved(tmp_path):
    directory = finished(tmp_path, synthetic_run())
    quiet = dataclasses.replace(RECORDED, samples=(sample(1, be0__rx_bytes=5),), changes=())
    directory.write_telemetry(quiet, t0_ns=T0)

    page = " ".join(report.render(directory.path).read_text(encoding="utf-8").split())

    assert "No error counter moved, and no link and no route changed." in page
