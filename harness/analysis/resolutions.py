"""Uncertainty of recovery times: bins, clocks, and when exactly the fault fired. Pure.

A fault's timestamp (`fired.first_ns` of its receipt) is when its firing was first *observed*, by reading its rule's
counter at intervals of 20 ms or more. It fired between the two times of `fired.between_ns`. Times measured from the
firing have that uncertainty, and effects of the fault may precede the timestamp.

Each interval certainly contains the true value, if the clocks keep to their own error bounds. Goodput that stays
slightly below its floor may do so by chance. The lower bound of a recovery is therefore the time until goodput was
above what noise alone explains (`beyond_chance`), so that noise cannot make a bound FAIL.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from faultbed.harness import confidence
from faultbed.harness.analysis.phases import Phase
from faultbed.harness.analysis.restarts import Length
from faultbed.harness.analysis.routing import TIMES, Routing
from faultbed.harness.analysis.timeline import HEALTHY_SHARE, Baseline, Goodput, Impact
from faultbed.harness.confidence import Interval, resolution
from faultbed.harness.record.evidence.fault_evidence import FaultRun
from faultbed.harness.record.evidence.run_evidence import RunEvidence

__all__ = ["Firing", "beyond_chance", "firings", "of_restarts", "resolutions_of"]

_Span = tuple[float, float]
"""The minimum and the maximum of a time, ns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Firing:
    """By how much a fault may have fired before and after its timestamp; 0, 0 if the run does not say."""

    early_ns: int = 0
    late_ns: int = 0

    def since(self, length_ns: int, error_ns: int) -> _Span:
        """Return the range of a time since the firing, from its length since the timestamp and the error of its end."""
        return max(0, length_ns - self.late_ns - error_ns), length_ns + self.early_ns + error_ns


def firings(faults: Iterable[FaultRun]) -> dict[str, Firing]:
    """Return the uncertainty of the firing of each fault that fired."""
    by_fault = {}
    for fault in faults:
        if fault.receipt is None or (fired := fault.receipt.fired).first_ns is None:
            continue
        error_ns = fault.receipt.armed.clock_error_ns or 0
        least, most = fired.between_ns or (fired.first_ns - error_ns, fired.first_ns + error_ns)
        by_fault[fault.plan.id] = Firing(early_ns=max(0, fired.first_ns - least), late_ns=max(0, most - fired.first_ns))
    return by_fault


def resolutions_of(
    run: RunEvidence,
    step_ns: int,
    impacts: Mapping[str, Impact],
    by_phase: Mapping[str, Sequence[Phase]],
    by_routing: Mapping[str, Routing],
    fired: Mapping[str, Firing],
    sure: Mapping[str, Impact] | None = None,
    hidden_ns: int = 0,
) -> dict[str, Interval]:
    """Return intervals by metric. `step_ns` is the width of a goodput bin.

    `sure` are the impacts that chance cannot explain; None: all impacts. `hidden_ns` is the longest outage that is no
    dip (`Baseline.hidden_ns`): a recovery of 0 because no dip was seen may have taken that long.
    """
    sure = impacts if sure is None else sure
    return {
        **_recoveries(run, step_ns, impacts, fired, sure, hidden_ns),
        **_phases(
            run, step_ns, by_phase, fired, {name: _by_chance_ns(impact, sure, name) for name, impact in impacts.items()}
        ),
        **_routing(run, by_routing, fired),
    }


def beyond_chance(whole: Goodput, base: Baseline, impacts: Mapping[str, Impact], level: float) -> Baseline:
    """Return the baseline with a floor below which goodput does not fall by chance in any window of these impacts.

    Goodput below half of the baseline's floor never counts as chance.
    """
    bins = whole.bytes_per_s[whole.bin_of(base.start_ns) : whole.bin_of(base.end_ns)]
    width = base.window_ns // whole.step_ns
    windows = sum(
        (max(impact.end_ns, impact.cleared_ns) - impact.fired_ns) // whole.step_ns + width
        for impact in impacts.values()
    )
    floor = max(
        confidence.lowest_by_chance(bins, width=width, windows=windows, level=level) * base.mean, base.floor / 2
    )
    return replace(base, floor=min(floor / HEALTHY_SHARE, base.floor))


def _by_chance_ns(impact: Impact, sure: Mapping[str, Impact], name: str) -> int:
    """Return how much of a recovery chance alone may explain."""
    return max(0, impact.recovery_ns - (sure[name].recovery_ns if name in sure else 0))


def _recoveries(
    run: RunEvidence,
    step_ns: int,
    impacts: Mapping[str, Impact],
    fired: Mapping[str, Firing],
    sure: Mapping[str, Impact],
    hidden_ns: int,
) -> dict[str, Interval]:
    error_ns = step_ns + run.workload.clock_error_ns
    removed_off_ns = {
        fault.plan.id: fault.receipt.cleared.clock_error_ns or 0
        for fault in run.injected.faults
        if fault.receipt is not None
    }
    intervals: dict[str, Interval] = {}
    for prefix in ("recovery", "after_clear"):
        spans: dict[str, _Span] = {}
        for fault_id, impact in impacts.items():
            if prefix == "recovery":
                length_ns, firing = impact.recovery_ns, fired.get(fault_id, Firing())
            else:
                # A removal is stamped when it is complete, by its target's clock.
                off_ns = removed_off_ns.get(fault_id, 0)
                length_ns, firing = impact.after_clear_ns, Firing(early_ns=off_ns, late_ns=off_ns)
            unseen_ns = 0 if impact.dip_ns is not None else hidden_ns
            least, most = firing.since(length_ns, error_ns) if length_ns else (0, unseen_ns)
            least = firing.since(max(0, length_ns - _by_chance_ns(impact, sure, fault_id)), error_ns)[0] if least else 0
            if (slow_down := impact.slow_down) is not None:
                slowed_ns = slow_down.recovery_ns if prefix == "recovery" else slow_down.after_clear_ns
                if slowed_ns is not None and slowed_ns > length_ns:
                    most = max(most, firing.since(slowed_ns, error_ns)[1])
            spans[fault_id] = (least, most)
        of = (
            "one bin, the clocks' error, when the fault was seen to fire, what may be noise of goodput, and the "
            "longest outage that rolling goodput does not show"
        )
        for name, group in (*((name, [span]) for name, span in spans.items()), ("total", [*spans.values()])):
            if any(most for _, most in group):
                intervals[f"{prefix}.{name}"] = _interval(group, of=of)
    return intervals


def _phases(
    run: RunEvidence,
    step_ns: int,
    by_phase: Mapping[str, Sequence[Phase]],
    fired: Mapping[str, Firing],
    by_chance_ns: Mapping[str, int],
) -> dict[str, Interval]:
    spans: dict[str, list[_Span]] = {}
    inexact = set()
    for fault_id, steps in by_phase.items():
        for phase in steps:
            span: _Span = (phase.length_ns, phase.length_ns)
            if not phase.is_exact:
                inexact.add(phase.name)
                firing = fired.get(fault_id, Firing()) if phase.is_from_firing else Firing()
                error_ns = run.workload.clock_error_ns + (step_ns if phase.name == "hold" else 0)
                span = firing.since(phase.length_ns, error_ns)
                if phase.name == "hold":
                    least_ns = max(0, phase.length_ns - by_chance_ns.get(fault_id, 0))
                    span = firing.since(least_ns, error_ns)[0], span[1]
            spans.setdefault(phase.name, []).append(span)
    of = "the clocks' error and when the fault was seen to fire"
    return {
        f"recovery.{name}": _interval(
            phase_spans, of=f"one bin, what may be noise of goodput, {of}" if name == "hold" else of
        )
        for name, phase_spans in spans.items()
        if name in inexact
    }


def _routing(run: RunEvidence, by_routing: Mapping[str, Routing], fired: Mapping[str, Firing]) -> dict[str, Interval]:
    error_ns = max((machine.clock_error_ns for machine in run.telemetry.watched), default=0)
    spans: dict[str, list[_Span]] = {}
    for fault_id, stages in by_routing.items():
        firing = fired.get(fault_id, Firing())
        for name, of in TIMES.items():
            if (length_ns := of(stages)) is not None:
                span = (Firing() if name == "restored" else firing).since(length_ns, error_ns)
                spans.setdefault(name, []).append(span)
    return {
        f"routing.{name}": _interval(stage_spans, of="the clocks' error and when the fault was seen to fire")
        for name, stage_spans in spans.items()
    }


def of_restarts(
    run: RunEvidence, lengths: Mapping[str, Sequence[Length]], fired: Mapping[str, Firing]
) -> dict[str, Interval]:
    """Return the intervals of the times of restarts: `lengths` are as `restarts.lengths` returns them.

    Phases without an interval are exact: the controller's clock stamps both of their ends. A length that is open counts
    as well: the low end of an interval decides whether a lower bound is beyond a maximum.
    """
    firing = Firing(
        early_ns=max((timing.early_ns for timing in fired.values()), default=0),
        late_ns=max((timing.late_ns for timing in fired.values()), default=0),
    )
    timings = {"detect": firing, "restore": Firing(), "catch_up": Firing(), "total": firing}
    return {
        f"restart.{name}": _interval(
            [timing.since(length.ns, run.workload.clock_error_ns) for length in known],
            of="the clocks' error and when the fault was seen to fire" if timing is firing else "the clocks' error",
        )
        for name, timing in timings.items()
        if (known := lengths.get(name, ()))
    }


def _interval(spans: Sequence[_Span], *, of: str) -> Interval:
    """Return the interval of the longest of several times that each lie within a span."""
    low_ns, high_ns = max(least for least, _ in spans), max(most for _, most in spans)
    return resolution(low_ns / 1e9, high_ns / 1e9, of=of)
