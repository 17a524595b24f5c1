"""Telemetry of a lab whose watchers are programs on this machine, and its files."""

from __future__ import annotations

import time

import pyarrow.parquet as pq
import pytest
from local_watcher import Here
from waiting import until

from faultbed.harness.record import telemetry_file
from faultbed.testbed.errors import CommandFailed
from faultbed.testbed.observe import telemetry
from faultbed.testbed.observe.clock import ClockOffset
from faultbed.testbed.observe.watcher import WatcherGone


@pytest.fixture
def lab():
    one = Here()
    yield one
    for channel in one.channels:
        channel.close()


def test_telemetry_samples_have_times_and_cost(lab, tmp_path):
    """Every sample lies within the time that was followed, and the files can be read by any Parquet reader."""
    began_ns = time.monotonic_ns()
    with telemetry.start(lab, every_ms=10) as following:
        until(lambda: following._data["here"].count >= 2)  # no listener is called for samples without changes
        recorded = following.stop()
    (machine,) = recorded.machines
    assert machine.samples >= 2
    assert machine.lost is None
    # At most the promised share of a CPU, plus the cost of one sample.
    assert machine.busy_ns < (time.monotonic_ns() - began_ns) / 10
    assert recorded.samples[0].at_ns >= began_ns - machine.clock_error_ns
    telemetry_file.write(
        recorded, t0_ns=began_ns, telemetry=tmp_path / "telemetry.parquet", changes=tmp_path / "changes.parquet"
    )
    table = pq.read_table(tmp_path / "telemetry.parquet")
    assert table.schema.names == telemetry_file.TELEMETRY_SCHEMA.names
    assert "lo.rx_bytes" in table.column("name").to_pylist()
    assert pq.read_table(tmp_path / "changes.parquet").num_rows == len(recorded.changes)


def test_telemetry_clock_error_includes_movement_while_following(lab):
    with telemetry.start(lab, every_ms=50) as following:
        watcher = lab.watcher("here")
        watcher.offset = ClockOffset(offset_ns=watcher.offset.offset_ns + 10**9, error_ns=watcher.offset.error_ns)
        (machine,) = following.stop().machines
    assert 10**9 <= machine.clock_error_ns < 11 * 10**8
    with telemetry.start(lab, every_ms=50) as following:
        (machine,) = following.stop().machines
    assert machine.clock_error_ns < 10**8, "it is measured again each time"


def test_telemetry_names_a_watcher_that_died(lab):
    """The silence of a dead watcher must not look like a lack of changes."""
    with telemetry.start(lab) as following:
        lab.channels[0].process.kill()
        lab.channels[0].process.wait()
        recorded = following.stop()
    assert "ended" in recorded.machines[0].lost or "gone" in recorded.machines[0].lost


def test_watcher_late_answer_is_not_taken_for_the_next_one(lab):
    """A request that timed out leaves an answer behind; the next request gets its own."""
    watcher = lab.watcher("here")
    with pytest.raises(CommandFailed, match="no answer to `state` in 0 s"):
        watcher.request({"do": "state", "nodes": {"here": None}}, timeout_s=0.0)
    assert "lo.mtu" in watcher.request({"do": "counters", "nodes": {"here": None}})["nodes"]["here"]


def test_watcher_that_is_dead_raises_watcher_gone(lab):
    """The lab can then start another one."""
    watcher = lab.watcher("here")
    lab.channels[0].process.kill()
    with pytest.raises(WatcherGone):
        watcher.request({"do": "clock"}, timeout_s=10.0)


def test_lab_restarts_a_watcher_that_has_ended(lab):
    """A reboot of the machine, or a kill, must not blind the lab permanently."""
    fields = {"do": "counters", "nodes": {"here": None}}
    assert "lo.mtu" in lab.request("here", fields)["nodes"]["here"]
    lab.channels[0].process.kill()
    lab.channels[0].process.wait()
    assert "lo.mtu" in lab.request("here", fields)["nodes"]["here"]
    assert len(lab.channels) == 2
