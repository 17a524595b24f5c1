"""What a lease keeps on a target: a planned fault, or a routing scheme."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from faultbed.inject.mechanisms.mechanism import Place

__all__ = ["Leased"]


class Leased(Protocol):
    """Identity, target and holder request of what is leased: the fields that faults and routing schemes share."""

    @property
    def id(self) -> str:
        """Prefix of the names of its unit and its stored revert."""

    @property
    def kind(self) -> str:
        """Name of the fault kind, or of the routing scheme, in messages and claims."""

    @property
    def target_text(self) -> str:
        """Name of the target, as users write it."""

    @property
    def place(self) -> Place:
        """Where its holder runs."""

    @property
    def request(self) -> Mapping[str, Any]:
        """The holder's request (JSON)."""

    @property
    def ends_s(self) -> float:
        """When its window ends, in seconds after the workload's start."""
