"""Planning a fault: what fits where, what is refused with which words, and the same bytes every time."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inject.catalogue import CATALOGUE, find
from inject.heal import script
from inject.node.actuator import make
from inject.plan import FaultSpec, plan, plan_all
from testbed import dirty, inventory
from testbed.errors import Unsupported, UsageError
from testbed.fingerprint import Fingerprint
from testbed.shipped import inventories

SOFT = inventory.load(inventories() / "soft.yml").topology
PORTS = [link.name for link in SOFT.links]
SOFT_KINDS = [name for name, kind in CATALOGUE.items() if "soft" in kind.fidelity]
RNICS = [f"{host.name}:{rnic.name}" for host in SOFT.hosts for rnic in host.rnics]


def soft(kind, target, *, for_s=1.0, at_s=0.0, **params):
    return plan(FaultSpec(kind=kind, target=target, at_s=at_s, for_s=for_s, params=params), SOFT, lab_kind="soft")


def dumped(planned):
    return json.dumps(planned.to_json(), sort_keys=True)


flaps = st.builds(
    lambda target, for_s, period: FaultSpec(kind="link.flap", target=target, for_s=for_s, params=period),
    st.sampled_from(PORTS + RNICS),
    st.floats(0.05, 60),
    st.one_of(st.just({}), st.fixed_dictionaries({"period": st.floats(0.05, 60), "duty": st.floats(0.01, 0.99)})),
)
drops = st.builds(
    lambda target, params: FaultSpec(kind="packet.drop", target=target, for_s=1.0, params=params),
    st.sampled_from(RNICS),
    st.one_of(
        st.fixed_dictionaries({"share": st.floats(0.000001, 1)}),
        st.fixed_dictionaries({"psn": st.integers(0, (1 << 24) - 1), "qp": st.integers(1, (1 << 24) - 1)}),
    ),
)
_selected = st.one_of(
    st.fixed_dictionaries({"share": st.floats(0.000001, 0.9)}),
    st.fixed_dictionaries({"every": st.integers(1, 10_000)}),
    st.fixed_dictionaries({"psn": st.integers(0, (1 << 24) - 1), "qp": st.integers(1, (1 << 24) - 1)}),
)
packets = st.builds(
    lambda kind, target, params, opcode, direction: FaultSpec(
        kind=kind,
        target=target,
        for_s=1.0,
        params=params | {"opcode": opcode, "direction": direction} | ({"delay": 20} if kind == "packet.delay" else {}),
    ),
    st.sampled_from([name for name in CATALOGUE if name.startswith("packet.") and name != "packet.forge"]),
    st.sampled_from(PORTS + RNICS),
    _selected,
    st.sampled_from(["any", "data", "ack", "nak", "cnp", "read-response", "atomic"]),
    st.sampled_from(["to", "from"]),
)
throttles = st.builds(
    lambda target, percent: FaultSpec(kind="gpu.throttle", target=target, for_s=1.0, params={"percent": percent}),
    st.sampled_from([f"{host.name}:gpu0" for host in SOFT.hosts]),
    st.floats(1, 99),
)
SAMPLES = {
    "link.down": ("host1:rxe0", {}),
    "link.flap": ("rtsw1:ctsw1", {"period": 1}),
    "link.oneway": ("rtsw1:ctsw1", {}),
    "link.rate": ("host1:rxe0", {"rate": 10}),
    "link.mtu": ("host1:rxe0", {}),
    "packet.drop": ("host1:rxe0", {"share": 0.1}),
    "packet.mark": ("host1:rxe0", {"every": 7}),
    "packet.corrupt": ("host1:rxe0", {"share": 0.1}),
    "packet.delay": ("rtsw1:ctsw1", {"delay": 20, "direction": "from"}),
    "packet.reorder": ("host1:rxe0", {"share": 0.1}),
    "packet.duplicate": ("host1:rxe0", {}),
    "data.corrupt": ("host1:rxe0", {"every": 50}),
    "packet.forge": ("host1:rxe0", {"what": "nak"}),
    "congestion.shallow-queue": ("host1:rxe0", {}),
    "congestion.background": ("host1:rxe0", {}),
    "congestion.incast": ("host1:rxe0", {}),
    "congestion.hash-collision": ("rtsw1:ctsw1", {}),
    "congestion.slow-receiver": ("host1", {}),
    "host.clock-step": ("host4", {"step": -30}),
    "host.disk-full": ("host4", {}),
    "storage.slow": ("host4", {}),
    "storage.stall": ("host4", {}),
    "storage.burst": ("host4", {}),
    "switch.reboot": ("ctsw1", {}),
    "switch.drain": ("ctsw1", {}),
    "rnic.reset": ("host1:rxe0", {}),
    "rnic.remove": ("host1:rxe0", {}),
    "gpu.lost": ("host1:gpu0", {}),
    "gpu.xid": ("host1:gpu0", {"period": 0.25, "count": 2}),
    "switch.bgp-kill": ("rtsw1", {}),
    "switch.bgp-reset": ("ctsw1", {}),
    "switch.freeze": ("ctsw1", {}),
    "switch.withdraw": ("rtsw1", {}),
    "switch.hash-policy": ("rtsw1", {}),
    "host.freeze": ("host1", {}),
    "host.reboot": ("host1", {}),
    "host.cpu-steal": ("host1", {"share": 0.5}),
    "host.memory-pressure": ("host1", {}),
    "host.rank-kill": ("host1", {}),
    "host.rank-hang": ("host1", {}),
    "gpu.throttle": ("host1:gpu0", {"percent": 50}),
    "gpu.thermal": ("host1:gpu0", {}),
    "gpu.noisy-neighbour": ("host1:gpu0", {}),
}
samples = st.sampled_from(sorted(SAMPLES)).map(
    lambda kind: FaultSpec(kind=kind, target=SAMPLES[kind][0], for_s=5.0, params=SAMPLES[kind][1])
)
specs = st.one_of(flaps, drops, packets, throttles, samples)


@given(specs)
def test_the_same_spec_gives_the_same_bytes(spec):
    """A plan is a function of its input alone, and plain JSON."""
    first = dumped(plan(spec, SOFT, lab_kind="soft"))
    assert first == dumped(plan(spec, SOFT, lab_kind="soft"))
    assert json.loads(first)["kind"] == spec.kind


def test_the_same_bytes_in_another_process():
    """No hash order and no clock leaks into a plan."""
    code = (
        "import json;from testbed import inventory;from testbed.shipped import inventories;from inject.plan import *;"
        "t=inventory.load(inventories()/'soft.yml').topology;"
        "p=plan(FaultSpec(kind='packet.drop',target='host1:rxe0',for_s=2.0,params={'share':0.01}),t,lab_kind='soft');"
        "print(json.dumps(p.to_json(),sort_keys=True))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "77", "PATH": "/usr/bin:/bin"},
        cwd=inventories().parent,
        timeout=60,
    )
    assert other.stdout.strip() == dumped(soft("packet.drop", "host1:rxe0", for_s=2.0, share=0.01))


@given(specs)
def test_every_plan_can_be_read_and_reverted(spec):
    """Each change has its revert, each fault a witness, and ids make valid unit and table names."""
    check_plan(plan(spec, SOFT, lab_kind="soft"))


@pytest.mark.parametrize("kind", SAMPLES)
def test_every_kinds_plan_can_be_read_and_reverted(kind):
    """Of every kind, and not of those that were drawn today."""
    target, params = SAMPLES[kind]
    check_plan(plan(FaultSpec(kind=kind, target=target, for_s=5.0, params=params), SOFT, lab_kind="soft"))


def check_plan(planned):
    assert all(step.do and step.undo for step in planned.steps)
    assert planned.must_move or planned.while_on
    assert planned.shows
    assert planned.reads
    assert planned.id.replace("-", "").isalnum()
    assert planned.request["edges"][0] == [0.0, True]


@given(flaps)
def test_edges_alternate_and_end_inside_the_window(spec):
    """A train of flaps goes down, up, down, ... in order, and starts nothing after its window."""
    edges = plan(spec, SOFT, lab_kind="soft").request["edges"]
    assert [on for _, on in edges] == [index % 2 == 0 for index in range(len(edges))]
    times = [at for at, _ in edges]
    assert times == sorted(times)
    assert times[-1] < spec.for_s


def test_a_train_has_the_flaps_that_fit():
    """Period 2 s, 25 % down, in 5 s: down at 0, 2 and 4."""
    planned = soft("link.flap", "rtsw1:ctsw1", for_s=5.0, period=2, duty=0.25)
    assert planned.request["edges"] == [[0.0, True], [0.5, False], [2.0, True], [2.5, False], [4.0, True], [4.5, False]]
    assert planned.must_move[0].at_least == 3


def test_an_uplink_is_witnessed_at_its_other_end():
    """The port that goes down is on rtsw1; the counter that proves it is ctsw1's."""
    planned = soft("link.flap", "rtsw1:ctsw1")
    assert (planned.place.node, planned.place.netns) == ("fabric", "rtsw1")
    assert planned.must_move[0].any_of == ("ctsw1/rtsw1.carrier_down_count",)
    assert planned.steps[0].do == "ip -n rtsw1 link set dev ctsw1 down"


def test_an_rnic_is_flapped_beside_qemu():
    """An RNIC's carrier is QEMU's: a local holder, and the guest's own counter."""
    planned = soft("link.flap", "host1:rxe0")
    assert (planned.place.local, planned.binding) == (True, "local")
    assert planned.must_move[0].any_of == ("host1/be0.carrier_changes",)


def test_a_drop_towards_an_rnic_is_done_at_the_port_that_faces_it():
    """Towards the RNIC is the egress of its switch port; from it, the ingress."""
    to, back = (
        soft("packet.drop", "host1:rxe0", share=0.1),
        soft("packet.drop", "host1:rxe0", share=0.1, direction="from"),
    )
    assert to.place.netns == "rtsw1"
    assert 'hook egress device "host1-rxe0"' in to.request["args"]["ruleset"]
    assert 'hook ingress device "host1-rxe0"' in back.request["args"]["ruleset"]
    assert "numgen random mod 1000000 < 100000" in to.request["args"]["ruleset"]


@given(packets)
def test_a_packet_fault_owns_one_table_at_one_port(spec):
    """Whatever the kind and the filters: one owned table, one rule, one counter, at the port that faces the target."""
    planned = plan(spec, SOFT, lab_kind="soft")
    args, towards = planned.request["args"], planned.params["direction"] == "to"
    assert args["ruleset"].count('counter name "hits"') == 1
    assert "flags owner" in args["ruleset"]
    assert f'hook {"egress" if towards else "ingress"} device "{args["device"]}"' in args["ruleset"]
    assert planned.shows["device"] == args["device"]
    assert planned.place.netns == planned.target.link.a.node if planned.target.kind == "rnic" else planned.target.node


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"share": 0.1, "opcode": "nak"}, ["@th,64,8 0x11", "@th,160,8 0x60-0x7f"]),
        ({"share": 0.1, "opcode": "cnp"}, ["@th,64,8 0x81"]),
        ({"every": 256, "qp": 17}, ["@th,104,24 17", "numgen inc mod 256 255"]),
        ({"psn": 7, "qp": 17, "round": 3}, ["@th,136,24 7", "numgen inc mod 2147483648 2"]),
    ],
)
def test_filters_become_expressions_of_the_rule(params, words):
    """Opcode class, n-th packet and retry round are header bytes and counts."""
    rules = soft("packet.drop", "host1:rxe0", **params).request["args"]["ruleset"]
    assert all(word in rules for word in words), rules


@pytest.mark.parametrize("kind", ["packet.drop", "packet.mark", "packet.delay"])
def test_one_sender_and_one_receiver_at_an_uplink(kind):
    """host1 to host3 and nobody else: by the addresses of their RNICs, before anything is counted."""
    extra = {"delay": 5} if kind == "packet.delay" else {"every": 10}
    planned = soft(kind, "rtsw1:ctsw1", src="host1:rxe0", dst="host3:rxe0", **extra)
    (rule,) = (line for line in planned.request["args"]["ruleset"].splitlines() if "udp dport" in line)
    src, dst = (SOFT.resolve(name).rnic.ip for name in ("host1:rxe0", "host3:rxe0"))
    assert rule.strip().startswith(f"ip saddr {src} ip daddr {dst} udp dport 4791")
    plain = soft(kind, "rtsw1:ctsw1", **extra)
    assert planned.must_not_move == plain.must_not_move
    assert "ip saddr" not in plain.request["args"]["ruleset"]


def rnics_of(witness):
    """RNICs of a witness' counters, in the order in which they are believed."""
    return list(dict.fromkeys(key.partition(".")[0] for key in witness.any_of))


def test_a_loss_is_witnessed_by_those_whose_packets_pass():
    """Any RNIC's timer was proof of a loss at any link; now first that of the link, and no other of its host."""
    at_link = rnics_of(soft("packet.drop", "host1:rxe0", share=0.1).must_move[0])
    assert at_link[0] == "host1/rxe0"
    assert "host1/rxe1" not in at_link
    assert {"host2/rxe0", "host4/rxe1"} < set(at_link)
    burst = soft("packet.drop", "rtsw1:host1:rxe0", share=0.1, burst=3)
    assert rnics_of(burst.must_move[0]) == at_link
    both = soft("packet.drop", "rtsw1:ctsw1", share=0.1, src="host2:rxe1", dst="host3:rxe0")
    assert rnics_of(both.must_move[0]) == ["host2/rxe1", "host3/rxe0"]
    own = soft("packet.corrupt", "host3:rxe0", every=9, src="host1:rxe1")
    assert rnics_of(own.must_move[0]) == ["host3/rxe0", "host1/rxe1"]
    anybody = soft("packet.reorder", "rtsw1:ctsw1", every=9)
    assert len(rnics_of(anybody.must_move[0])) == sum(len(host.rnics) for host in SOFT.hosts)


def test_at_an_rnics_own_link_the_other_end_is_what_can_be_chosen():
    assert soft("packet.drop", "host3:rxe0", share=0.1, src="host1:rxe0").place.netns == "rtsw2"
    assert soft("packet.drop", "rtsw2:host3:rxe0", share=0.1, src="host1:rxe0", dst="host3:rxe0")
    assert soft("packet.drop", "host3:rxe0", share=0.1, direction="from", dst="host1:rxe0")


def test_a_burst_has_the_mean_that_was_asked_for():
    """Gilbert: mean loss p/(p+r), mean burst 1/r; the drops are counted where they happen."""
    args = soft("packet.drop", "host1:rxe0", share=0.01, burst=4).request["args"]
    into, back = (float(word.rstrip("%")) / 100 for word in args["queue"].split("gemodel ")[1].split()[:2])
    assert into / (into + back) == pytest.approx(0.01, rel=1e-3)
    assert (1 / back, args["count"]) == (pytest.approx(4), "drops")
    assert "numgen" not in args["ruleset"]


def gilbert_elliott(**params):
    queue = soft("packet.drop", "host1:rxe0", **params).request["args"]["queue"]
    return [float(word.rstrip("%")) / 100 for word in queue.split("gemodel ")[1].split()]


@given(st.floats(0.5, 1), st.floats(0, 0.1), st.floats(0.12, 0.4), st.floats(10, 1000))
def test_both_states_of_a_channel_lose_what_was_asked_for(loss_bad, loss_good, share, burst):
    """Gilbert and Elliott: the chain that the kernel runs has the mean share that was asked for, and the mean stay."""
    into, back, bad, good = gilbert_elliott(share=share, burst=burst, loss_bad=loss_bad, loss_good=loss_good)
    assert (bad, good) == (pytest.approx(loss_bad, abs=1e-6), pytest.approx(loss_good, abs=1e-6))
    assert 1 / back == pytest.approx(burst, rel=1e-2)
    in_bad = into / (into + back)
    assert in_bad * bad + (1 - in_bad) * good == pytest.approx(share, rel=1e-2)


def test_the_chain_of_the_kernel_gives_that_share():
    """As net/sched/sch_netem.c goes on from packet to packet, 400,000 of them; the bad state comes in bursts."""
    into, back, bad, good = gilbert_elliott(share=0.05, burst=20, loss_bad=0.5, loss_good=0.01)
    drawn = random.Random(7)
    is_bad, lost, stays, entered = False, 0, 0, 0
    for _ in range(400_000):
        stays += is_bad
        lost += drawn.random() > 1 - bad if is_bad else drawn.random() < good
        turns = drawn.random() < (back if is_bad else into)
        entered += turns and not is_bad
        is_bad ^= turns
    assert lost / 400_000 == pytest.approx(0.05, rel=0.05)
    assert stays / entered == pytest.approx(20, rel=0.05)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"share": 0.1, "loss_bad": 0.5}, "add burst"),
        ({"share": 0.1, "burst": 5, "loss_good": 0.2}, "is not between the loss in the good state"),
        ({"share": 0.5, "burst": 5, "loss_bad": 0.4}, "is not between the loss in the good state"),
        ({"share": 0.45, "burst": 1, "loss_bad": 0.5}, "cannot come in bursts of only 1 packets"),
    ],
)
def test_a_channel_that_cannot_be_is_refused(params, said):
    with pytest.raises(UsageError, match=said):
        soft("packet.drop", "host1:rxe0", **params)


def test_a_detour_leaves_the_queue_of_the_port_alone():
    """A device of its own carries the delay; on egress tc redirects what nftables has marked, and nothing else."""
    planned = soft("packet.delay", "host1:rxe0", delay=20)
    commands = " ".join(step.do for step in planned.steps)
    assert "qdisc add dev host1-rxe0 clsact" in commands
    assert "dev host1-rxe0 root" not in commands
    assert "match mark 0xfb000001 0xffffffff" in commands
    assert "clsact" not in " ".join(
        step.do for step in soft("packet.delay", "host1:rxe0", delay=20, direction="from").steps
    )


def test_two_detours_of_one_port_collide():
    """A port has one clsact: the conflict is named; a drop beside a delay composes, and so does the other direction."""
    delay = FaultSpec(kind="packet.delay", target="host1:rxe0", for_s=1.0, params={"delay": 5})
    back = FaultSpec(kind="packet.delay", target="host1:rxe0", for_s=1.0, params={"delay": 5, "direction": "from"})
    drop = FaultSpec(kind="packet.drop", target="host1:rxe0", for_s=1.0, params={"share": 0.1})
    assert len(plan_all([delay, back, drop], SOFT, lab_kind="soft")) == 3
    rate = FaultSpec(kind="link.rate", target="rtsw1:host1:rxe0", for_s=1.0, params={"rate": 5})
    with pytest.raises(UsageError, match="overlaps"):
        plan_all([delay, rate], SOFT, lab_kind="soft")


def test_one_packet_is_matched_by_qp_and_psn_once():
    """Exactly one packet: BTH destination QP and PSN, and a count that lets the rule match a single time."""
    planned = soft("packet.drop", "host1:rxe0", psn=291, qp=17)
    assert "@th,104,24 17 @th,136,24 291 numgen inc mod 2147483648 0 " in planned.request["args"]["ruleset"]
    assert planned.learn is None


def test_a_relative_psn_is_learned_from_the_receiver():
    """+100 of any QP: asked of the RNIC just before arming."""
    planned = soft("packet.drop", "host2:rxe1", psn="+100", qp="any")
    assert (planned.learn.host, planned.learn.rnic, planned.learn.qp, planned.learn.psn_ahead) == (
        "host2",
        "rxe1",
        "any",
        100,
    )


def test_half_of_a_gpu_is_left_in_short_periods():
    """50 % of 10 ms; the kernel's smallest quota of 1 ms makes the period longer where little is left."""
    assert soft("gpu.throttle", "host1:gpu0", percent=50).request["args"]["value"] == "5000 10000"
    assert soft("gpu.throttle", "host1:gpu0", percent="99").request["args"]["value"] == "1000 100000"


@pytest.mark.parametrize(
    ("kind", "target", "params", "words"),
    [
        ("link.flop", "rtsw1:ctsw1", {}, ["fault.kind", "link.flap"]),
        ("link.flap", "rtsw1:ctsw9", {}, ["fault.target", "did you mean rtsw1:ctsw"]),
        ("link.flap", "host1:gpu0", {}, ["fault.target", "does not fit a gpu"]),
        ("link.flap", "rtsw1:ctsw1", {"perod": 1}, ["fault.perod", "did you mean period"]),
        ("link.flap", "rtsw1:ctsw1", {"duty": 2}, ["fault.duty", "0.01..0.99"]),
        ("link.flap", "rtsw1:ctsw1", {"count": 3}, ["fault.count", "period"]),
        ("packet.drop", "host1:rxe0", {}, ["share or psn"]),
        ("packet.drop", "host1:rxe0", {"share": 0.1, "psn": 4, "qp": 17}, ["either share or psn"]),
        ("packet.drop", "host1:rxe0", {"share": 0.1, "opcode": "cnq"}, ["fault.opcode", "read-response"]),
        ("packet.drop", "host1:rxe0", {"share": 0.1, "round": 2}, ["fault.round", "psn"]),
        ("packet.drop", "host1:rxe0", {"every": 10, "burst": 4}, ["fault.burst", "share"]),
        ("packet.drop", "host1:rxe0", {"share": 0.9, "burst": 1.5}, ["fault.burst", "cannot come in bursts"]),
        ("packet.mark", "host1:rxe0", {"share": 0.1, "every": 4}, ["either share, every or psn"]),
        ("packet.corrupt", "host1:rxe0", {"share": 1}, ["fault.share", "never ends"]),
        ("packet.corrupt", "host1:rxe0", {}, ["takes share, every or psn"]),
        ("packet.delay", "host1:rxe0", {"delay": 5, "jitter": 9}, ["fault.jitter"]),
        ("packet.delay", "host1:rxe0", {}, ["needs delay"]),
        ("packet.reorder", "host1:rxe0", {}, ["overtaken"]),
        ("link.rate", "rtsw1:ctsw1", {}, ["needs rate"]),
        ("switch.freeze", "rtsw1", {}, ["fault.for", "3 s"]),
        ("data.corrupt", "host1:rxe0", {}, ["takes share, every or psn"]),
        ("data.corrupt", "rtsw1:ctsw1", {"every": 9}, ["fault.target", "RNIC"]),
        ("packet.forge", "rtsw1:ctsw1", {"what": "nak"}, ["fault.target", "RNIC"]),
        ("packet.forge", "host1:rxe0", {"what": "rst"}, ["fault.what", "cnp"]),
        ("congestion.hash-collision", "rtsw1:host1:rxe0", {}, ["fault.target", "uplink"]),
        ("congestion.hash-collision", "ctsw1:rtsw1", {}, ["fault.target", "from its end"]),
        ("switch.drain", "rtsw1", {}, ["fault.target", "only way"]),
        ("switch.withdraw", "ctsw1", {}, ["fault.target", "RTSW"]),
        ("switch.bgp-kill", "host1", {}, ["does not fit a host"]),
        ("host.cpu-steal", "host1", {"share": 1}, ["fault.share", "0.05..0.9"]),
        ("gpu.thermal", "host1:gpu0", {"low": 50, "high": 50}, ["fault.high", "gpu.throttle"]),
        ("link.down", "rtsw1:ctsw1", {"period": 1}, ["fault.period", "no parameter"]),
        ("packet.drop", "host1:rxe0", {"psn": 4}, ["fault.psn", "qp"]),
        ("packet.drop", "host1:rxe0", {"psn": "-4", "qp": 17}, ["fault.psn", "0..16777215"]),
        ("packet.drop", "rtsw1:ctsw1", {"psn": "+4", "qp": 17}, ["one receiving RNIC"]),
        ("packet.drop", "host1:rxe0", {"share": True}, ["fault.share"]),
        ("packet.drop", "host1:rxe0", {"share": "nan"}, ["fault.share"]),
        ("packet.drop", "rtsw1:ctsw1", {"share": 1, "src": "host9:rxe0"}, ["fault.src", "did you mean"]),
        ("packet.drop", "rtsw1:ctsw1", {"share": 1, "dst": "host1"}, ["fault.dst", "not an RNIC"]),
        ("packet.drop", "rtsw1:ctsw1", {"share": 1, "dst": 3}, ["fault.dst", "no target"]),
        ("packet.drop", "host3:rxe0", {"share": 1, "dst": "host1:rxe0"}, ["fault.dst", "link of host3:rxe0"]),
        (
            "packet.drop",
            "rtsw2:host3:rxe0",
            {"share": 1, "src": "host1:rxe0", "direction": "from"},
            ["fault.src", "no packet of host1:rxe0"],
        ),
        (
            "packet.mark",
            "rtsw1:ctsw1",
            {"src": "host1:rxe0", "dst": "host1:rxe0"},
            ["fault.dst", "nothing to itself"],
        ),
        ("packet.drop", "host3:rxe0", {"psn": "+9", "qp": "any", "src": "host1:rxe0"}, ["fault.src", "name the qp"]),
        ("packet.forge", "host1:rxe0", {"what": "nak", "src": "host2:rxe0"}, ["fault.src", "no parameter"]),
        ("gpu.throttle", "host1:gpu0", {}, ["needs percent"]),
        ("gpu.throttle", "host1:gpu0", {"percent": 100}, ["fault.percent", "1..99"]),
    ],
)
def test_what_is_wrong_is_named_with_its_path(kind, target, params, words):
    """A usage error says where, what, and what would be right."""
    with pytest.raises(UsageError) as caught:
        soft(kind, target, **params)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_lab_that_cannot_do_it_says_so():
    """Unsupported, not a guess: each kind of lab has kinds that the other has not."""
    with pytest.raises(Unsupported, match="rack lab"):
        plan(FaultSpec(kind="gpu.thermal", target="host1:gpu0", for_s=1.0), SOFT, lab_kind="rack")
    with pytest.raises(Unsupported, match="soft lab"):
        plan(
            FaultSpec(kind="gpu.power-cap", target="host1:gpu0", for_s=1.0, params={"percent": 30}),
            SOFT,
            lab_kind="soft",
        )


def test_faults_that_change_the_same_thing_at_once_are_refused():
    """Two flaps of one port overlap; one after the other they are fine, and so are two drops on one port."""
    flap = FaultSpec(kind="link.flap", target="rtsw1:ctsw1", at_s=1.0, for_s=2.0)
    later = FaultSpec(kind="link.flap", target="rtsw1:ctsw1", at_s=3.0, for_s=1.0)
    drop = FaultSpec(kind="packet.drop", target="host1:rxe0", for_s=9.0, params={"share": 0.1})
    with pytest.raises(UsageError, match=r"faults\[1\].*overlaps faults\[0\]"):
        plan_all([flap, FaultSpec(kind="link.flap", target="rtsw1:ctsw1", at_s=2.0, for_s=2.0)], SOFT, lab_kind="soft")
    assert len({fault.id for fault in plan_all([flap, later, drop, drop], SOFT, lab_kind="soft")}) == 4


COMPOSE = ("packet.drop", "packet.mark", "packet.corrupt", "data.corrupt", "packet.forge")
"""Each has a rule of its own: the same one twice is two of them. What takes a detour towards a port does not."""


def sample(kind, **more):
    target, params = SAMPLES[kind]
    return FaultSpec(kind=kind, target=target, for_s=5.0, params=params, **more)


def collide(*specs):
    """The refusal of two faults at one time, or None."""
    try:
        plan_all(specs, SOFT, lab_kind="soft")
    except UsageError as error:
        return str(error)
    return None


@given(samples, samples)
def test_collision_is_symmetric(one, two):
    """Whichever is written first."""
    assert (collide(one, two) is None) == (collide(two, one) is None)


@pytest.mark.parametrize("kind", SOFT_KINDS)
def test_the_same_fault_twice_collides_unless_it_composes(kind):
    """At one time; one after the other all go together."""
    refused = collide(sample(kind), sample(kind))
    detour_from_port = kind == "packet.delay"  # its sample comes from the port: a table and a device of its own
    assert (refused is None) == (kind in COMPOSE or detour_from_port), refused
    assert collide(sample(kind), sample(kind, at_s=5.0)) is None


@pytest.mark.parametrize(
    ("one", "two", "thing"),
    [
        (("switch.reboot", "rtsw1"), ("link.down", "rtsw1:ctsw1"), "link rtsw1:ctsw1"),
        (("switch.reboot", "rtsw1"), ("link.down", "ctsw1:rtsw1"), "link rtsw1:ctsw1"),
        (("switch.reboot", "rtsw1"), ("switch.bgp-kill", "rtsw1"), "bgpd of switch rtsw1"),
        (("switch.reboot", "rtsw1"), ("packet.mark", "host1:rxe0"), "of switch rtsw1"),
        (("link.down", "rtsw1:ctsw1"), ("link.flap", "ctsw1:rtsw1"), "link rtsw1:ctsw1"),
        (("link.down", "rtsw1:ctsw1"), ("link.oneway", "ctsw1:rtsw1"), "link rtsw1:ctsw1"),
        (("switch.bgp-kill", "ctsw1"), ("switch.drain", "ctsw1"), "bgpd/bgp graceful-shutdown of switch ctsw1"),
        (("host.freeze", "host1"), ("host.cpu-steal", "host1"), "hog of host host1"),
        (("host.freeze", "host1"), ("link.down", "host1:rxe0"), "link rtsw1:host1:rxe0"),
        (("host.freeze", "host1"), ("gpu.thermal", "host1:gpu0"), "of host host1"),
        (("host.reboot", "host1"), ("host.disk-full", "host1"), "of host host1"),
        (("rnic.reset", "host1:rxe0"), ("rnic.remove", "host1:rxe0"), "host1:rxe0"),
        (("rnic.reset", "host1:rxe0"), ("link.down", "host1:rxe0"), "link rtsw1:host1:rxe0"),
        (("rnic.remove", "host1:rxe0"), ("link.down", "rtsw1:host1:rxe0"), "link rtsw1:host1:rxe0"),
        (("gpu.lost", "host1:gpu0"), ("gpu.noisy-neighbour", "host1:gpu0"), "hog of host host1"),
        (("host.cpu-steal", "host1"), ("gpu.noisy-neighbour", "host1:gpu0"), "hog of host host1"),
    ],
)
def test_what_is_inside_a_claimed_thing_collides(one, two, thing):
    """The conflict is named with both faults and the thing, whichever comes first."""
    specs = [
        FaultSpec(kind=kind, target=target, for_s=5.0, params=SAMPLES[kind][1] if kind in SAMPLES else {})
        for kind, target in (one, two)
    ]
    for pair in (specs, specs[::-1]):
        refused = collide(*pair)
        assert refused is not None
        assert all(f"{spec.kind} on {spec.target}" in refused for spec in pair)
        assert f"{thing};" in refused


@pytest.mark.parametrize(
    "specs",
    [
        [("packet.drop", "host1:rxe0"), ("packet.drop", "host1:rxe0")],
        [("packet.drop", "host1:rxe0"), ("packet.mark", "host1:rxe0")],
        [("host.cpu-steal", "host1"), ("packet.drop", "host1:rxe0")],
        [("host.freeze", "host1"), ("link.down", "rtsw1:ctsw1"), ("packet.drop", "host1:rxe0")],
        [("gpu.lost", "host1:gpu0"), ("gpu.xid", "host1:gpu0"), ("gpu.thermal", "host2:gpu0")],
        [("link.down", "rtsw1:ctsw1"), ("link.down", "rtsw1:ctsw2"), ("link.mtu", "rtsw1:ctsw1")],
        [("rnic.reset", "host1:rxe0"), ("rnic.remove", "host1:rxe1"), ("switch.bgp-kill", "rtsw1")],
        [("switch.withdraw", "rtsw1"), ("switch.bgp-reset", "rtsw1"), ("switch.hash-policy", "rtsw1")],
        [("switch.reboot", "ctsw1"), ("switch.reboot", "ctsw2"), ("host.rank-hang", "host1")],
    ],
)
def test_faults_that_change_different_things_go_together(specs):
    """Inside one machine, on one port, at the two uplinks of a switch."""
    faults = [FaultSpec(kind=kind, target=target, for_s=5.0, params=SAMPLES[kind][1]) for kind, target in specs]
    assert collide(*faults) is None


def test_two_ways_of_one_link_compose_and_one_way_twice_does_not():
    """Silence in one direction is not that in the other, whichever end it is named from."""
    there = FaultSpec(kind="link.oneway", target="rtsw1:ctsw1", for_s=5.0)
    back = FaultSpec(kind="link.oneway", target="ctsw1:rtsw1", for_s=5.0)
    same = FaultSpec(kind="link.oneway", target="ctsw1:rtsw1", for_s=5.0, params={"direction": "from"})
    assert collide(there, back) is None
    assert collide(there, same)


def test_a_gpu_that_another_fault_throttles_is_no_bystander():
    """Each throttle names the other GPUs as bystanders, except those that are throttled on purpose."""
    one, two = plan_all(
        [FaultSpec(kind="gpu.throttle", target=f"host{n}:gpu0", for_s=1.0, params={"percent": 50}) for n in (1, 2)],
        SOFT,
        lab_kind="soft",
    )
    assert one.must_not_move == two.must_not_move == ("host3/gpu0.nr_throttled", "host4/gpu0.nr_throttled")


def test_a_thing_that_another_fault_takes_away_is_no_bystander():
    """A GPU that is gone has no counters; that they can no longer be read is not the throttle's doing."""
    lost, throttle = plan_all(
        [
            FaultSpec(kind="gpu.lost", target="host1:gpu0", for_s=1.0),
            FaultSpec(kind="gpu.throttle", target="host2:gpu0", for_s=1.0, params={"percent": 50}),
        ],
        SOFT,
        lab_kind="soft",
    )
    assert throttle.must_not_move == ("host3/gpu0.nr_throttled", "host4/gpu0.nr_throttled")
    assert lost.must_not_move == throttle.must_not_move


def assert_shell(text):
    """POSIX shell that parses: a revert that does not is found when nobody is there to mend it."""
    checked = subprocess.run(["sh", "-n"], input=text, capture_output=True, text=True, check=False, timeout=20)
    assert checked.returncode == 0, checked.stderr


def healed(tmp_path, kind="soft", topology=SOFT):
    return SimpleNamespace(
        topology=topology,
        kind=kind,
        state_dir=tmp_path,
        carrier=lambda name: SimpleNamespace(name=name),
        netns=lambda _: None,
    )


def test_what_heals_a_machine_is_shell(tmp_path):
    """The script of every machine, with all its marks."""
    text = script(healed(tmp_path), "rtsw1")
    assert_shell(text)
    assert all(mark in text for mark in ("faultbed-fault-", "faultbed_", "fbvia", "cpu.max", "faultbed-hog"))
    assert "ip link set dev ctsw1 up" in text
    assert "not ours: rtsw1" not in text


def test_a_port_of_a_rack_that_is_down_may_be_somebodys_maintenance(tmp_path):
    """Only what was up before the run that left the lab DIRTY is brought up; the others are named."""
    lab = healed(tmp_path, "rack")
    text = script(lab, "rtsw1")
    assert_shell(text)
    assert "link set dev" not in text
    assert "not ours: rtsw1:ctsw1 is down" in text
    before = {"rtsw1": {"link ctsw1": "UP LOWER_UP mtu 4200", "link ctsw2": "mtu 4200"}}
    dirty.mark(tmp_path, ["a port is down"], Fingerprint(nodes=before))
    text = script(lab, "rtsw1")
    assert_shell(text)
    assert "ip link set dev ctsw1 up" in text
    assert "ip link set dev ctsw2 up" not in text
    assert "not ours: rtsw1:ctsw2 is down" in text


@pytest.mark.parametrize(
    ("kind", "argument", "goes_on"),
    [("soft", "somebody", True), ("rack", "somebody", False), ("rack", "traffic.node.engine", True)],
)
def test_a_stopped_process_of_a_rack_may_be_somebodys(tmp_path, kind, argument, goes_on):
    """A real process that is stopped: on a rack it goes on only when it is a program of ours."""
    program = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        ["python3", "-c", program, argument], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        bare = SimpleNamespace(links=(), switches=(), host_by_name={})
        text = script(healed(tmp_path, kind, bare), "host1")
        only = text[text.index("for p in $(grep -ls '^State") :].replace(
            "/proc/[0-9]*/status", f"/proc/{process.pid}/status"
        )
        said = subprocess.run(["sh", "-c", only], capture_output=True, text=True, check=True, timeout=20).stdout
        process.send_signal(signal.SIGCONT)
        process.communicate()
    assert said.startswith(f"{'healed:' if goes_on else 'not ours:'} process {process.pid} (python3")


@pytest.mark.parametrize("kind", SOFT_KINDS)
def test_every_kind_can_be_planned_and_made(kind):
    """Each kind of the catalogue has a sample here, and the node knows its actuator with exactly these arguments."""
    target, params = SAMPLES[kind]
    planned = soft(kind, target, for_s=5.0, **params)
    args = dict(planned.request["args"])
    if planned.request["actuator"] == "qmp":
        args |= {"socket": "/none", "nic": "nic-be0", "python": ["python3"]}
    if planned.request["actuator"] == "vm_reset":
        args |= {"socket": "/none", "rejoin": ["python3", "-m", "inject.rejoin", "soft.yml", "host1"]}
    actuator = make(planned.request["actuator"], args)
    assert planned.target.kind in CATALOGUE[kind].targets
    assert actuator.hits() in (None, 0)
    assert_shell(actuator.revert_script())


@pytest.mark.parametrize("kind", SOFT_KINDS)
def test_a_fault_at_another_place_is_not_this_one(kind):
    """What the readback must show tells this target from the others of its kind."""
    here, params = SAMPLES[kind]
    there = next(
        name
        for name in ("host2", "host2:rxe1", "host2:gpu0", "rtsw2", "ctsw2", "rtsw2:ctsw2", "rtsw2:host3:rxe0")
        if SOFT.resolve(name).kind == SOFT.resolve(here).kind
        and not (kind == "switch.withdraw" and name.startswith("ctsw"))
        and not (kind == "switch.drain" and name.startswith("rtsw"))
    )
    one, two = (soft(kind, target, for_s=5.0, **params) for target in (here, there))
    told = (one.place, dict(one.shows)) != (two.place, dict(two.shows))
    assert told
    assert one.request["claims"] != two.request["claims"] or one.place != two.place


def test_every_kind_says_all_there_is_to_say():
    """The catalogue is complete: nothing that a person or a plot needs is left empty."""
    for kind in CATALOGUE.values():
        assert kind is find(kind.name)
        assert all(
            [kind.summary, kind.binding, kind.fidelity, kind.armed_by, kind.must_move, kind.must_not_move, kind.colour]
        )
        assert all(param.summary and param.range for param in kind.params)
