"""Proof that a fault fired: readback, count, an independent witness, and bystanders that did not move."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from planned_faults import SAMPLES, SOFT_KINDS, soft, with_mechanism

from faultbed.harness.proof import unproven
from faultbed.inject.evidence.firing_times import on_time_of
from faultbed.inject.evidence.observation import NOTHING, Observation
from faultbed.inject.evidence.receipt import Armed, Cleared, Receipt, concluded, judge_fired
from faultbed.inject.evidence.witnesses import rebooting_hosts
from faultbed.inject.fault_plan import plan, plan_all
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.selection import MOST_SEED
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.observe.counters import BOOT
from faultbed.testbed.shipped import inventories

MINI = lab_inventory.load(inventories() / "soft-mini.yml").topology
SOFT = lab_inventory.load(inventories() / "soft.yml").topology
FLAP = plan(FaultSpec(kind="link.flap", target="rtsw1:ctsw1", for_s=1.0), MINI, lab_kind="soft")
DROP = plan(FaultSpec(kind="packet.drop", target="host2:rxe0", for_s=1.0, params={"share": 0.1}), MINI, lab_kind="soft")
DONE = Observation(state="over", count=1, first_ns=10, last_ns=20)
WITNESS = FLAP.mechanism.must_move[0].any_of[0]


def snapshot(**moved):
    """Return a snapshot of all relevant counters, at 0 except those given by `node/name`."""
    actual = {}
    for planned in (FLAP, DROP):
        for key in planned.reads_keys:
            node, name = key.split("/", 1)
            actual.setdefault(node, {})[name] = moved.get(key, 0)
    return actual


def armed_at(planned):
    return Armed(
        ok=True, readback={"applied": True, **planned.mechanism.shows}, while_on=dict(planned.mechanism.while_on)
    )


def judged(planned=FLAP, *, armed=None, observed=DONE, moved=None, after=None):
    return judge_fired(
        planned,
        armed=armed or armed_at(planned),
        observed=observed,
        before=snapshot(),
        after=snapshot(**(moved or {})) if after is None else after,
    )


def test_receipt_is_proven_by_readback_count_and_witness():
    """All three are there, and the witness is named."""
    fired, doubts = judged(moved={WITNESS: 1})
    assert doubts == ()
    assert (fired.count, fired.witness, fired.must_move) == (1, WITNESS, {WITNESS: 1})


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"armed": Armed(ok=False), "moved": {WITNESS: 1}}, "not armed"),
        ({"armed": Armed(ok=True, readback={"device": "ctsw2"}), "moved": {WITNESS: 1}}, "armed elsewhere: device"),
        ({"observed": replace(DONE, count=0), "moved": {WITNESS: 1}}, "counted nothing"),
        ({"observed": NOTHING, "moved": {WITNESS: 1}}, "counted nothing"),
        ({"observed": replace(DONE, lost=True), "moved": {WITNESS: 1}}, "something else removed it early"),
        (
            {"observed": replace(DONE, unread="no device"), "moved": {WITNESS: 1}},
            "could not be read just before it was",
        ),
        ({}, "no independent witness"),
        ({"moved": {WITNESS: 1, "host1/rxe0.send_err": 2}}, "host1/rxe0.send_err moved by 2"),
    ],
)
def test_receipt_each_missing_part_is_a_doubt(change, word):
    """Without readback, count or witness, or with a sender that failed by itself, the receipt proves nothing."""
    _, doubts = judged(**change)
    assert len(doubts) == 1
    assert word in doubts[0]


def test_receipt_state_not_confirmed_by_a_second_reading_is_a_doubt():
    """The holder's own word is not enough if a second source exists."""
    planned = with_mechanism(FLAP, while_on=(("rtsw1/ctsw1.mtu", 1500),))
    for second_mtu, doubted in ((1500, False), (4200, True), (None, True)):
        armed = replace(armed_at(planned), while_on={"rtsw1/ctsw1.mtu": second_mtu})
        _, doubts = judged(planned, armed=armed, moved={WITNESS: 1})
        assert bool(doubts) is doubted


def test_receipt_state_from_before_the_fault_is_a_doubt():
    """A switch that an operator had drained already looks drained, whatever the fault did."""
    drain = plan(FaultSpec(kind="switch.drain", target="ctsw1", for_s=1.0), SOFT, lab_kind="soft")
    witness = drain.mechanism.must_move[0]
    for shared, doubted in ((1, False), (0, True)):
        before = {node: {} for node in drain.reads}
        for key in drain.reads_keys:
            node, name = key.split("/", 1)
            before[node][name] = shared if name.endswith(".multipath") else 0
        after = {node: dict(values) for node, values in before.items()}
        node, name = witness.any_of[0].split("/", 1)
        after[node][name] = witness.at_least
        _, doubts = judge_fired(drain, armed=armed_at(drain), observed=DONE, before=before, after=after)
        assert [("before the fault" in doubt) for doubt in doubts] == [True] * len(drain.mechanism.while_on) * doubted


def test_receipt_absence_of_a_device_is_a_state():
    """A removed device has no counters. Their absence is a witness only if the node was read."""
    planned = with_mechanism(FLAP, must_move=(), while_on=(("host1/rxe0.send_err", None),))
    for looked, doubted in (({"host1/rxe0.send_err": None}, False), ({"host1/rxe0.send_err": 0}, True), ({}, True)):
        fired, doubts = judged(planned, armed=replace(armed_at(planned), while_on=looked))
        assert bool(doubts) is doubted
        assert fired.witness == (None if doubted else "host1/rxe0.send_err")


def test_receipt_unreadable_counters_prove_nothing():
    """A machine that does not answer provides neither a witness nor a clean bystander."""
    _, doubts = judged(after={})
    assert any("no independent witness" in doubt for doubt in doubts)
    assert any("can no longer be read" in doubt for doubt in doubts)


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [
        ({"host1/rxe0.send_err": 7}, {WITNESS: 1}, "host1/rxe0.send_err was reset, from 7 to 0"),
        ({"host1/rxe0.send_err": 7}, {WITNESS: 1, "host1/rxe0.send_err": 3}, "was reset, from 7 to 3"),
        ({"host1/rxe0.send_err": None}, {WITNESS: 1, "host1/rxe0.send_err": None}, "could not be read"),
        ({"host1/rxe0.send_err": None}, {WITNESS: 1}, "host1/rxe0.send_err was not read before the fault"),
    ],
)
def test_receipt_bystander_that_was_reset_or_never_read_is_unknown(before, after, word):
    """A host that rebooted counts from 0 again, so its counter does not show whether it moved before."""
    fired, doubts = judge_fired(
        FLAP, armed=armed_at(FLAP), observed=DONE, before=without_unread(before), after=without_unread(after)
    )
    assert len(doubts) == 1
    assert word in doubts[0]
    assert fired.must_not_move["host1/rxe0.send_err"] is None


def test_receipt_bystander_that_is_zero_before_and_after_a_reboot_is_unknown():
    """Nothing shows what it counted before: an error of the host's RNIC was lost with the boot, and it looked still."""
    before, after = snapshot(), snapshot(**{WITNESS: 1})
    before["host1"][BOOT], after["host1"][BOOT] = 1, 2
    fired, doubts = judge_fired(FLAP, armed=armed_at(FLAP), observed=DONE, before=before, after=after)
    of_host1 = {key for key in FLAP.mechanism.must_not_move if key.startswith("host1/")}
    assert of_host1
    assert {key for key, moved in fired.must_not_move.items() if moved is None} == of_host1
    assert len(doubts) == len(of_host1)
    assert all("belongs to host1, which has booted since" in doubt for doubt in doubts)


def test_receipt_bystander_of_a_device_that_was_reset_is_unknown():
    before, after = snapshot(), snapshot(**{WITNESS: 1})
    before["host1"] |= {"rxe0.sent_pkts": 5000, "rxe0.rcvd_pkts": 4000}
    after["host1"] |= {"rxe0.sent_pkts": 10, "rxe0.rcvd_pkts": 10}
    _, doubts = judge_fired(FLAP, armed=armed_at(FLAP), observed=DONE, before=before, after=after)
    assert [doubt for doubt in doubts if "rxe0, which was reset since" in doubt] == list(doubts) != []


def test_receipt_of_a_fault_that_was_never_armed_does_not_list_every_counter():
    """A run that is stopped reads no counters before the faults that are still to come: one reason is enough."""
    armed = Armed(ok=False, error="the run was stopped")
    _, doubts = judge_fired(FLAP, armed=armed, observed=NOTHING, before={}, after=snapshot())
    assert FLAP.mechanism.must_not_move
    assert "no counter was read before the fault" in doubts
    assert not [doubt for doubt in doubts if "was not read" in doubt]


def test_receipt_own_counter_that_was_not_read_before_the_fault_proves_nothing():
    """The counter used to count from 0, so its growth since the boot proved the fault."""
    before, after = without_unread({WITNESS: None}), snapshot(**{WITNESS: 40})
    fired, doubts = judge_fired(FLAP, armed=armed_at(FLAP), observed=DONE, before=before, after=after)
    assert (fired.witness, fired.must_move) == (None, {WITNESS: None})
    (doubt,) = doubts
    assert f"no independent witness: {WITNESS} moved by 0" in doubt
    assert f"{WITNESS} was not read before the fault: its increment is unknown" in doubt
    receipt = Receipt(
        id=FLAP.id, kind=FLAP.kind, target=FLAP.target.text, fidelity=FLAP.fidelity, armed=Armed(ok=True), fired=fired,
        cleared=Cleared(ok=True),
    )  # fmt: skip
    assert unproven(receipt) == (f"what must move did not ({WITNESS})",)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ({WITNESS: 9}, {WITNESS: 2}, f"{WITNESS} was reset, from 9 to 2"),
        ({f"ctsw1/{BOOT}": 1}, {WITNESS: 1, f"ctsw1/{BOOT}": 2}, f"{WITNESS} belongs to ctsw1, which has booted since"),
    ],
)
def test_receipt_own_counter_that_was_reset_meanwhile_proves_nothing(before, after, words):
    """A port that was made anew has lost its carrier before: it fell from 9 to 2, which counted as moved by 2."""
    shots = [snapshot(**values) for values in (before, after)]
    for shot, values in zip(shots, (before, after), strict=True):
        shot["ctsw1"] |= {BOOT: values.get(f"ctsw1/{BOOT}", 1)}
    fired, doubts = judge_fired(FLAP, armed=armed_at(FLAP), observed=DONE, before=shots[0], after=shots[1])
    assert (fired.witness, fired.must_move) == (None, {WITNESS: None})
    (doubt,) = doubts
    assert words in doubt
    assert doubt.endswith("its increment is unknown")


def test_receipt_witness_of_a_reboot_is_not_lost_by_that_reboot():
    """The counters of the host count from 0 again because of the fault itself."""
    reboot = plan(FaultSpec(kind="host.reboot", target="host1", for_s=1.0), MINI, lab_kind="soft")
    before = {node: {key.split("/", 1)[1]: 0 for key in reboot.reads_keys} for node in reboot.reads}
    after = {node: dict(values) for node, values in before.items()}
    before["host1"][BOOT], after["host1"][BOOT], after["host1"]["boots"] = 1, 2, 1
    for key, state in reboot.mechanism.restored:
        after["host1"][key.split("/", 1)[1]] = state
    fired, doubts = judge_fired(reboot, armed=armed_at(reboot), observed=DONE, before=before, after=after)
    assert (fired.witness, doubts) == ("host1/boots", ())


def test_plan_of_a_fault_beside_a_reboot_has_no_bystander_on_that_host():
    drop = FaultSpec(kind="packet.drop", target="host2:rxe0", for_s=1.0, params={"share": 0.1})
    reboot = FaultSpec(kind="host.reboot", target="host1", at_s=20.0, for_s=2.0)
    alone = plan(drop, SOFT, lab_kind="soft")
    beside, _ = plan_all([drop, reboot], SOFT, lab_kind="soft")
    assert {key for key in alone.mechanism.must_not_move if key not in beside.mechanism.must_not_move} == {
        key for key in alone.mechanism.must_not_move if key.startswith("host1/")
    }


@pytest.mark.parametrize("kind", SOFT_KINDS)
def test_no_kind_reboots_the_host_of_its_own_bystander(kind):
    target, params = SAMPLES[kind]
    planned = soft(kind, target, for_s=5.0, **params)
    assert not {key.partition("/")[0] for key in planned.mechanism.must_not_move} & set(rebooting_hosts(planned))


def without_unread(values):
    """A snapshot without the counters that are None in `values`."""
    read = snapshot(**{key: value for key, value in values.items() if value is not None})
    for node, name in (key.split("/", 1) for key, value in values.items() if value is None):
        del read[node][name]
    return read


def test_receipt_fault_that_removes_a_device_may_reset_its_counters():
    """If the fault removes and recreates a device, its counters restart at 0. That is not a doubt."""
    remove = plan(FaultSpec(kind="rnic.remove", target="host1:rxe0", for_s=1.0), MINI, lab_kind="soft")
    before = {node: {} for node in remove.reads}
    for node, name in (key.split("/", 1) for key in remove.reads_keys):
        before[node][name] = 7
    after = {**before, "host1": {**before["host1"], "rxe0.send_err": 0}}
    _, doubts = judge_fired(remove, armed=armed_at(remove), observed=DONE, before=before, after=after)
    assert doubts == ()


def test_receipt_names_the_most_specific_witness():
    """A gap at the receiver is more specific than a timer, and is named although the sender's timers moved more."""
    moved = {"host1/rxe0.completer_retry_err": 40, "host2/rxe0.out_of_seq_request": 2}
    fired, doubts = judged(DROP, moved=moved)
    assert doubts == ()
    assert fired.witness == "host2/rxe0.out_of_seq_request"
    assert fired.must_move["host1/rxe0.completer_retry_err"] == 40


def test_receipt_is_the_faults_element_of_a_verdict():
    """The element has the fields of verdict.json, and is plain JSON."""
    fired, doubts = judged(moved={WITNESS: 1})
    receipt = Receipt(
        id=FLAP.id, kind=FLAP.kind, target=FLAP.target.text, fidelity=FLAP.fidelity, armed=Armed(ok=True), fired=fired,
        cleared=Cleared(ok=True),
    )  # fmt: skip
    receipt = concluded(receipt, doubts)
    decoded = json.loads(json.dumps(receipt.to_json()))
    assert list(decoded) == [
        "id", "kind", "target", "fidelity", "armed", "fired", "exposed", "cleared", "on_time", "edges", "doubts",
        "unproven",
    ]  # fmt: skip
    assert list(decoded["fired"]) == ["count", "first_ns", "last_ns", "witness", "must_move", "must_not_move"]
    chosen, _ = judged(DROP, moved={DROP.mechanism.must_move[0].any_of[0]: 1})
    said_too = replace(receipt, fired=chosen).to_json()["fired"]
    assert said_too["selection"] == "selected by seed 1, period 10240"
    assert receipt.proved

    firing, _ = judged(moved={WITNESS: 1}, observed=replace(DONE, between_ns=(9, 12)))
    element = json.loads(json.dumps(replace(receipt, fired=firing).to_json()))
    assert element["fired"]["between_ns"] == [9, 12]


SECOND = 1_000_000_000


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"cleared": Cleared(ok=False, error="the port is still down")}, "not cleared: the port is still down"),
        ({"on_time": on_time_of(((0, 60 * SECOND),), [(0, 0, True), (SECOND, SECOND, False)])}, "was on for 1.00 s of"),
        ({"on_time": on_time_of(((0, 60 * SECOND),), [(0, 0, True)])}, "was on for 0.00 s of the planned 60 s"),
    ],
)
def test_receipt_not_cleared_or_not_on_as_planned_proves_nothing(change, reason):
    fired, doubts = judged(moved={WITNESS: 1})
    receipt = Receipt(
        id=FLAP.id, kind=FLAP.kind, target=FLAP.target.text, fidelity=FLAP.fidelity, armed=Armed(ok=True), fired=fired,
        cleared=Cleared(ok=True),
    )  # fmt: skip
    receipt = concluded(replace(receipt, **change), doubts)
    assert receipt.proved is (reason is None)
    assert receipt.to_json()["unproven"] == list(receipt.unproven)
    if reason is not None:
        assert reason in receipt.unproven[0]


@pytest.mark.parametrize(
    ("params", "count", "passed", "word"),
    [
        ({"share": 0.1}, 2048, 20_480, None),
        ({"share": 0.1}, 2049, 20_480, None),
        ({"share": 0.1}, 2060, 20_480, "2060 of 20480 packets were hit, planned were 2048 ± 1"),
        ({"share": 0.1}, 1, 20_480, "2048 ± 1"),
        ({"every": 50}, 200, 10_049, None),
        ({"every": 50}, 190, 10_049, "190 of 10049 packets were hit, planned were 200 ± 1"),
        ({"share": 0.1}, 3, None, None),
    ],
)
def test_receipt_share_other_than_requested_is_a_doubt(params, count, passed, word):
    planned = plan(FaultSpec(kind="packet.drop", target="host2:rxe0", for_s=1.0, params=params), MINI, lab_kind="soft")
    observed = replace(DONE, count=count, passed=passed)
    fired, doubts = judged(planned, observed=observed, moved={planned.mechanism.must_move[0].any_of[0]: 1})
    assert fired.passed == passed
    if word is None:
        assert doubts == ()
    else:
        assert word in " ".join(doubts)


@given(share=st.floats(1e-6, 0.999), passed=st.integers(0, 20_000), seed=st.integers(0, MOST_SEED))
def test_receipt_correct_hop_is_never_in_doubt(share, passed, seed):
    """The count is compared with the packets that the seed selected, not with a binomial distribution."""
    spec = FaultSpec(kind="packet.drop", target="host2:rxe0", for_s=1.0, params={"share": share}, seed=seed)
    planned = plan(spec, MINI, lab_kind="soft")
    chosen, inverse = set(planned.mechanism.selection.positions), planned.mechanism.selection.spared
    count = sum((number % planned.mechanism.selection.period in chosen) is not inverse for number in range(passed))
    observed = replace(DONE, count=count, passed=passed)
    _, doubts = judged(planned, observed=observed, moved={planned.mechanism.must_move[0].any_of[0]: 1})
    assert [doubt for doubt in doubts if "were hit" in doubt] == []


def test_receipt_records_why_an_early_end_of_the_fault_cannot_be_observed():
    """No readback shows whether something else ended the fault: that is no doubt, and not silence either."""
    fired, doubts = judged(observed=replace(DONE, unseen="QEMU does not report it"), moved={WITNESS: 1})
    assert doubts == ()
    assert fired.loss_unknown_why == "QEMU does not report it"
    assert msgspec.to_builtins(fired)["unseen"] == fired.loss_unknown_why, "its name in verdict.json"
    assert judged(moved={WITNESS: 1})[0].loss_unknown_why is None
