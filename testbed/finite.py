"""Refuse numbers that no comparison can use: NaN, infinity and integers of more than 64 bits.

A comparison with NaN is always false. A bound that is NaN therefore passes every value, and a range check that is
written as "refuse what is below or above" accepts it. TOML, YAML and command lines can all spell such numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from testbed.errors import UsageError

__all__ = ["require_finite", "what_is_wrong", "wrong_number"]

_LARGEST = 2**63


def what_is_wrong(value: object) -> str | None:
    """Return what is wrong with a number, in words; None: it is finite, or not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int):
        return None if -_LARGEST <= value < _LARGEST else "an integer of more than 64 bits is not a usable number"
    return None if math.isfinite(value) else f"{value} is not a finite number; write one, or leave the key out"


def wrong_number(raw: object) -> tuple[str, str] | None:
    """Return path and fault of the first unusable number in decoded TOML, YAML or JSON; None: there is none.

    Containers that occur more than once (YAML aliases) are read once.
    """
    return _search(raw, "", set())


def require_finite(spec: Any) -> None:
    """Refuse a dataclass instance one of whose fields is an unusable number.

    Raises:
        UsageError: a field is NaN, infinite or too large; the message names it.
    """
    for field in dataclasses.fields(spec):
        if wrong := what_is_wrong(getattr(spec, field.name)):
            raise UsageError(f"{field.name}: {wrong}")


def _search(raw: object, path: str, seen: set[int]) -> tuple[str, str] | None:
    if isinstance(raw, Mapping):
        parts = [(f"{path}.{key}" if path else str(key), value) for key, value in raw.items()]
    elif isinstance(raw, list | tuple):
        parts = [(f"{path}[{index}]", value) for index, value in enumerate(raw)]
    else:
        wrong = what_is_wrong(raw)
        return None if wrong is None else (path, wrong)
    if id(raw) in seen:
        return None
    seen.add(id(raw))
    for at, value in parts:
        if unusable := _search(value, at, seen):
            return unusable
    return None
