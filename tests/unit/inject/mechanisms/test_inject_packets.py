"""Plans of packet faults: rules, filters, channels, detours and the witnesses of a loss."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned_faults import SOFT, packets, soft

from faultbed.inject.fault_plan import plan, plan_all
from faultbed.inject.kinds.catalogue import CATALOGUE
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.mechanisms.soft.hop import OPCODES
from faultbed.testbed.errors import UsageError
from faultbed.testbed.packets.bth import OPCODES as RC


def test_drop_towards_an_rnic_acts_at_the_port_that_faces_it():
    """Towards the RNIC is the egress of its switch port; from it, the ingress."""
    to, back = (
        soft("packet.drop", "host1:rxe0", share=0.1),
        soft("packet.drop", "host1:rxe0", share=0.1, direction="from"),
    )
    assert to.place.netns == "rtsw1"
    assert 'hook egress device "host1-rxe0"' in to.request["args"]["ruleset"]
    assert 'hook ingress device "host1-rxe0"' in back.request["args"]["ruleset"]
    assert "numgen inc mod 10240 { " in to.request["args"]["ruleset"]


@given(packets)
def test_packet_fault_owns_one_table_at_one_port(spec):
    """Whatever the kind and the filters: one owned table, one rule, one counter, at the port that faces the target."""
    planned = plan(spec, SOFT, lab_kind="soft")
    args, towards = planned.request["args"], planned.spec.params["direction"] == "to"
    assert args["ruleset"].count('counter name "hits"') == 1
    assert "flags owner" in args["ruleset"]
    assert f'hook {"egress" if towards else "ingress"} device "{args["device"]}"' in args["ruleset"]
    assert planned.mechanism.shows["device"] == args["device"]
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
def test_packet_filters_become_expressions_of_the_rule(params, words):
    """Opcode class, n-th packet and retry round are header bytes and counts."""
    rules = soft("packet.drop", "host1:rxe0", **params).request["args"]["ruleset"]
    assert all(word in rules for word in words), rules


@pytest.mark.parametrize("kind", ["packet.drop", "packet.mark", "packet.delay"])
def test_packet_fault_between_one_sender_and_one_receiver_filters_by_address(kind):
    """The rule matches only host1 to host3, by the addresses of their RNICs, before anything is counted."""
    extra = {"delay": 5} if kind == "packet.delay" else {"every": 10}
    planned = soft(kind, "rtsw1:ctsw1", src="host1:rxe0", dst="host3:rxe0", **extra)
    (rule,) = (line for line in planned.request["args"]["ruleset"].splitlines() if "udp dport" in line)
    src, dst = (SOFT.resolve(name).rnic.ip for name in ("host1:rxe0", "host3:rxe0"))
    assert rule.strip().startswith(f"ip saddr {src} ip daddr {dst} udp dport 4791")
    plain = soft(kind, "rtsw1:ctsw1", **extra)
    assert planned.mechanism.must_not_move == plain.mechanism.must_not_move
    assert "ip saddr" not in plain.request["args"]["ruleset"]


def rnics_of(witness):
    """Return the RNICs whose counters can be the witness, the most specific first."""
    return list(dict.fromkeys(key.partition(".")[0] for key in witness.any_of))


def test_loss_is_witnessed_by_rnics_whose_packets_pass():
    """Any RNIC's timer used to prove a loss at any link. Now the link's own RNIC comes first, never its neighbours."""
    at_link = rnics_of(soft("packet.drop", "host1:rxe0", share=0.1).mechanism.must_move[0])
    assert at_link[0] == "host1/rxe0"
    assert "host1/rxe1" not in at_link
    assert {"host2/rxe0", "host4/rxe1"} < set(at_link)
    burst = soft("packet.drop", "rtsw1:host1:rxe0", share=0.1, burst=3)
    assert rnics_of(burst.mechanism.must_move[0]) == at_link
    both = soft("packet.drop", "rtsw1:ctsw1", share=0.1, src="host2:rxe1", dst="host3:rxe0")
    assert rnics_of(both.mechanism.must_move[0]) == ["host2/rxe1", "host3/rxe0"]
    own = soft("packet.corrupt", "host3:rxe0", every=9, src="host1:rxe1")
    assert rnics_of(own.mechanism.must_move[0]) == ["host3/rxe0", "host1/rxe1"]
    anybody = soft("packet.reorder", "rtsw1:ctsw1", every=9)
    assert len(rnics_of(anybody.mechanism.must_move[0])) == sum(len(host.rnics) for host in SOFT.hosts)


def test_packet_fault_at_an_rnics_own_link_may_choose_the_other_end():
    assert soft("packet.drop", "host3:rxe0", share=0.1, src="host1:rxe0").place.netns == "rtsw2"
    assert soft("packet.drop", "rtsw2:host3:rxe0", share=0.1, src="host1:rxe0", dst="host3:rxe0")
    assert soft("packet.drop", "host3:rxe0", share=0.1, direction="from", dst="host1:rxe0")


def test_drop_burst_has_the_requested_mean():
    """In Gilbert's model the mean loss is p/(p+r) and the mean burst 1/r. Drops are counted at the hop that drops."""
    args = soft("packet.drop", "host1:rxe0", share=0.01, burst=4).request["args"]
    into, back = (float(word.rstrip("%")) / 100 for word in args["queue"].split("gemodel ")[1].split()[:2])
    assert into / (into + back) == pytest.approx(0.01, rel=1e-3)
    assert (1 / back, args["count"]) == (pytest.approx(4), "drops")
    assert "numgen" not in args["ruleset"]


def gilbert_elliott(**params):
    queue = soft("packet.drop", "host1:rxe0", **params).request["args"]["queue"]
    return [float(word.rstrip("%")) / 100 for word in queue.split("gemodel ")[1].split()[:4]]


@given(st.floats(0.5, 1), st.floats(0, 0.1), st.floats(0.12, 0.4), st.floats(10, 1000))
def test_gilbert_elliott_chain_has_the_requested_share_and_burst(loss_bad, loss_good, share, burst):
    """The chain that the kernel runs has the requested mean share and mean length of the bad state."""
    into, back, bad, good = gilbert_elliott(share=share, burst=burst, loss_bad=loss_bad, loss_good=loss_good)
    assert (bad, good) == (pytest.approx(loss_bad, abs=1e-6), pytest.approx(loss_good, abs=1e-6))
    assert 1 / back == pytest.approx(burst, rel=1e-2)
    in_bad = into / (into + back)
    assert in_bad * bad + (1 - in_bad) * good == pytest.approx(share, rel=1e-2)


def test_gilbert_elliott_simulation_of_netem_gives_the_share():
    """400,000 packets through the transitions of net/sched/sch_netem.c; the bad state comes in bursts."""
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
    ("params", "message"),
    [
        ({"share": 0.1, "loss_bad": 0.5}, "add burst"),
        ({"share": 0.1, "burst": 5, "loss_good": 0.2}, "is not between the loss in the good state"),
        ({"share": 0.5, "burst": 5, "loss_bad": 0.4}, "is not between the loss in the good state"),
        ({"share": 0.45, "burst": 1, "loss_bad": 0.5}, "is impossible with bursts of 1 packets"),
    ],
)
def test_gilbert_elliott_impossible_parameters_are_rejected(params, message):
    with pytest.raises(UsageError, match=message):
        soft("packet.drop", "host1:rxe0", **params)


def test_detour_leaves_the_queue_of_the_port_alone():
    """A separate device adds the delay. On egress, tc redirects only packets that nftables has marked."""
    planned = soft("packet.delay", "host1:rxe0", delay=20)
    commands = " ".join(step.do for step in planned.mechanism.steps)
    assert "filter add dev host1-rxe0 egress" in commands
    assert "clsact" not in commands, "the port has one: to make it would lose packets"
    assert "dev host1-rxe0 root" not in commands
    assert "match mark 0xfb000001 0xffffffff" in commands
    assert "clsact" not in " ".join(
        step.do for step in soft("packet.delay", "host1:rxe0", delay=20, direction="from").mechanism.steps
    )


def test_detours_of_one_port_collide():
    """A port has one redirection: the conflict is named.

    A drop composes with a delay, and so does the other direction.
    """
    delay = FaultSpec(kind="packet.delay", target="host1:rxe0", for_s=1.0, params={"delay": 5})
    back = FaultSpec(kind="packet.delay", target="host1:rxe0", for_s=1.0, params={"delay": 5, "direction": "from"})
    drop = FaultSpec(kind="packet.drop", target="host1:rxe0", for_s=1.0, params={"share": 0.1})
    assert len(plan_all([delay, back, drop], SOFT, lab_kind="soft")) == 3
    rate = FaultSpec(kind="link.rate", target="rtsw1:host1:rxe0", for_s=1.0, params={"rate": 5})
    with pytest.raises(UsageError, match="overlaps"):
        plan_all([delay, rate], SOFT, lab_kind="soft")


def test_packet_drop_by_qp_and_psn_matches_once():
    """The rule matches the BTH's destination QP and PSN, and its limit lets it match only once."""
    planned = soft("packet.drop", "host1:rxe0", psn=291, qp=17)
    assert "@th,104,24 17 @th,136,24 291 numgen inc mod 2147483648 0 " in planned.request["args"]["ruleset"]
    assert planned.mechanism.late_binding is None


def test_packet_drop_relative_psn_is_bound_late_at_the_receiver():
    """The PSN +100 of any QP is read from the RNIC just before arming."""
    planned = soft("packet.drop", "host2:rxe1", psn="+100", qp="any")
    assert (
        planned.mechanism.late_binding.host,
        planned.mechanism.late_binding.rnic,
        planned.mechanism.late_binding.qp,
        planned.mechanism.late_binding.psn_ahead,
    ) == (
        "host2",
        "rxe1",
        "any",
        100,
    )


def _codes(kind):
    """Return the opcodes that the rule of a class matches; the set is the only part of it."""
    (expression,) = OPCODES[kind]
    return {
        code
        for part in expression.partition("{ ")[2].rstrip(" }").split(", ")
        for low, _, high in [part.partition("-")]
        for code in range(int(low, 16), int(high or low, 16) + 1)
    }


def test_opcode_classes_by_place_in_a_message_are_those_of_the_standards_table_and_make_up_all_data():
    """The names of the table of opcodes end with the place: RDMA_WRITE_LAST_WITH_IMMEDIATE, SEND_ONLY."""
    data = {code for code, row in RC.items() if row.name.startswith(("RC_SEND_", "RC_RDMA_WRITE_"))}
    assert _codes("data") == data
    for place in ("first", "middle", "last", "only"):
        assert _codes(f"data-{place}") == {code for code in data if f"_{place.upper()}" in RC[code].name}
    assert CATALOGUE["packet.drop"].param("opcode").choices == tuple(OPCODES)
