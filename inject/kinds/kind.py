"""The description of a fault kind: frozen data for the planner, the command line, the reports and the docs."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from faultbed.inject.kinds.effect import EffectOf
from faultbed.testbed.units import RATE, SIZE, TIME, Quantity

__all__ = ["Binding", "Example", "FaultKind", "Fidelity", "Param", "ParamType", "Trait", "described"]

Fidelity = Literal["real", "emulated", "modelled"]
"""`real`: real cause and effect; `emulated`: real symptom, another cause; `modelled`: no packet shows it."""

Binding = Literal["fd", "unit", "local"]
"""What reverts a fault if its holder dies.

`fd`: the kernel, when the holder's socket closes; `unit`: PID 1 of the target; `local`: the guardian beside QEMU.
"""

_BARE = re.compile(r"[+-]?[0-9]*\.?[0-9]+([eE][+-]?[0-9]+)?")

ParamType = Literal["number", "integer", "psn", "qpn", "rnic", "choice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One parameter with its unit, its range `low`..`high` (inclusive; None: no bound) and default (None: not set)."""

    name: str
    type: ParamType
    unit: str
    summary: str
    low: float | None = None
    high: float | None = None
    default: float | str | None = None
    choices: tuple[str, ...] = ()
    required: bool = False

    @property
    def quantity(self) -> Quantity | None:
        """The quantity that it is a number of; None: it has no unit that a person can write in another way."""
        return next((quantity for quantity in (TIME, SIZE, RATE) if quantity.size_of(self.unit) is not None), None)

    @property
    def plain_unit(self) -> str:
        """The unit as messages spell it: `Mb/s`, also if `unit` is the alias `Mbit/s`."""
        return self.unit if self.quantity is None else self.quantity.aliases.get(self.unit, self.unit)

    def spelled(self, value: object) -> object:
        """Return a value as a person writes it: a bare number of a time, a size or a rate with its unit."""
        is_bare = isinstance(value, int | float) and not isinstance(value, bool)
        if isinstance(value, str):
            is_bare = _BARE.fullmatch(value.strip()) is not None
        return f"{value}{self.plain_unit}" if is_bare and self.quantity is not None else value

    @property
    def range(self) -> str:
        """The allowed values as text."""
        if self.type == "choice":
            return " | ".join(self.choices)
        if self.type == "psn":
            return "0..16777215 or +1..+8388607"
        if self.type == "qpn":
            return "1..16777215, any or any[0], any[1], ..."
        if self.type == "rnic":
            return "an RNIC, such as host1:rxe0"
        low = "" if self.low is None else f"{self.low:g}"
        high = "" if self.high is None else f"{self.high:g}"
        return f"{low}..{high}"


class Trait(enum.Enum):
    """A property of a fault kind that policies and analyses depend on."""

    WHOLE_TARGET = "leaves no part of its target as it was: any other fault inside it would be lost or unverifiable"
    LINK_STATE = "decides whether a link carries packets"
    BUS_RESCAN = "on a rack the device comes back by a rescan of all PCI buses of its host, which restores others, too"
    LOG_ONLY = "writes an event of the GPU to a log; the GPU itself does not change"
    KEEPS_UPLINKS = "leaves a switch with all its uplinks"
    NO_PACKET = "loses, delays and reorders no packet, and keeps no node from answering"
    ONE_HOP = "acts on packets at one hop, and only on those that pass it in one direction"
    MARKS_ECT1 = "marks packets with ECT(1), on all or some of its settings"
    MARKS_CE = "marks packets with CE"
    SENDS = "sends packets of its own to its target"
    SPREADS = "may affect other users of the fabric, far from its target: it needs a confirmation"
    CARRIER = "may take down the carrier of an interface"
    ROUTES = "may move counters of TCP connections or of missing routes, anywhere"
    FRAGMENTS = "makes packets too big for a port"
    NEEDS_SELECTION = "takes no packet at all unless `share`, `every` or `psn` selects some"
    LOSES = "each packet that it takes is lost for its receiver"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A target on the default soft lab, with parameters. Kinds for racks only: a target on the example rack."""

    target: str
    params: Mapping[str, str | float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """A kind of fault.

    Attributes:
        name: family and kind, such as `link.flap`.
        summary: what it does, for help texts.
        binding: what reverts it, for each kind of target that it can have
            (`faultbed.testbed.model.topology.Target.kind`).
        params: its parameters.
        fidelity: of the fault, on each kind of lab that can do it.
        armed_by, must_move, must_not_move: what proves it, for people; the planner chooses the counters by target.
        reversible: whether it can be reverted.
        colour: of its bars in reports.
        example: for help texts, pages and tests.
        traits: what policies and analyses need to know.
        may_fail: checks of a run that the fault is expected to fail, such as `workload` if it kills a rank.
        is_mild: returns whether the fault fails none of these checks with given parameters; None: it always may.
        tried: kinds of lab on which a receipt of it has been proved.
        on_rack: how it is carried out on a rack lab, in words; None: it is not supported there.
        effect: what the fault does to a model of the fabric; None: not known, so that `faultbed predict` refuses it.
    """

    name: str
    summary: str
    binding: Mapping[str, Binding]
    params: tuple[Param, ...]
    fidelity: Mapping[str, Fidelity]
    armed_by: str
    must_move: str
    must_not_move: str
    reversible: bool
    colour: str
    example: Example
    traits: frozenset[Trait] = frozenset()
    may_fail: tuple[str, ...] = ()
    is_mild: Callable[[Mapping[str, Any]], bool] | None = None
    tried: tuple[str, ...] = ("soft",)
    on_rack: str | None = None
    effect: EffectOf | None = None

    def may_fail_with(self, params: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the checks of a run that the fault is expected to fail with these parameters."""
        return () if self.is_mild is not None and self.is_mild(params) else self.may_fail

    @property
    def targets(self) -> tuple[str, ...]:
        """The kinds of target that this kind can have."""
        return tuple(self.binding)

    @property
    def fidelity_text(self) -> str:
        """The fidelity by lab as text, with a note where it has not been run yet."""
        return ", ".join(
            f"{lab}: {fidelity}{'' if lab in self.tried else ' (not yet run)'}"
            for lab, fidelity in self.fidelity.items()
        )

    @property
    def command(self) -> str:
        """A command that injects the example."""
        values = "".join(f" --set {name}={value}" for name, value in self.spelled(self.example.params).items())
        return f"faultbed inject {self.name} {self.example.target} --for 5s{values}"

    def spelled(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return parameters of a plan as a person writes them, with their units."""
        by_name = {param.name: param for param in self.params}
        return {name: by_name[name].spelled(value) if name in by_name else value for name, value in params.items()}

    def param(self, name: str) -> Param | None:
        """Return the parameter of that name, or None."""
        return next((param for param in self.params if param.name == name), None)


def described(*, binding: Mapping[str, Binding], fidelity: Mapping[str, Fidelity], **rest: object) -> FaultKind:
    """Return a kind whose mappings cannot be changed."""
    return FaultKind(
        binding=MappingProxyType(dict(binding)),
        fidelity=MappingProxyType(dict(fidelity)),
        **rest,  # type: ignore[arg-type]
    )
