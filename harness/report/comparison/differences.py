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

from faultbed.harness.experiment.run_plan import Plan
from faultbed.harness.quantities import format_bytes, format_duration
from faultbed.harness.record.evidence.environment import Environment
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.record.evidence.workload_evidence import Connection
from faultbed.inject.kinds.fault_spec import FaultSpec

__all__ = ["NOTHING", "Difference", "of_environments", "of_labs", "of_plans", "words"]

NOTHING = "—"
Part = Literal["plan", "workload", "faults", "lab", "environment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A setting, a fault or a part of the lab that differs between A and B."""

    part: Part
    what: str
    a: str
    b: str


def of_plans(plan_a: Plan, plan_b: Plan) -> tuple[Difference, ...]:
    """Compare two plans: what identifies them, what they record, the workload's fields, and each fault."""
    plain: Mapping[str, tuple[Any, Any]] = {
        "experiment": (plan_a.experiment, plan_b.experiment),
        "seed": (plan_a.seed, plan_b.seed),
        "inventory": (plan_a.inventory[:12], plan_b.inventory[:12]),
        "version of faultbed": (plan_a.faultbed, plan_b.faultbed),
        "captured ports": (_ports(plan_a), _ports(plan_b)),
        "probes": (_probes(plan_a), _probes(plan_b)),
        "bystander": (_bystander(plan_a), _bystander(plan_b)),
        "routing scheme": (_scheme(plan_a), _scheme(plan_b)),
    }
    differences = [
        Difference(part="plan", what=name, a=str(value_a), b=str(value_b))
        for name, (value_a, value_b) in plain.items()
        if value_a != value_b
    ]
    differences += _of_mappings("workload", plan_a.workload, plan_b.workload)
    faults_a, faults_b = ({fault.id: fault for fault in plan.faults} for plan in (plan_a, plan_b))
    for fault_id in dict.fromkeys((*faults_a, *faults_b)):
        differences += _of_faults(fault_id, faults_a.get(fault_id), faults_b.get(fault_id))
    return tuple(differences)


def of_labs(run_a: RunEvidence, run_b: RunEvidence) -> tuple[Difference, ...]:
    """Compare the lab, its topology, and the paths of the workload's queue pairs."""
    plain: Mapping[str, tuple[Any, Any]] = {
        "lab": (run_a.lab.name, run_b.lab.name),
        "kind of lab": (run_a.lab.kind, run_b.lab.kind),
        "accelerator": (run_a.lab.accelerator or "none", run_b.lab.accelerator or "none"),
        "ranks": (_ranks(run_a), _ranks(run_b)),
    }
    differences = [
        Difference(part="lab", what=name, a=str(value_a), b=str(value_b))
        for name, (value_a, value_b) in plain.items()
        if value_a != value_b
    ]
    if run_a.lab.topology != run_b.lab.topology:
        differences.append(Difference(part="lab", what="topology", a=_nodes(run_a), b=_nodes(run_b)))
    differences += _of_paths(run_a.workload.connections, run_b.workload.connections)
    return tuple(differences)


def of_environments(environment_a: Environment, environment_b: Environment) -> tuple[Difference, ...]:
    """Compare the controllers and their machines."""
    return tuple(_of_mappings("environment", _flat(environment_a), _flat(environment_b)))


def words(differences: Sequence[Difference]) -> tuple[str, ...]:
    """Describe differences of plans in one line each, with one line for the workload and one for the faults."""
    lines = [
        f"{difference.what}: {difference.a} and {difference.b}"
        for difference in differences
        if difference.part == "plan"
    ]
    changed = [
        f"{difference.what} {difference.a} and {difference.b}"
        for difference in differences
        if difference.part == "workload"
    ]
    if changed:
        lines.append(f"workload: {', '.join(changed)}")
    if any(difference.part == "faults" for difference in differences):
        lines.append("the faults, or their times")
    return tuple(lines)


def _of_mappings(part: Part, mapping_a: Mapping[str, Any], mapping_b: Mapping[str, Any]) -> list[Difference]:
    keys = sorted(key for key in {*mapping_a, *mapping_b} if mapping_a.get(key) != mapping_b.get(key))
    return [
        Difference(part=part, what=key, a=_text_of(mapping_a.get(key)), b=_text_of(mapping_b.get(key))) for key in keys
    ]


def _of_faults(fault_id: str, fault_a: FaultSpec | None, fault_b: FaultSpec | None) -> Iterator[Difference]:
    if fault_a is None or fault_b is None:
        yield Difference(part="faults", what=fault_id, a=_fault(fault_a), b=_fault(fault_b))
        return
    pairs: Mapping[str, tuple[Any, Any]] = {
        "kind": (fault_a.kind, fault_b.kind),
        "target": (fault_a.target, fault_b.target),
        "at": (format_duration(fault_a.at_ns), format_duration(fault_b.at_ns)),
        "for": (format_duration(fault_a.for_ns), format_duration(fault_b.for_ns)),
        "seed": (fault_a.seed, fault_b.seed),
        **{
            key: (fault_a.params.get(key), fault_b.params.get(key))
            for key in sorted({*fault_a.params, *fault_b.params})
        },
    }
    for key, (value_a, value_b) in pairs.items():
        if value_a != value_b:
            yield Difference(part="faults", what=f"{fault_id}: {key}", a=_text_of(value_a), b=_text_of(value_b))


def _fault(fault: FaultSpec | None) -> str:
    if fault is None:
        return NOTHING
    return f"{fault.kind} on {fault.target} at {format_duration(fault.at_ns)} for {format_duration(fault.for_ns)}"


def _of_paths(connections_a: Sequence[Connection], connections_b: Sequence[Connection]) -> list[Difference]:
    """Compare the paths of queue pairs between the same two RNICs, in order."""
    paths_a, paths_b = _by_ends(connections_a), _by_ends(connections_b)
    shared = [
        (path_a, path_b)
        for ends in paths_a.keys() & paths_b.keys()
        for path_a, path_b in zip(paths_a[ends], paths_b[ends], strict=False)
        if path_a and path_b
    ]
    moved = sum(path_a != path_b for path_a, path_b in shared)
    if not moved:
        return []
    of_all = f"those of {len(shared)} queue pairs"
    return [Difference(part="lab", what="paths through the fabric", a=of_all, b=f"{moved} of them took another")]


def _by_ends(connections: Sequence[Connection]) -> dict[tuple[str, str], list[tuple[str, ...]]]:
    paths: dict[tuple[str, str], list[tuple[str, ...]]] = defaultdict(list)
    for connection in connections:
        paths[connection.src, connection.dst].append(connection.path)
    return paths


def _flat(environment: Environment) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(environment)
    parts = {**plain.pop("packages"), **plain.pop("versions")}
    return {**{key.replace("_", " "): value for key, value in plain.items()}, **parts}


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


def _ranks(run: RunEvidence) -> str:
    return ", ".join(f"{rank.host}:{rank.rnic}" for rank in run.workload.ranks)


def _nodes(run: RunEvidence) -> str:
    topology = run.lab.topology
    return f"{len(topology.hosts)} hosts, {len(topology.switches)} switches, {len(topology.links)} links"


def _text_of(value: Any) -> str:
    return NOTHING if value is None else str(value)
