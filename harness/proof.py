"""The rule by which a fault is proven: the judge, reports, the pytest plugin and the command line share it. Pure.

The receipt itself must prove that the fault happened (`unproven`, and the doubts of
`faultbed.inject.evidence.receipt`). Its times must be those of the plan, while the workload ran
(`faultbed.inject.evidence.firing_times`). It must have acted on something that the workload used at that time
(`faultbed.inject.evidence.exposure`).
"""

from __future__ import annotations

from collections.abc import Sequence

from faultbed.harness.record.evidence.fault_evidence import FaultRun
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.inject.evidence import firing_times
from faultbed.inject.evidence.exposure import why_not_exposed
from faultbed.inject.evidence.firing_times import OnTime, Span
from faultbed.inject.evidence.receipt import Receipt

__all__ = ["unproven", "why_not_exposed_in", "why_not_happened_in", "why_unproven", "why_unproven_in"]


_NOT_CLEARED = "no readback shows that it was cleared"


def why_unproven_in(run: RunEvidence, fault: FaultRun) -> tuple[str, ...]:
    """Return why a run does not show that a fault happened, and acted on what its plan says; empty if it does."""
    return (*why_not_happened_in(run, fault), *why_not_exposed_in(run, fault))


def why_not_happened_in(run: RunEvidence, fault: FaultRun) -> tuple[str, ...]:
    """Return why a run does not show that a fault happened as planned, whatever its workload used; empty if it does."""
    planned = (0, fault.plan.for_ns)
    return why_unproven(fault.receipt, workloads=((run.workload.t0_ns, run.workload.end_ns),), planned=planned)


def why_not_exposed_in(run: RunEvidence, fault: FaultRun) -> tuple[str, ...]:
    """Return why a run does not show that a fault acted on something that its workload used, or on nothing of it.

    Which of the two is meant, the plan says. Empty: the run shows it.
    """
    if fault.receipt is None:
        return (f"it is unknown whether the workload used {fault.plan.target}: the fault was never tried",)
    return why_not_exposed(fault.receipt, fault.plan, run.lab.topology)


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
    # A kind that moves no counter is proven by a state that was read while it was on, independently of the holder. The
    # state's value is judged where it is read (`faultbed.inject.evidence.receipt`).
    if not fired.must_move and fired.witness not in receipt.armed.while_on:
        problems.append("only its holder has seen it: no counter moved, and no state was read independently")
    for name, delta in fired.must_not_move.items():
        if delta is None:
            problems.append(f"{name} must not move and could not be read")
        elif delta:
            problems.append(f"{name} must not move and moved by {delta:g}")
    if not receipt.cleared.ok:
        problems.append(_NOT_CLEARED)
    return tuple(problems)


def why_unproven(
    receipt: Receipt | None,
    *,
    workloads: Sequence[Span] = (),
    planned: Span | None = None,
) -> tuple[str, ...]:
    """Return why a receipt does not prove its fault; empty if it does.

    Args:
        receipt: the fault's receipt; None: the fault was never tried.
        workloads: when workloads ran (controller ns). The fault must lie within one of them. Empty: not judged.
        planned: planned begin and end of the fault after its onset, for receipts recorded before `on_time` existed.
    """
    problems = unproven(receipt)
    if receipt is None:
        return problems
    if receipt.doubts:  # they are more exact than the problems found here
        uncleared = () if receipt.cleared.ok else (_NOT_CLEARED,)
        problems = (*receipt.doubts, *uncleared)
    if receipt.fired.first_ns is None or not receipt.armed.ok:
        return problems
    on_time, first_ns = _on_time(receipt, planned), receipt.fired.first_ns
    if on_time is None and planned is not None:
        problems = (*problems, "it is unknown how long it was on: nothing says when it was armed and cleared")
    first_hit = receipt.fired.between_ns or (first_ns, first_ns)
    last_ns = max(receipt.fired.last_ns or first_ns, first_hit[1])
    reasons = [_why_not_as_planned(on_time, None)]
    if workloads:
        reasons = [_why_not_within(receipt, on_time, first_hit, last_ns, workload) for workload in workloads]
    return (*problems, *(reason for reason in min(reasons, key=len) if reason not in problems))


def _why_not_within(
    receipt: Receipt, on_time: OnTime | None, first_hit: Span, last_ns: int, workload: Span
) -> tuple[str, ...]:
    """Return why a fault did not act as planned within a workload; empty if it did.

    `first_hit` are two moments between which its first hit lies, `last_ns` is the time of its last one.
    """
    if outside := firing_times.why_outside(first_hit, workload):
        return (outside,)
    if beyond := _why_beyond(receipt, on_time, last_ns, workload):
        return (beyond,)
    return _why_not_as_planned(on_time, workload)


def _why_not_as_planned(on_time: OnTime | None, workload: Span | None) -> tuple[str, ...]:
    return firing_times.why_not_as_planned(on_time, workload) if on_time else ()


def _why_beyond(receipt: Receipt, on_time: OnTime | None, last_ns: int, workload: Span) -> str | None:
    """Return why a fault that is complete by its hits did not have all of them while the workload ran, or None."""
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
