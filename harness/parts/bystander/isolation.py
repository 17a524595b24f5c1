"""Effects of faults on the bystander: a flow that they should not affect. Pure.

    bystander.goodput_ratio   mean goodput from a fault's arming to 1 s after its removal, over that of the fault-free
                              start; the lowest of all faults
    bystander.gap             longest time without data that begins between 1 s before a fault's arming and 1 s after
                              its removal
    bystander.qp_errors       queue pairs of the bystander that failed after the end of the fault-free start. It is a
                              lower bound if the bystander failed, or carried nothing around a fault or at the end:
                              a queue pair without data does not fail, and one that retries has not failed yet

A fault's window ends 1 s after its removal, because a revert, too, can disturb other traffic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from faultbed.harness import confidence
from faultbed.harness.analysis import intervals, timeline
from faultbed.harness.analysis.effects.fault_windows import acting_windows, fired_windows, first_disturbance
from faultbed.harness.analysis.observations import Observation
from faultbed.harness.analysis.timeline import Baseline, Goodput
from faultbed.harness.ledger.sealed import Sealed
from faultbed.harness.ledger.statistics.contrasts import Member
from faultbed.harness.parts.bystander.bystander_evidence import BystanderEvidence
from faultbed.harness.record.evidence.run_evidence import RunEvidence

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["bystander_goodput", "isolation"]

_MARGIN_NS = 1_000_000_000
"""Time before the arming and after the removal of a fault that belongs to its window."""
_RATIO, _GAP, _ERRORS = "bystander.goodput_ratio", "bystander.gap", "bystander.qp_errors"


def bystander_goodput(run: RunEvidence, flow: BystanderEvidence) -> Goodput | None:
    """Return the goodput of the bystander while the workload ran; None: no samples of it."""
    if not flow.samples:
        return None
    return timeline.goodput(
        flow.samples, start_ns=run.workload.t0_ns, end_ns=run.workload.end_ns, sample_ns=run.workload.sample_ns
    )


def isolation(run: RunEvidence, sealed: Sealed, level: float) -> dict[str, Observation]:
    """Return the metrics of the bystander, with their intervals.

    Args:
        run: the run.
        sealed: the evidence of its parts.
        level: confidence level of the interval of `bystander.goodput_ratio`.
    """
    flow = sealed.of(BystanderEvidence)
    if flow is None:
        return dict.fromkeys((_RATIO, _GAP, _ERRORS), Observation(value=None, detail="this run has no bystander"))
    whole, first_fault_ns = bystander_goodput(run, flow), first_disturbance(run, fired_windows(run.injected.faults))
    is_dead = whole is None or not whole.bytes.any() or flow.failure is not None
    receipts = [fault.receipt for fault in run.injected.faults if fault.receipt is not None]
    error_ns = run.workload.clock_error_ns + max((receipt.armed.clock_error_ns or 0 for receipt in receipts), default=0)
    doubt = _why_errors_unknown(run, flow, whole, first_fault_ns)
    errors = _errors(flow, first_fault_ns, error_ns=error_ns, doubt=doubt)
    if whole is None or is_dead:
        why = flow.failure or f"no data arrived from {flow.src} to {flow.dst}"
        return {**dict.fromkeys((_RATIO, _GAP), Observation(value=None, detail=f"bystander: {why}")), _ERRORS: errors}
    base = timeline.baseline(
        whole, first_fault_ns=first_fault_ns, window_ns=timeline.ROLLING_NS, reads=run.telemetry.reads
    )
    return {_RATIO: _goodput_ratio(run, whole, base, level), _GAP: _gap(run, flow, whole, base), _ERRORS: errors}


def _why_errors_unknown(run: RunEvidence, flow: BystanderEvidence, whole: Goodput | None, first_fault_ns: int) -> str:
    """Return why more queue pairs may have failed than the engine reported; empty: no reason."""
    if flow.failure is not None:
        return flow.failure
    if whole is None or not whole.bytes.any():
        return "it carried nothing"
    silent = whole.bytes == 0
    for name, window in acting_windows(run).items():
        around = silent[whole.bin_of(window.start_ns) : whole.bin_of(window.cleared_ns + _MARGIN_NS)]
        if len(around) and around.all():
            return f"it carried nothing around {name}"
    # A paced flow is silent between its messages, too.
    usual, _ = _longest_silence(silent[: whole.bin_of(first_fault_ns)], 0, len(silent))
    ending = len(silent) - 1 - int(np.flatnonzero(~silent)[-1])
    return "it carried nothing at the end" if ending > max(usual, _MARGIN_NS // whole.step_ns) else ""


def _errors(flow: BystanderEvidence, first_fault_ns: int, *, error_ns: int, doubt: str) -> Observation:
    """Return the number of errors after the fault-free start.

    An error within the clocks' error of its end may be before or after it, so the number gets a range.
    """
    early = sum(at_ns < first_fault_ns for at_ns in flow.qp_errors)
    least, most = (
        sum(at_ns >= first_fault_ns + by_ns for at_ns in flow.qp_errors) for by_ns in (error_ns + 1, -error_ns)
    )
    detail = f"of the flow from {flow.src} to {flow.dst}, as the traffic engine reports"
    if early:
        detail += f"; {early} more failed before the first fault: raise timeout in bystander.qp on a busy lab"
    if least < most:
        detail += f"; {most - least} failed within the clocks' error of the first fault's arming"
    if doubt:
        detail += f"; {doubt}"
    return Observation(
        value=len(flow.qp_errors) - early,
        detail=detail,
        censored=bool(doubt),
        between=(least, most) if least < most else None,
    )


def _goodput_ratio(run: RunEvidence, whole: Goodput, base: Baseline | None, level: float) -> Observation:
    windows = acting_windows(run)
    if base is None:
        return Observation(
            value=None,
            detail="no baseline of the bystander: less than 3 s of data before the first fault; begin the fault later",
        )
    rates = {
        name: rate
        for name, window in windows.items()
        if len(rate := whole.bytes_per_s[whole.bin_of(window.start_ns) : whole.bin_of(window.cleared_ns + _MARGIN_NS)])
    }
    if missing := sorted({fault.plan.id for fault in run.injected.faults} - set(rates)):
        return Observation(
            value=None,
            detail=f"{missing[0]}: its receipt has no time of arming or firing, or the run has no data after it",
        )
    if not rates:
        return Observation(value=None, detail="no fault in this run")
    member_level = 1 - (1 - level) / len(rates)
    before = whole.bytes_per_s[whole.bin_of(base.start_ns) : whole.bin_of(base.end_ns)]
    members = []
    for name, under in rates.items():
        after = intervals.bins_after(whole, windows, name, windows[name].cleared_ns + _MARGIN_NS)
        ratio = float(under.mean()) / base.mean
        members.append(
            Member(
                name=name,
                value=ratio,
                before=intervals.ends_of(intervals.ratio_of_means(under, before, ratio, member_level)),
                after=intervals.ends_of(intervals.ratio_to(under, after, member_level)),
            )
        )
    worst = min(members, key=lambda member: member.value)
    seconds = len(rates[worst.name]) * whole.step_ns / 1e9
    return Observation(
        value=worst.value,
        detail=f"around {worst.name} for {seconds:.1f} s, against the mean of the fault-free start",
        interval=intervals.hull(members, worst.value, level),
        members=tuple(members),
    )


def _gap(run: RunEvidence, flow: BystanderEvidence, whole: Goodput, base: Baseline | None) -> Observation:
    silent = whole.bytes == 0
    longest = {
        name: _longest_silence(
            silent, whole.bin_of(window.start_ns - _MARGIN_NS), whole.bin_of(window.cleared_ns + _MARGIN_NS)
        )
        for name, window in acting_windows(run).items()
    }
    if not longest:
        return Observation(value=None, detail="no fault in this run, or none acted")
    worst = max(longest, key=lambda name: longest[name])
    bins, is_cut = longest[worst]
    step_s = whole.step_ns / 1e9
    before = ""
    if base is not None:
        usual, _ = _longest_silence(silent, whole.bin_of(base.start_ns), whole.bin_of(base.end_ns))
        before = f"; in the fault-free start {usual * step_s:.1f} s"
    without = [fault.plan.id for fault in run.injected.faults if fault.plan.id not in longest]
    return Observation(
        value=bins * step_s,
        detail=f"{flow.src} to {flow.dst} around {worst}, in bins of {step_s:g} s{before}",
        censored=is_cut,
        interval=confidence.resolution(bins * step_s, (bins + 2) * step_s, of="the bins at both ends of the gap"),
        unseen=dict.fromkeys(without, "its receipt has no time of arming or firing"),
    )


def _longest_silence(silent: NDArray[np.bool_], first: int, last: int) -> tuple[int, bool]:
    """Return the length of the longest stretch of silent bins, and whether a longer one may be cut by the end of data.

    A stretch must begin before bin `last` and may end later. The part of it before bin `first` does not count.
    """
    edges = np.flatnonzero(np.diff(silent[first:].astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    counted = [(int(begin), int(end)) for begin, end in edges if begin < last - first]
    bins = max((end - begin for begin, end in counted), default=0)
    # The last bin is short: it may be silent by chance.
    return bins, any(end == len(silent) - first and end - begin > 1 for begin, end in counted)
