"""Differences between two runs apart from measurements: their plans, labs and environments. Pure.

A comparison is only valid for what is the same. Each difference has its area (`part`), its subject, and the values in A
and B; a dash if one of them has no value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from harness.experiment.run_plan import Plan, ScheduledFault
from harness.quantities import format_bytes, format_duration
from harness.record.measurements import Connection, Environment, Measurements

__all__ = ["NOTHING", "Difference", "of_environments", "of_labs", "of_plans", "words"]

NOTHING = "—"
Part = Literal["plan", "workload", "faults", "lab", "environment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that differs between A and B."""

    part: Part
    what: str
    a: str
    b: str


def of_plans(a: Plan, b: Plan) -> tuple[Difference, ...]:
    """Compare two plans: what identifies them, what they record, the workload's fields, and each fault."""
    plain: Mapping[str, tuple[Any, Any]] = {
        "experiment": (a.experiment, b.experiment),
        "seed": (a.seed, b.seed),
        "inventory": (a.inventory[:12], b.inventory[:12]),
        "version of faultbed": (a.faultbed, b.faultbed),
        "captured ports": (_ports(a), _ports(b)),
        "probes": (_probes(a), _probes(b)),
        "bystander": (_bystander(a), _bystander(b)),
        "routing scheme": (_scheme(a), _scheme(b)),
    }
    differences = [
        Difference(part="plan", what=what, a=str(one), b=str(two)) for what, (one, two) in plain.items() if one != two
    ]
    differences += _of_mappings("workload", a.workload, b.workload)
    mine, other = ({fault.id: fault for fault in plan.faults} for plan in (a, b))
    for fault_id in dict.fromkeys((*mine, *other)):
        differences += _of_faults(fault_id, mine.get(fault_id), other.get(fault_id))
    return tuple(differences)


def of_labs(a: Measurements, b: Measurements) -> tuple[Difference, ...]:
    """Compare the lab, its topology, and the paths of the workload's queue pairs."""
    plain: Mapping[str, tuple[Any, Any]] = {
        "lab": (a.lab, b.lab),
        "kind of lab": (a.lab_kind, b.lab_kind),
        "accelerator": (a.accelerator or "none", b.accelerator or "none"),
        "ranks": (_ranks(a), _ranks(b)),
    }
    differences = [
        Difference(part="lab", what=what, a=str(one), b=str(two)) for what, (one, two) in plain.items() if one != two
    ]
    if a.topology != b.topology:
        differences.append(Difference(part="lab", what="topology", a=_nodes(a), b=_nodes(b)))
    differences += _of_ways(a.connections, b.connections)
    return tuple(differences)


def of_environments(a: Environment, b: Environment) -> tuple[Difference, ...]:
    """Compare the controllers and their machines."""
    return tuple(_of_mappings("environment", _flat(a), _flat(b)))


def words(found: Sequence[Difference]) -> tuple[str, ...]:
    """Describe differences of plans in one line each, with one line for the workload and one for the faults."""
    lines = [f"{one.what}: {one.a} and {one.b}" for one in found if one.part == "plan"]
    changed = [f"{one.what} {one.a} and {one.b}" for one in found if one.part == "workload"]
    if changed:
        lines.append(f"workload: {', '.join(changed)}")
    if any(one.part == "faults" for one in found):
        lines.append("the faults, or their times")
    return tuple(lines)


def _of_mappings(part: Part, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    keys = sorted(key for key in {*a, *b} if a.get(key) != b.get(key))
    return [Difference(part=part, what=key, a=_said(a.get(key)), b=_said(b.get(key))) for key in keys]


def _of_faults(fault_id: str, a: ScheduledFault | None, b: ScheduledFault | None) -> Iterator[Difference]:
    if a is None or b is None:
        yield Difference(part="faults", what=fault_id, a=_fault(a), b=_fault(b))
        return
    pairs: Mapping[str, tuple[Any, Any]] = {
        "kind": (a.kind, b.kind),
        "target": (a.target, b.target),
        "at": (format_duration(a.at_ns), format_duration(b.at_ns)),
        "for": (format_duration(a.duration_ns), format_duration(b.duration_ns)),
        "seed": (a.seed, b.seed),
        **{key: (a.parameters.get(key), b.parameters.get(key)) for key in sorted({*a.parameters, *b.parameters})},
    }
    for key, (one, two) in pairs.items():
        if one != two:
            yield Difference(part="faults", what=f"{fault_id}: {key}", a=_said(one), b=_said(two))


def _fault(one: ScheduledFault | None) -> str:
    if one is None:
        return NOTHING
    return f"{one.kind} on {one.target} at {format_duration(one.at_ns)} for {format_duration(one.duration_ns)}"


def _of_ways(a: Sequence[Connection], b: Sequence[Connection]) -> list[Difference]:
    """Compare the paths of queue pairs between the same two RNICs, in order."""
    mine, other = _by_ends(a), _by_ends(b)
    shared = [
        (one, two)
        for ends in mine.keys() & other.keys()
        for one, two in zip(mine[ends], other[ends], strict=False)
        if one and two
    ]
    moved = sum(one != two for one, two in shared)
    if not moved:
        return []
    of_all = f"those of {len(shared)} queue pairs"
    return [Difference(part="lab", what="paths through the fabric", a=of_all, b=f"{moved} of them took another")]


def _by_ends(connections: Sequence[Connection]) -> dict[tuple[str, str], list[tuple[str, ...]]]:
    paths: dict[tuple[str, str], list[tuple[str, ...]]] = defaultdict(list)
    for one in connections:
        paths[one.src, one.dst].append(one.path)
    return paths


def _flat(environment: Environment) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(environment)
    packages = plain.pop("packages")
    return {**{key.replace("_", " "): value for key, value in plain.items()}, **packages}


def _ports(plan: Plan) -> str:
    return ", ".join(plan.capture) if isinstance(plan.capture, tuple) else NOTHING


def _probes(plan: Plan) -> str:
    return NOTHING if plan.probe is msgspec.UNSET else f"{plan.probe.per_s:g} a second, {plan.probe.qps} queue pairs"


def _bystander(plan: Plan) -> str:
    flow = plan.bystander
    if flow is msgspec.UNSET:
        return NOTHING
    rate = f" at {flow.rate_bps / 1e6:g} Mb/s" if flow.rate_bps else ""
    return f"{flow.qps} x {flow.depth} {flow.verb} of {format_bytes(flow.message_bytes)} {flow.src} to {flow.dst}{rate}"


def _scheme(plan: Plan) -> str:
    if plan.fabric is msgspec.UNSET:
        return NOTHING
    return ", ".join([plan.fabric.routing, *(f"{name} {value}" for name, value in plan.fabric.parameters.items())])


def _ranks(run: Measurements) -> str:
    return ", ".join(f"{one.host}:{one.rnic}" for one in run.ranks)


def _nodes(run: Measurements) -> str:
    topology = run.topology
    return f"{len(topology.hosts)} hosts, {len(topology.switches)} switches, {len(topology.links)} links"


def _said(value: Any) -> str:
    return NOTHING if value is None else str(value)
