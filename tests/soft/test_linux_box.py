"""A Linux box with two NICs as a switch of a rack lab: a soft host that forwards between its two NICs.

Packets between host1 and host3 pass host2 in both directions: its first NIC faces host1, its second the rest of the
fabric. Faults are planned for a rack lab, and act on the machine itself, in no namespace. RNICs are rxe devices, with
rxe's names of counters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading

import pytest
from planned_faults import with_mechanism
from waiting import until

from faultbed.harness.packets.analysis import analyse
from faultbed.inject.fault_plan import plan
from faultbed.inject.injector import Injector
from faultbed.inject.journal import Journal
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.mechanisms.planned_fault import PlannedFault
from faultbed.inject.mechanisms.rack.rack_mechanism import COUNTERS
from faultbed.testbed.model.topology import Link, Port, Switch, Topology
from faultbed.testbed.observe import packet_capture
from faultbed.testbed.packets import capture_file
from faultbed.testbed.packets.pcapng_writer import write_pcapng
from faultbed.traffic.engine.task_specs import QpParams
from faultbed.traffic.flows import flow_run as flow
from faultbed.traffic.flows.flow_run import FlowSpec

pytestmark = [pytest.mark.soft, pytest.mark.slow, pytest.mark.needs("hosts >= 4")]

TTL_S = 10.0
CASES = (
    ("packet.drop", "host3:rxe0", {"qp": "any", "psn": "+50"}),
    ("packet.drop", "host3:rxe0", {"share": 0.05}),
    ("packet.drop", "host3:rxe0", {"share": 0.05, "burst": 3}),
    ("packet.mark", "host3:rxe0", {}),
    ("packet.corrupt", "host3:rxe0", {"every": 20}),
    ("packet.delay", "host1:rxe0", {"delay": "20ms", "direction": "from"}),
    ("packet.reorder", "host3:rxe0", {"share": 0.1}),
    ("packet.duplicate", "host3:rxe0", {}),
    ("packet.forge", "host3:rxe0", {"what": "replay"}),
    ("data.corrupt", "host3:rxe0", {"every": 50}),
    ("congestion.shallow-queue", "host3:rxe0", {"packets": 3, "rate": "5Mb/s"}),
    ("link.oneway", "host3:rxe0", {}),
    ("link.mtu", "host3:rxe0", {}),
)
ON_RXE = {new: old for old, new in COUNTERS.items()}
WINDOW_S = 1.5


def first(host):
    return host.rnics[0]


def gateway(link):
    return link.a.address.partition("/")[0]


@pytest.fixture
def box(lab):
    """Return the lab as a rack with host2 as the switch; remove the detour at the end."""
    one, two, three, _ = lab.topology.hosts[:4]
    near, far = two.rnics[:2]
    leaf, near_link, far_link = (
        lab.topology.rnic_link(host.name, rnic.name) for host, rnic in ((one, first(one)), (two, near), (two, far))
    )
    uplinks = [link.end(leaf.a.node).netdev for link in lab.topology.links_of(leaf.a.node) if link.is_uplink]
    turns = [  # (machine, incoming ports, destination, next hop)
        (leaf.a.node, [leaf.a.netdev], first(three), f"via {near.ip} dev {near_link.a.netdev}"),
        (two.name, [near.netdev], first(three), f"via {gateway(far_link)} dev {far.netdev}"),
        (leaf.a.node, uplinks, first(one), f"via {far.ip} dev {far_link.a.netdev}"),
        (two.name, [far.netdev], first(one), f"via {gateway(near_link)} dev {near.netdev}"),
    ]
    forward = "echo {} > /proc/sys/net/ipv4/ip_forward"
    lab.node(two.name).run(["sh", "-c", forward.format(1)])
    for table, (node, ports, to, via) in enumerate(turns, 240):
        rules = [f"ip rule add pref 800 iif {port} to {to.ip}/32 lookup {table}" for port in ports]
        lab.node(node).run(["sh", "-c", " && ".join([f"ip route add default {via} table {table}", *rules])])
    switch = Switch(
        name=two.name, role="rtsw", zone=two.zone, rack=two.rack, asn=65000, loopback="10.78.0.99/32", carrier=None,
        nos="frr",
    )  # fmt: skip

    def cable(mine, host):
        rnic = first(host)
        return Link(
            a=Port(node=two.name, netdev=mine.netdev, mac=mine.mac, address=mine.address),
            b=Port(node=host.name, netdev=rnic.netdev, mac=rnic.mac, address=rnic.address),
            rnic=rnic.name,
        )

    yield Topology(hosts=(one, three), switches=(switch,), links=(cable(near, one), cable(far, three)))
    for table, (node, *_) in enumerate(turns, 240):
        lab.node(node).run(
            ["sh", "-c", f"while ip rule del pref 800 2>/dev/null; do :; done; ip route flush table {table}"]
        )
    lab.node(two.name).run(["sh", "-c", forward.format(0)])


@contextlib.contextmanager
def flow_through_it(lab):
    one, _, three, _ = lab.topology.hosts[:4]
    spec = FlowSpec(
        src=f"{one.name}:{first(one).name}", dst=f"{three.name}:{first(three).name}", message_bytes=16384, qps=2,
        depth=2, duration_s=600.0, op_deadline_s=90.0, peer_deadline_s=90.0, stall_deadline_s=120.0,
        qp=QpParams(timeout=18, retry_cnt=6),
    )  # fmt: skip
    with flow.start(lab, spec) as running:
        yield running
        assert not running.is_over, running.failure
        running.abort("the test is over")


def planned_at(box, kind, target, params, *, index=0, for_s=WINDOW_S) -> PlannedFault:
    """Plan a fault as on a rack, but with rxe's names of RNIC counters."""
    spec = FaultSpec(kind=kind, target=target, for_s=for_s, params=params)
    planned = plan(spec, box, lab_kind="rack", index=index)
    assert planned.place.netns is None

    def on_rxe(key):
        node, _, name = key.partition("/")
        device, _, counter = name.rpartition(".")
        if counter == "np_ecn_marked_roce_packets":
            return f"{node}/ip.InCEPkts"
        return f"{node}/{device}.{ON_RXE.get(counter, counter)}"

    must_move = tuple(
        dataclasses.replace(one, any_of=tuple(on_rxe(key) for key in one.any_of)) for one in planned.mechanism.must_move
    )
    return with_mechanism(planned, must_move=must_move)


@pytest.mark.parametrize("mutate", [None, "noop"])
def test_packet_faults_are_exact_in_a_linux_box_of_a_rack(lab, tmp_path, box, mutate):
    """Each fault is proved, but not if a no-op replaces its action. A fault of one packet takes exactly one."""
    proved, hits = {}, {}
    with (
        flow_through_it(lab),
        Journal(tmp_path / "j") as journal,
        Injector(lab, journal, mutate=mutate) as injector,
    ):
        for index, (kind, target, params) in enumerate(CASES):
            prepared = injector.prepare(planned_at(box, kind, target, params, index=index))
            prepared.arm()
            threading.Event().wait(WINDOW_S)
            receipt = prepared.clear()
            print(kind, params, receipt.fired.count, receipt.fired.witness, receipt.doubts)
            assert receipt.cleared.ok, receipt.cleared.error
            proved[index, kind], hits[index, kind] = receipt.proved, receipt.fired.count
    assert proved == dict.fromkeys(proved, mutate is None)
    if mutate is None:
        assert hits[0, "packet.drop"] == 1


class AsRack:
    """The lab with the box as the switch of its topology."""

    def __init__(self, lab, box):
        self.topology, self._lab = box, lab

    def __getattr__(self, name):
        return getattr(self._lab, name)


def test_capture_on_the_box_is_complete(lab, tmp_path, box):
    """The capture holds every packet that both ports count; the dropped one is missing and requested again once."""
    with (
        packet_capture.start(AsRack(lab, box), ["host1:rxe0", "host3:rxe0"]) as running,
        Journal(tmp_path / "j") as journal,
        Injector(lab, journal) as injector,
    ):
        with flow_through_it(lab):
            prepared = injector.prepare(planned_at(box, "packet.drop", "host3:rxe0", {"qp": "any", "psn": "+50"}))
            prepared.arm()
            until(lambda: prepared.observe().count)
            receipt = prepared.clear()
        # A NIC counts sent packets with a delay, so ports are read at rest.
        captured = running.stop()
    assert receipt.fired.count == 1
    assert [proof.is_whole for proof in captured.proofs] == [True, True], captured.proofs
    write_pcapng(tmp_path / "box.pcapng", captured.frames)
    flows = [flow for flow in analyse(capture_file.read(tmp_path / "box.pcapng")).flows if flow.missing]
    assert [(flow.missing, flow.naks) for flow in flows] == [(1, 1)], flows


LOOK = "nft list tables; ip -br link; tc qdisc show; ip rule; cat /sys/class/net/be*/mtu; ls /run/faultbed/faults"


@pytest.mark.parametrize(
    ("kind", "params"),
    [("packet.drop", {"share": 0.05}), ("packet.reorder", {"share": 0.1}), ("data.corrupt", {"every": 50})],
)
def test_killed_holder_on_the_box_leaves_nothing(lab, tmp_path, box, kind, params):
    node = lab.node("host2")

    def looks():
        return node.run(["sh", "-c", LOOK], check=False).stdout

    with (
        flow_through_it(lab),
        Journal(tmp_path / "j") as journal,
        Injector(lab, journal, ttl_s=TTL_S) as injector,
    ):
        before = looks()
        prepared = injector.prepare(planned_at(box, kind, "host3:rxe0", params, for_s=300.0))
        assert prepared.arm().ok
        assert looks() != before
        node.run(["systemctl", "kill", "--signal=KILL", "--kill-whom=main", prepared.lease.unit])
        print(f"{kind}: as before {until(lambda: looks() == before, within_s=TTL_S + 2):.1f} s after SIGKILL")


def test_management_interface_of_the_box_is_never_a_target(lab, tmp_path, box):
    """The SSH connection's interface is rejected even if the inventory lists it as a port."""
    named = box.links[1]
    wrong = dataclasses.replace(named, a=dataclasses.replace(named.a, netdev="mgmt0"))
    at_mgmt = dataclasses.replace(box, links=(box.links[0], wrong))
    with Journal(tmp_path / "j") as journal, Injector(lab, journal) as injector:
        for kind, params in (("packet.drop", {"share": 0.05}), ("packet.reorder", {"share": 0.1}), ("link.mtu", {})):
            planned = plan(
                FaultSpec(kind=kind, target="host3:rxe0", for_s=5.0, params=params), at_mgmt, lab_kind="rack"
            )
            with pytest.raises(Exception, match="management connection"):
                injector.prepare(planned)
