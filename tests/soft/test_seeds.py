"""The seed of a fault decides which packets it drops, shown by captures on both sides of the hop on the soft lab.

Only one small message is in flight, so a lost packet is followed by its retransmission, and the order of packets at the
hop is the same in every run.
"""

import numpy as np
import pytest
from waiting import until

from faultbed.inject.fault_plan import plan
from faultbed.inject.injector import Injector
from faultbed.inject.journal import Journal
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.testbed.observe import packet_capture
from faultbed.testbed.packets.columns import decode
from faultbed.traffic.engine.engine_client import Engines
from faultbed.traffic.engine.task_specs import QpParams
from faultbed.traffic.flows import flow_run
from faultbed.traffic.flows.flow_run import FlowSpec

pytestmark = pytest.mark.soft

PATIENT = QpParams(timeout=17, retry_cnt=6)
"""An ACK timeout of 0.54 s: a virtual CPU that pauses for less sends nothing twice."""


def ends(lab):
    one, two = lab.topology.hosts[:2]
    return f"{one.name}:{one.rnics[0].name}", f"{two.name}:{two.rnics[0].name}"


def offered_and_lost(lab, params, seed, journal, *, messages, engines=None):
    """Run one flow through an armed fault; return (PSN, whether it was lost) of each packet in the order of the hop.

    The hop is the port towards the receiver. Packets that enter the sender's port are offered to it. A packet is lost
    if it does not leave the receiver's port before its PSN is sent again.
    """
    src, dst = ends(lab)
    planned = plan(
        FaultSpec(kind="packet.drop", target=dst, for_s=120.0, params=params, seed=seed), lab.topology, lab_kind="soft"
    )
    names = [packet_capture.port_named(lab.topology, end)[0] for end in (src, dst)]
    with Journal(journal) as written, Injector(lab, written) as injector, packet_capture.start(lab, names) as running:
        prepared = injector.prepare(planned)
        prepared.arm()
        spec = FlowSpec(src=src, dst=dst, message_bytes=512, depth=1, messages=messages, op_deadline_s=60.0, qp=PATIENT)
        sent = flow_run.start_all(lab, [spec], engines=engines)
        until(lambda: sent.is_over, within_s=110.0)
        assert sent.wait(60.0).outcome == "completed"
        receipt = prepared.clear()
        captured = running.stop()
    assert not receipt.doubts, "cleared as soon as the flow is over, it is proved in all but its time"
    assert receipt.cleared.ok
    assert all(proof.is_whole for proof in captured.proofs), captured.proofs
    packets = decode(captured.frames)
    at_src, at_dst = (captured.frames.interfaces.index(name) for name in names)
    requests = packets.take((packets.opcode < 0x0D) & (packets.dqpn == sent.connections[0].rqpn))
    came = requests.take((requests.port == at_src) & (requests.outbound == 0))
    left = requests.take((requests.port == at_dst) & (requests.outbound == 1))
    assert len(came) >= messages
    assert receipt.fired.count == len(came) - len(left)
    ends_ns = [*came.time_ns[1:], np.iinfo(np.int64).max]
    lost = []
    for psn, from_ns, to_ns in zip(came.psn, came.time_ns, ends_ns, strict=True):
        passed = (left.psn == psn) & (left.time_ns >= from_ns) & (left.time_ns < to_ns)
        lost.append((int(psn), not passed.any()))
    return planned, lost


def numbers_lost(lost):
    return [number for number, (_, is_lost) in enumerate(lost) if is_lost]


def test_packets_of_a_share_are_those_the_seed_selects(lab, tmp_path):
    """Equal seeds drop the same PSNs, those in the plan; another seed drops others.

    Either seed takes three of the flow's packets: each loss costs the flow an ACK timeout.
    """
    with Engines.start(lab, [end.partition(":")[0] for end in ends(lab)]) as engines:
        runs = [
            offered_and_lost(lab, {"share": 0.06}, seed, tmp_path / f"{n}", messages=52, engines=engines)
            for n, seed in enumerate((3, 3, 4))
        ]
    for planned, lost in runs:
        assert numbers_lost(lost) == [
            number for number in range(len(lost)) if planned.mechanism.selection.takes(number)
        ]
        assert len(numbers_lost(lost)) >= 3
    first, again, other = ([psn for psn, is_lost in lost if is_lost] for _, lost in runs)
    assert first == again
    assert numbers_lost(runs[2][1]) != numbers_lost(runs[0][1])
    assert first != other


@pytest.mark.slow
def test_packets_of_bursts_are_those_the_seed_selects(lab, tmp_path):
    """netem draws a Gilbert-Elliott channel from the seed: the same packets twice, and others with another seed."""
    params = {"share": 0.05, "burst": 3}
    runs = [
        numbers_lost(offered_and_lost(lab, params, seed, tmp_path / f"{n}", messages=250)[1])
        for n, seed in enumerate((5, 5, 6))
    ]
    assert runs[0] == runs[1] != runs[2]
    assert min(map(len, runs)) >= 2
