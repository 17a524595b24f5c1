"""Plan faults: from a request to the exact changes, reverts and counters. Pure: no machine is touched.

    FaultSpec + Topology  →  PlannedFault

A plan is a function of its input alone: the same request on the same topology gives the same bytes
(`PlannedFault.to_json`), so it can be stored before the first change and replayed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from faultbed.inject.evidence.witnesses import rebooting_hosts
from faultbed.inject.kinds.catalogue import FaultKind, Param, kind_named
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.mechanisms import rack, soft
from faultbed.inject.mechanisms.mechanism import Mechanism, Request
from faultbed.inject.mechanisms.planned_fault import PlannedFault
from faultbed.inject.param_units import example, in_unit
from faultbed.inject.policy.conflicts import both_claim
from faultbed.testbed.errors import Unsupported, UsageError
from faultbed.testbed.model.fault_names import slug
from faultbed.testbed.model.lab_kind import LabKind
from faultbed.testbed.model.path_selector import PlaceOnPath, ends_in
from faultbed.testbed.model.selectors import candidates, is_chosen_later, resolve, select_one
from faultbed.testbed.model.topology import Target, Topology
from faultbed.testbed.suggestions import hint

__all__ = ["plan", "plan_all", "plan_beside"]

PSN_COUNT = 1 << 24
"""Number of packet sequence numbers: they have 24 bits (InfiniBand 9.2)."""


_RESOLVE: Mapping[LabKind, Callable[[Request], Mechanism]] = {"soft": soft.resolve, "rack": rack.resolve}


def plan(
    spec: FaultSpec, topology: Topology, *, lab_kind: LabKind, index: int = 0, where: str = "fault"
) -> PlannedFault:
    """Plan one fault.

    Args:
        spec: the fault as the user wrote it.
        topology: the lab.
        lab_kind: the kind of lab.
        index: position in its experiment; part of the id, so that two equal faults have different ids.
        where: the path that errors begin with, such as `faults[1]`.

    Raises:
        UsageError: unknown kind, parameter or target, or a value out of its range.
        Unsupported: this kind of lab, or this target, does not support the fault.
    """
    kind = kind_named(spec.kind, where=f"{where}.kind")
    if is_chosen_later(spec.target):
        return _plan_candidates(spec, topology, kind, lab_kind=lab_kind, index=index, where=where)
    target = _target(spec, topology, kind, where=where)
    return _plan_on(target, spec, topology, kind, lab_kind=lab_kind, index=index, where=where)


def _plan_candidates(
    spec: FaultSpec, topology: Topology, kind: FaultKind, *, lab_kind: LabKind, index: int, where: str
) -> PlannedFault:
    """Plan a fault on every target that it may have when it is armed.

    A kind that cannot act at the uplink of a path, or at its spine, acts at the receiver's port, or its rack switch.

    Raises:
        UsageError: as `plan`, or different machines would hold the fault: its holder starts before the choice.
    """

    def planned_at(at: PlaceOnPath) -> list[PlannedFault]:
        try:
            names = candidates(topology, spec.target, at=at)
        except UsageError as error:
            raise UsageError(f"{where}.target: {error}") from None
        targets = [_target(dataclasses.replace(spec, target=name), topology, kind, where=where) for name in names]
        return [
            _plan_on(target, spec, topology, kind, lab_kind=lab_kind, index=index, where=where) for target in targets
        ]

    is_port = "port" in kind.targets
    try:
        options = planned_at("uplink" if is_port else "spine")
    except UsageError:
        if ends_in(spec.target) is None:
            raise
        options = planned_at("receiver" if is_port else "rack switch")
    machines = sorted({option.place.node for option in options})
    if len(machines) > 1:
        near = f"name a switch, as in {options[0].target.node}:{spec.target}"
        advice = f"name one of {', '.join(option.target.text for option in options)}" if ends_in(spec.target) else near
        raise UsageError(
            f'{where}.target: "{spec.target}" may become a target on {" or ".join(machines)}, and one machine has to '
            f"hold the fault; {advice}"
        )
    target = dataclasses.replace(options[0].target, text=spec.target)
    return dataclasses.replace(options[0], target=target, candidates=tuple(options))


def _plan_on(
    target: Target, spec: FaultSpec, topology: Topology, kind: FaultKind, *, lab_kind: LabKind, index: int, where: str
) -> PlannedFault:
    """Plan one fault on this target; `plan` has the meaning of the other arguments."""
    if lab_kind not in kind.fidelity:
        raise Unsupported(
            f"{where}: {kind.name} is not supported on this lab: a {lab_kind} lab has no mechanism for it yet; "
            f"it works on: {', '.join(kind.fidelity)}"
        )
    spec = dataclasses.replace(
        spec,
        kind=kind.name,
        target=spec.target if is_chosen_later(spec.target) else target.text,
        at_s=_seconds(spec.at_s, f"{where}.at", low=0.0),
        for_s=_seconds(spec.for_s, f"{where}.for", low=0.01),
        params=_params(spec, kind, topology, where=where),
    )
    fault_id = _fault_id(index, spec)
    request = Request(spec=spec, id=fault_id, target=target, topology=topology, where=where)
    return PlannedFault(spec=spec, id=fault_id, target=target, lab_kind=lab_kind, mechanism=_RESOLVE[lab_kind](request))


def plan_all(
    specs: Sequence[FaultSpec], topology: Topology, *, lab_kind: LabKind, names: Sequence[str] = ()
) -> tuple[PlannedFault, ...]:
    """Plan the faults of one experiment together, in order.

    Counters that one fault is expected to move, to remove or to reset by a reboot are removed from the bystanders of
    the others.

    Args:
        specs: the faults as the user wrote them.
        topology: the lab.
        lab_kind: the kind of lab.
        names: how errors name each of them; default: `faults[0]` and so on.

    Raises:
        UsageError: as `plan`, or two faults would change the same thing at the same time.
        Unsupported: as `plan`.
    """
    names = names or [f"faults[{index}]" for index in range(len(specs))]
    planned = [
        plan(spec, topology, lab_kind=lab_kind, index=index, where=where)
        for index, (spec, where) in enumerate(zip(specs, names, strict=True))
    ]
    for second, fault in enumerate(planned):
        for first, other in enumerate(planned[:second]):
            if shared := both_claim(other, fault, topology):
                raise UsageError(
                    f"{names[second]}: {fault.kind} on {fault.target.text} overlaps {names[first]} "
                    f"({other.kind} on {other.target.text}): both change {shared}; move one of the windows"
                )
    return _without_shared_bystanders(planned)


def plan_beside(
    spec: FaultSpec,
    active: Sequence[PlannedFault],
    topology: Topology,
    *,
    lab_kind: LabKind,
    index: int,
    where: str = "fault",
) -> tuple[PlannedFault, ...]:
    """Plan one fault in addition to active ones, whatever their windows.

    Returns:
        All faults, the new one last. Counters that one fault is expected to move are removed from the bystanders of
        the others.

    Raises:
        UsageError: as `plan`, or the new fault would change what an active fault changes.
        Unsupported: as `plan`.
    """
    planned = plan(spec, topology, lab_kind=lab_kind, index=index, where=where)
    for other in active:
        if shared := both_claim(other, planned, topology, at_any_time=True):
            raise UsageError(
                f"{where}: {planned.kind} on {planned.target.text} conflicts with {other.kind} on "
                f"{other.target.text}: both change {shared}; clear the active one first"
            )
    return _without_shared_bystanders([*active, planned])


def _without_shared_bystanders(planned: Sequence[PlannedFault]) -> tuple[PlannedFault, ...]:
    """Remove from each fault's bystanders the counters that another fault is expected to move, remove or reset."""
    return tuple(
        _with_bystanders_left(fault, [option for other in planned if other is not fault for option in other.options])
        for fault in planned
    )


def _with_bystanders_left(fault: PlannedFault, other_faults: Sequence[PlannedFault]) -> PlannedFault:
    return dataclasses.replace(
        fault,
        mechanism=dataclasses.replace(fault.mechanism, must_not_move=_still_bystanders(fault, other_faults)),
        candidates=tuple(_with_bystanders_left(option, other_faults) for option in fault.candidates),
    )


def _still_bystanders(fault: PlannedFault, other_faults: Sequence[PlannedFault]) -> tuple[str, ...]:
    moved = {key for other in other_faults for witness in other.mechanism.must_move for key in witness.any_of}
    gone = {
        key.rpartition(".")[0] for other in other_faults for key, value in other.mechanism.while_on if value is None
    }
    rebooted = {host for other in other_faults for host in rebooting_hosts(other)}
    return tuple(
        key
        for key in fault.mechanism.must_not_move
        if key not in moved and key.rpartition(".")[0] not in gone and key.partition("/")[0] not in rebooted
    )


def _target(spec: FaultSpec, topology: Topology, kind: FaultKind, *, where: str) -> Target:
    try:
        target = resolve(topology, spec.target)
    except UsageError as error:
        raise UsageError(f"{where}.target: {error}") from None
    if target.kind not in kind.targets:
        raise UsageError(
            f'{where}.target: {kind.name} cannot target a {target.kind} ("{spec.target}"); it targets: '
            f"{', '.join(kind.targets)}"
        )
    return target


def _seconds(value: float, where: str, *, low: float) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value < low:
        raise UsageError(f"{where}: {value!r} is not a time; give at least {low:g} s")
    return float(value)


def _params(spec: FaultSpec, kind: FaultKind, topology: Topology, *, where: str) -> Mapping[str, Any]:
    names = [param.name for param in kind.params]
    for name in spec.params:
        if name not in names:
            advice = hint(name, names)
            raise UsageError(f'{where}.{name}: {kind.name} has no parameter "{name}"; {advice}')
    values: dict[str, Any] = {}
    for param in kind.params:
        if param.name in spec.params:
            values[param.name] = _value(spec.params[param.name], param, where=f"{where}.{param.name}")
            if param.type == "rnic":
                try:
                    values[param.name] = select_one(topology, values[param.name])
                except UsageError as error:
                    raise UsageError(f"{where}.{param.name}: {error}") from None
        elif param.required:
            raise UsageError(f"{where}: {kind.name} needs {param.name} ({param.summary})")
        elif param.default is not None:
            values[param.name] = param.default
    return MappingProxyType(dict(sorted(values.items())))


def _value(value: Any, param: Param, *, where: str) -> Any:
    remedy = f"; write {spelled}" if (spelled := example(param)) else ""
    wrong = UsageError(f"{where}: {value!r} is not in {param.range}{param.unit and ' ' + param.unit}{remedy}")
    if isinstance(value, bool):
        raise wrong
    text = str(value).strip()
    if param.type == "choice":
        if text not in param.choices:
            raise wrong
        return text
    if param.type == "psn":
        return _psn(text, wrong)
    if param.type == "rnic" or (param.type == "qpn" and re.fullmatch(r"any(\[[0-9]{1,5}\])?", text)):
        return text
    return _number(text, param, wrong)


def _number(text: str, param: Param, wrong: UsageError) -> float:
    """Convert a parameter to a number; raise `wrong` if it is no number, out of range, or must be whole and is not."""
    try:
        number = in_unit(text, param)
    except ValueError:
        raise wrong from None
    low, high = (1, PSN_COUNT - 1) if param.type == "qpn" else (param.low, param.high)
    if not math.isfinite(number) or (low is not None and number < low) or (high is not None and number > high):
        raise wrong
    if param.type in ("integer", "qpn"):
        if number != int(number):
            raise wrong
        return int(number)
    return number


def _psn(text: str, wrong: UsageError) -> int | str:
    if not re.fullmatch(r"\+?[0-9]{1,9}", text):
        raise wrong
    number = int(text)
    # At most half the PSN space: a larger distance ahead means behind (InfiniBand 9.7.2, 24-bit serial numbers).
    if number >= PSN_COUNT or (text.startswith("+") and not 1 <= number <= PSN_COUNT // 2):
        raise wrong
    return f"+{number}" if text.startswith("+") else number


def _fault_id(index: int, spec: FaultSpec) -> str:
    content = json.dumps([index, spec.kind, spec.target, spec.at_s, spec.for_s, dict(spec.params)], sort_keys=True)
    return f"{index}-{slug(f'{spec.kind}-{spec.target}')}-{hashlib.sha256(content.encode()).hexdigest()[:6]}"
