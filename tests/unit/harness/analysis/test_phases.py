"""Phases of recovery, from the events that a run recorded."""

import pytest
from synthetic_run import changed, fired_between, lost_at, synthetic_run

from faultbed.harness.analysis.observe import observe
from faultbed.harness.analysis.phases import NAMES
from faultbed.harness.experiment.experiment_file import decode
from faultbed.harness.experiment.metrics import METRICS
from faultbed.harness.record.evidence.workload_evidence import RebuildMark
from faultbed.testbed.errors import ConfigError

MS = 1_000_000


@pytest.fixture(scope="module")
def run():
    return synthetic_run()


@pytest.fixture(scope="module")
def fired(run):
    """Return the first firing of each fault, as in the judge's impacts."""
    return {fault_id: impact.fired_ns for fault_id, impact in observe(run).impacts.items()}


def lengths(run, fault_id, backs=()):
    return {one.name: one.length_ns for one in observe(run, goings_back=backs).phases[fault_id]}


def test_phases_without_dead_queue_pairs_have_zero_error_and_rebuild(run):
    """The values are 0, not missing: no queue pair died. Detection is unknown without packets."""
    phases = lengths(run, "uplink")
    assert (phases["qp_error"], phases["rebuild"], phases["first_data"]) == (0, 0, 0)
    assert not {"detect", "retransmit"} & set(phases)
    assert phases["hold"] == observe(run).impacts["uplink"].recovery_ns


def test_phases_of_a_dead_queue_pair_are_complete(run, fired):
    """Error, reconnection, first data and hold follow each other and add up to the recovery."""
    at = fired["uplink"]
    impact = observe(run).impacts["uplink"]
    mark = RebuildMark(error_ns=at + 100 * MS, rebuilt_ns=at + 300 * MS, recovered_ns=at + 320 * MS)
    hurt = changed(run, qps_lost=(lost_at(at + 100 * MS),), rebuild_marks=(mark,))
    phases = lengths(hurt, "uplink")
    assert phases["detect"] == phases["qp_error"] == 100 * MS
    assert (phases["rebuild"], phases["first_data"]) == (200 * MS, 20 * MS)
    assert sum(phases[name] for name in ("qp_error", "rebuild", "first_data", "hold")) == impact.recovery_ns


def test_phases_detect_and_retransmit_come_from_packets(run, fired):
    """A NAK comes 5 ms after the firing, the packet 2 ms later; an earlier go-back is not this fault's."""
    at = fired["loss"]
    backs = ((at - 50 * MS, at - 40 * MS), (at + 5 * MS, at + 7 * MS), (at + 9 * MS, at + 90 * MS))
    phases = lengths(run, "loss", backs)
    assert (phases["detect"], phases["retransmit"]) == (5 * MS, 2 * MS)
    assert observe(run, goings_back=backs).metrics["recovery.detect"].value == pytest.approx(0.005)


def test_phases_detail_names_the_faults_under_which_the_phase_was_not_seen(run, fired):
    """The worst fault is the worst of those that showed the phase, which the number alone does not say."""
    captured = observe(run, goings_back=[(fired["loss"] + 5 * MS, fired["loss"] + 7 * MS)])
    assert "; not seen under uplink" in captured.metrics["recovery.detect"].detail
    assert "not seen" not in captured.metrics["recovery.qp_error"].detail


def test_phases_rebuild_without_end_has_no_length(run, fired):
    """The length is missing, not 0."""
    at = fired["uplink"]
    mark = RebuildMark(error_ns=at + MS, rebuilt_ns=None, recovered_ns=None)
    phases = lengths(changed(run, qps_lost=(lost_at(at + MS),), rebuild_marks=(mark,)), "uplink")
    assert not {"rebuild", "first_data"} & set(phases)


def test_phases_assign_each_mark_to_one_fault(run, fired):
    """An error that occurs during the second fault belongs to the second fault only."""
    hurt = changed(run, qps_lost=(lost_at(fired["loss"] + MS),))
    assert lengths(hurt, "uplink")["qp_error"] == 0
    assert lengths(hurt, "loss")["qp_error"] == MS


def test_phases_assign_a_nak_before_the_observed_firing_to_its_fault(run, fired):
    """The hop's counter is read every 20 ms; a NAK takes three.

    Without the bounds of the firing, no fault would own it.
    """
    at = fired["loss"]
    backs = ((at - 3 * MS, at + 4 * MS), (at + 80 * MS, at + 90 * MS))
    assert lengths(run, "loss", backs)["detect"] == 80 * MS

    bounded = observe(fired_between(run, "loss", 20 * MS, 2 * MS), goings_back=backs)

    one = bounded.metrics["recovery.detect"]
    assert (one.value, one.interval.low) == (0, 0)
    assert one.interval.high == pytest.approx((20 * MS + run.workload.clock_error_ns) / 1e9)
    assert {one.name: one.length_ns for one in bounded.phases["loss"]}["retransmit"] == 7 * MS
    assert bounded.metrics["recovery.retransmit"].interval is None


def test_phases_interval_is_as_wide_as_the_uncertainty_of_the_firing(run, fired):
    """The fault fired up to 20 ms earlier or 5 ms later than observed, so the recovery is that much longer or
    shorter.
    """
    at = fired["uplink"]
    mark = RebuildMark(error_ns=at + 100 * MS, rebuilt_ns=at + 300 * MS, recovered_ns=at + 320 * MS)
    hurt = changed(run, qps_lost=(lost_at(at + 100 * MS),), rebuild_marks=(mark,))
    result = observe(fired_between(hurt, "uplink", 20 * MS, 5 * MS)).metrics
    clock = run.workload.clock_error_ns / 1e9

    def span(name):
        one = result[name]
        return (one.value - one.interval.low, one.interval.high - one.value)

    assert span("recovery.qp_error") == pytest.approx((0.005 + clock, 0.020 + clock))
    assert span("recovery.rebuild") == pytest.approx((clock, clock))
    assert span("recovery.uplink") == pytest.approx((0.105 + clock, 0.120 + clock))
    before = observe(hurt).metrics["recovery.uplink"]
    assert (before.value - before.interval.low, before.interval.high - before.value) == pytest.approx(
        (0.1 + clock, 0.1 + clock)
    )


def test_phases_zero_length_is_exact(run):
    """No queue pair died: the value is known and has no interval that would leave a bound of 0 undecided."""
    metrics = observe(fired_between(run, "uplink", 20 * MS, 5 * MS)).metrics
    for name in ("qp_error", "rebuild", "first_data"):
        assert (metrics[f"recovery.{name}"].value, metrics[f"recovery.{name}"].interval) == (0, None)


def test_phases_without_end_for_one_fault_have_no_worst_value(run, fired):
    """Otherwise the worst of the other faults would be reported as the worst of all."""
    good = RebuildMark(error_ns=fired["loss"] + MS, rebuilt_ns=fired["loss"] + 2 * MS, recovered_ns=None)
    lost = changed(run, qps_lost=(lost_at(fired["loss"] + MS),), rebuild_marks=(good,))
    metrics = observe(lost).metrics
    assert metrics["recovery.rebuild"].value == pytest.approx(0.001)
    assert (metrics["recovery.first_data"].value, metrics["recovery.first_data"].detail) == (
        None,
        "loss: the phase had no end in this run",
    )


def test_phases_are_all_metrics(run):
    """Each is in the metrics table, concerns faults, and has a value or a reason."""
    metrics = observe(run).metrics
    for name in NAMES:
        assert METRICS[f"recovery.{name}"].about_faults
        one = metrics[f"recovery.{name}"]
        assert one.value is not None or one.detail


@pytest.mark.parametrize("name", ["total", "hold"])
def test_phase_name_is_rejected_as_a_fault_id(name):
    """`recovery.hold` would be ambiguous."""
    content = f"""
name = "x"
[workload]
flow = "write"
src = "host1:rxe0"
dst = "host3:rxe0"
duration = "9s"
[[faults]]
id = "{name}"
kind = "link.flap"
target = "rtsw1:ctsw1"
at = "5s"
for = "1s"
"""
    with pytest.raises(ConfigError, match=f"recovery.{name} is a metric"):
        decode(content.encode(), source="x")
