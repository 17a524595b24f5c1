"""Traffic tests that need the software fabric or rxe's counters: loss, captures, late receives, MTU."""

import pytest

from faultbed.testbed.errors import LabError
from faultbed.testbed.observe import packet_capture
from faultbed.testbed.packets.columns import decode
from faultbed.traffic.engine.engine_client import Engines
from faultbed.traffic.engine.task_specs import QpParams
from faultbed.traffic.flows import flow_run
from faultbed.traffic.flows.flow_run import FlowSpec
from faultbed.traffic.probes.ecmp_entropy import sport_of

pytestmark = [pytest.mark.soft, pytest.mark.needs("hosts >= 4")]

PATIENT = QpParams(timeout=18)
"""An ACK timeout of 1.07 s: on a busy machine a virtual CPU that pauses is not a lost packet."""


def test_lossy_unreliable_flow_delivers_only_correct_bytes(lab, inject, subtests):
    """A tenth of all packets is lost. Fewer messages arrive than were sent, and every byte of them is checked.

    A concurrent RC flow proves the loss, because no RNIC counts packets that an unreliable QP misses.
    """
    hosts = [host.name for host in lab.topology.hosts[:4]]
    src, dst = f"{hosts[0]}:rxe0", f"{hosts[-1]}:rxe0"
    fields = {"src": src, "dst": dst, "qp": PATIENT, "message_bytes": 2048, "messages": 200, "qps": 2}
    with Engines.start(lab, hosts) as engines:
        fault = inject("packet.drop", dst, share=0.1)
        fault.arm()
        kinds = (("uc", "write"), ("uc", "send"), ("ud", "send"))
        more = {"rate_bps": 2e6, "depth": 16, "check": True}
        specs = [FlowSpec(**fields, transport=transport, verb=verb, **more) for transport, verb in kinds]
        for one in flow_run.start_all(lab, specs, engines=engines).wait(120.0).flows:
            with subtests.test(transport=one.spec.transport, verb=one.spec.verb):
                assert one.outcome == "completed", one.where
                assert one.sent == 200
                assert 120 < one.messages < 200
                assert (one.checked_bytes, one.wrong_bytes) == (one.messages * 2048, 0)
        reliable = flow_run.start_all(lab, [FlowSpec(**fields)], engines=engines).wait(120.0)
        assert reliable.outcome == "completed", reliable.where
        assert fault.clear().proved


def test_udp_source_ports_match_their_prediction(lab, subtests):
    """Ports follow both QPNs or a flow label (rc, uc) or the sender's QPN alone (ud); captured where they leave the
    host.
    """
    src, dst = (f"{lab.topology.hosts[place].name}:rxe0" for place in (0, -1))
    fields = {"src": src, "dst": dst, "verb": "send", "message_bytes": 512, "messages": 40, "qps": 4, "rate_bps": 1e6}
    kinds = (("rc", 0), ("rc", 77), ("uc", 0), ("uc", 78), ("ud", 0))
    specs = [FlowSpec(**fields, transport=name, qp=QpParams(timeout=18, flow_label=label)) for name, label in kinds]
    specs.append(FlowSpec(**fields, entropy=2, qp=QpParams(timeout=18)))
    with packet_capture.start(lab, [src]) as running:
        result = flow_run.start_all(lab, specs).wait(60.0)
        packets = decode(running.stop().frames)
    for one in result.connections:
        with subtests.test(transport=one.transport, flow_label=one.flow_label, lqpn=one.lqpn, rqpn=one.rqpn):
            own = (packets.src == packets.addresses.index(one.src_ip)) & (packets.dqpn == one.rqpn)
            assert set(packets.sport[own].tolist()) == {sport_of(one)}
    assert sorted(connection.flow_label for connection in result.flows[-1].connections) == [1, 1, 2, 2]
    assert len({sport_of(connection) for connection in result.flows[-1].connections}) == 2


def test_late_receives_cause_rnr_naks_at_the_sender(lab, subtests):
    """With rnr_retry 7 the sender waits and continues; with 0 it loses its queue pair."""
    hosts = [host.name for host in lab.topology.hosts[:4]]
    late = {"src": f"{hosts[0]}:rxe0", "dst": f"{hosts[-1]}:rxe0", "message_bytes": 4096, "messages": 40}
    patient = QpParams(timeout=18, min_rnr_timer=14, rnr_retry=7)
    with Engines.start(lab, hosts) as engines:

        def run(verb, late_ms, qp, **change):
            spec = FlowSpec(**{**late, **change}, verb=verb, late_receives_ms=late_ms, qp=qp)
            return flow_run.start_all(lab, [spec], engines=engines).wait(120.0).flows[0]

        for verb in ("send", "write-imm"):
            with subtests.test(verb=verb):
                one = run(verb, 30.0, patient)
                assert (one.outcome, one.messages) == ("completed", 40), one.where
                assert one.rnr.outcome == "waited"
                assert one.rnr.naks_counter == "rcvd_rnr_err"
                assert one.rnr.naks >= 39
                assert one.window.duration_ns >= 39 * 30e6 - max(one.clock_error_ns.values())
        with subtests.test(rnr_retry=0):
            one = run("send", 500.0, QpParams(timeout=18, min_rnr_timer=12, rnr_retry=0), messages=6)
            assert one.outcome == "recovered", one.where
            assert one.rnr.outcome == "exceeded"
            assert one.rnr.lost_qps >= 1
            assert {error.status for error in one.qp_errors} == {"RNR_RETRY_EXC_ERR"}


def test_path_mtu_above_the_ports_is_rejected_with_the_ports_name(lab):
    host, rnic = lab.topology.hosts[0], lab.topology.hosts[0].rnics[0]
    spec = FlowSpec(
        src=f"{host.name}:{rnic.name}", dst=f"{lab.topology.hosts[-1].name}:rxe0", duration_s=1.0, qp=PATIENT
    )
    before = lab.node(host.name).run(["cat", f"/sys/class/net/{rnic.netdev}/mtu"]).stdout.strip()
    lab.node(host.name).run(["ip", "link", "set", rnic.netdev, "mtu", "1500"])
    try:
        with pytest.raises(LabError, match=rf"path MTU of 4096 is more than the 1024 of {rnic.name}'s port"):
            flow_run.start(lab, spec)
    finally:
        lab.node(host.name).run(["ip", "link", "set", rnic.netdev, "mtu", before])


TWICE = """
import pyverbs.enums as replaced, pyverbs.libibverbs_enums as kept
names = [name for name in vars(replaced) if name.isupper() and not name.startswith("_")]
print(len(names), [name for name in names if getattr(kept, name, None) != getattr(replaced, name)])
"""


def test_pyverbs_has_the_same_constants_twice(lab):
    """The engine replaces one of the two modules by the other, which saves each host a quarter of its start."""
    count, _, differing = lab.node("host1").run(["python3", "-c", TWICE]).stdout.partition(" ")
    assert int(count) > 300
    assert differing.strip() == "[]"
