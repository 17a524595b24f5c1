"""Fault kinds as data: name, targets, parameters, and what proves that the fault happened.

Each description is used by the planner (`faultbed.inject.fault_plan`), by the holder on the target (through the
request that the planner writes) and by the report. `faultbed.inject.kinds` has a module of descriptions for each
family, and `faultbed.inject.mechanisms` carries them out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from faultbed.inject.kinds import congestion, gpu, host, link, packet, rack, rnic, storage, switch
from faultbed.inject.kinds.kind import Binding, Example, FaultKind, Fidelity, Param, ParamType, Trait
from faultbed.inject.mechanisms.rack import MECHANISMS
from faultbed.testbed.errors import UsageError
from faultbed.testbed.suggestions import hint, nearest

__all__ = [
    "CATALOGUE",
    "Binding",
    "Example",
    "FaultKind",
    "Fidelity",
    "Param",
    "ParamType",
    "Trait",
    "has_trait",
    "kind_named",
]

_ALL = (
    *link.KINDS,
    *packet.KINDS,
    *congestion.KINDS,
    *switch.KINDS,
    *rnic.KINDS,
    *host.KINDS,
    *gpu.KINDS,
    *storage.KINDS,
    *rack.KINDS,
)


def _with_rack(kind: FaultKind) -> FaultKind:
    """Add the rack mechanism of a kind, if it has one."""
    mechanism = MECHANISMS.get(kind.name)
    if mechanism is None:
        return kind
    return dataclasses.replace(
        kind, fidelity=MappingProxyType({**kind.fidelity, "rack": mechanism.fidelity}), on_rack=mechanism.by
    )


CATALOGUE: Mapping[str, FaultKind] = MappingProxyType({kind.name: _with_rack(kind) for kind in _ALL})
"""Every kind, by name."""


def has_trait(name: str, trait: Trait) -> bool:
    """Return whether a kind has a trait; False if there is no kind of that name."""
    kind = CATALOGUE.get(name)
    return kind is not None and trait in kind.traits


def kind_named(name: str, *, where: str = "kind") -> FaultKind:
    """Return the kind of that name.

    Raises:
        UsageError: there is no such kind; the message starts with `where` and suggests the most similar name.
    """
    if name in CATALOGUE:
        return CATALOGUE[name]
    family = [kind for kind in CATALOGUE if kind.partition(".")[0] == name.partition(".")[0]]
    known = list(CATALOGUE) if nearest(name, CATALOGUE) or not family else family
    raise UsageError(f'{where}: no fault kind "{name}"; {hint(name, known)}')
