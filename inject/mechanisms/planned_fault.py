"""A fault on a target of a lab, with the mechanism that carries it out. `faultbed.inject.fault_plan` makes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faultbed.inject.evidence import link_quality
from faultbed.inject.kinds.catalogue import CATALOGUE, Binding, FaultKind, Fidelity
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.mechanisms.mechanism import Mechanism, Place
from faultbed.testbed.model.lab_kind import LabKind, traits_of
from faultbed.testbed.model.topology import Target

__all__ = ["PlannedFault"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """A fault that is ready to be carried out on one lab.

    Attributes:
        spec: what was asked for, validated: its target by its name, unless that is chosen later, and its parameters as
            numbers, with the defaults of the kind.
        id: derived from everything that defines the fault; unique within an experiment, and prefix of the name of its
            unit on the target.
        target: the part of the lab that it changes.
        lab_kind: the kind of lab.
        mechanism: place, changes, reverts and witnesses.
        candidates: this fault on each target that it may have, of which one is chosen when it is armed, by what the
            workload uses then (`faultbed.inject.mechanisms.late_target`); empty: the target is known. `target` then has
            the selector as its text, and `mechanism` is that of the first candidate.
    """

    spec: FaultSpec
    id: str
    target: Target
    lab_kind: LabKind
    mechanism: Mechanism
    candidates: tuple[PlannedFault, ...] = ()

    @property
    def options(self) -> tuple[PlannedFault, ...]:
        """The fault on each target that it may have: itself, if its target is known."""
        return self.candidates or (self,)

    @property
    def fault_kind(self) -> FaultKind:
        """The description of its kind."""
        return CATALOGUE[self.spec.kind]

    @property
    def fidelity(self) -> Fidelity:
        """The fidelity of this kind on this kind of lab."""
        return self.fault_kind.fidelity[self.lab_kind]

    @property
    def binding(self) -> Binding:
        """What reverts the fault if its holder dies."""
        # A rack has no QEMU, and no socket that owns a switch's rule: PID 1 of the target reverts.
        return self.fault_kind.binding[self.target.kind] if traits_of(self.lab_kind).is_emulated else "unit"

    @property
    def kind(self) -> str:
        """The name of its kind."""
        return self.spec.kind

    @property
    def target_text(self) -> str:
        """The target as messages name it."""
        return self.target.text

    @property
    def place(self) -> Place:
        """Where its holder runs."""
        return self.mechanism.place

    @property
    def request(self) -> Mapping[str, Any]:
        """What the controller sends to the holder (JSON)."""
        return self.mechanism.request

    @property
    def ends_s(self) -> float:
        """When the fault's window ends, in seconds after the workload's start."""
        return self.spec.at_s + self.spec.for_s

    @property
    def reads_keys(self) -> tuple[str, ...]:
        """Every counter and state that decides whether the fault fired and whether it is restored, as `node/name`."""
        how = self.mechanism
        keys = [key for witness in how.must_move for key in witness.any_of]
        states = [key for key, _ in (*how.restored, *how.while_on)]
        return tuple(dict.fromkeys([*keys, *how.must_not_move, *states, *link_quality.keys(how.quality)]))

    @property
    def reads(self) -> tuple[str, ...]:
        """The hosts and switches to read `reads_keys` from, sorted."""
        return tuple(sorted({key.split("/", 1)[0] for key in self.reads_keys}))

    def to_json(self) -> dict[str, Any]:
        """Return plain data for the journal; with `sort_keys=True` the same plan gives the same bytes."""
        how = self.mechanism
        return {
            "id": self.id,
            "kind": self.kind,
            "target": self.target.text,
            "at_s": self.spec.at_s,
            "for_s": self.spec.for_s,
            "params": dict(self.spec.params),
            "lab": self.lab_kind,
            "fidelity": self.fidelity,
            "binding": self.binding,
            "reads": list(self.reads),
            **dataclasses.asdict(how),
            "selection": how.selection.to_json() if how.selection else None,
        } | ({"candidates": [option.to_json() for option in self.candidates]} if self.candidates else {})
