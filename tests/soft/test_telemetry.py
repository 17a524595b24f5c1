"""Reports of the watchers while faults act on a lab."""

from __future__ import annotations

import time

import pytest
from waiting import until

from faultbed.testbed.observe import counters, telemetry

pytestmark = pytest.mark.soft

PATIENCE_S = 30.0


def test_telemetry_link_down_is_reported_by_both_switches_with_moved_routes(lab):
    """Both ends of the link report, then the routes change, in one clock. The CPU cost stays within its limit."""
    began_ns = time.monotonic_ns()
    heard = []

    def moved(word):
        return {one.node for one in list(heard) if one.subject.startswith(word)}

    with telemetry.start(lab, on_change=heard.append) as following:
        lab.node("rtsw1").run(["ip", "link", "set", "ctsw1", "down"])
        down_ns = time.monotonic_ns()
        until(lambda: {"rtsw1", "rtsw2"} <= moved("route "), within_s=PATIENCE_S)
        lab.node("rtsw1").run(["ip", "link", "set", "ctsw1", "up"])
        lab.node("host1").run(["sh", "-c", "echo '<3>faultbed: a test of the log' > /dev/kmsg"])
        until(lambda: "host1" in moved("kernel"), within_s=PATIENCE_S)
        # A busy emulated machine sends a sample every 4 s.
        until(lambda: time.monotonic_ns() - began_ns > 9e9, within_s=PATIENCE_S)
        recorded = following.stop()
    lost = [change for change in recorded.changes if change.subject == "link ctsw1" and change.node == "rtsw1"]
    error_ns = max(machine.clock_error_ns for machine in recorded.machines)
    assert "LOWER_UP" not in (lost[0].text or ""), lost[0]
    assert began_ns - error_ns <= lost[0].at_ns <= down_ns + error_ns
    later = {
        change.node
        for change in recorded.changes
        if change.subject.startswith("route ") and change.at_ns > lost[0].at_ns
    }
    assert {"rtsw1", "rtsw2"} <= later
    assert "3 faultbed: a test of the log" in [change.text for change in recorded.changes if change.node == "host1"]
    assert {sample.node for sample in recorded.samples} >= {"rtsw1", "host1"}
    for machine in recorded.machines:
        assert machine.lost is None
        assert machine.samples >= 2
        # The limit is 0.2 % of a CPU, or one sample in four seconds if that is more.
        assert machine.busy_ns < 0.05 * (time.monotonic_ns() - began_ns)


def test_rnic_counters_equal_those_in_sysfs(lab):
    """Netlink and sysfs are compared: no counter is missing, and without traffic all are equal."""
    host = lab.topology.hosts[0]
    script = "cd /sys/class/infiniband && grep -H . */ports/1/hw_counters/*"
    files = {}
    for line in lab.node(host.name).run(["sh", "-c", script]).stdout.splitlines():
        path, _, value = line.rpartition(":")
        device, *_, counter = path.split("/")
        if counter != "lifespan":  # maximum age of a reading, not a counter
            files[f"{device}.{counter}"] = int(value)
    reported = counters.read(lab, [host.name])[host.name]

    assert len(files) >= 10 * len(host.rnics)
    assert {name: reported.get(name) for name in files} == files
