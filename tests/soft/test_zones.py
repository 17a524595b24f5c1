"""A lab with zones and rates: goodput equals the taper, a lost spine causes no detour through a rack, shapers are
checked.

Needs `pytest -m "" --lab soft-zones tests/soft/test_zones.py`; on a lab with one zone all of it is skipped.
"""

from __future__ import annotations

import ipaddress

import pytest
from waiting import until

from faultbed.harness.experiment import experiment_file
from faultbed.harness.experiment.fabric_file import Fabric
from faultbed.harness.run import bisection_run, loop
from faultbed.harness.run.bisection_run import BisectionSpec
from faultbed.harness.run.prepare.preflight import preflight
from faultbed.harness.verdict import Verdict
from faultbed.testbed.backends.soft import lifecycle
from faultbed.testbed.observe import fingerprint
from faultbed.traffic.engine.task_specs import QpParams
from faultbed.traffic.flows import flow_run
from faultbed.traffic.flows.flow_run import FlowSpec
from faultbed.traffic.flows.matrix import pairs_in

pytestmark = [pytest.mark.soft, pytest.mark.slow, pytest.mark.needs("zones >= 2", "uplinks >= 2")]

PATIENT = QpParams(timeout=20)
"""An ACK timeout of 4.3 s: what waits in the queue of a slow link is not lost."""

BYTES = """
name = "bytes"
[workload]
collective = "all-to-all"
size = "256KiB"
qps_per_peer = 4
iterations = 40
qp = { timeout = 20 }
[[expect]]
metric = "link_bytes.error"
max = 0.03
[[expect]]
metric = "wrong_elements"
max = 0
"""


@pytest.fixture
def put_back(lab):
    """Reset the lab after the test, because these tests change it by hand."""
    yield
    lifecycle.reset(lab.inventory_model, lambda _: None, lab=lab)


def goodput_bps(lab, pattern):
    """Return the total goodput of a pattern's flows: enough queue pairs for every link, few enough for no timeout."""
    specs = [
        FlowSpec(src=src, dst=dst, message_bytes=16384, qps=16, depth=1, duration_s=20.0, qp=PATIENT)
        for src, dst in pairs_in(lab.topology, pattern)
    ]
    result = flow_run.start_all(lab, specs).wait(90.0)
    assert result.outcome == "completed", result.where
    return result.goodput_bps


def test_goodput_across_zones_is_goodput_within_zones_divided_by_the_taper(lab):
    shapes = lab.inventory_model.shapes
    spine = shapes["ctsw1"]
    roles = {switch.name: switch.role for switch in lab.topology.switches}
    down = sum(shape.rate_bps for port, shape in spine.items() if roles[port] == "rtsw")
    up = sum(shape.rate_bps for port, shape in spine.items() if roles[port] == "atsw")
    inside, across = goodput_bps(lab, "in-zone"), goodput_bps(lab, "across-zones")
    print(
        f"in zones {inside / 1e6:.1f} Mb/s, across {across / 1e6:.1f}: {across / inside:.3f}; 1/taper {up / down:.3f}"
    )
    assert across / inside == pytest.approx(up / down, rel=0.1)


def test_bytes_of_every_link_are_those_of_schedule_placement_and_ecmp(lab, tmp_path):
    experiment = experiment_file.decode(BYTES.encode(), source="bytes.toml")
    resolved = loop.resolve(experiment, BYTES.encode(), lab.inventory_model)
    finished = loop.execute(resolved, lab.inventory_model, out=tmp_path, progress=print)
    lab.forget_connections()
    check = next(check for check in finished.verdict.checks if check.name == "link_bytes.error")
    print(check.observed, check.detail)
    assert finished.verdict.verdict is Verdict.PASS, finished.verdict.checks


def test_permutation_in_zones_without_a_common_link_has_nine_tenths_of_full_bisection(lab):
    """With `pinned`, the RNICs of a rack are reached over an uplink each, so that no two flows share a link."""
    spec = BisectionSpec(
        tiers=("zone",), permutations=9, seed=1, seconds=20.0, qps=16, message_bytes=32768,
        fabric=Fabric(routing="pinned"),
    )  # fmt: skip
    result = bisection_run.measure(lab, spec, print)
    print(result.tiers[0].value, result.tiers[0].interval, result.routing)
    assert result.lab_state == "CLEAN"
    assert result.routing.unproven == ()
    assert result.tiers[0].value >= 0.9


def test_spine_does_not_reach_a_rack_through_another_spine(lab, put_back):
    """The spine withdraws the rack's route, so all other switches avoid it, and no session flaps."""
    network = ipaddress.IPv4Interface(lab.topology.links_of("rtsw1")[0].a.address).network

    def next_hops(switch):
        reported = lab.node(switch).run(["ip", "route", "show", str(network)]).stdout
        return {word for word in reported.split() if word in lab.topology.switch_by_name}

    assert next_hops("ctsw1") == {"rtsw1"}
    assert next_hops("rtsw2") == {"ctsw1", "ctsw2"}
    lab.node("rtsw1").run(["ip", "link", "set", "ctsw1", "down"])
    until(lambda: next_hops("rtsw2") == {"ctsw2"}, within_s=30.0)
    until(lambda: next_hops("atsw1") == {"ctsw2"}, within_s=30.0)
    assert next_hops("ctsw1") == set()
    assert next_hops("rtsw3") == {"ctsw3", "ctsw4"}


def test_shaper_deleted_or_changed_by_hand_is_reported(lab, put_back):
    before = fingerprint.capture(lab)
    lab.node("ctsw1").run(["tc", "qdisc", "del", "dev", "atsw1", "root"])
    lab.node("rtsw2").run(["tc", "qdisc", "change", "dev", "ctsw2", "parent", "1:2", "netem", "rate", "99mbit"])
    lab.node("atsw2").run(["tc", "filter", "del", "dev", "ctsw1", "parent", "1:"])
    lines = fingerprint.diff(before, fingerprint.capture(lab))
    assert any("ctsw1: qdisc atsw1" in line for line in lines)
    assert any("rtsw2: qdisc ctsw2" in line for line in lines)
    assert any("atsw2: filter ctsw1" in line for line in lines)
    result = preflight(lab, lambda _: None, with_burnin=False)
    assert {(finding.check, finding.where) for finding in result.findings} == {
        ("queue", "ctsw1:atsw1"),
        ("queue", "rtsw2:ctsw2"),
    }


@pytest.mark.parametrize(
    ("kind", "target", "params"),
    [
        ("link.rate", "ctsw1:atsw1", {"rate": "1Mb/s"}),
        ("packet.delay", "rtsw1:host1:rxe0", {"delay": "20ms"}),
        ("congestion.shallow-queue", "host1:rxe0", {"packets": 8, "rate": "2Mb/s"}),
        ("packet.drop", "rtsw1:ctsw1", {"share": 0.1}),
    ],
)
def test_fault_on_a_shaped_port_keeps_its_shaper(lab, inject, kind, target, params):
    before = fingerprint.capture(lab)
    fault = inject(kind, target, prove=False, **params)
    assert fault.arm().ok
    during = fingerprint.diff(before, fingerprint.capture(lab))
    assert not [line for line in during if "parent 1:2" in line or "root was prio" in line]
    fault.clear()
    assert fingerprint.settle(lab, before) == []
