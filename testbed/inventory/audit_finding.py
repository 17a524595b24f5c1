"""A mistake in an inventory, as `faultbed inventory check` reports it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["InventoryFinding", "repeated_values"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InventoryFinding:
    """A mistake in an inventory: its place, what is wrong, and what to do."""

    place: str
    what: str
    do: str


def repeated_values(placed: Iterable[tuple[str, str]], kind: str, owners: str) -> Iterator[InventoryFinding]:
    """Yield a finding for each (place, value) whose value an earlier place uses."""
    first: dict[str, str] = {}
    for place, value in placed:
        if value in first:
            yield InventoryFinding(
                place=place,
                what=f"{kind} {value} is already used at {first[value]}",
                do=f"give {owners} one of its own",
            )
        first.setdefault(value, place)
