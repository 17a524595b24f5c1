"""Prepare the faults of a run, and arm and clear each at its time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

from faultbed.harness.error_words import describe
from faultbed.harness.parts.passes import EarlyEnd, Pass
from faultbed.inject.evidence.receipt import Receipt, concluded
from faultbed.inject.injector import Injector
from faultbed.inject.mechanisms.planned_fault import PlannedFault
from faultbed.inject.policy.conflicts import both_claim
from faultbed.inject.policy.overlap import LEAD_S, REMOVAL_S, TAIL_S
from faultbed.inject.prepared_fault import PreparedFault
from faultbed.testbed.errors import FaultbedError, FaultError
from faultbed.testbed.model.topology import Topology
from faultbed.traffic.engine.running_traffic import Running

__all__ = ["drive_all", "prepare_all"]


def prepare_all(injector: Injector, faults: Sequence[PlannedFault]) -> list[PreparedFault]:
    """Prepare all faults at once, each on its own thread: on an emulated machine, a holder may take seconds to start.

    Raises:
        Exception: the error of the first fault that could not be prepared.
    """
    ready: dict[str, PreparedFault] = {}
    failures: list[BaseException] = []

    def prepare(planned: PlannedFault) -> None:
        try:
            ready[planned.id] = injector.prepare(planned, later=True)
        except Exception as error:  # noqa: BLE001 (raised again below, where the run can see it)
            failures.append(error)

    _all_threads([threading.Thread(target=prepare, args=(planned,)) for planned in faults])
    if failures:
        raise failures[0]
    return [ready[planned.id] for planned in faults]


def drive_all(run: Pass, running: Running[Any]) -> None:
    """Arm and clear each fault at its time while the workload runs, on its own thread: faults may overlap.

    An error of a thread becomes an error of the run. If the workload's health before the first fault was not checked,
    the receipt of that fault says so.
    """
    record, ready, errors = run.injected, run.injected.ready, run.setting.errors

    def drive_to_end(prepared: PreparedFault) -> None:
        planned = prepared.planned
        name = planned.spec.id
        try:
            with contextlib.suppress(FaultbedError):
                # If a fault cannot be armed, its receipt says so, and the judge decides: not an error of the harness.
                _drive(run, prepared, running)
        except Exception as error:  # noqa: BLE001 (the fault must not stay until the workload ends)
            errors.append(f"{name}: {describe(error)}")
        try:
            record.receipts[name] = prepared.clear(keep_holder=True)
        except Exception as error:  # noqa: BLE001 (a thread's exception would be lost: the run would miss a receipt)
            errors.append(f"{name}: not known to be cleared: {describe(error)}")
            return
        receipt = record.receipts[name]
        if prepared is first and receipt.armed.ok and (doubts := run.doubts()):
            record.receipts[name] = concluded(receipt, (*receipt.doubts, *doubts))
        run.readings.reads += prepared.reads
        run.progress(f"{planned.kind} on {planned.target.text}: {_brief(record.receipts[name])}")

    first = min(ready, key=lambda prepared: prepared.planned.spec.at_s)
    _all_threads([threading.Thread(target=drive_to_end, args=(prepared,)) for prepared in ready])
    record.planned = tuple(prepared.planned for prepared in ready)


def _drive(run: Pass, prepared: PreparedFault, running: Running[Any]) -> None:
    planned, lab = prepared.planned, run.setting.lab
    at_ns = run.work.t0_ns + round(planned.spec.at_s * 1e9)

    def cancel_reason() -> str | None:
        if running.is_over:
            early_s = (at_ns - running.ended_ns) / 1e9
            if early_s < 0:
                return f"it was due {-early_s:.1f} s before the workload ended, and could not be armed by then"
            return f"the workload ended {early_s:.1f} s before the fault was due"
        return "the run was stopped" if run.ending.is_requested else None

    _wait_until(at_ns - int(LEAD_S * 1e9), running, run.ending)
    if not (reason := cancel_reason()):
        earlier = [other for other in run.injected.ready if other is not prepared and other.is_on]
        try:
            prepared.baseline()
        except FaultError:
            reason = _why_not_inspected(planned, [other.planned for other in earlier], lab.topology)
            if not reason:
                raise
        else:
            lab.guard()
            reason = cancel_reason()
    if reason:
        prepared.cancel(reason)
        run.progress(f"{planned.kind} on {planned.target.text}: not armed, {reason}")
        return
    prepared.arm(at_ns=max(at_ns, time.monotonic_ns()), cancel_reason=cancel_reason)
    run.progress(f"{planned.kind} on {planned.target.text}: armed")
    _wait_until(max(at_ns, time.monotonic_ns()) + round(planned.spec.for_s * 1e9), running, run.ending)


def _why_not_inspected(planned: PlannedFault, on: Sequence[PlannedFault], topology: Topology) -> str | None:
    """Return why the target refused its inspection if a fault that was on there explains it, and when to begin instead.

    The target of a workload's fault is inspected shortly before the fault begins, because the processes do not exist
    earlier. The target cannot know that it has found another fault of this run: its own advice, `heal`, would end it.
    """
    for other in on:
        if shared := both_claim(other, planned, topology, at_any_time=True):
            earliest_s = other.ends_s + LEAD_S + TAIL_S + REMOVAL_S
            return (
                f"its target is inspected {LEAD_S:g} s before it begins, and {other.kind} on {other.target.text} still "
                f"changed {shared} then; begin it at {earliest_s:g} s or later"
            )
    return None


def _wait_until(time_ns: int, running: Running[Any], ending: EarlyEnd) -> None:
    """Wait until a controller time, or until the pass is to end or the workload has ended."""
    while (left_ns := time_ns - time.monotonic_ns()) > 0:
        if running.is_over or ending.wait(min(left_ns / 1e9, 0.2)):
            return


def _all_threads(threads: Sequence[threading.Thread]) -> None:
    """Run threads to their end. They are joined in small steps, so that Ctrl-C reaches the main thread."""
    for thread in threads:
        thread.daemon = True
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.2)


def _brief(receipt: Receipt) -> str:
    cleared = "cleared and verified" if receipt.cleared.ok else f"NOT cleared: {receipt.cleared.error}"
    if not receipt.proved:
        return f"{cleared}, but not proved: {'; '.join(receipt.unproven)}"
    return f"fired {receipt.fired.count} times, seen in {receipt.fired.witness}, {cleared}"
