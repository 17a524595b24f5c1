"""The fault kinds that a fuzz draws from. Pure."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase

from faultbed.inject.kinds.catalogue import CATALOGUE, kind_named
from faultbed.testbed.errors import Unsupported
from faultbed.testbed.model.lab_kind import LabKind

__all__ = ["kinds_named"]


def kinds_named(patterns: Collection[str], lab_kind: LabKind) -> tuple[str, ...]:
    """Return the kinds that a lab can do and revert, and whose names match one of the patterns (none: all).

    A kind that cannot be reverted is drawn only if a pattern is its exact name.

    Raises:
        UsageError: a pattern without wildcards names no kind.
        Unsupported: no kind is left.
    """
    for pattern in patterns:
        if not any(sign in pattern for sign in "*?["):
            kind_named(pattern, where="--kinds")
    named = [
        kind.name
        for kind in CATALOGUE.values()
        if lab_kind in kind.fidelity
        and (any(fnmatchcase(kind.name, pattern) for pattern in patterns) if patterns else True)
        and (kind.reversible or kind.name in patterns)
    ]
    if not named:
        named_patterns = ", ".join(patterns) or "any kind"
        raise Unsupported(
            f"--kinds: a {lab_kind} lab has no revertible fault kind of {named_patterns}; `faultbed faults` lists them"
        )
    return tuple(named)
