"""Refuse numbers that no comparison can use: NaN, infinity and integers of more than 64 bits.

A comparison with NaN is always false. A bound that is NaN therefore passes every value, and a range check that is
written as "refuse what is below or above" accepts it. TOML, YAML and command lines can all spell such numbers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from faultbed.testbed.errors import UsageError
from faultbed.testbed.leaves import leaves

__all__ = ["require_finite", "what_is_wrong", "wrong_number"]

_LARGEST = 2**63


def what_is_wrong(value: object) -> str | None:
    """Return what is wrong with a number, in words; None if it is usable, or if `value` is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int):
        return None if -_LARGEST <= value < _LARGEST else "an integer of more than 64 bits is not a usable number"
    return None if math.isfinite(value) else f"{value} is not a finite number; write one, or leave the key out"


def wrong_number(raw: object) -> tuple[str, str] | None:
    """Return path and problem of the first unusable number in decoded TOML, YAML or JSON; None: there is none."""
    return next(((path, wrong) for path, value in leaves(raw) if (wrong := what_is_wrong(value))), None)


def require_finite(spec: Any) -> None:
    """Refuse a dataclass instance one of whose fields is an unusable number.

    Raises:
        UsageError: a field is NaN, infinite or too large; the message names it.
    """
    for field in dataclasses.fields(spec):
        if wrong := what_is_wrong(getattr(spec, field.name)):
            raise UsageError(f"{field.name}: {wrong}")
