"""Recovery in phases, out of marks that a run leaves."""

import msgspec
import pytest
from synthetic_run import fired_between, lost_at, synthetic_run

from harness.analysis.observe import observe
from harness.analysis.phases import NAMES
from harness.experiment.experiment_file import decode
from harness.experiment.metrics import METRICS
from harness.record.measurements import PacketSummary, RebuildMark
from testbed.errors import ConfigError

MS = 1_000_000


@pytest.fixture(scope="module")
def run():
    return synthetic_run()


@pytest.fixture(scope="module")
def fired(run):
    """First firings by fault, as the judge's own impacts have them."""
    return {fault_id: impact.fired_ns for fault_id, impact in observe(run).impacts.items()}


def lengths(run, fault_id):
    return {one.name: one.length_ns for one in observe(run).phases[fault_id]}


def test_a_fault_that_killed_nothing_has_no_error_and_no_rebuild(run):
    """0, not missing: it is known that no queue pair died. Who noticed is not known without packets."""
    found = lengths(run, "uplink")
    assert (found["qp_error"], found["rebuild"], found["first_data"]) == (0, 0, 0)
    assert not {"detect", "retransmit"} & set(found)
    assert found["hold"] == observe(run).impacts["uplink"].recovery_ns


def test_a_dead_queue_pair_has_all_its_phases(run, fired):
    """Error, connected anew, first data, hold: one after the other, and together as long as the recovery."""
    at = fired["uplink"]
    impact = observe(run).impacts["uplink"]
    mark = RebuildMark(error_ns=at + 100 * MS, rebuilt_ns=at + 300 * MS, recovered_ns=at + 320 * MS)
    hurt = msgspec.structs.replace(run, qps_lost=(lost_at(at + 100 * MS),), rebuild_marks=(mark,))
    found = lengths(hurt, "uplink")
    assert found["detect"] == found["qp_error"] == 100 * MS
    assert (found["rebuild"], found["first_data"]) == (200 * MS, 20 * MS)
    assert sum(found[name] for name in ("qp_error", "rebuild", "first_data", "hold")) == impact.recovery_ns


def test_packets_show_who_noticed_and_when_it_was_sent_again(run, fired):
    """A NAK 5 ms after the firing, the packet 2 ms later; an earlier going back is not this fault's."""
    at = fired["loss"]
    backs = ((at - 50 * MS, at - 40 * MS), (at + 5 * MS, at + 7 * MS), (at + 9 * MS, at + 90 * MS))
    seen = msgspec.structs.replace(run, packets=PacketSummary(frames=9, missed=0, broken=0, goings_back=backs))
    found = lengths(seen, "loss")
    assert (found["detect"], found["retransmit"]) == (5 * MS, 2 * MS)
    assert observe(seen).metrics["recovery.detect"].value == pytest.approx(0.005)


def test_a_rebuild_that_never_ended_has_no_length(run, fired):
    """Missing, not 0."""
    at = fired["uplink"]
    mark = RebuildMark(error_ns=at + MS, rebuilt_ns=None, recovered_ns=None)
    found = lengths(msgspec.structs.replace(run, qps_lost=(lost_at(at + MS),), rebuild_marks=(mark,)), "uplink")
    assert not {"rebuild", "first_data"} & set(found)


def test_a_mark_belongs_to_one_fault(run, fired):
    """An error under the second fault is not the first one's."""
    hurt = msgspec.structs.replace(run, qps_lost=(lost_at(fired["loss"] + MS),))
    assert lengths(hurt, "uplink")["qp_error"] == 0
    assert lengths(hurt, "loss")["qp_error"] == MS


def with_backs(run, *backs):
    return msgspec.structs.replace(run, packets=PacketSummary(frames=9, missed=0, broken=0, goings_back=backs))


def test_a_nak_before_the_fault_was_seen_to_fire_is_its_own(run, fired):
    """The hop's counter is looked at every 20 ms; a NAK needs three. Without knowing, it would be nobody's."""
    at = fired["loss"]
    backs = ((at - 3 * MS, at + 4 * MS), (at + 80 * MS, at + 90 * MS))
    assert lengths(with_backs(run, *backs), "loss")["detect"] == 80 * MS

    seen = fired_between(with_backs(run, *backs), "loss", 20 * MS, 2 * MS)

    one = observe(seen).metrics["recovery.detect"]
    assert (one.value, one.interval.low) == (0, 0)
    assert one.interval.high == pytest.approx((20 * MS + run.clock_error_ns) / 1e9)
    assert lengths(seen, "loss")["retransmit"] == 7 * MS
    assert observe(seen).metrics["recovery.retransmit"].interval is None


def test_what_begins_with_a_firing_is_as_exact_as_that_is_known(run, fired):
    """20 ms earlier and 5 later than it was seen: so much longer, and shorter, may all of it have taken."""
    at = fired["uplink"]
    mark = RebuildMark(error_ns=at + 100 * MS, rebuilt_ns=at + 300 * MS, recovered_ns=at + 320 * MS)
    hurt = msgspec.structs.replace(run, qps_lost=(lost_at(at + 100 * MS),), rebuild_marks=(mark,))
    found = observe(fired_between(hurt, "uplink", 20 * MS, 5 * MS)).metrics
    clock = run.clock_error_ns / 1e9

    def span(name):
        one = found[name]
        return (one.value - one.interval.low, one.interval.high - one.value)

    assert span("recovery.qp_error") == pytest.approx((0.005 + clock, 0.020 + clock))
    assert span("recovery.rebuild") == pytest.approx((clock, clock))
    assert span("recovery.uplink") == pytest.approx((0.105 + clock, 0.120 + clock))
    before = observe(hurt).metrics["recovery.uplink"]
    assert (before.value - before.interval.low, before.interval.high - before.value) == pytest.approx(
        (0.1 + clock, 0.1 + clock)
    )


def test_nothing_is_exactly_nothing(run):
    """No queue pair died: that is known, and has no interval that would leave a bound of 0 open."""
    metrics = observe(fired_between(run, "uplink", 20 * MS, 5 * MS)).metrics
    for name in ("qp_error", "rebuild", "first_data"):
        assert (metrics[f"recovery.{name}"].value, metrics[f"recovery.{name}"].interval) == (0, None)


def test_a_phase_that_did_not_end_for_one_fault_has_no_worst(run, fired):
    """That of the others would be told as if it were all of them."""
    good = RebuildMark(error_ns=fired["loss"] + MS, rebuilt_ns=fired["loss"] + 2 * MS, recovered_ns=None)
    lost = msgspec.structs.replace(run, qps_lost=(lost_at(fired["loss"] + MS),), rebuild_marks=(good,))
    metrics = observe(lost).metrics
    assert metrics["recovery.rebuild"].value == pytest.approx(0.001)
    assert (metrics["recovery.first_data"].value, metrics["recovery.first_data"].detail) == (
        None,
        "loss: it had no end in this run",
    )


def test_every_phase_is_a_metric(run):
    """In the table, about faults, with a value or a reason."""
    metrics = observe(run).metrics
    for name in NAMES:
        assert METRICS[f"recovery.{name}"].about_faults
        one = metrics[f"recovery.{name}"]
        assert one.value is not None or one.detail


@pytest.mark.parametrize("name", ["total", "hold"])
def test_a_fault_cannot_have_the_name_of_a_phase(name):
    """`recovery.hold` would mean two things."""
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
