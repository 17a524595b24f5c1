"""What is known of a fault once it is over, and whether that proves it. Frozen data and pure functions.

A receipt has three parts, each of them something that was read and not something that was asked for:

    armed     what the target said right after the change
    fired     how often it hit, first and last, and the independent counters that had to move, or had to stay
    cleared   what the target said after the revert

`Receipt.proved` is what a verdict rests on: the hop or actuator counted something AND an independent counter moved AND
nothing moved that must not AND it was on for as long as planned (`inject.evidence.firing_times`) AND it is gone.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inject.evidence import firing_times
from inject.evidence.firing_times import OnTime
from inject.fault_plan import PlannedFault
from testbed.observe.counters import Snapshot, flat_deltas, value_at

__all__ = ["Armed", "Cleared", "Fired", "Receipt", "end_sentence", "judge_fired", "not_cleared"]

_LEFT_OUT = ("between_ns", "passed", "selection")
"""Keys of `fired` that are not there when there is nothing to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Armed:
    """The change, read back. `at_ns` is controller time, wrong by at most `clock_error_ns`.

    `while_on` are states as another way of looking than the holder's has found them while the fault was on.
    """

    ok: bool
    at_ns: int | None = None
    clock_error_ns: int | None = None
    readback: Mapping[str, Any] = field(default_factory=dict)
    learned: Mapping[str, int] = field(default_factory=dict)
    while_on: Mapping[str, int | None] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fired:
    """What it did.

    `count` is the actuator's own; `witness` names the most telling independent counter that moved.
    `must_move` and `must_not_move` are the increments of the counters since just before arming; one of each group of
    `must_move` is enough. Times are controller time; their resolution is the holder's polling period (20 ms at the hop,
    50 ms for a cgroup; longer where asking is slow, at most 5 % of the time goes into it), and exact for edges.
    `between_ns` are two moments between which it fired first, whatever the clocks; None: it never did.
    `passed` is the number of packets that a share, or every n-th, was taken of; None: the fault takes none.
    `selection` says how the seed decided which packets were taken; None: nothing was drawn.
    """

    count: int
    first_ns: int | None
    last_ns: int | None
    witness: str | None
    must_move: Mapping[str, int]
    must_not_move: Mapping[str, int]
    between_ns: tuple[int, int] | None = None
    passed: int | None = None
    selection: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """The revert, read back. `at_ns` is controller time, wrong by at most `clock_error_ns`.

    `by` is `holder`, or `lease` when the target did it alone after losing us.
    """

    ok: bool
    at_ns: int | None = None
    clock_error_ns: int | None = None
    by: str = "holder"
    readback: Mapping[str, Any] = field(default_factory=dict)
    restored: Mapping[str, int | None] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """One fault, from beginning to end. `edges` are (controller time in ns, on) of every change it made.

    `doubts` are the reasons not to believe that it happened (`judge_fired`); `on_time` is None where nothing was read.
    """

    id: str
    kind: str
    target: str
    fidelity: str
    armed: Armed
    fired: Fired
    cleared: Cleared
    edges: tuple[tuple[int, bool], ...] = ()
    doubts: tuple[str, ...] = ()
    on_time: OnTime | None = None

    @property
    def unproven(self) -> tuple[str, ...]:
        """Every reason why it does not prove its fault, a workload aside: empty when it does."""
        reasons = [*self.doubts]
        if self.on_time is not None and self.armed.ok and self.fired.count:
            reasons += firing_times.why_not_as_planned(self.on_time)
        if not self.cleared.ok:
            reasons.append(f"not cleared: {self.cleared.error or 'the readback still shows the change'}")
        return tuple(reasons)

    @property
    def proved(self) -> bool:
        """Whether it provably happened, where it should and nowhere else, for as long as planned, and is gone."""
        return not self.unproven

    def to_json(self) -> dict[str, Any]:
        """The `faults` element of `verdict.json`."""
        return {
            "id": self.id,
            "kind": self.kind,
            "target": self.target,
            "fidelity": self.fidelity,
            "armed": _plain(_as_dict(self.armed)),
            "fired": _plain(_as_dict(self.fired)),
            "cleared": _plain(_as_dict(self.cleared)),
            "on_time": _plain(dataclasses.asdict(self.on_time)) if self.on_time else None,
            "unproven": list(self.unproven),
        }


def not_cleared(receipts: Iterable[Receipt]) -> tuple[str, ...]:
    """Return one sentence for each fault that may still be in place; each of them makes the lab DIRTY."""
    return tuple(
        f"{each.kind} on {each.target} is not cleared: {each.cleared.error or 'the readback does not show it'}"
        for each in receipts
        if not each.cleared.ok
    )


def end_sentence(receipts: Sequence[Receipt], abandoned: Sequence[str], *, ttl_s: float) -> str:
    """Return how faults ended, as far as that was seen: `2 faults cleared and verified`; empty without any fault."""
    cleared = sum(each.cleared.ok for each in receipts)
    said = [f"{cleared} {'fault' if cleared == 1 else 'faults'} cleared and verified"] if cleared else []
    said += not_cleared(receipts)
    said += [f"{fault} left to its {ttl_s:g} s lease" for fault in abandoned]
    return "; ".join(said)


def _as_dict(part: Armed | Fired | Cleared) -> dict[str, Any]:
    found = {name: getattr(part, name) for name in part.__dataclass_fields__}
    return {name: value for name, value in found.items() if name not in _LEFT_OUT or value is not None}


def judge_fired(
    planned: PlannedFault,
    *,
    armed: Armed,
    observed: Mapping[str, Any],
    before: Snapshot,
    after: Snapshot,
) -> tuple[Fired, tuple[str, ...]]:
    """Cross-check the actuator's count with the independent counters.

    Args:
        planned: what was to be done.
        armed: how arming went.
        observed: the holder's last observation, times already the controller's.
        before: counters just before arming.
        after: counters after clearing, settled.

    Returns:
        What fired, and every reason to doubt it (none: proved).
    """
    deltas = flat_deltas(before, after)
    lost = [key for key in planned.must_not_move if key not in deltas and value_at(before, key) is not None]
    moved = {key: deltas[key] for witness in planned.must_move for key in witness.any_of if key in deltas}
    stayed = {key: deltas[key] for key in planned.must_not_move if key in deltas}
    count = int(observed.get("count") or 0)
    doubts = [*_doubts_of_arming(planned, armed), *_doubts_of_states_before(planned, before)]
    if count == 0:
        doubts.append("the actuator counted nothing")
    for witness in planned.must_move:
        best = max((moved.get(key, 0) for key in witness.any_of), default=0)
        if best < witness.at_least:
            names = ", ".join(witness.any_of[:3]) + (", ..." if len(witness.any_of) > 3 else "")  # noqa: PLR2004
            doubts.append(f"no independent witness: {names} moved by {best}, must move by {witness.at_least}")
    doubts += [f"{key} moved by {delta}: it must not" for key, delta in stayed.items() if delta]
    doubts += [f"{key} can no longer be read" for key in lost]
    passed = observed.get("passed")
    doubts += _doubts_of_share(planned, count, passed)
    fired = Fired(
        count=count,
        first_ns=observed.get("first_ns"),
        last_ns=observed.get("last_ns"),
        between_ns=observed.get("between_ns"),
        witness=next(
            itertools.chain(
                (key for each in planned.must_move for key in each.any_of if moved.get(key, 0) >= each.at_least),
                (key for key, value in planned.while_on if key in armed.while_on and armed.while_on[key] == value),
            ),
            None,
        ),
        must_move=moved,
        must_not_move=stayed,
        passed=passed,
        selection=str(planned.selection) if planned.selection else None,
    )
    return fired, tuple(doubts)


def _doubts_of_arming(planned: PlannedFault, armed: Armed) -> list[str]:
    """Whether what was read back is the change that was planned, at its place."""
    if not armed.ok:
        return [f"not armed: {armed.error or 'the readback does not show the change'}"]
    elsewhere = [
        f"armed elsewhere: {key} reads back as {armed.readback.get(key)}, was to be {value}"
        for key, value in planned.shows.items()
        if armed.readback.get(key) not in (value, [value])
    ]
    late = "could not be read before the fault was over: give it a longer window"
    return elsewhere + [
        f"{key} was {armed.while_on[key]} while the fault was on, was to be {value}"
        if key in armed.while_on
        else f"{key} {late}"
        for key, value in planned.while_on
        if key not in armed.while_on or armed.while_on[key] != value
    ]


def _doubts_of_states_before(planned: PlannedFault, before: Snapshot) -> list[str]:
    """Name each state that held already before the fault: seen while it is on, it shows no change.

    Not of a fault of the workload, whose processes may not have started by then, nor of a thing that is to be gone.
    """
    if planned.of_workload:
        return []
    return [
        f"{key} was {value} before the fault already: it does not show the fault"
        for key, value in planned.while_on
        if value is not None and value_at(before, key) == value
    ]


def _doubts_of_share(planned: PlannedFault, count: int, passed: int | None) -> list[str]:
    """Compare the packets hit with those that were to be, of so many that passed: which ones is decided by the plan."""
    if passed is None:
        return []
    if (every := planned.params.get("every")) is not None:
        expected = passed // every
    elif planned.selection is not None and planned.selection.period:
        expected = planned.selection.taken_of(passed)
    else:
        return []
    if abs(count - expected) <= 1:  # one may be on its way between the two counters
        return []
    return [f"{count} of {passed} packets were hit, {expected} ± 1 were to be"]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
