"""The effect of one fault never proves another one: every pair of kinds, one of which does nothing."""

from __future__ import annotations

import itertools

import pytest
from planned_faults import RNICS, SAMPLES, SOFT, soft

from faultbed.inject.evidence.observation import Observation
from faultbed.inject.evidence.receipt import Armed, judge_fired
from faultbed.inject.policy.conflicts import both_claim
from faultbed.inject.policy.overlap import may_move, own_evidence

DONE = Observation(state="over", count=1_000_000, first_ns=10, last_ns=20)

# Each kind has two targets, one as in the samples and one elsewhere, so that it is also paired with itself.
_ELSEWHERE = {
    "host1:rxe0": "host3:rxe0",
    "rtsw1:ctsw1": "rtsw2:ctsw2",
    "host1:gpu0": "host2:gpu0",
    "host1": "host2",
    "host4": "host3",
    "rtsw1": "rtsw2",
    "ctsw1": "ctsw2",
}
LONG = {"for_s": 30.0}
PLANNED = {
    f"{kind} on {at}": soft(kind, at, **LONG, **params)
    for kind, (target, params) in SAMPLES.items()
    for at in (target, _ELSEWHERE[target])
}
ONE_WAY = {
    "drop to host1": soft("packet.drop", "host1:rxe0", share=0.1, **LONG),
    "drop to host3": soft("packet.drop", "host3:rxe0", share=0.1, **LONG),
    "drop from host1": soft("packet.drop", "host1:rxe0", share=0.1, direction="from", **LONG),
    "drop to host3 by dst": soft("packet.drop", "rtsw1:ctsw1", share=0.1, dst="host3:rxe0", **LONG),
    "ACKs to host1": soft("packet.drop", "host1:rxe0", share=0.1, opcode="ack", **LONG),
}
PAIRS = [
    (one, two)
    for one, two in itertools.permutations(PLANNED | ONE_WAY, 2)
    if not both_claim((PLANNED | ONE_WAY)[one], (PLANNED | ONE_WAY)[two], SOFT)
]
TROUBLE = ("out_of_seq_request", "rcvd_seq_err", "completer_retry_err", "duplicate_request", "rcvd_rnr_err")
PACKETS = ("packet.", "link.", "switch.", "congestion.", "host.", "rnic.", "data.", "storage.", "gpu.noisy-neighbour")
HARMLESS = {"packet.mark", "host.clock-step", "host.disk-full"}


def effect(fault):
    """Return what a fault may move, derived from its effect on packets and not from the code under test.

    Loss towards one RNIC opens gaps there and nowhere else; senders and waiting ranks may count anything else.
    """
    moved = {
        key for witness in fault.mechanism.must_move for key in witness.any_of if not key.endswith("out_of_seq_request")
    }
    if fault.kind.startswith(PACKETS) and fault.kind not in HARMLESS:
        moved |= {
            f"{rnic.replace(':', '/')}.{name}" for rnic in RNICS for name in TROUBLE if name != "out_of_seq_request"
        }
        hit = [rnic for rnic in RNICS if _loses_on_the_way_to(fault, rnic)]
        moved |= {f"{rnic.replace(':', '/')}.out_of_seq_request" for rnic in hit}
        moved |= {f"{switch.name}/{port}.tx_packets" for switch in SOFT.switches for port in _ports(switch.name)}
    if fault.kind.startswith(("host.", "gpu.", "storage.", "congestion.slow", "congestion.late")):
        moved |= {f"{fault.target.node}/{name}" for name in ("cpu0.wait_us", "gpu0.wait_us", "memory.stalled_us")}
    if fault.kind.startswith(("link.", "switch.")):
        moved |= {
            f"{switch.name}/{name}"
            for switch in SOFT.switches
            for name in ("tcp.ActiveOpens", "tcp.PassiveOpens", "tcp.RetransSegs", "ip.InNoRoutes")
        }
    return moved


def _loses_on_the_way_to(fault, rnic):
    if fault.kind.startswith(("packet.", "data.")) or fault.kind in (
        "link.oneway", "link.rate", "congestion.shallow-queue",
    ):  # fmt: skip
        if fault.spec.params.get("direction", "to") == "to" and fault.spec.params.get("dst"):
            return fault.spec.params["dst"] == rnic
        if fault.spec.params.get("direction", "to") == "to" and fault.target.kind == "rnic":
            return fault.target.text == rnic
    return True


def _ports(switch):
    return [link.end(switch).netdev for link in SOFT.links_of(switch)]


def nothing_done(fault, other):
    """Return the doubts about a no-op fault that claims success, next to another fault with its full effect."""
    own, shared = own_evidence(fault, [other], SOFT)
    moved = effect(other)
    keys = {key for one in (fault, other) for key in one.reads_keys}
    before, after = {}, {}
    for key in keys:
        node, _, name = key.partition("/")
        before.setdefault(node, {})[name] = 0
        # No bystander moves here, because that would be another doubt.
        after.setdefault(node, {})[name] = 10**9 if key in moved and key not in own.mechanism.must_not_move else 0
    looked = dict(other.mechanism.while_on)
    armed = Armed(
        ok=True,
        readback={"applied": True, **fault.mechanism.shows},
        while_on={key: looked.get(key, -7) for key, _ in own.mechanism.while_on},
    )
    _, doubts = judge_fired(own, armed=armed, observed=DONE, before=before, after=after)
    return (*doubts, *shared)


@pytest.mark.parametrize("kind", sorted({fault.kind for fault in (PLANNED | ONE_WAY).values()}))
def test_fault_without_effect_is_never_proven_by_another_fault(kind):
    faults = PLANNED | ONE_WAY
    believed = [
        f"{one} by {two}"
        for one, two in PAIRS
        if faults[one].kind == kind and not nothing_done(faults[one], faults[two])
    ]
    assert believed == []


def test_pairs_of_faults_are_many_and_some_keep_their_own_evidence():
    """Evidence from a direction, a hop or a device is kept, so two faults may run together."""
    faults = PLANNED | ONE_WAY
    assert len(PAIRS) > 3000
    kept = [pair for pair in PAIRS if not own_evidence(faults[pair[0]], [faults[pair[1]]], SOFT)[1]]
    assert len(kept) > len(PAIRS) / 3
    for one, two in (("drop to host1", "drop to host3"), ("link.down on host1:rxe0", "drop to host3")):
        assert own_evidence(faults[one], [faults[two]], SOFT)[1] == ()
    own, _ = own_evidence(faults["drop to host3"], [faults["drop to host1"]], SOFT)
    assert own.mechanism.must_move[0].any_of == tuple(
        key for key in faults["drop to host3"].mechanism.must_move[0].any_of
        if key.endswith("out_of_seq_request") and not key.startswith("host1/rxe0.")
    )  # fmt: skip


def test_doubt_names_the_fault_that_may_have_moved_the_witness():
    faults = PLANNED | ONE_WAY
    _, (doubt,) = own_evidence(faults["drop from host1"], [faults["link.down on host3:rxe0"]], SOFT)
    assert "no evidence of its own" in doubt
    assert "link.down on host3:rxe0" in doubt


@pytest.mark.parametrize(("lead_s", "least"), [(0.0, 5), (3.9, 9)])
def test_doubt_says_how_far_apart_the_two_faults_must_be(lead_s, least):
    """Counters of a run are compared from 4 s before a fault on, and may move for 4 s after the other one's end."""
    hang, stall = soft("host.rank-hang", "host4", **LONG), soft("storage.stall", "host4", **LONG)
    _, (doubt,) = own_evidence(hang, [stall], SOFT, lead_s=lead_s)
    assert f"leave at least {least} s between the end of one of the two faults and the begin of the other" in doubt


def test_state_made_by_two_faults_proves_neither_and_is_restored_by_the_last():
    """A stopped rank and stopped storage each stop one process, and the readback counts only stopped processes."""
    hang, stall = soft("host.rank-hang", "host4", **LONG), soft("storage.stall", "host4", **LONG)
    own, (doubt,) = own_evidence(hang, [stall], SOFT)
    assert "host4/processes.stopped" in doubt
    assert own.mechanism.while_on == own.mechanism.restored == ()


def test_fault_alone_keeps_all_its_witnesses():
    for fault in PLANNED.values():
        assert own_evidence(fault, [], SOFT) == (fault, ())


def test_fault_may_move_the_counters_it_declares():
    for fault in PLANNED.values():
        keys = [key for witness in fault.mechanism.must_move for key in witness.any_of]
        assert any(may_move(fault, key, SOFT) for key in keys) or not keys, fault.kind


def test_limits_of_two_uplinks_to_different_spines_keep_their_own_evidence():
    """No path crosses two spines of a zone, so packets marked at one spine are not counted at the other."""
    pair = [soft("link.rate", f"rtsw1:{spine}", rate=10.0, **LONG) for spine in ("ctsw1", "ctsw2")]
    for one, two in (pair, pair[::-1]):
        assert own_evidence(one, [two], SOFT) == (one, ())
        assert not may_move(two, f"{one.target.text.partition(':')[2]}/ip.InECT1Pkts", SOFT)
    # Packets from two racks to one spine, and those on their way down, cross the same switches.
    assert may_move(soft("link.rate", "rtsw2:ctsw1", rate=10.0, **LONG), "ctsw1/ip.InECT1Pkts", SOFT)
    assert may_move(soft("link.rate", "rtsw2:ctsw1", rate=10.0, **LONG), "rtsw1/ip.InECT1Pkts", SOFT)
    assert may_move(soft("link.rate", "ctsw1:rtsw1", rate=10.0, **LONG), "rtsw1/ip.InECT1Pkts", SOFT)


def test_switch_port_down_during_another_loss_has_no_own_evidence():
    """A VM's carrier stays up when its switch port goes down, so an unmoved carrier must not be the reason."""
    port = soft("link.down", "rtsw1:host1:rxe0", **LONG)
    assert not any("carrier" in key for witness in port.mechanism.must_move for key in witness.any_of)
    own, (doubt,) = own_evidence(port, [soft("link.down", "rtsw1:host2:rxe0", **LONG)], SOFT)
    assert "no evidence of its own" in doubt
    assert own.mechanism.must_move == ()
