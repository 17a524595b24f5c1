"""Pair the items of two finished runs for the page of a comparison. Pure.

A and B are matched by name: faults by their id, checks and links by their name. Items of only one run are kept
unpaired.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from faultbed.harness.analysis.links.link_load import LinkLoad
from faultbed.harness.analysis.observe import Observed
from faultbed.harness.analysis.timeline import Impact
from faultbed.harness.check_places import places
from faultbed.harness.experiment.run_plan import Plan
from faultbed.harness.record.evidence.fault_evidence import FaultRun
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.report.comparison.compare import Row
from faultbed.harness.report.plots.recovery_bars import (
    PhaseBar,
    RecoveryBar,
    phase_bars,
    phases_reach_ns,
    reach_ns,
    recovery_bar,
    recovery_check,
)
from faultbed.harness.verdict import Check, VerdictFile
from faultbed.testbed.suggestions import first_of

__all__ = [
    "CheckPair",
    "LoadPair",
    "Recovery",
    "RecoveryPair",
    "Side",
    "check_pairs",
    "describe",
    "headline",
    "load_pairs",
    "origin_ns",
    "recovery_pairs",
    "unlike_lines",
]

_NAMED = 3
"""Maximum number of metrics that the headline names; the table has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two runs, with its letter, the contents of its directory and its observations."""

    letter: str
    name: str
    run: RunEvidence
    observed: Observed
    verdict: VerdictFile
    plan: Plan
    experiment: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPair:
    """A check of both runs; None if a run does not have it."""

    name: str
    a: Check | None
    b: Check | None

    @property
    def changed(self) -> bool:
        """Whether the verdict differs, or only one run has the check."""
        return self.a is None or self.b is None or self.a.verdict != self.b.verdict

    @property
    def bounds(self) -> tuple[Check, ...]:
        """The checks with a bound; only one of them if both runs have the same bound."""
        bounded = [check for check in (self.a, self.b) if check is not None and check.bound is not None]
        return tuple(
            bounded[:1] if len({(check.bound, check.comparison, check.unit) for check in bounded}) == 1 else bounded
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Recovery of one run from a fault. `impact` None: not measured, or the fault is not in this run."""

    fault: FaultRun | None
    impact: Impact | None
    bar: RecoveryBar


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPair:
    """A fault's recoveries on one scale, and the phases of both on another common scale.

    `phases` are (name, in A, in B); None if it is not shown for that run.
    """

    fault_id: str
    a: Recovery
    b: Recovery
    phases: tuple[tuple[str, PhaseBar | None, PhaseBar | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPair:
    """A link in both runs; None if the lab of that run has no such link."""

    name: str
    is_uplink: bool
    a: LinkLoad | None
    b: LinkLoad | None


def check_pairs(checks_a: Sequence[Check], checks_b: Sequence[Check]) -> tuple[CheckPair, ...]:
    """Return every check of either run: changed verdicts first, then in A's order, then checks that only B has.

    Two bounds of one metric are two checks.
    """
    in_a, in_b = dict(places(checks_a)), dict(places(checks_b))
    pairs = [CheckPair(name=place[0], a=in_a.get(place), b=in_b.get(place)) for place in dict.fromkeys((*in_a, *in_b))]
    return tuple(sorted(pairs, key=lambda pair: not pair.changed))


def recovery_pairs(side_a: Side, side_b: Side) -> tuple[RecoveryPair, ...]:
    """Return every fault of either run. All bars share one scale; the phases of one fault share another."""
    ids = tuple(dict.fromkeys(fault.plan.id for side in (side_a, side_b) for fault in side.run.injected.faults))
    reaches = [
        reach_ns(impact, recovery_check(side.verdict.checks, fault_id))
        for side in (side_a, side_b)
        for fault_id, impact in side.observed.impacts.items()
    ]
    whole_ns = max(reaches, default=1)
    return tuple(
        RecoveryPair(
            fault_id=fault_id,
            a=_recovery(side_a, fault_id, whole_ns),
            b=_recovery(side_b, fault_id, whole_ns),
            phases=_phases(side_a, side_b, fault_id),
        )
        for fault_id in ids
    )


def load_pairs(loads_a: Sequence[LinkLoad], loads_b: Sequence[LinkLoad]) -> tuple[LoadPair, ...]:
    """Return every link of either run, those between switches first."""
    uplinks = {load.name for load in (*loads_a, *loads_b) if load.is_uplink}
    in_a, in_b = ({load.name: load for load in loads} for loads in (loads_a, loads_b))
    pairs = [
        LoadPair(name=name, is_uplink=name in uplinks, a=in_a.get(name), b=in_b.get(name))
        for name in dict.fromkeys((*in_a, *in_b))
    ]
    return tuple(sorted(pairs, key=lambda pair: not pair.is_uplink))


def origin_ns(side: Side) -> int | None:
    """Return when the first fault of a run fired; None if none did."""
    fired = [fault.receipt.fired.first_ns for fault in side.run.injected.faults if fault.receipt is not None]
    return min((at_ns for at_ns in fired if at_ns is not None), default=None)


def headline(rows: Sequence[Row]) -> str:
    """Summarise how B compares with A in a few words, using only differences that the intervals show."""
    by_says: Mapping[str, list[str]] = {
        outcome: [row.metric for row in rows if row.says == outcome]
        for outcome in ("worse", "better", "higher", "lower")
    }
    worse, better = by_says["worse"], by_says["better"]
    if worse and better:
        return f"B is worse in {first_of(worse, _NAMED)}, and better in {first_of(better, _NAMED)}"
    if worse:
        return f"B is worse in {first_of(worse, _NAMED)}"
    if better:
        return f"B is better in {first_of(better, _NAMED)}"
    if differ := [*by_says["higher"], *by_says["lower"]]:
        return f"B is neither better nor worse, and differs in {first_of(differ, _NAMED)}"
    if rows and all(row.says == "not comparable" for row in rows):
        return f"A and B cannot be compared: {rows[0].why}"
    return "No difference shown between A and B"


def describe(side_a: Side, side_b: Side, rows: Sequence[Row], checks: Sequence[CheckPair]) -> str:
    """Describe the comparison in two or three sentences: job time, verdicts, checks."""
    parts = []
    job = next((row for row in rows if row.metric == "job time"), None)
    if job is not None and job.ratio is not None:
        parts.append(f"For the same iterations B took {job.ratio:.3f} of A's time{_hidden(job)}.")
    if side_a.verdict.verdict == side_b.verdict.verdict:
        parts.append(f"Both runs ended {side_a.verdict.verdict}.")
    else:
        parts.append(f"The verdict went from {side_a.verdict.verdict} to {side_b.verdict.verdict}.")
    changed = [pair.name for pair in checks if pair.changed]
    if changed:
        parts.append(f"{len(changed)} of {len(checks)} checks differ: {first_of(changed, _NAMED)}.")
    return " ".join(parts)


def unlike_lines(side_a: Side, side_b: Side) -> tuple[str, ...]:
    """Return the unified diff of the two experiment files."""
    lines = difflib.unified_diff(
        side_a.experiment.splitlines(), side_b.experiment.splitlines(), "A", "B", lineterm="", n=2
    )
    return tuple(lines)


def _hidden(job: Row) -> str:
    """Describe the interval; if it shows no difference, include the largest difference that it could hide."""
    interval = job.interval
    if interval is None:
        return "; there are too few to know their noise"
    words = f" ({100 * interval.level:g} % interval {interval.low:.3f} to {interval.high:.3f})"
    if job.says == "not comparable":
        return f"{words}, which shows nothing: {job.why}"
    if job.says != "no difference shown" or interval.low <= 0:
        return words
    most = max(interval.high - 1, 1 - interval.low)
    return f"{words}, which shows no difference and could hide one of {100 * most:.1f} %"


def _recovery(side: Side, fault_id: str, whole_ns: int) -> Recovery:
    impact = side.observed.impacts.get(fault_id)
    bound = recovery_check(side.verdict.checks, fault_id)
    fault = next((candidate for candidate in side.run.injected.faults if candidate.plan.id == fault_id), None)
    return Recovery(fault=fault, impact=impact, bar=recovery_bar(impact, bound, whole_ns=whole_ns))


def _phases(side_a: Side, side_b: Side, fault_id: str) -> tuple[tuple[str, PhaseBar | None, PhaseBar | None], ...]:
    phases_of_sides = []
    for side in (side_a, side_b):
        impact = side.observed.impacts.get(fault_id)
        phases_of_sides.append((side.observed.phases.get(fault_id, ()), impact, side.verdict.checks))
    whole_ns = max(
        (phases_reach_ns(steps, impact, checks) for steps, impact, checks in phases_of_sides if impact), default=1.0
    )
    bars = [
        {} if impact is None else {bar.phase.name: bar for bar in phase_bars(steps, impact, checks, whole_ns=whole_ns)}
        for steps, impact, checks in phases_of_sides
    ]
    order = dict.fromkeys(phase.name for steps, _, _ in phases_of_sides for phase in steps)
    return tuple((name, bars[0].get(name), bars[1].get(name)) for name in order if name in bars[0] or name in bars[1])
