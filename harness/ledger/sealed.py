"""Evidence of a run: what each part sealed at the end of each pass, in `evidence/<pass>/<part>.json`.

A pass is one workload from its start to the release of everything that was beside it: the fault-free `twin`, or the
`measured` pass with the faults. `calibrate` comes before them and has no workload. Claims are settled from these files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar, get_args, runtime_checkable

import msgspec

__all__ = ["PHASES", "Checked", "Evidence", "Kind", "Phase", "Sealed"]

Phase = Literal["calibrate", "twin", "measured"]
PHASES: tuple[Phase, ...] = get_args(Phase)

Evidence = msgspec.Struct
"""What a part knows of a pass; a frozen struct of its own type."""

Kind = type[Evidence]
"""The type of a part's evidence, which also identifies the part."""

E = TypeVar("E", bound=msgspec.Struct)


@runtime_checkable
class Checked(Protocol):
    """Evidence that may contradict itself, because its file was edited or assembled."""

    def refuse_contradictions(self) -> None:
        """Raise ValueError, with the field, if it does."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """The evidence of all parts of a run, by pass and type."""

    evidence: Mapping[tuple[Phase, Kind], msgspec.Struct] = field(default_factory=dict)

    def of(self, kind: type[E], phase: Phase = "measured") -> E | None:
        """Return what a part has sealed in a pass; None: nothing is known about it."""
        found = self.evidence.get((phase, kind))
        return found if isinstance(found, kind) else None

    def having(self, *sealed: msgspec.Struct, phase: Phase = "measured") -> Sealed:
        """Return this evidence with more of one pass. Evidence of a part that was there before is replaced."""
        return Sealed({**self.evidence, **{(phase, type(one)): one for one in sealed}})
