"""Names of faults: the file names and units of a fault on its target say its kind and its target. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from faultbed.testbed.model.topology import Link

__all__ = ["is_fault_on", "slug", "targets_on"]

_LONGEST = 40
_INSTANCE = re.compile(r"(?:faultbed-fault-)?\d+-(?P<slug>.+)-[0-9a-f]{6}-[0-9a-f]{6}(?:\.revert|\.service)?")


def slug(text: str) -> str:
    """Return a kind and a target, or either, as a part of a file name; it is cut off if it is long."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_LONGEST]


def targets_on(link: Link) -> tuple[str, ...]:
    """Return the two target names of a link: an uplink's names from both ends, or a host link's name and its RNIC."""
    rnic = f"{link.b.node}:{link.rnic}"
    return (link.name, f"{link.b.node}:{link.a.node}") if link.rnic is None else (link.name, rnic)


def is_fault_on(name: str, targets: Iterable[str]) -> bool:
    """Return whether a stored revert or a unit of this name belongs to a fault on one of these targets.

    A long name is cut off (`_LONGEST`). The beginning of a target is then enough for a match.
    """
    match = _INSTANCE.fullmatch(name)
    if match is None:
        return False
    slug_in_name = match["slug"]
    for target in map(slug, targets):
        min_match = len(target) if len(slug_in_name) < _LONGEST else 1
        if any(slug_in_name.endswith(f"-{target[:length]}") for length in range(len(target), min_match - 1, -1)):
            return True
    return False
