"""Plan faults: from a specification to the exact changes, reverts and counters. Pure: no machine is touched.

    FaultSpec + Topology  →  PlannedFault

A plan is a function of its input alone: the same specification on the same topology gives the same bytes
(`PlannedFault.to_json`), so it can be stored before the first change and replayed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from faultbed.inject.evidence import link_quality
from faultbed.inject.evidence.witnesses import rebooting_hosts
from faultbed.inject.kinds.catalogue import Binding, FaultKind, Fidelity, Param, kind_named
from faultbed.inject.mechanisms import rack, soft
from faultbed.inject.mechanisms.mechanism import Mechanism, Request
from faultbed.inject.param_units import example, in_unit
from faultbed.inject.policy.conflicts import both_claim
from faultbed.inject.selection import Selection
from faultbed.testbed.errors import Unsupported, UsageError
from faultbed.testbed.model.fault_names import slug
from faultbed.testbed.model.lab_kind import LabKind, traits_of
from faultbed.testbed.model.path_selector import PlaceOnPath, ends_in
from faultbed.testbed.model.selectors import candidates, is_chosen_later, resolve, select_one
from faultbed.testbed.model.topology import Target, Topology
from faultbed.testbed.suggestions import hint

__all__ = ["FaultSpec", "PlannedFault", "plan", "plan_all", "plan_beside"]

PSN_COUNT = 1 << 24
"""Number of packet sequence numbers: they have 24 bits (InfiniBand 9.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSpec:
    """A fault as the user wrote it: kind, target, window (seconds from the start of the workload) and parameters.

    `seed` decides which packets the fault takes (`faultbed.inject.selection`): 0 to 2³¹ - 1. `name` is its id in an
    experiment.
    """

    name: str = ""
    kind: str
    target: str
    at_s: float = 0.0
    for_s: float
    params: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """One fault, from `spec` to the exact changes on a lab.

    Counters and states are named `node/name`, as in `faultbed.testbed.observe.counters`.

    Attributes:
        spec: the fault as the user wrote it; `at_s`, `for_s` and `params` below are its validated values.
        id: derived from everything that defines the fault; unique within an experiment.
        fidelity: of this kind on this kind of lab.
        binding: what reverts the fault if its holder dies.
        place: where the holder runs.
        request: what the controller sends to the holder (JSON).
        steps: the same changes and reverts, as commands for people.
        must_move: counters that prove that the fault fired.
        must_not_move: counters that must stay as they are ("bystanders").
        restored: states after the fault, as (name, value).
        shows: what the readback must contain, to prove that the change is at the planned place.
        while_on: states while the fault is on, as (name, value); None: no such state exists then.
        late_binding: what is known only when the fault is armed; None: everything is known.
        of_workload: whether what the fault changes exists only while a workload runs.
        complete_after: number of hits after which the fault is complete; None: it lasts for its whole window.
        selection: how the seed chooses packets; None: nothing is drawn.
        quality: ports (`node/netdev`) whose rates of bit errors must be as before, once the fault is removed.
        candidates: this fault on each target that it may have, of which one is chosen when it is armed, by what the
            workload uses then (`faultbed.inject.mechanisms.late_target`); empty: the target is known. `target` then has
            the selector as its text, and the other attributes are those of the first candidate.
    """

    spec: FaultSpec
    id: str
    kind: str
    target: Target
    at_s: float
    for_s: float
    params: Mapping[str, Any]
    lab_kind: LabKind
    fidelity: Fidelity
    binding: Binding
    colour: str
    place: soft.Place
    request: Mapping[str, Any]
    steps: tuple[soft.Step, ...]
    must_move: tuple[soft.Witness, ...]
    must_not_move: tuple[str, ...]
    restored: tuple[tuple[str, int | None], ...]
    shows: Mapping[str, Any]
    while_on: tuple[tuple[str, int | None], ...]
    late_binding: soft.LateBinding | None
    of_workload: bool
    complete_after: int | None = None
    selection: Selection | None = None
    quality: tuple[str, ...] = ()
    candidates: tuple[PlannedFault, ...] = ()

    @property
    def options(self) -> tuple[PlannedFault, ...]:
        """The fault on each target that it may have: itself, if its target is known."""
        return self.candidates or (self,)

    @property
    def target_text(self) -> str:
        """The target as the user named it."""
        return self.target.text

    @property
    def ends_s(self) -> float:
        """When the fault's window ends, in seconds after the workload's start."""
        return self.at_s + self.for_s

    @property
    def reads_keys(self) -> tuple[str, ...]:
        """Every counter and state that decides whether the fault fired and whether it is restored, as `node/name`."""
        keys = [key for witness in self.must_move for key in witness.any_of]
        states = [key for key, _ in (*self.restored, *self.while_on)]
        return tuple(dict.fromkeys([*keys, *self.must_not_move, *states, *link_quality.keys(self.quality)]))

    @property
    def reads(self) -> tuple[str, ...]:
        """The hosts and switches to read `reads_keys` from, sorted."""
        return tuple(sorted({key.split("/", 1)[0] for key in self.reads_keys}))

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `plan.json`; with `sort_keys=True` the same plan gives the same bytes."""
        return {
            "id": self.id,
            "kind": self.kind,
            "target": self.target.text,
            "at_s": self.at_s,
            "for_s": self.for_s,
            "params": dict(self.params),
            "lab": self.lab_kind,
            "fidelity": self.fidelity,
            "binding": self.binding,
            "place": dataclasses.asdict(self.place),
            "request": dict(self.request),
            "steps": [dataclasses.asdict(step) for step in self.steps],
            "must_move": [{"any_of": list(w.any_of), "at_least": w.at_least} for w in self.must_move],
            "must_not_move": list(self.must_not_move),
            "restored": [list(pair) for pair in self.restored],
            "shows": dict(self.shows),
            "while_on": [list(pair) for pair in self.while_on],
            "of_workload": self.of_workload,
            "complete_after": self.complete_after,
            "learn": dataclasses.asdict(self.late_binding) if self.late_binding else None,
            "reads": list(self.reads),
            "selection": self.selection.to_json() if self.selection else None,
            **({"quality": list(self.quality)} if self.quality else {}),
        } | ({"candidates": [option.to_json() for option in self.candidates]} if self.candidates else {})


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
    at_s = _seconds(spec.at_s, f"{where}.at", low=0.0)
    for_s = _seconds(spec.for_s, f"{where}.for", low=0.01)
    params = _params(spec, kind, topology, where=where)
    named = spec.target if is_chosen_later(spec.target) else target.text
    fault_id = _fault_id(index, kind.name, named, at_s, for_s, params)
    mechanism = _RESOLVE[lab_kind](
        Request(
            id=fault_id,
            kind=kind.name,
            target=target,
            for_s=for_s,
            params=params,
            topology=topology,
            where=where,
            seed=spec.seed,
        )
    )
    return PlannedFault(
        spec=spec,
        id=fault_id,
        kind=kind.name,
        target=target,
        at_s=at_s,
        for_s=for_s,
        params=params,
        lab_kind=lab_kind,
        fidelity=kind.fidelity[lab_kind],
        # A rack has no QEMU, and no socket that owns a switch's rule: PID 1 of the target reverts.
        binding=kind.binding[target.kind] if traits_of(lab_kind).is_emulated else "unit",
        colour=kind.colour,
        **{f.name: getattr(mechanism, f.name) for f in dataclasses.fields(mechanism)},
    )


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
        must_not_move=_still_bystanders(fault, other_faults),
        candidates=tuple(_with_bystanders_left(option, other_faults) for option in fault.candidates),
    )


def _still_bystanders(fault: PlannedFault, other_faults: Sequence[PlannedFault]) -> tuple[str, ...]:
    moved = {key for other in other_faults for witness in other.must_move for key in witness.any_of}
    gone = {key.rpartition(".")[0] for other in other_faults for key, value in other.while_on if value is None}
    rebooted = {host for other in other_faults for host in rebooting_hosts(other)}
    return tuple(
        key
        for key in fault.must_not_move
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


def _fault_id(index: int, kind: str, target: str, at_s: float, for_s: float, params: Mapping[str, Any]) -> str:
    content = json.dumps([index, kind, target, at_s, for_s, dict(params)], sort_keys=True)
    return f"{index}-{slug(f'{kind}-{target}')}-{hashlib.sha256(content.encode()).hexdigest()[:6]}"
