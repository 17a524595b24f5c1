"""Prepare the faults of a run, arm and clear each at its time, and end the workload where a stop condition held."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from faultbed.harness.run import ends
from faultbed.harness.run.faults.live_guard import StopWatcher
from faultbed.harness.run.run_record import RunRecord
from faultbed.inject.evidence.receipt import FaultReceipt
from faultbed.inject.fault_plan import PlannedFault
from faultbed.inject.injector import Injector
from faultbed.inject.journal import Journal
from faultbed.inject.policy.conflicts import both_claim
from faultbed.inject.policy.overlap import REMOVAL_S, TAIL_S
from faultbed.inject.prepared_fault import PreparedFault
from faultbed.testbed.errors import FaultbedError, FaultError
from faultbed.testbed.lab import Lab
from faultbed.testbed.model.topology import Topology
from faultbed.traffic.engine.running_traffic import Running

__all__ = ["LEAD_S", "drive_all", "end_early", "prepare_all"]

Progress = Callable[[str], None]
LEAD_S = 4.0
"""Seconds before a fault when its target is inspected, its baseline is read and its holder receives the time."""


def prepare_all(injector: Injector, faults: Sequence[PlannedFault]) -> list[PreparedFault]:
    """Prepare all faults at once, each on its own thread: its holder is an interpreter that starts in seconds.

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


def end_early(
    watching: StopWatcher, running: Running[Any], journal: Journal, record: RunRecord, progress: Progress
) -> None:
    """Stop the workload if the live guard has stopped the run, and report why; does nothing otherwise.

    All faults must be cleared.
    """
    if not watching.stopped.is_set():
        return
    stops = record.stops
    if stops.held is not None:
        condition = stops.held.condition
        reason = f"stopped: {condition.metric.name} was {stops.held.value:g}, bound {condition.bound:g}"
    elif stops.missing is not None:
        reason = f"stopped: no more data of {stops.missing.condition.metric.name}, which a stop condition needs"
    elif stops.refused is not None:
        reason = f"no fault was armed: {stops.refused}"
    else:
        reason = f"stopped: {watching.error}"
        record.errors.append(str(watching.error))
    journal.note("stop", said=reason)
    progress(reason)
    running.stop()


def drive_all(
    lab: Lab,
    ready: Sequence[PreparedFault],
    running: Running[Any],
    record: RunRecord,
    watching: StopWatcher,
    progress: Progress,
) -> None:
    """Arm and clear each fault at its time, on its own thread: faults may overlap.

    An error of a thread becomes an error of the run. If the workload's health before the first fault was not checked,
    the receipt of that fault says so.
    """

    def drive_to_end(prepared: PreparedFault) -> None:
        planned = prepared.planned
        name = planned.spec.name
        try:
            with contextlib.suppress(FaultbedError):
                # If a fault cannot be armed, its receipt says so, and the judge decides: not an error of the harness.
                _drive(lab, prepared, ready, record.measured.workload.t0_ns, running, watching.stopped, progress)
        except Exception as error:  # noqa: BLE001 (the fault must not stay until the workload ends)
            record.errors.append(f"{name}: {ends.describe(error)}")
        try:
            record.faults.receipts[name] = prepared.clear(keep_holder=True)
        except Exception as error:  # noqa: BLE001 (a thread's exception would be lost: the run would miss a receipt)
            record.errors.append(f"{name}: not known to be cleared: {ends.describe(error)}")
            return
        receipt = record.faults.receipts[name]
        if prepared is first and receipt.armed.ok and (why := watching.why_gate_missed):
            record.faults.receipts[name] = msgspec.structs.replace(receipt, doubts=(*receipt.doubts, why))
        record.telemetry.reads += prepared.reads
        progress(f"{planned.kind} on {planned.target.text}: {_brief(record.faults.receipts[name])}")

    first = min(ready, key=lambda prepared: prepared.planned.at_s)
    _all_threads([threading.Thread(target=drive_to_end, args=(prepared,)) for prepared in ready])
    record.faults.planned = tuple(prepared.planned for prepared in ready)


def _drive(
    lab: Lab,
    prepared: PreparedFault,
    ready: Sequence[PreparedFault],
    t0_ns: int,
    running: Running[Any],
    stopped: threading.Event,
    progress: Progress,
) -> None:
    planned = prepared.planned
    at_ns = t0_ns + round(planned.at_s * 1e9)

    def cancel_reason() -> str | None:
        if running.is_over:
            early_s = (at_ns - running.ended_ns) / 1e9
            if early_s < 0:
                return f"it was due {-early_s:.1f} s before the workload ended, and could not be armed by then"
            return f"the workload ended {early_s:.1f} s before the fault was due"
        return "the run was stopped" if stopped.is_set() else None

    _wait_until(at_ns - int(LEAD_S * 1e9), running, stopped)
    if not (reason := cancel_reason()):
        earlier = [other for other in ready if other is not prepared and other.is_on]
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
        progress(f"{planned.kind} on {planned.target.text}: not armed, {reason}")
        return
    prepared.arm(at_ns=max(at_ns, time.monotonic_ns()), cancel_reason=cancel_reason)
    progress(f"{planned.kind} on {planned.target.text}: armed")
    _wait_until(max(at_ns, time.monotonic_ns()) + round(planned.for_s * 1e9), running, stopped)


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


def _wait_until(time_ns: int, running: Running[Any], stopped: threading.Event) -> None:
    """Wait until a controller time, or until the run is stopped or the workload has ended."""
    while (left_ns := time_ns - time.monotonic_ns()) > 0:
        if running.is_over or stopped.wait(min(left_ns / 1e9, 0.2)):
            return


def _all_threads(threads: Sequence[threading.Thread]) -> None:
    """Run threads to their end. They are joined in small steps, so that Ctrl-C reaches the main thread."""
    for thread in threads:
        thread.daemon = True
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.2)


def _brief(receipt: FaultReceipt) -> str:
    cleared = "cleared and verified" if receipt.cleared.ok else f"NOT cleared: {receipt.cleared.error}"
    if not receipt.proved:
        return f"{cleared}, but not proved: {'; '.join(receipt.unproven)}"
    return f"fired {receipt.fired.count} times, seen in {receipt.fired.witness}, {cleared}"
