"""Hypothesis strategies for cases that fit one lab and the safety policy of its owner. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from faultbed.harness.experiment import experiment_file
from faultbed.harness.experiment.declare.section import Section, fields_of
from faultbed.harness.experiment.workload_file import Collective, Flow
from faultbed.harness.fuzz.case import Case, to_toml
from faultbed.harness.fuzz.field_values import values_of
from faultbed.harness.run.prepare.resolve import refusal, resolve
from faultbed.inject.fault_plan import plan
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.policy import safety
from faultbed.inject.policy.overlap import LEAD_S
from faultbed.inject.strategies import Accepts, Grid, compatible, fault_specs
from faultbed.testbed.errors import FaultbedError, Unsupported
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.model.topology import Topology
from faultbed.traffic.flows.flow_spec import CHECKED, TRANSPORTS
from faultbed.traffic.flows.matrix import PATTERNS
from faultbed.traffic.schedules import COLLECTIVES, algorithms_for
from faultbed.traffic.workloads.ranks import ITEM_BYTES

__all__ = ["ON_LAB", "WORKLOADS", "cases"]

_Drawn = st.SearchStrategy[dict[str, Any]]

ON_LAB = Grid(earliest_s=LEAD_S, latest_s=LEAD_S + 4, shortest_s=0.5, longest_s=4.0, step_s=0.5, levels=8)
"""Times on a lab. A fault before LEAD_S would fire late, because arming takes time. Steps are coarse, because each step
of shrinking is a run on the lab."""

_NOT_DRAWN = frozenset({"duration", "iterations"})
"""Keys for the length of a workload. A case computes it from its faults."""
_SHAPES = frozenset({"src", "dst", "pattern"})
"""Keys that the shape of a flow decides."""
_PAIRED_KEYS = {"on": "off", "off": "on"}
"""Keys that must be drawn together with another key."""
_MOST_SETTINGS = 3
"""Maximum number of further keys of a workload. Most settings exclude some others, so a case with many is rarely
valid."""
_SIZES = ("64KiB", "4KiB", "256KiB", "1MiB")


def cases(
    inventory: Inventory,
    *,
    kinds: Collection[str],
    workloads: Collection[str],
    most: int,
    grid: Grid = ON_LAB,
) -> st.SearchStrategy[Case]:
    """Draw cases that can be planned on a lab and that its owner allows.

    Args:
        inventory: the lab.
        kinds: names of fault kinds.
        workloads: names from WORKLOADS.
        most: faults in one case, at most.
        grid: times and parameter values of the faults.

    Raises:
        Unsupported: the lab has no allowed target for any of the kinds.
    """
    topology, fits = inventory.topology, _remembered(lambda case: _fits(case, inventory))
    longest_s = max(grid.shortest_s, min(grid.longest_s, safety.policy_of(inventory).longest_fault_s))
    grid = replace(grid, longest_s=longest_s)
    specs = fault_specs(topology, kinds=kinds, lab_kind=inventory.kind, grid=grid, accepts=_allowed(inventory))
    if specs.is_empty:
        raise Unsupported(
            f"{inventory.name} has no target for {', '.join(kinds)} that its owner allows to be disrupted"
        )
    # Most cases have a fault; the simplest has none.
    drawn_faults = st.integers(0, 7).flatmap(
        lambda number: st.lists(specs, min_size=min(most, number and 1), max_size=most)
    )
    drawn_workload = st.one_of(*(WORKLOADS[name](topology) for name in WORKLOADS if name in workloads)).filter(
        lambda workload: fits(Case(workload=workload))
    )

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        workload = draw(drawn_workload)
        faults = compatible(draw(drawn_faults), lambda some: fits(Case(workload=workload, faults=tuple(some))))
        return Case(workload=workload, faults=faults)

    return case()


def _remembered(fits: Callable[[Case], bool]) -> Callable[[Case], bool]:
    """Return `fits` with a cache, because a search draws the same cases repeatedly while it shrinks a failure."""
    known: dict[str, bool] = {}

    def fits_cached(case: Case) -> bool:
        text = to_toml(case)
        if text not in known:
            known[text] = fits(case)
        return known[text]

    return fits_cached


def _fits(case: Case, inventory: Inventory) -> bool:
    source = to_toml(case).encode()
    try:
        resolved = resolve(experiment_file.decode(source, source="fuzz"), source, inventory)
    except FaultbedError:
        return False
    return refusal(resolved, inventory) is None


def _allowed(inventory: Inventory) -> Accepts:
    """Return a function that says whether faults can be planned and are allowed, without planning an experiment."""

    def accepts(specs: Sequence[FaultSpec]) -> bool:
        try:
            for spec in specs:
                safety.check(plan(spec, inventory.topology, lab_kind=inventory.kind), inventory)
        except FaultbedError:
            return False
        return True

    return accepts


def _settings(section: type[Section], shapes: st.SearchStrategy[dict[str, Any]], topology: Topology) -> _Drawn:
    """Draw workloads of these shapes with up to `_MOST_SETTINGS` further keys that the section declares.

    Keys are put in the order of the declaration, because hypothesis draws keys of a dictionary in any order.
    """
    fields = {field.key: field for field in fields_of(section)}
    values = {key: values_of(field, topology.rnic_names) for key, field in fields.items() if key not in _NOT_DRAWN}

    def with_more(shape: dict[str, Any]) -> _Drawn:
        free = [key for key, some in values.items() if some and key not in shape and key not in _SHAPES]
        keys = st.integers(0, _MOST_SETTINGS).flatmap(
            lambda number: st.lists(st.sampled_from(free), unique=True, min_size=number, max_size=number)
        )
        complete_keys = keys.map(lambda drawn: [*drawn, *(_PAIRED_KEYS[key] for key in drawn if key in _PAIRED_KEYS)])
        return complete_keys.flatmap(
            lambda drawn: st.fixed_dictionaries({key: st.sampled_from(values[key]) for key in dict.fromkeys(drawn)})
        ).map(lambda more: {key: value for key in fields if (value := (shape | more).get(key)) is not None})

    return shapes.flatmap(with_more)


def _collective(topology: Topology) -> _Drawn:
    shapes = st.sampled_from(COLLECTIVES).flatmap(
        lambda name: st.fixed_dictionaries(
            {
                "collective": st.just(name),
                "size": st.sampled_from(_SIZES),
                "algorithm": st.sampled_from(("auto", *algorithms_for(name))),
                "dtype": st.sampled_from(tuple(ITEM_BYTES)),
            }
        )
    )
    return _settings(Collective, shapes, topology)


def _flow(topology: Topology) -> _Drawn:
    rnics = topology.rnic_names
    ends = st.fixed_dictionaries({"src": st.sampled_from(rnics), "dst": st.sampled_from(rnics[::-1])})
    return _settings(Flow, st.tuples(_shape(), ends).map(lambda both: both[0] | both[1]), topology)


def _pattern(topology: Topology) -> _Drawn:
    patterns = st.fixed_dictionaries({"pattern": st.sampled_from(tuple(PATTERNS))})
    return _settings(Flow, st.tuples(_shape(), patterns).map(lambda both: both[0] | both[1]), topology)


def _shape() -> _Drawn:
    """Draw the keys that flows between one pair and between several pairs have in common."""
    verbs = [(verb, transport) for transport, carried in TRANSPORTS.items() for verb in carried]
    return st.sampled_from(verbs).flatmap(
        lambda pair: st.fixed_dictionaries(
            {
                "flow": st.just(pair[0]),
                "transport": st.just(pair[1]),
                "size": st.sampled_from(("4KiB", "64KiB") if pair[0] != "atomic" else ("8",)),
                "qps": st.integers(1, 4),
                "depth": st.sampled_from((4, 1, 16)),
                # Check every byte of half the flows where that is possible: some settings exclude the check.
                **({"check": st.sampled_from((True, None))} if pair[0] in CHECKED[pair[1]] else {}),
            }
        )
    )


WORKLOADS: Mapping[str, Callable[[Topology], _Drawn]] = {
    "collective": _collective,
    "flow": _flow,
    "pattern": _pattern,
}
"""Workloads with a given duration, by name. A job is not among them: it ends after its iterations, so the times of
faults cannot be chosen."""
