"""Probes on every path of a real lab: no finding on a healthy fabric, and the correct place of a fault."""

from __future__ import annotations

import pytest

from faultbed.harness.experiment.experiment_file import decode
from faultbed.harness.record.rundir import open_run
from faultbed.harness.run import loop as run
from faultbed.traffic.engine.task_specs import QpParams
from faultbed.traffic.probes import prober
from faultbed.traffic.probes.prober import ProbeSpec

pytestmark = [pytest.mark.soft, pytest.mark.needs("hosts >= 4", "uplinks >= 2")]

SPEC = ProbeSpec(duration_s=6.0)


def test_probes_name_only_the_lossy_link(lab, inject, traffic):
    """First a healthy fabric; then one direction of one RNIC's link loses a fifth of all packets.

    No RNIC counts lost datagrams, so a flow provides the receipt's witness. It begins while the fault is on.
    """
    healthy = prober.run(lab, SPEC)
    assert healthy.suspects == (), healthy.suspects
    assert healthy.uncovered == ()
    fault = inject("packet.drop", "host3:rxe1", share=0.2, prove=False)
    fault.arm()
    hurt = prober.run(lab, SPEC)
    flow = traffic.flow("host1:rxe1", "host3:rxe1", message_bytes=1024, messages=100, qp=QpParams(timeout=16))
    assert flow.wait(60.0).outcome == "completed"
    (result,) = hurt.suspects
    assert "rtsw2 -> host3:rxe1" in result.names
    assert 0.1 < result.lost / result.sent < 0.3
    assert fault.clear().proved


@pytest.mark.slow
def test_probes_name_the_delaying_link_and_tell_network_from_hosts(lab, inject):
    """A healthy fabric has no suspect. Then one direction of an RNIC's link takes 200 ms more, unlike any process."""
    healthy = prober.run(lab, SPEC)
    assert healthy.suspects == (), healthy.suspects
    answered = sum(path.answered for path in healthy.paths)
    assert answered > 0.9 * sum(path.sent for path in healthy.paths)
    assert not any("host3:rxe1" in name for one in healthy.slow for name in one.names), healthy.slow
    fault = inject("packet.delay", "host3:rxe1", delay="200ms")
    fault.arm()
    hurt = prober.run(lab, SPEC)
    fault.clear()
    place = {"rtsw2 -> host3:rxe1", "host3:rxe1 -> rtsw2"}
    actual = [one for one in hurt.slow if place & set(one.names)]
    assert len(actual) == 1, hurt.slow
    assert actual[0] == hurt.slow[0]
    assert actual[0].times > 2
    over = [path for path in hurt.paths if "host3:rxe1" in path.places and path.responder is not None]
    others = [path for path in healthy.paths if "host3:rxe1" in path.places and path.responder is not None]
    assert min(one.network.median_ns for one in over) > 3 * max(one.network.min_ns for one in others)


BESIDE = """
name = "probed"
seed = 5

[workload]
collective = "all-reduce"
size = "64KiB"
duration = "22s"
compute_units = 10

[probe]

[[faults]]
kind = "packet.delay"
target = "host3:rxe0"
at = "10s"
for = "5s"
set = { delay = "200ms" }
"""


@pytest.mark.slow
def test_probes_during_a_job_locate_the_delaying_link_and_its_window(lab, tmp_path):
    """A delay moves no rxe counter that shows its place; only the probes do."""
    source = BESIDE.encode()
    resolved = run.resolve(decode(source, source="here.toml"), source, lab.inventory_model)
    done = run.execute(resolved, lab.inventory_model, out=tmp_path, progress=print)
    lab.forget_connections()
    assert done.verdict.lab_state == "CLEAN", done.verdict
    result = open_run(done.run_dir.path).read_probes()
    assert result.trouble is None
    assert result.unknown < 0.1 * len(result.trips)
    named = [one for one in done.verdict.attribution if one.name == "rtsw2:host3:rxe0"]
    assert named, done.verdict.attribution
    text = " ".join(named[0].evidence)
    assert "times what they take on similar paths" in text, text
    assert "Probes" in done.report.read_text(encoding="utf-8")
