"""Stop conditions: bounds on live values that end the faults and the run. Pure.

    [[stop]]
    metric = "goodput_ratio"
    min = 0.1
    for = "5s"

A condition *holds* while its value is beyond its bound, here below 0.1. While faults are on, each condition is compared
with live values at least once a second (`faultbed.harness.run.faults.live_guard`). The first condition that holds for
its time (`for`) ends the faults and the run at once, as FAIL, or as INCONCLUSIVE if the experiment says so. A
condition is also INCONCLUSIVE

- if its value was never known;
- if its value was known for less than its time;
- if every known value within its time was beyond the bound, but some values in between were unknown;
- if it may have held while it was not evaluated: the gap between two known values, or before the first or after the
  last one, is longer than `MISSING_NS`, and long enough for its time. Counts that never fall have no such gaps.

Missing data end the faults, too, and the run is INCONCLUSIVE: if the value of a condition is unknown for more than
`MISSING_NS` although it was known before, or should be known by now. An experiment without `[[stop]]` has no guard.

Before the first fault the workload must be healthy (`faultbed.harness.run.faults.live_guard`). Otherwise no fault is
armed (`Guard.refused`), and the run is INCONCLUSIVE.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from faultbed.harness.verdict import Check, Verdict, VerdictFile, worst

__all__ = ["METRICS", "MISSING_NS", "Condition", "Ending", "Guard", "Metric", "Missing", "judged"]

MISSING_NS = 1_000_000_000
"""For how long the value of a condition may be unknown or not evaluated while faults are on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A value that is known during a run. `bound` says whether a stop condition is its minimum or its maximum.

    `never_falls`: the value is a count of events, so that a later value includes what happened while nothing was read.
    """

    name: str
    unit: Literal["s", "ratio", "count"]
    bound: Literal["min", "max"]
    meaning: str
    never_falls: bool = False


_TABLE = (
    Metric(name="qp_errors", unit="count", bound="max", meaning="Queue pairs that were lost so far", never_falls=True),
    Metric(
        name="goodput_ratio",
        unit="ratio",
        bound="min",
        meaning="Goodput of all ranks in the last whole second, over the mean before the first fault",
    ),
    Metric(
        name="silence",
        unit="s",
        bound="max",
        meaning="Longest time since a machine of the lab last reported (each reports every 4 s, under emulation "
        "every 8 s)",
    ),
    Metric(
        name="kernel.broken",
        unit="count",
        bound="max",
        meaning="Machines whose kernel has reported its own bug",
        never_falls=True,
    ),
    Metric(
        name="slow_ranks",
        unit="count",
        bound="max",
        meaning="Ranks that compute slower than before, as named by the online detector",
    ),
)
METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _TABLE}
"""What a stop condition can bound, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Stop when `metric` is beyond `bound` (in its unit) for `for_ns` without a break; the run is then `verdict`."""

    metric: Metric
    bound: float
    for_ns: int = 0
    verdict: Verdict = Verdict.FAIL

    def holds(self, value: float) -> bool:
        """Return whether a value is beyond the bound."""
        return value > self.bound if self.metric.bound == "max" else value < self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A condition that ended a run: its last value, since when it had held, and when that was seen (controller, ns)."""

    condition: Condition
    value: float
    since_ns: int
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A condition whose data stopped coming, which ended a run: since when, and when that was seen (controller, ns)."""

    condition: Condition
    since_ns: int
    at_ns: int


class Guard:
    """Evaluates stop conditions repeatedly, and remembers how long each has held."""

    def __init__(self, conditions: Sequence[Condition] = ()) -> None:
        self.conditions = tuple(conditions)
        self.held: Ending | None = None
        self.missing: Missing | None = None
        self.refused: str | None = None
        """Why no fault was armed: what was wrong with the workload before the first one."""
        self.last_values: dict[Condition, float] = {}
        """The last known value of each condition that had one."""
        self.evaluated_ns: dict[Condition, tuple[int, int]] = {}
        """When each of these conditions had a known value first and last (controller, ns)."""
        self.may_have_held_ns: dict[Condition, tuple[int, int]] = {}
        """A time for which a condition may have held: no known value in it refutes that, but some are unknown."""
        self.largest_gap_ns: dict[Condition, int] = {}
        """The longest time between two known values of a condition, its expected begin and its end included."""
        self._expected_ns: dict[Condition, int] = {}
        self._held_since_ns: dict[Condition, int] = {}
        self._not_refuted_since_ns: dict[Condition, int] = {}
        self._unknown_since_ns: dict[Condition, int] = {}

    def evaluate(self, now_ns: int, values: Mapping[str, float | None], *, due: Collection[str] = ()) -> Ending | None:
        """Compare every condition with the current values; return the first one that holds.

        A value that is None or absent is unknown. If it stays unknown for more than `MISSING_NS`, `missing` is set, but
        only for metrics in `due` and for those that were known before.
        """
        for condition in self.conditions:
            value = values.get(condition.metric.name)
            if value is not None or not (condition.metric.name in due or condition in self.last_values):
                self._unknown_since_ns.pop(condition, None)
            else:
                since_ns = self._unknown_since_ns.setdefault(condition, now_ns)
                if self.missing is None and now_ns - since_ns > MISSING_NS:
                    self.missing = Missing(condition=condition, since_ns=since_ns, at_ns=now_ns)
            if value is not None:
                self._note_gap(condition, value, now_ns)
            if value is None or not condition.holds(value):
                self._held_since_ns.pop(condition, None)
            else:
                since_ns = self._held_since_ns.setdefault(condition, now_ns)
                if self.held is None and now_ns - since_ns >= condition.for_ns:
                    self.held = Ending(condition=condition, value=value, since_ns=since_ns, at_ns=now_ns)
            if value is not None:
                self.last_values[condition] = value
                self.evaluated_ns[condition] = self.evaluated_ns.get(condition, (now_ns, now_ns))[0], now_ns
                self._note_possible_hold(condition, value, now_ns)
        return self.held

    def expect(self, since_ns: Mapping[str, int]) -> None:
        """Note from when on metrics should be known (controller, ns). A value that comes later follows a gap."""
        self._expected_ns = {
            condition: since_ns[condition.metric.name]
            for condition in self.conditions
            if condition.metric.name in since_ns
        }

    def end(self, now_ns: int) -> None:
        """Note that no fault is on any more. A condition may have held since its last value if that is long ago."""
        for condition in self.conditions:
            self._note_gap(condition, None, now_ns)

    def _note_gap(self, condition: Condition, value: float | None, now_ns: int) -> None:
        """Note a gap before a known value, or before the end (None), if the condition may have held in it.

        A hold is not continuous over a gap, but it may have been.
        """
        known_ns = self.evaluated_ns.get(condition, (0, self._expected_ns.get(condition, now_ns)))[1]
        gap_ns = now_ns - known_ns
        self.largest_gap_ns[condition] = max(self.largest_gap_ns.get(condition, 0), gap_ns)
        if gap_ns <= MISSING_NS:
            return
        self._held_since_ns.pop(condition, None)
        if condition.metric.never_falls and value is not None and not condition.holds(value):
            return
        since_ns = self._not_refuted_since_ns.setdefault(condition, known_ns)
        if now_ns - since_ns >= condition.for_ns:
            self.may_have_held_ns.setdefault(condition, (since_ns, now_ns))

    def _note_possible_hold(self, condition: Condition, value: float, now_ns: int) -> None:
        """Note that a condition may have held for its time, if only unknown values interrupted it."""
        if not condition.holds(value):
            self._not_refuted_since_ns.pop(condition, None)
            return
        since_ns = self._not_refuted_since_ns.setdefault(condition, now_ns)
        if now_ns - since_ns >= condition.for_ns:
            self.may_have_held_ns.setdefault(condition, (since_ns, now_ns))


def judged(verdict: VerdictFile, guard: Guard, *, t0_ns: int) -> VerdictFile:
    """Return the verdict with a check for each stop condition. Times count from `t0_ns`, the workload's start."""
    if not guard.conditions and guard.refused is None:
        return verdict
    added = [_check(condition, guard, t0_ns) for condition in guard.conditions]
    if guard.refused is not None:
        added.append(
            Check(
                name="healthy_start",
                verdict=Verdict.INCONCLUSIVE,
                observed=None,
                bound=None,
                unit="",
                meaning="The workload is healthy before the first fault, or no fault is armed",
                detail=f"no fault was armed: {guard.refused}",
            )
        )
    checks = (*verdict.checks, *added)
    return msgspec.structs.replace(verdict, checks=checks, verdict=worst(check.verdict for check in checks))


def _check(condition: Condition, guard: Guard, t0_ns: int) -> Check:
    metric, ending = condition.metric, guard.held
    lasting = f" for {condition.for_ns / 1e9:g} s" if condition.for_ns else ""
    value: float | None = guard.last_values.get(condition)
    if ending is not None and ending.condition == condition:
        value, outcome = ending.value, condition.verdict
        since_s, at_s = (ending.since_ns - t0_ns) / 1e9, (ending.at_ns - t0_ns) / 1e9
        beyond = f"beyond the bound from {since_s:.1f} s on"
        detail = f"{beyond}; at {at_s:.1f} s all faults were cleared and the run was ended"
    elif guard.missing is not None and guard.missing.condition == condition:
        outcome = Verdict.INCONCLUSIVE
        since_s, at_s = (guard.missing.since_ns - t0_ns) / 1e9, (guard.missing.at_ns - t0_ns) / 1e9
        missing = f"no data of the metric from {since_s:.1f} s on"
        detail = f"{missing}; at {at_s:.1f} s all faults were cleared and the run was ended"
    elif value is None:
        outcome, detail = Verdict.INCONCLUSIVE, "never known while faults were on"
    elif (watched_ns := guard.evaluated_ns[condition][1] - guard.evaluated_ns[condition][0]) < condition.for_ns:
        outcome = Verdict.INCONCLUSIVE
        detail = f"known for {watched_ns / 1e9:.1f} s only, but the condition must hold{lasting}"
    elif condition in guard.may_have_held_ns:
        outcome = Verdict.INCONCLUSIVE
        since_s, at_s = ((at_ns - t0_ns) / 1e9 for at_ns in guard.may_have_held_ns[condition])
        gap_s = guard.largest_gap_ns[condition] / 1e9
        detail = (
            f"not refuted from {since_s:.1f} s to {at_s:.1f} s, and not known all the time in between (longest gap "
            f"between two values {gap_s:.1f} s)"
        )
    else:
        outcome = Verdict.PASS
        gap_s = guard.largest_gap_ns[condition] / 1e9
        detail = (
            f"never beyond the bound{lasting} while faults were on; observed is the last value (longest gap between "
            f"two values {gap_s:.1f} s)"
        )
    return Check(
        name=f"stop.{metric.name}",
        verdict=outcome,
        observed=value,
        bound=condition.bound,
        unit=metric.unit,
        comparison=metric.bound,
        meaning=f"If it is beyond the bound{lasting}, the run is ended. {metric.meaning}",
        detail=detail,
    )
