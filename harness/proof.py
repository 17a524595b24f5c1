"""The rule by which a fault is proven: the judge, reports, the pytest plugin and the command line share it. Pure.

The receipt itself must prove that the fault happened (`unproven`, and the doubts of
`inject.evidence.receipt`), and its times must be those of the plan, while the workload ran
(`inject.evidence.firing_times`).
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.record.measurements import FaultRun, Measurements
from inject.evidence import firing_times
from inject.evidence.firing_times import OnTime, Span
from inject.evidence.receipt import Receipt

__all__ = ["unproven", "why_unproven", "why_unproven_in"]


def why_unproven_in(run: Measurements, fault: FaultRun) -> tuple[str, ...]:
    """Say why a fault of a run is not proven; empty when it is."""
    planned = (0, fault.plan.duration_ns)
    return why_unproven(fault.receipt, fault.doubts, workloads=((run.t0_ns, run.end_ns),), planned=planned)


def unproven(receipt: Receipt | None) -> tuple[str, ...]:
    """Return why a receipt does not prove that the fault happened; empty if it does."""
    if receipt is None:
        return ("it was never tried",)
    fired = receipt.fired
    problems = []
    if not receipt.armed.ok:
        problems.append("no readback shows that it was armed")
    if fired.count <= 0 or fired.first_ns is None:
        problems.append(f"it never fired ({fired.witness or 'no witness'} counts {fired.count})")
    if fired.must_move and not any(delta is not None and delta > 0 for delta in fired.must_move.values()):
        problems.append(f"what must move did not ({', '.join(fired.must_move)})")
    # Some kinds move no counter: a second look while it was on saw the state that it makes, and its value is judged
    # where it was read (`inject.evidence.receipt`).
    if not fired.must_move and fired.witness not in receipt.armed.while_on:
        problems.append("only its holder has seen it: no counter moved, and no state was read independently")
    for name, delta in fired.must_not_move.items():
        if delta is None:
            problems.append(f"{name} must not move and could not be read")
        elif delta:
            problems.append(f"{name} must not move and moved by {delta:g}")
    if not receipt.cleared.ok:
        problems.append("no readback shows that it was cleared")
    return tuple(problems)


def why_unproven(
    receipt: Receipt | None,
    doubts: Sequence[str] = (),
    *,
    workloads: Sequence[Span] = (),
    planned: Span | None = None,
    overlap: bool = False,
) -> tuple[str, ...]:
    """Say why a receipt does not prove its fault; empty when it does.

    Args:
        receipt: of the fault; None: it was never tried.
        doubts: the injector's own.
        workloads: when workloads ran (controller ns); the fault is to lie within one of them. None at all: not judged.
        planned: from when to when after its onset the fault was to be on; for receipts of before `on_time`.
        overlap: it is enough that it fired at some time while a workload ran: a test may begin with the fault.
    """
    problems = unproven(receipt)
    if receipt is None:
        return problems
    # What the injector doubts is said more exactly; what it has not looked at is added.
    problems = tuple(doubts) or problems
    if receipt.fired.first_ns is None or not receipt.armed.ok:
        return problems
    on_time, first_ns = _on_time(receipt, planned), receipt.fired.first_ns
    if on_time is None and planned is not None:
        problems = (*problems, "how long it was on is not known: nothing says when it was armed and cleared")
    between = receipt.fired.between_ns or (first_ns, first_ns)
    last_ns = max(receipt.fired.last_ns or first_ns, between[1])
    times: list[tuple[str, ...]] = []
    workload: Span | None
    for workload in workloads or (None,):
        if workload is not None and overlap and between[0] <= workload[1] and last_ns >= workload[0]:
            if on_time is not None and firing_times.is_off_during(on_time, workload):
                times.append(("was off all the time that the workload ran",))
                continue
            workload = None  # noqa: PLW2901 (nothing more is asked of it)
        if workload is not None and (outside := firing_times.why_outside(between, workload)):
            times.append((outside,))
        elif workload is not None and (beyond := _why_beyond(receipt, on_time, last_ns, workload)):
            times.append((beyond,))
        else:
            times.append(firing_times.why_not_as_planned(on_time, workload) if on_time else ())
    return (*problems, *(reason for reason in min(times, key=len) if reason not in problems))


def _why_beyond(receipt: Receipt, on_time: OnTime | None, last_ns: int, workload: Span) -> str | None:
    """Say why a fault that is complete by its hits did not have all of them while the workload ran; None: it had."""
    if on_time is None or not on_time.complete or receipt.fired.count <= 1 or last_ns <= workload[1]:
        return None
    return f"its last hits came up to {(last_ns - workload[1]) / 1e9:.2f} s after the workload ended"


def _on_time(receipt: Receipt, planned: Span | None) -> OnTime | None:
    """Return the receipt's own times, or the longest that an older receipt allows: from armed to cleared."""
    if receipt.on_time is not None or planned is None:
        return receipt.on_time
    begin, end = receipt.armed.at_ns, receipt.cleared.at_ns
    if begin is None or end is None:
        return None
    longest = planned[1] - planned[0]
    # How long the removal took is not known: only too short a time is.
    end = min(end, begin + longest)
    return firing_times.on_time_of((planned,), [(begin, begin, True), (end, end, False)])
