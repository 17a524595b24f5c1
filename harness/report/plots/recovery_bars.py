"""Positions of recovery bars, phase bars and their bounds. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from faultbed.harness.analysis.phases import Phase
from faultbed.harness.analysis.timeline import Impact
from faultbed.harness.verdict import Check

__all__ = ["PhaseBar", "RecoveryBar", "phase_bars", "phases_reach_ns", "reach_ns", "recovery_bar", "recovery_check"]

_REACH = 4
"""Bounds this many times longer than a recovery are not drawn, because its bars would vanish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseBar:
    """One phase of a recovery: the start, width and bound of its bar, in percent.

    `bound_left` None: there is no bound, or it is off the scale. `is_open`: the phase lasted at least as long as shown.
    """

    phase: Phase
    left: float
    width: float
    bound_s: float | None
    bound_left: float | None
    broken: bool
    is_open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryBar:
    """A recovery as a bar, in percent of the scale: while the fault was active, then after its removal.

    `bound_left` is the position of its bound; None without one.
    """

    held: float
    after: float
    bound_left: float | None
    bound: Check | None


def reach_ns(impact: Impact, bound: Check | None) -> int:
    """Return the extent of a recovery, its fault's window and its bound, in ns since the fault fired."""
    return max(impact.recovery_ns, impact.cleared_ns - impact.fired_ns, _end_of_bound(bound, impact), 1)


def recovery_bar(impact: Impact | None, bound: Check | None, *, whole_ns: int) -> RecoveryBar:
    """Return the bar of one recovery on a scale of `whole_ns`; empty if nothing was measured."""
    if impact is None:
        return RecoveryBar(held=0, after=0, bound_left=None, bound=bound)
    held_ns = min(impact.recovery_ns, impact.cleared_ns - impact.fired_ns)
    return RecoveryBar(
        held=100 * held_ns / whole_ns,
        after=100 * (impact.recovery_ns - held_ns) / whole_ns,
        bound_left=None if bound is None else 100 * _end_of_bound(bound, impact) / whole_ns,
        bound=bound,
    )


def phases_reach_ns(steps: Sequence[Phase], impact: Impact, checks: Sequence[Check]) -> float:
    """Return the extent of phases in ns since the fault fired, including bounds that are not far away."""
    took_ns = max([1, impact.recovery_ns, *(phase.end_ns - impact.fired_ns for phase in steps)])
    ends_ns = _ends_of_bounds(steps, impact, checks)
    return max([took_ns, *(end_ns for end_ns in ends_ns.values() if end_ns <= _REACH * took_ns)])


def phase_bars(
    steps: Sequence[Phase], impact: Impact, checks: Sequence[Check], *, whole_ns: float | None = None
) -> tuple[PhaseBar, ...]:
    """Return the phases that took time or have a bound, on a scale of `whole_ns` (None: their own extent).

    Empty for a single phase without a bound, which equals the fault's own bar.
    """
    bounds = _bounds_s(steps, checks)
    ends_ns = _ends_of_bounds(steps, impact, checks)
    whole_ns = phases_reach_ns(steps, impact, checks) if whole_ns is None else whole_ns
    bars = tuple(
        PhaseBar(
            phase=phase,
            left=100 * max(0, phase.start_ns - impact.fired_ns) / whole_ns,
            width=100 * max(0, phase.end_ns - max(phase.start_ns, impact.fired_ns)) / whole_ns,
            bound_s=bounds.get(phase.name),
            bound_left=100 * ends_ns[phase.name] / whole_ns if ends_ns.get(phase.name, math.inf) <= whole_ns else None,
            broken=phase.name in bounds and phase.length_ns > bounds[phase.name] * 1e9,
        )
        for phase in steps
        if phase.length_ns or phase.name in bounds or not phase.is_exact
    )
    return bars if len(bars) > 1 or bounds else ()


def _bounds_s(steps: Sequence[Phase], checks: Sequence[Check]) -> dict[str, float]:
    return {phase.name: bound for phase in steps if (bound := _bound_s(checks, f"recovery.{phase.name}")) is not None}


def _ends_of_bounds(steps: Sequence[Phase], impact: Impact, checks: Sequence[Check]) -> dict[str, float]:
    """Return the position of each phase's bound, in ns since the fault fired."""
    bounds = _bounds_s(steps, checks)
    return {
        phase.name: phase.start_ns - impact.fired_ns + bounds[phase.name] * 1e9
        for phase in steps
        if phase.name in bounds
    }


def _bound_s(checks: Sequence[Check], name: str) -> float | None:
    """Return the upper bound of a check in seconds, or None."""
    for check in checks:
        if check.name == name and isinstance(check.bound, int | float) and check.comparison == "max":
            return float(check.bound)
    return None


def recovery_check(checks: Sequence[Check], fault_id: str) -> Check | None:
    """Return the bound to draw on a fault's recovery bar: its own before the total, recovery before after_clear."""
    for name in (f"recovery.{fault_id}", f"after_clear.{fault_id}", "recovery.total", "after_clear.total"):
        for check in checks:
            if check.name == name and isinstance(check.bound, int | float) and check.comparison == "max":
                return check
    return None


def _end_of_bound(check: Check | None, impact: Impact) -> int:
    """Return the position of a bound on the bar, in ns since the fault fired."""
    if check is None or not isinstance(check.bound, int | float):
        return 0
    begin = impact.cleared_ns - impact.fired_ns if check.name.startswith("after_clear") else 0
    return begin + int(check.bound * 1e9)
