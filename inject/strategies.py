"""Hypothesis strategies for faults and fault schedules. They shrink to fewer, earlier, shorter and weaker faults.

Use: decorate a test with `@given(schedules(topology))`; each example is a tuple of `FaultSpec`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from faultbed.inject.fault_plan import plan, plan_all
from faultbed.inject.kinds.catalogue import CATALOGUE, FaultKind, Param, Trait
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.testbed.errors import FaultbedError
from faultbed.testbed.model.lab_kind import LabKind
from faultbed.testbed.model.topology import Topology

__all__ = ["Accepts", "Grid", "compatible", "fault_specs", "schedules"]

Accepts = Callable[[Sequence[FaultSpec]], bool]
"""A function that returns whether a schedule is allowed. The default plans the schedule on the topology."""

_WIDE = 1000
"""Values of a range whose ends are this factor apart are drawn by order of magnitude: 0.1 ms, 1 ms, 10 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The times and parameter values that faults are drawn from.

    A coarse grid shrinks in fewer steps. That matters where each step is a run on a lab. `step_s` divides both times;
    `levels` is the number of steps from the lowest to the highest value of a parameter.
    """

    earliest_s: float = 0.0
    latest_s: float = 10.0
    shortest_s: float = 0.1
    longest_s: float = 5.0
    step_s: float = 0.001
    levels: int = 100

    @property
    def starts(self) -> st.SearchStrategy[float]:
        """When a fault begins, in seconds."""
        return self._times(self.earliest_s, self.latest_s)

    @property
    def durations(self) -> st.SearchStrategy[float]:
        """How long a fault lasts, in seconds."""
        return self._times(self.shortest_s, self.longest_s)

    def _times(self, low_s: float, high_s: float) -> st.SearchStrategy[float]:
        steps = round((high_s - low_s) / self.step_s)
        return st.integers(0, steps).map(lambda step: round(low_s + step * self.step_s, 6))


def fault_specs(
    topology: Topology,
    *,
    kinds: Iterable[str] | None = None,
    lab_kind: LabKind = "soft",
    grid: Grid | None = None,
    accepts: Accepts | None = None,
) -> st.SearchStrategy[FaultSpec]:
    """Return a strategy for faults that a lab of this topology supports.

    Args:
        topology: the lab.
        kinds: names of the kinds to draw; None: all kinds that can be reverted.
        lab_kind: `soft` or `rack`.
        grid: times and parameter values.
        accepts: whether a fault alone is allowed; what it rejects is never drawn.

    Returns:
        A strategy. It is empty where the lab has no target for any of the kinds.
    """
    grid = grid or Grid()
    accepts = accepts or _plannable(topology, lab_kind)
    requested = None if kinds is None else frozenset(kinds)
    able = [kind for kind in CATALOGUE.values() if lab_kind in kind.fidelity]
    chosen = [kind for kind in able if (kind.reversible if requested is None else kind.name in requested)]
    targets = {kind.name: _targets(kind, topology, grid, accepts) for kind in chosen}
    possible = [kind for kind in chosen if targets[kind.name]]
    if not possible:
        return st.nothing()
    # Made once: hypothesis checks a new strategy at every draw, which takes longer than the draw.
    specs_of = {kind.name: _of_kind(kind, targets[kind.name], grid, accepts) for kind in possible}
    return st.sampled_from(possible).flatmap(lambda kind: specs_of[kind.name])


def schedules(
    topology: Topology,
    *,
    kinds: Iterable[str] | None = None,
    most: int = 6,
    lab_kind: LabKind = "soft",
    grid: Grid | None = None,
    accepts: Accepts | None = None,
) -> st.SearchStrategy[tuple[FaultSpec, ...]]:
    """Return a strategy for up to `most` faults that do not conflict, in the order in which they begin.

    The other arguments are those of `fault_specs`.
    """
    accepts = accepts or _plannable(topology, lab_kind)
    specs = fault_specs(topology, kinds=kinds, lab_kind=lab_kind, grid=grid, accepts=accepts)
    return st.lists(specs, max_size=most).map(lambda drawn: compatible(drawn, accepts))


def compatible(drawn: Sequence[FaultSpec], accepts: Accepts) -> tuple[FaultSpec, ...]:
    """Return the faults in the order in which they begin, without those that conflict with an earlier one.

    Every list becomes a schedule, so shrinking never stops at one that cannot be planned.
    """
    kept: list[FaultSpec] = []
    for spec in sorted(drawn, key=lambda spec: spec.at_s):
        if accepts([*kept, spec]):
            kept.append(spec)
    return tuple(kept)


def _plannable(topology: Topology, lab_kind: LabKind) -> Accepts:
    def accepts(specs: Sequence[FaultSpec]) -> bool:
        try:
            if len(specs) == 1:
                plan(specs[0], topology, lab_kind=lab_kind)
            else:
                plan_all(specs, topology, lab_kind=lab_kind)
        except FaultbedError:
            return False
        return True

    return accepts


def _targets(kind: FaultKind, topology: Topology, grid: Grid, accepts: Accepts) -> list[str]:
    """Return the targets that accept the longest fault of a kind, with the lowest values of its parameters."""
    least: Mapping[str, object] = {
        **{param.name: _least(param) for param in kind.params if param.required},
        **({"share": 0.001} if Trait.NEEDS_SELECTION in kind.traits else {}),
    }

    def is_accepted(target: str) -> bool:
        spec = FaultSpec(kind=kind.name, target=target, at_s=grid.earliest_s, for_s=grid.longest_s, params=least)
        return accepts([spec])

    fitting = [name for name in topology.target_names() if topology.resolve(name).kind in kind.targets]
    return [name for name in fitting if is_accepted(name)]


def _of_kind(kind: FaultKind, targets: Sequence[str], grid: Grid, accepts: Accepts) -> st.SearchStrategy[FaultSpec]:
    params = {param.name: _value(param, grid.levels) for param in kind.params if param.required}
    if Trait.NEEDS_SELECTION in kind.traits:
        params["share"] = st.integers(0, grid.levels).map(lambda level: round(0.001 + 0.499 * level / grid.levels, 6))
    return st.builds(
        lambda target, at_s, for_s, values: FaultSpec(
            kind=kind.name, target=target, at_s=at_s, for_s=for_s, params=values
        ),
        st.sampled_from(targets),
        grid.starts,
        grid.durations,
        st.fixed_dictionaries(params),
    ).filter(lambda spec: accepts([spec]))


def _least(param: Param) -> object:
    if param.type == "choice":
        return param.choices[0]
    return param.low or 0.0


def _value(param: Param, levels: int) -> st.SearchStrategy[object]:
    if param.type == "choice":
        return st.sampled_from(param.choices)
    low, high = param.low or 0.0, param.high if param.high is not None else 100.0
    if param.type == "integer" and high - low <= levels:
        return st.integers(round(low), round(high))
    values = st.integers(0, levels).map(lambda level: _at_level(low, high, level / levels))
    return values.map(round) if param.type == "integer" else values


def _at_level(low: float, high: float, share: float) -> float:
    """Return the value at a share of a range, in few digits: by its order of magnitude where the range has several."""
    if low > 0 and high >= _WIDE * low:
        return min(high, max(low, float(f"{low * (high / low) ** share:.2g}")))
    return round(low + (high - low) * share, 6)
