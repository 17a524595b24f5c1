"""The description of a fault kind: frozen data for the planner, the command line, the reports and the docs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

__all__ = ["Binding", "FaultKind", "Fidelity", "Param", "ParamType", "described"]

Fidelity = Literal["real", "emulated", "modelled"]
"""`real`: real cause and effect; `emulated`: real symptom, another cause; `modelled`: no packet shows it."""

Binding = Literal["fd", "unit", "local"]
"""What reverts if the holder dies: the kernel with its socket, PID 1 of the target, or the guardian beside QEMU."""

ParamType = Literal["number", "integer", "psn", "qpn", "rnic", "choice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One parameter with its unit, its closed range `low`..`high` (None: open) and its default (None: omitted)."""

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
    def range(self) -> str:
        """The range as text."""
        if self.type == "choice":
            return " | ".join(self.choices)
        if self.type == "psn":
            return "0..16777215 or +1..+8388607"
        if self.type == "qpn":
            return "1..16777215 or any"
        if self.type == "rnic":
            return "an RNIC, such as host1:rxe0"
        low = "" if self.low is None else f"{self.low:g}"
        high = "" if self.high is None else f"{self.high:g}"
        return f"{low}..{high}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """A kind of fault.

    `binding` maps each kind of target (`testbed.model.topology.Target.kind`) to what reverts it; `fidelity` maps
    each kind of lab that can do it to its fidelity there; `tried` names those on which a receipt of it has been
    proved. `on_rack` says how a rack lab does it. The three `*_by`/`must_*` texts are for people; the exact
    counters are chosen for the target by the planner.
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
    tried: tuple[str, ...] = ("soft",)
    on_rack: str | None = None

    @property
    def targets(self) -> tuple[str, ...]:
        """The kinds of target that this kind can have."""
        return tuple(self.binding)

    @property
    def worth(self) -> str:
        """The fidelity by lab as text, with a note where it has not been run yet."""
        return ", ".join(
            f"{lab}: {fidelity}{'' if lab in self.tried else ' (not yet run)'}"
            for lab, fidelity in self.fidelity.items()
        )

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
