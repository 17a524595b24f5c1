"""Evaluation of stop conditions while faults are on. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from faultbed.harness.experiment.stop import Condition
from faultbed.harness.parts.stops.stop_evidence import Held, StopsEvidence, Watched

__all__ = ["MISSING_NS", "Ending", "Guard", "Missing"]

MISSING_NS = 1_000_000_000
"""For how long the value of a condition may be unknown or not evaluated while faults are on."""


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

    def sealed(self, *, t0_ns: int) -> StopsEvidence:
        """Return what was seen of every condition. `t0_ns` is when the workload began."""
        return StopsEvidence(
            t0_ns=t0_ns, conditions=tuple(self._seen(condition) for condition in self.conditions), refused=self.refused
        )

    def _seen(self, condition: Condition) -> Watched:
        held, missing = self.held, self.missing
        return Watched(
            metric=condition.metric.name,
            bound=condition.bound,
            for_ns=condition.for_ns,
            last_value=self.last_values.get(condition),
            known_ns=self.evaluated_ns.get(condition),
            largest_gap_ns=self.largest_gap_ns.get(condition, 0),
            may_have_held_ns=self.may_have_held_ns.get(condition),
            held=Held(value=held.value, since_ns=held.since_ns, at_ns=held.at_ns)
            if held is not None and held.condition == condition
            else None,
            missing_ns=(missing.since_ns, missing.at_ns)
            if missing is not None and missing.condition == condition
            else None,
        )
