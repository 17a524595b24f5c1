"""Switch, host and GPU kinds on a real lab, in sequence, during one flow between racks and a busy GPU."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest
from faults import case, work
from planned_faults import with_mechanism

from faultbed.inject.fault_plan import plan
from faultbed.inject.injector import Injector
from faultbed.inject.journal import Journal
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.testbed.observe import counters
from faultbed.traffic.engine.task_specs import QpParams
from faultbed.traffic.flows import flow_run
from faultbed.traffic.flows.flow_run import FlowSpec

pytestmark = [pytest.mark.soft, pytest.mark.needs("hosts >= 4", "uplinks >= 2")]

CASES = (
    ("switch.bgp-kill", "rtsw1", 1.5, {}),
    ("switch.bgp-reset", "ctsw1", 1.0, {}),
    ("switch.freeze", "ctsw1", 5.0, {}),
    ("switch.withdraw", "rtsw2", 1.5, {}),
    ("switch.hash-policy", "rtsw1", 2.0, {}),
    ("link.mtu", "host3:rxe0", 1.5, {}),
    ("link.down", "rtsw1:ctsw1", 1.0, {}),
    # Longer than two ACK timeouts of the flow (timeout 18: 1.07 s).
    ("host.freeze", "host3", 2.5, {}),
    ("host.cpu-steal", "host3", 2.0, {"share": 0.5}),
    ("host.memory-pressure", "host4", 5.0, {}),
    ("host.clock-step", "host4", 2.0, {"step": "60s"}),
    ("host.disk-full", "host4", 2.0, {}),
    ("gpu.thermal", "host1:gpu0", 2.0, {"period": "2s"}),
    ("gpu.noisy-neighbour", "host1:gpu0", 2.0, {"neighbours": 2}),
    # Windows long enough for a second reading that is late on a starved machine.
    ("host.rank-hang", "host3", 15.0, {}),
    ("packet.forge", "host1:rxe0", 1.5, {"what": "nak"}),
    ("congestion.background", "host3:rxe0", 1.5, {"rate": "5Mb/s"}),
    ("congestion.incast", "host3:rxe0", 1.5, {"rate": "20Mb/s"}),
    ("congestion.shallow-queue", "host3:rxe0", 1.5, {"packets": 3, "rate": "5Mb/s"}),
    ("congestion.hash-collision", "rtsw1:ctsw1", 2.0, {}),
    # The sending end: the receiver's CPU is not involved in writes.
    ("congestion.slow-receiver", "host1", 15.0, {}),
    ("switch.drain", "ctsw1", 2.0, {}),
    ("switch.reboot", "ctsw1", 2.0, {}),
    ("rnic.reset", "host3:rxe0", 1.5, {}),
    ("rnic.remove", "host2:rxe1", 15.0, {}),
    ("gpu.lost", "host2:gpu0", 15.0, {}),
    ("gpu.xid", "host2:gpu0", 2.0, {"xid": 63, "period": "0.5s", "count": 3}),
    # Last, because it ends only when the host has booted.
    ("host.reboot", "host2", 2.0, {}),
)

LONGEST_S = 5.0
"""A fault is cleared after that long, whatever its window."""


@pytest.fixture
def busy(lab):
    """Run a light flow between racks, whose queue pairs survive silence, and a busy GPU. SSH must stay responsive."""
    one, _, three, _ = lab.topology.hosts[:4]
    running = flow_run.start(
        lab,
        FlowSpec(
            src=f"{one.name}:{one.rnics[0].name}", dst=f"{three.name}:{three.rnics[0].name}", message_bytes=16384,
            qps=2, depth=2, duration_s=900.0, op_deadline_s=90.0, peer_deadline_s=90.0, stall_deadline_s=120.0,
            qp=QpParams(timeout=18, retry_cnt=6),
        ),
    )  # fmt: skip
    with work(lab, "throttle"):
        yield running
    if not running.is_over:
        running.abort("the test is over")
    running.wait(60.0)


@pytest.mark.slow
def test_every_other_kind_is_proved(lab, tmp_path, busy):
    """Each kind is armed, fires with a witness and is cleared; doubts are listed by kind."""
    actual = {}
    with Journal(tmp_path / "j") as journal, Injector(lab, journal, until_cleared=True) as injector:
        for index, (kind, target, for_s, params) in enumerate(CASES):
            assert not busy.is_over, f"the flow has ended before {kind}"
            spec = FaultSpec(kind=kind, target=target, for_s=for_s, params=params)
            prepared = injector.prepare(plan(spec, lab.topology, lab_kind="soft", index=index))
            armed = prepared.arm()
            threading.Event().wait(min(for_s, LONGEST_S))
            receipt = prepared.clear()
            print(kind, receipt.fired.count, receipt.fired.witness, armed.readback, receipt.cleared.readback)
            actual[kind] = [*receipt.doubts, *([] if receipt.cleared.ok else [str(receipt.cleared.error)])]
    assert {kind: doubts for kind, doubts in actual.items() if doubts} == {}


ROUTED = [("switch.drain", "ctsw1"), ("congestion.hash-collision", "rtsw1:ctsw1")]


@pytest.mark.parametrize("mutation", [None, pytest.param("lie", marks=pytest.mark.slow)])
def test_routing_fault_is_proved_by_routes_alone(lab, tmp_path, busy, mutation):
    """ECMP may use the other uplink without any drain or collision, so traffic alone must not prove the fault."""
    proved = {}
    with Journal(tmp_path / "j") as journal, Injector(lab, journal, until_cleared=True, mutate=mutation) as injector:
        for index, (kind, target) in enumerate(ROUTED):
            spec = FaultSpec(kind=kind, target=target, for_s=3.0)
            prepared = injector.prepare(plan(spec, lab.topology, lab_kind="soft", index=index))
            prepared.arm()
            threading.Event().wait(spec.for_s)
            receipt = prepared.clear()
            print(kind, receipt.fired.witness, receipt.doubts)
            assert receipt.cleared.ok
            proved[kind] = receipt.proved
    assert not busy.is_over
    assert proved == dict.fromkeys(proved, mutation is None)


def test_host_sends_again_after_path_mtu_is_restored(lab, tmp_path):
    """A path MTU learnt from the switch used to outlive the fault: rxe could not send for ten minutes (send_err)."""
    one, _, three, _ = lab.topology.hosts[:4]
    rnic = one.rnics[0].name
    spec = FlowSpec(
        src=f"{one.name}:{rnic}", dst=f"{three.name}:{three.rnics[0].name}", message_bytes=16384, qps=2, depth=2,
        duration_s=300.0, op_deadline_s=60.0, peer_deadline_s=60.0, qp=QpParams(timeout=17, retry_cnt=6),
    )  # fmt: skip
    with (
        flow_run.start(lab, spec) as running,
        Journal(tmp_path / "j") as journal,
        Injector(lab, journal, until_cleared=True) as injector,
    ):
        fault = FaultSpec(kind="link.mtu", target=spec.dst, for_s=1.5)
        prepared = injector.prepare(plan(fault, lab.topology, lab_kind="soft"))
        assert prepared.arm().ok
        threading.Event().wait(1.5)
        receipt = prepared.clear()
        assert receipt.proved, receipt.unproven
        before = counters.read(lab, [one.name])[one.name]
        threading.Event().wait(3.0)
        after = counters.read(lab, [one.name])[one.name]
        assert after[f"{rnic}.send_err"] == before[f"{rnic}.send_err"]
        assert after[f"{rnic}.sent_pkts"] > before[f"{rnic}.sent_pkts"]
        running.abort("the test is over")


@pytest.mark.slow
def test_killed_rank_is_proved_by_its_host_watcher(lab, tmp_path):
    """The watcher of the rank's host no longer sees its engine."""
    one, _, three, _ = lab.topology.hosts[:4]
    running = flow_run.start(
        lab,
        FlowSpec(
            src=f"{one.name}:{one.rnics[0].name}", dst=f"{three.name}:{three.rnics[0].name}", message_bytes=16384,
            qps=2, depth=2, duration_s=600.0, qp=QpParams(timeout=14, retry_cnt=6),
        ),
    )  # fmt: skip
    threading.Event().wait(2.0)
    with Journal(tmp_path / "j") as journal, Injector(lab, journal, until_cleared=True) as injector:
        spec = FaultSpec(kind="host.rank-kill", target="host3", for_s=3.0)
        prepared = injector.prepare(plan(spec, lab.topology, lab_kind="soft"))
        assert prepared.arm().ok
        threading.Event().wait(3.0)
        receipt = prepared.clear()
    if not running.is_over:
        running.abort("the test is over")
    assert running.wait(60.0).outcome == "failed"
    assert receipt.proved, receipt.unproven


@pytest.mark.slow
def test_job_on_rebooting_host_fails_and_host_returns(lab, tmp_path):
    """The job reports its lost peer and the reboot is proved. The `lab` fixture checks that the lab is restored."""
    fault = case(lab, "reboot")
    one, gone = lab.topology.hosts[0], lab.topology.host_by_name[fault.planned.place.node]
    spec = FlowSpec(
        src=f"{one.name}:{one.rnics[0].name}", dst=f"{gone.name}:{gone.rnics[0].name}", message_bytes=16384,
        qps=2, depth=2, duration_s=600.0, peer_deadline_s=20.0, qp=QpParams(timeout=14, retry_cnt=6),
    )  # fmt: skip
    with (
        flow_run.start(lab, spec) as running,
        Journal(tmp_path / "j") as journal,
        Injector(lab, journal, until_cleared=True) as injector,
    ):
        prepared = injector.prepare(fault.planned)
        begin = time.monotonic()
        armed = prepared.arm()
        threading.Event().wait(2.0)
        receipt = prepared.clear()
        print(f"{gone.name} was back {time.monotonic() - begin:.1f} s after its reset", armed.readback)
        result = running.wait(90.0)
    assert receipt.proved, receipt.unproven
    assert receipt.fired.witness == f"{gone.name}/boots"
    assert receipt.cleared.ok, receipt.cleared.error
    assert result.outcome == "failed"
    assert gone.name in result.where, result.where
    # A flow on a host that has come back works like any other.
    with flow_run.start(lab, dataclasses.replace(spec, duration_s=2.0)) as again:
        assert again.wait(60.0).outcome == "completed"


@pytest.mark.slow
def test_fault_without_action_is_never_proved(lab, tmp_path, busy):
    """Every kind runs with its action replaced by a no-op."""
    believed = []
    with Journal(tmp_path / "j") as journal, Injector(lab, journal, until_cleared=True, mutate="noop") as injector:
        for index, (kind, target, for_s, params) in enumerate(CASES):
            spec = FaultSpec(kind=kind, target=target, for_s=for_s, params=params)
            prepared = injector.prepare(plan(spec, lab.topology, lab_kind="soft", index=index))
            prepared.arm()
            threading.Event().wait(min(for_s, LONGEST_S))
            receipt = prepared.clear()
            assert receipt.cleared.ok, receipt.cleared.error
            believed += [kind] if receipt.proved else []
    assert not busy.is_over
    assert believed == []


@pytest.mark.slow
def test_fault_at_another_target_is_never_proved(lab, tmp_path, busy):
    """Every kind acts on another target of the same type, if there is one; the planned one is not proved."""
    believed = []
    others = {"host1:gpu0": "host2:gpu0", "host3": "host2", "host3:rxe0": "host2:rxe1", "rtsw1:ctsw1": "rtsw2:ctsw2"}
    others |= {
        "rtsw1": "rtsw2",
        "rtsw2": "rtsw1",
        "ctsw1": "ctsw2",
        "host1": "host3",
        "host2": "host4",
        "host1:rxe0": "host3:rxe0",
        "host4": "host2",
    }
    others |= {"host2:rxe1": "host4:rxe1", "host2:gpu0": "host4:gpu0"}
    with Journal(tmp_path / "j") as journal, Injector(lab, journal, until_cleared=True) as injector:
        for index, (kind, target, for_s, params) in enumerate(CASES):
            if kind == "host.rank-hang":
                continue  # the other host has no rank, so the holder refuses
            here, there = (
                plan(
                    FaultSpec(kind=kind, target=name, for_s=for_s, params=params),
                    lab.topology,
                    lab_kind="soft",
                    index=index,
                )
                for name in (target, others[target])
            )
            prepared = injector.prepare(with_mechanism(here, request=there.request, place=there.place))
            prepared.arm()
            threading.Event().wait(min(for_s, LONGEST_S))
            receipt = prepared.clear()
            assert receipt.cleared.ok or receipt.cleared.restored, receipt.cleared.error
            believed += [kind] if receipt.proved else []
    assert not busy.is_over
    assert believed == []
