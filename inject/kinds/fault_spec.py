"""A fault as an experiment, a command, a test or a profile requests it: all of them make the same record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Exposed", "FaultSpec"]

Exposed = Literal["workload", "none"]
"""What a fault must act on: something that the workload uses, or nothing that it uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSpec:
    """A fault as requested. It is an element of `faults` in `plan.json`.

    Attributes:
        id: its name in an experiment; empty: it has none.
        kind: name of its kind.
        target: name or selector of its target.
        at_s: begin of its window, in seconds after the workload's start.
        for_s: length of its window, in seconds.
        seed: decides which packets the fault takes (`faultbed.inject.selection`), and which of several targets in use:
            0 to 2³¹ - 1.
        exposed: what it must act on.
        params: parameters of its kind: with their units, as the user wrote them, or validated, as numbers
            (`faultbed.inject.mechanisms.planned_fault.PlannedFault`).
    """

    id: str = ""
    kind: str
    target: str
    at_s: float = 0.0
    for_s: float
    seed: int = 1
    exposed: Exposed = "workload"
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def at_ns(self) -> int:
        """Begin of its window, in nanoseconds after the workload's start."""
        return round(self.at_s * 1e9)

    @property
    def for_ns(self) -> int:
        """Length of its window, in nanoseconds."""
        return round(self.for_s * 1e9)
