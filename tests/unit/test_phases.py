"""Recovery in phases, out of marks that a run leaves."""

import msgspec
import pytest
from synthetic_run import lost_at, synthetic_run

from harness.analysis.observe import observe
from harness.analysis.phases import NAMES, phases
from harness.experiment.file import decode
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
    found = phases(run, observe(run).impacts)[fault_id]
    return {one.name: one.length_ns for one in found}


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
