"""Hypothesis strategies for faults and schedules of them, which shrink: to fewer, shorter, earlier, simpler ones.

@given(schedules(topology))
def test_the_job_lives_through_it(specs): ...
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from inject.fault_plan import FaultSpec, plan, plan_all
from inject.kinds.catalogue import CATALOGUE, FaultKind, Param
from testbed.errors import FaultbedError
from testbed.model.topology import Topology

__all__ = ["fault_specs", "schedules"]

# One of these says which packets; without it the kind does not know.
_NEEDS_SHARE = frozenset({"packet.drop", "packet.corrupt", "packet.reorder", "data.corrupt"})


def fault_specs(
    topology: Topology, *, kinds: Sequence[str] | None = None, latest_s: float = 10.0, longest_s: float = 5.0
) -> st.SearchStrategy[FaultSpec]:
    """Faults that a soft lab of this topology can do, of the given kinds (None: all that can be reverted)."""
    able = [kind for kind in CATALOGUE.values() if "soft" in kind.fidelity]
    chosen = [kind for kind in able if (kind.reversible if kinds is None else kind.name in kinds)]
    return st.sampled_from(chosen).flatmap(lambda kind: _of_kind(kind, topology, latest_s, longest_s))


def schedules(
    topology: Topology,
    *,
    kinds: Sequence[str] | None = None,
    most: int = 6,
    latest_s: float = 10.0,
    longest_s: float = 5.0,
) -> st.SearchStrategy[tuple[FaultSpec, ...]]:
    """Up to `most` faults that go together, in the order in which they begin."""
    specs = fault_specs(topology, kinds=kinds, latest_s=latest_s, longest_s=longest_s)

    def compatible(found: list[FaultSpec]) -> tuple[FaultSpec, ...]:
        kept: list[FaultSpec] = []
        for spec in sorted(found, key=lambda each: each.at_s):
            # Leave out what collides with an earlier one, so that every list is a schedule and shrinking never stops.
            try:
                plan_all([*kept, spec], topology, lab_kind="soft")
            except FaultbedError:
                continue
            kept.append(spec)
        return tuple(kept)

    return st.lists(specs, max_size=most).map(compatible)


def _of_kind(kind: FaultKind, topology: Topology, latest_s: float, longest_s: float) -> st.SearchStrategy[FaultSpec]:
    targets = [name for name in topology.target_names() if topology.resolve(name).kind in kind.targets]
    params = {param.name: _value(param) for param in kind.params if param.required}
    if kind.name in _NEEDS_SHARE:
        params["share"] = st.integers(1, 500).map(lambda thousandths: thousandths / 1000)
    return st.builds(
        lambda target, at_ms, for_ms, values: FaultSpec(
            kind=kind.name, target=target, at_s=at_ms / 1000, for_s=for_ms / 1000, params=values
        ),
        st.sampled_from(targets),
        st.integers(0, round(latest_s * 1000)),
        st.integers(100, round(longest_s * 1000)),
        st.fixed_dictionaries(params),
    ).filter(lambda spec: _is_possible(spec, topology))


def _value(param: Param) -> st.SearchStrategy[object]:
    if param.type == "choice":
        return st.sampled_from(param.choices)
    low, high = param.low or 0.0, param.high if param.high is not None else 100.0
    if param.type == "integer":
        return st.integers(round(low), round(high))
    # Whole steps shrink to something a person can read.
    return st.integers(0, 100).map(lambda percent: round(low + (high - low) * percent / 100, 6))


def _is_possible(spec: FaultSpec, topology: Topology) -> bool:
    try:
        plan(spec, topology, lab_kind="soft")
    except FaultbedError:
        return False
    return True
