"""Which fault kinds a lab supports at which targets, according to the planner and to the machine of each target.

Each machine runs the code of the fault until just before its first change (`faultbed.inject.node.probe`). That code
refuses an unsuitable release or ASIC of a switch, its ACLs and containers, firmware that keeps ports up, missing
tools, and state that faultbed did not make. Nothing is changed, and nothing is reserved.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from faultbed.inject.fault_plan import plan
from faultbed.inject.kinds.catalogue import CATALOGUE
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.kinds.kind import FaultKind, Param
from faultbed.inject.mechanisms.planned_fault import PlannedFault
from faultbed.testbed.errors import LabError, Unsupported, UsageError
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.side_by_side import on_each
from faultbed.testbed.suggestions import first_of

if TYPE_CHECKING:
    from faultbed.testbed.lab import Lab

__all__ = ["Capability", "query_capabilities", "summary", "targets_of"]

MODULE = "faultbed.inject.node.probe"
_FOR_S = 10.0
_TIMEOUT_S = 600.0
_ALL_S = 2 * _TIMEOUT_S
_SAMPLES: Mapping[str, Any] = {"share": 1, "rate": 1000, "period": 8, "percent": 20}
"""Parameter values for the query. A `share` of 1 is the only one that an ASIC's ACL supports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """Whether a fault kind is supported at one target. `why` is the reason of the planner or the machine if it is not.

    `can` is `unknown` if the target's machine did not answer; `why` is then the error.
    """

    kind: str
    target: str
    can: Literal["yes", "no", "unknown"]
    why: str = ""


def targets_of(kind: FaultKind, topology: Topology) -> Iterator[str]:
    """Yield the name of every target in a lab that has the right type for a kind, as experiments name it."""
    if "host" in kind.targets:
        yield from (host.name for host in topology.hosts)
    if "rnic" in kind.targets:
        yield from (f"{host.name}:{rnic.name}" for host in topology.hosts for rnic in host.rnics)
    if "gpu" in kind.targets:
        yield from (f"{host.name}:{gpu.name}" for host in topology.hosts for gpu in host.gpus)
    if "switch" in kind.targets:
        yield from (switch.name for switch in topology.switches)
    if "port" in kind.targets:
        yield from (link.name for link in topology.links)


def query_capabilities(lab: Lab, kinds: Sequence[FaultKind] | None = None) -> list[Capability]:
    """Plan each kind (default: all kinds) at each of its targets, then query the machines of these targets."""
    answers_by_target: dict[tuple[str, str], Capability] = {}
    faults_by_node: dict[str, list[PlannedFault]] = {}
    for kind in CATALOGUE.values() if kinds is None else kinds:
        for target in targets_of(kind, lab.topology):
            try:
                planned = plan(_spec(kind, target), lab.topology, lab_kind=lab.kind)
            except (Unsupported, UsageError) as error:
                why = str(error).removeprefix("fault: ")
                answers_by_target[kind.name, target] = Capability(kind=kind.name, target=target, can="no", why=why)
                continue
            can: Literal["yes", "unknown"] = "yes" if planned.place.local else "unknown"
            answers_by_target[kind.name, target] = Capability(kind=kind.name, target=target, can=can)
            if can == "unknown":
                faults_by_node.setdefault(planned.place.node, []).append(planned)
    for answers in on_each(faults_by_node, lambda node: _query_node(lab, node, faults_by_node[node]), timeout_s=_ALL_S):
        answers_by_target |= {(answer.kind, answer.target): answer for answer in answers}
    return list(answers_by_target.values())


def summary(answers: Sequence[Capability]) -> list[tuple[str, str, str, str]]:
    """Return rows of kind, answer, targets and reason; targets with the same answer share a row."""
    targets_by_answer: dict[tuple[str, str, str], list[str]] = {}
    for answer in answers:
        general_reason = answer.why.replace(answer.target, "TARGET")
        targets_by_answer.setdefault((answer.kind, answer.can, general_reason), []).append(answer.target)
    return [(kind, can, first_of(targets, 4), why) for (kind, can, why), targets in targets_by_answer.items()]


def _spec(kind: FaultKind, target: str) -> FaultSpec:
    params = {param.name: _sample_value(param) for param in kind.params if param.required or param.name == "share"}
    return FaultSpec(kind=kind.name, target=target, for_s=_FOR_S, params=params)


def _sample_value(param: Param) -> Any:
    if param.name in _SAMPLES:
        return _SAMPLES[param.name]
    bounds = [value for value in (param.default, param.low, param.high) if value is not None]
    return bounds[0] if bounds else next(iter(param.choices), "any")


def _unknown(faults: Sequence[PlannedFault], why: str) -> list[Capability]:
    return [Capability(kind=fault.kind, target=fault.target.text, can="unknown", why=why) for fault in faults]


def _query_node(lab: Lab, node: str, faults: Sequence[PlannedFault]) -> list[Capability]:
    requests = [{"actuator": fault.request["actuator"], "args": fault.request["args"]} for fault in faults]
    try:
        lab.ensure_code(node)
        done = lab.carrier(node).run(lab.python(MODULE), stdin=json.dumps(requests), timeout_s=_TIMEOUT_S, check=False)
        answers = [json.loads(line) for line in done.stdout.splitlines()]
    except (LabError, ValueError) as error:
        return _unknown(faults, str(error))
    if len(answers) != len(faults):
        return _unknown(
            faults,
            f"{node}: {len(answers)} of {len(faults)} checks answered; retry. stderr: {done.stderr.strip()[-200:]}",
        )
    return [
        Capability(
            kind=fault.kind,
            target=fault.target.text,
            can="yes" if answer["able"] else "no",
            why=str(answer.get("why", "")),
        )
        for fault, answer in zip(faults, answers, strict=True)
    ]
