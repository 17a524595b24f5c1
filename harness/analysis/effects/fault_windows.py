"""Times in which the faults of a run acted, from their receipts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from faultbed.harness.analysis.timeline import Window
from faultbed.harness.record.evidence.fault_evidence import FaultRun
from faultbed.harness.record.evidence.run_evidence import RunEvidence

__all__ = ["acting_windows", "fired_windows", "first_disturbance"]


def fired_windows(faults: Sequence[FaultRun]) -> dict[str, tuple[int, int]]:
    """Return (first firing, removal) in ns by fault id, in order of firing, of the faults that fired.

    If the time of removal is unknown, the window lasts as long as planned.
    """
    windows = {}
    for fault in faults:
        receipt = fault.receipt
        if receipt is None or receipt.fired.first_ns is None:
            continue
        first = receipt.fired.first_ns
        cleared = receipt.cleared.at_ns
        end = cleared if isinstance(cleared, int) else first + fault.plan.for_ns
        windows[fault.plan.id] = (first, max(first, end))
    return dict(sorted(windows.items(), key=lambda item: item[1]))


def first_disturbance(run: RunEvidence, fired: Mapping[str, tuple[int, int]]) -> int:
    """Return when the fault-free start ends: at the first arming or firing, because an armed fault may act unseen."""
    armed = [fault.receipt.armed.at_ns for fault in run.injected.faults if fault.receipt is not None]
    times = [*(start for start, _ in fired.values()), *(at_ns for at_ns in armed if isinstance(at_ns, int))]
    return min(times, default=run.workload.end_ns)


def acting_windows(run: RunEvidence) -> dict[str, Window]:
    """Return when each fault may have acted, by id: until the run's end if its removal was not confirmed."""
    windows = {}
    for fault in run.injected.faults:
        receipt = fault.receipt
        if receipt is None:
            continue
        armed_ns, fired = receipt.armed.at_ns, receipt.fired
        starts = [at for at in (armed_ns, fired.first_ns, *(fired.between_ns or ())) if isinstance(at, int)]
        if not starts:
            continue
        cleared_ns = receipt.cleared.at_ns
        is_confirmed = receipt.cleared.ok
        end_ns = cleared_ns if is_confirmed and isinstance(cleared_ns, int) else run.workload.end_ns
        windows[fault.plan.id] = Window(
            start_ns=min(starts), fired_ns=fired.first_ns, cleared_ns=max(end_ns, fired.first_ns or min(starts))
        )
    return windows
