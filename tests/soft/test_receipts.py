"""Each kind of fault on a real lab: armed, fired with a witness, cleared, and the lab as before."""

from __future__ import annotations

import shlex
import threading

import pytest
from faults import KINDS, case, work
from waiting import until

from faultbed.inject import heal as heal_module
from faultbed.inject.fault_plan import plan, plan_beside
from faultbed.inject.heal import heal
from faultbed.inject.injector import Injector
from faultbed.inject.journal import Journal, pending, read
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.mechanisms.planned_fault import PlannedFault
from faultbed.inject.node.machine.limit import RANKS_CGROUP
from faultbed.inject.node.network.steer import PRIORITY, TABLE
from faultbed.testbed.errors import FaultError
from faultbed.testbed.node.gpu.health import FOLDER as HEALTH
from faultbed.testbed.observe import counters

pytestmark = pytest.mark.soft


@pytest.mark.parametrize("name", KINDS)
def test_fault_fires_with_a_witness_and_leaves_nothing(lab, tmp_path, name):
    """Readback, count and an independent counter prove the fault; the fingerprint is the old one."""
    planned = case(lab, name, for_s=1.5).planned
    with Journal(tmp_path / "journal.jsonl") as journal, work(lab, name), Injector(lab, journal) as injector:
        prepared = injector.prepare(planned)
        armed = prepared.arm()
        threading.Event().wait(planned.spec.for_s)
        receipt = prepared.clear()
    assert armed.ok
    assert receipt.proved, receipt.unproven
    assert receipt.fired.count >= 1
    assert armed.at_ns <= receipt.fired.first_ns <= receipt.fired.last_ns <= receipt.cleared.at_ns
    assert receipt.cleared.ok
    assert receipt.cleared.by == "holder"
    assert pending(read(tmp_path / "journal.jsonl")) == []


def _flapped(lab, uplink):
    netdev = uplink.a.netdev
    lab.node(uplink.a.node).run(["sh", "-c", f"ip link set {netdev} up; sleep 1; ip link set {netdev} down"])


def _line_restored(lab, uplink):
    switch = lab.topology.switch_by_name[uplink.a.node]
    commands = [
        "configure terminal",
        f"router bgp {switch.asn}",
        "address-family ipv4 unicast",
        "redistribute connected",
    ]
    words = [word for command in commands for word in ("-c", command)]
    lab.node(lab.carrier(switch.name).name).run(["vtysh", "-N", lab.netns(switch.name), "-d", "bgpd", *words])


def _queue_changed(lab, uplink):
    lab.node(uplink.a.node).run(
        ["sh", "-c", "via=$(ls /sys/class/net | grep ^fbvia); tc qdisc change dev $via root netem delay 0ms"]
    )


@pytest.mark.needs("uplinks >= 2", "racks >= 2")
@pytest.mark.parametrize(
    ("kind", "params", "meddle"),
    [
        ("link.down", {}, _flapped),
        ("switch.withdraw", {}, _line_restored),
        ("packet.delay", {"delay": "20ms"}, _queue_changed),
    ],
    ids=["removed-and-put-back", "restored-in-frr", "queue-changed"],
)
def test_fault_that_something_else_ends_is_not_proved(lab, tmp_path, kind, params, meddle):
    """By its edges it was on for its whole time, and it is cleared in any case.

    A second fault of the kind, on another rack switch, is left alone: nothing has removed it early.
    """
    uplinks = [_first_uplink(lab, switch) for switch in ("rtsw1", "rtsw2")]
    planned: tuple[PlannedFault, ...] = ()
    for index, uplink in enumerate(uplinks):
        target = uplink.a.node if kind.startswith("switch.") else uplink.name
        spec = FaultSpec(kind=kind, target=target, for_s=60.0, params=params)
        planned = plan_beside(spec, planned, lab.topology, lab_kind="soft", index=index)
    with Journal(tmp_path / "j") as journal, Injector(lab, journal, until_cleared=True) as injector:
        prepared = [injector.prepare(fault) for fault in planned]
        for fault in prepared:
            assert fault.arm().ok
        meddle(lab, uplinks[0])
        receipts = [fault.clear() for fault in prepared]
    early = [
        [reason for reason in receipt.unproven if "something else removed it early" in reason] for receipt in receipts
    ]
    assert [bool(reasons) for reasons in early] == [True, False], early
    assert [receipt.cleared.ok for receipt in receipts] == [True, True]
    assert [receipt.fired.loss_unknown_why for receipt in receipts] == [None, None]


def _first_uplink(lab, switch):
    return next(uplink for uplink in lab.topology.uplinks if uplink.a.node == switch)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", ["noop", pytest.param("lie", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["uplink", "rnic", "throttle"])
def test_fault_without_action_is_not_proved(lab, tmp_path, name, mutation):
    """The action is replaced by a no-op that reports so, or by one that does not: the receipt has doubts."""
    planned = case(lab, name, for_s=1.0).planned
    with Journal(tmp_path / "j") as journal, work(lab, name), Injector(lab, journal, mutate=mutation) as injector:
        prepared = injector.prepare(planned)
        prepared.arm()
        threading.Event().wait(planned.spec.for_s)
        receipt = prepared.clear()
    assert not receipt.proved
    assert receipt.fired.witness is None


@pytest.mark.slow
def test_drop_without_action_is_not_proved(lab, tmp_path):
    """Retransmissions have other causes, too. Without a count at the hop they prove nothing."""
    planned = case(lab, "drop", for_s=1.0).planned
    with Journal(tmp_path / "j") as journal, work(lab, "drop"), Injector(lab, journal, mutate="noop") as injector:
        prepared = injector.prepare(planned)
        assert not prepared.arm().ok
        threading.Event().wait(planned.spec.for_s)
        receipt = prepared.clear()
    assert not receipt.proved
    assert receipt.fired.count == 0


def test_drop_by_psn_loses_exactly_one_packet(lab, tmp_path):
    """The PSN is ahead of the receiver: one hit at the hop, and a gap at the receiver or a timer at the sender."""
    spec = FaultSpec(
        kind="packet.drop",
        target=case(lab, "drop").planned.target.text,
        for_s=20.0,
        params={"psn": "+400", "qp": "any"},
    )
    planned = plan(spec, lab.topology, lab_kind="soft")
    with Journal(tmp_path / "j") as journal, work(lab, "drop"), Injector(lab, journal) as injector:
        prepared = injector.prepare(planned)
        prepared.arm()
        until(lambda: prepared.observe().count)
        receipt = prepared.clear()
    assert receipt.fired.count == 1
    assert receipt.proved, receipt.unproven
    assert receipt.armed.learned["psn"] >= 0


def test_flap_train_is_counted_at_both_ends(lab, tmp_path):
    """The holder's edges show three flaps, and the other switch's carrier counts three."""
    spec = FaultSpec(
        kind="link.flap", target=lab.topology.uplinks[0].name, for_s=3.0, params={"period": "1.0s", "duty": 0.3}
    )
    planned = plan(spec, lab.topology, lab_kind="soft")
    with Journal(tmp_path / "j") as journal, Injector(lab, journal) as injector:
        prepared = injector.prepare(planned)
        prepared.arm()
        threading.Event().wait(planned.spec.for_s)
        receipt = prepared.clear()
    assert receipt.proved, receipt.unproven
    assert receipt.fired.count == 3
    assert receipt.fired.must_move[planned.mechanism.must_move[0].any_of[0]] == 3
    downs = [at for at, on in receipt.edges if on]
    assert all(abs(at - downs[0] - k * 1e9) < 0.25e9 for k, at in enumerate(downs))


def test_port_already_down_is_rejected_and_left_alone(lab, tmp_path):
    """The port's state is not faultbed's, so nothing changes, not even when the holder ends."""
    planned = case(lab, "uplink").planned
    port = planned.request["args"]["device"]
    switch = lab.node(planned.target.node)
    switch.run(["ip", "link", "set", "dev", port, "down"])
    try:
        with (
            Journal(tmp_path / "j") as journal,
            Injector(lab, journal) as injector,
            pytest.raises(FaultError, match="already down"),
        ):
            injector.prepare(planned)
        assert counters.read(lab, [planned.target.node])[planned.target.node][f"{port}.up"] == 0
    finally:
        switch.run(["ip", "link", "set", "dev", port, "up"])


def test_heal_finds_leftovers_without_a_journal(lab):
    """Heal finds every kind of leftover by its mark, reverts and reports it. A second heal finds nothing."""
    planned = case(lab, "uplink").planned
    host, switch = lab.topology.hosts[0].name, lab.node(planned.target.node)
    switch.run(["ip", "link", "set", "dev", planned.request["args"]["device"], "down"])
    switch.run(["nft", "add", "table", "netdev", "faultbed_leftover"])
    switch.run(["ip", "link", "add", "fbvialeft", "up", "type", "dummy"])
    switch.run(["ip", "rule", "add", "priority", PRIORITY, "lookup", TABLE])
    lab.node(host).run(["mkdir", RANKS_CGROUP])
    limit = "echo 5000 10000 > /sys/fs/cgroup/faultbed.slice/faultbed-gpu0.service/cpu.max"
    lab.node(host).run(["sh", "-c", limit])
    hot = f"{HEALTH}/gpu0.heat.now"
    lab.node(host).run(["sh", "-c", f"mkdir -p {HEALTH} && echo '{{}}' > {hot}"])
    done = "\n".join(heal(lab))
    assert hot in done
    assert planned.request["args"]["device"] in done
    assert "faultbed_leftover" in done
    assert "cpu.max" in done
    assert "fbvialeft" in done
    assert f"the rule to table {TABLE}" in done
    assert RANKS_CGROUP in done
    assert heal(lab) == []


def test_sweep_of_a_namespace_removes_only_our_marks(lab):
    """In a namespace of its own, each kind of leftover of ours has a foreign counterpart next to it."""
    made = f"""\
nft add table netdev faultbed_1234abcd && nft add table netdev somebodys
ip link add fbvia1234abcd up type ifb && ip link add fbother up type ifb
tc qdisc add dev fbother clsact
ip rule add priority {PRIORITY} lookup {TABLE}"""
    sweep = f"sh -c {shlex.quote(heal_module._SWEEP)} sweep ' in here'"
    look = "nft list tables; tc qdisc show; ip -o link show; ip rule show"
    text = f"set -e\n{made}\n{sweep}\necho ---\n{look}\necho ---\n{sweep}"
    done = lab.node(lab.topology.switches[0].name).run(["unshare", "--net", "sh", "-c", text])
    output, left, again = done.stdout.split("---\n")
    assert sorted(output.splitlines()) == [
        "healed: removed fbvia1234abcd in here",
        "healed: removed nft table faultbed_1234abcd in here",
        f"healed: removed the rule to table {TABLE} in here",
    ]
    assert all(mark not in left for mark in ("faultbed_", "fbvia", f"lookup {TABLE}"))
    assert all(other in left for other in ("somebodys", "fbother", "clsact"))
    assert again == ""
