"""The active time of a fault, as a real holder keeps it and its receipt judges it. Only QEMU is a stand-in."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import replace

import pytest
from held import send_request
from holder_requests import prepare
from local_lab import lab_at
from planned_faults import with_mechanism
from waiting import until

from faultbed.harness import proof
from faultbed.inject.evidence import witnesses
from faultbed.inject.fault_plan import plan
from faultbed.inject.injector import Injector, audit_fields
from faultbed.inject.journal import Journal
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.policy.overlap import TAIL_S
from faultbed.testbed.observe import clock, counters, fingerprint
from faultbed.testbed.tenancy import audit_log
from faultbed.testbed.tenancy.lab_lease import this_process

S = 1_000_000_000
HOLD_S = 0.5


@pytest.fixture
def lab(qemu, tmp_path, monkeypatch):
    for module, name in ((counters, "read"), (fingerprint, "capture")):
        monkeypatch.setattr(module, name, getattr(module, name))  # restores what `lab_at` replaces
    return lab_at(tmp_path)


@pytest.fixture
def injecting(lab, tmp_path):
    with Journal(tmp_path / "journal") as journal:
        yield lambda **options: Injector(lab, journal, **options)


def flap(lab, for_s, **params):
    spec = FaultSpec(kind="link.flap", target="host1:rxe0", for_s=for_s, params=params)
    return plan(spec, lab.topology, lab_kind="soft")


def is_over(prepared):
    return prepared.observe().state == "over"


def test_holder_arm_request_too_late_is_done_in_full_and_reported(held, qemu, tmp_path):
    """A fault armed 2.5 s late used to be active for 1.6 ms instead of 0.5 s, and still counted as fired."""
    offset = clock.measure(held)
    prepare(held, tmp_path, window_s=HOLD_S)
    asked_ns = time.monotonic_ns() - 2_500_000_000 - offset.offset_ns
    answer = send_request(held, "arm", at_ns=asked_ns)
    assert answer["event"] == "armed"
    assert answer["late_ns"] >= 2_500_000_000
    until(lambda: send_request(held, "observe")["state"] == "over", within_s=10)
    observed = send_request(held, "observe")
    (_, on_ns, _), (off_ns, _, _) = observed["changes"]
    assert on_ns - asked_ns > 2_500_000_000
    assert off_ns - on_ns >= HOLD_S * S
    assert observed["late_ns"] == answer["late_ns"]


def test_holder_slow_change_does_not_shorten_its_window(held, qemu, tmp_path):
    """The change takes longer than the window, and still stays in effect for the whole window."""
    prepare(held, tmp_path, window_s=HOLD_S)
    qemu.mute_s = 1.5 * HOLD_S
    send_request(held, "arm")
    until(lambda: send_request(held, "observe")["state"] == "over", within_s=10)
    (begin_ns, on_ns, on), (off_ns, _, off) = send_request(held, "observe")["changes"]
    assert (on, off) == (True, False)
    assert on_ns - begin_ns >= 1.5 * HOLD_S * S
    assert off_ns - on_ns >= HOLD_S * S


def test_fault_with_its_whole_window_is_proven(lab, injecting):
    with injecting() as injector:
        prepared = injector.prepare(flap(lab, HOLD_S))
        prepared.arm()
        until(lambda: is_over(prepared), within_s=10)
        receipt = prepared.clear()
    assert receipt.unproven == ()
    assert abs(receipt.on_time.measured_ns - HOLD_S * S) <= receipt.on_time.tolerance_ns
    assert proof.why_unproven(receipt) == ()


@pytest.mark.parametrize("until_cleared", [False, True])
def test_fault_cleared_early_is_proven_only_if_its_kind_ends_by_clearing(lab, injecting, until_cleared):
    """In a run, the planned minute must pass. A test may clear its fault when it has seen enough."""
    with injecting(until_cleared=until_cleared) as injector:
        prepared = injector.prepare(flap(lab, 60.0))
        prepared.arm()
        receipt = prepared.clear()
    assert receipt.cleared.ok
    assert receipt.doubts == ()
    assert receipt.proved is until_cleared
    if not until_cleared:
        assert "of the planned 60 s" in receipt.unproven[0]


def test_flaps_cleared_midway_are_proven_only_if_their_kind_ends_by_clearing(lab, injecting, monkeypatch):
    monkeypatch.setattr(witnesses, "SETTLE_S", 0.5)  # clearing must not wait for the remaining 97 flaps
    planned = flap(lab, 60.0, period=0.6, duty=0.5)
    actual = {}
    for until_cleared in (False, True):
        with injecting(until_cleared=until_cleared) as injector:
            prepared = injector.prepare(planned)
            prepared.arm()
            until(lambda one=prepared: one.observe().count == 3, within_s=20)
            actual[until_cleared] = prepared.clear()
    assert "was on 3 of 100 planned times" in actual[False].unproven[-1]
    assert actual[True].on_time.planned_ns < 2 * S
    # On a busy machine a flap may begin late, and is then shorter than planned: that is another reason.
    assert not [reason for reason in actual[True].unproven if "planned times" in reason]


def test_late_fault_reports_its_delay(lab, injecting):
    with injecting() as injector:
        prepared = injector.prepare(flap(lab, HOLD_S))
        prepared.arm(at_ns=time.monotonic_ns() - 3 * S)
        until(lambda: is_over(prepared), within_s=10)
        receipt = prepared.clear()
    assert receipt.on_time.late_ns >= 3 * S
    assert receipt.unproven == ()


def test_cancelled_fault_reports_the_reason(lab, injecting):
    with injecting() as injector:
        prepared = injector.prepare(flap(lab, HOLD_S))
        prepared.cancel("the workload ended 2.1 s before the fault was due")
        receipt = prepared.clear()
    assert not receipt.proved
    assert "not armed: the workload ended 2.1 s before the fault was due" in receipt.unproven
    assert "the workload ended 2.1 s" in proof.why_unproven(receipt)[0]


def test_fault_directly_after_another_waits_for_own_evidence(lab, injecting):
    """The first fault's carrier returns while the second one's counters are compared, so the evidence is ambiguous."""
    planned, collected = flap(lab, HOLD_S), []
    with injecting() as injector:
        for hasty in (False, False, True):
            prepared = injector.prepare(planned)
            if hasty:
                prepared.baseline()
            prepared.arm()
            until(lambda one=prepared: is_over(one), within_s=10)
            collected.append(prepared.clear())
    first, second, hurried = collected
    assert first.unproven == second.unproven == ()
    assert second.armed.at_ns - first.cleared.at_ns >= TAIL_S * S
    assert "no evidence of its own" in hurried.unproven[0]
    assert "link.flap on host1:rxe0" in hurried.unproven[0]


def test_fault_waits_even_if_an_earlier_one_leaves_it_some_of_its_witnesses(lab, injecting):
    """A second loss on a path was armed at once: counters of other RNICs were left, but those do not see it."""
    first = flap(lab, HOLD_S)
    (witness,) = first.mechanism.must_move
    other = "host2/gpu0.nr_throttled"
    second = with_mechanism(first, must_move=(replace(witness, any_of=(*witness.any_of, other)),))
    with injecting() as injector:
        receipts = []
        for planned in (first, second):
            prepared = injector.prepare(planned)
            prepared.arm()
            until(lambda one=prepared: is_over(one), within_s=10)
            receipts.append(prepared.clear())
    assert receipts[1].armed.at_ns - receipts[0].cleared.at_ns >= TAIL_S * S


@pytest.mark.parametrize(
    ("process", "event", "proven"),
    [("alive", "arming", False), ("alive", "cleared", False), ("dead", "arming", False), ("own", "arming", True)],
)
def test_fault_needs_evidence_that_no_fault_of_another_shell_may_have_moved(
    lab, injecting, tmp_path, process, event, proven
):
    """The other command takes the same carrier down from the switch's side, or did until a moment ago.

    A command that is killed meanwhile leaves its fault in place until its lease is over.
    """
    with injecting() as injector:
        prepared = injector.prepare(flap(lab, HOLD_S))
        prepared.baseline()
        other = {
            **audit_fields(flap(lab, 60.0)),
            "session": injector._session if process == "own" else "another",
            "process": this_process() if process != "dead" else this_process().rpartition(":")[0] + ":1",
        }
        audit_log.append(tmp_path, "arming", **other)
        if event != "arming":
            audit_log.append(tmp_path, event, **other)
        prepared.arm()
        until(lambda: is_over(prepared), within_s=10)
        receipt = prepared.clear()
    assert receipt.proved is proven
    assert any("no evidence of its own: link.flap on host1:rxe0" in reason for reason in receipt.unproven) is not proven


@pytest.mark.parametrize("paused_s", [0.0, 5.0])
def test_fault_of_a_vm_that_was_paused_meanwhile_is_not_proven(lab, injecting, qemu, monkeypatch, paused_s):
    """The holder measured 0.5 s with a clock that stood still; by other clocks the fault was on for 5.5 s."""
    with injecting() as injector:
        fault = injector.prepare(flap(lab, HOLD_S))
        fault.arm()
        until(lambda: is_over(fault), within_s=10)
        now = fault.lease._clock()
        later = dataclasses.replace(now, offset_ns=now.offset_ns + round(paused_s * S))
        monkeypatch.setattr(fault.lease, "_clock", lambda: later)
        receipt = fault.clear()
    apart = [reason for reason in receipt.unproven if "moved 5.00 s apart" in reason]
    assert bool(apart) is bool(paused_s)
