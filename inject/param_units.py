"""Numbers of fault parameters with their units, as people write them: `20%`, `5ms`, `100Mb/s`.

The units are those of all quantities (`faultbed.testbed.units`). In files, on command lines and in tests a time, a size
or a rate needs its unit (`why_no_quantity`). The plan has numbers in the parameter's own unit, which
`faultbed faults KIND` prints.
"""

from __future__ import annotations

import re
from decimal import Decimal

from faultbed.inject.kinds.catalogue import CATALOGUE
from faultbed.inject.kinds.kind import Param
from faultbed.testbed.units import RATE, SIZE, TIME

__all__ = ["example", "in_unit", "why_no_quantity"]

_NUMBER_AND_UNIT = re.compile(r"(?P<number>[+-]?[0-9]*\.?[0-9]+)\s*(?P<unit>[^\s0-9].*)")


def why_no_quantity(kind: str, name: str, value: object) -> str | None:
    """Return what is wrong with a parameter that a person has written without its unit; None: nothing.

    The planner refuses an unknown kind or parameter. A count or a share has no unit; that of a percentage or a
    temperature is in its name.
    """
    param = CATALOGUE[kind].param(name) if kind in CATALOGUE else None
    if param is None or param.quantity is None or param.spelled(value) == value:
        return None
    return param.quantity.without_unit(value, param.plain_unit)


def in_unit(text: str, param: Param) -> float:
    """Return a number in a parameter's unit.

    Args:
        text: a bare number, one with the unit, or one with another unit of the same quantity (`0.5s` for ms).
        param: the parameter. A share (0..1) also takes a percentage.

    Raises:
        ValueError: it is no number, or has a unit of something else.
    """
    match = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if match is None or text.strip().lower() in ("nan", "inf"):
        return float(text)
    number, unit = Decimal(match["number"]), match["unit"].strip()
    if unit == param.unit:
        return float(number)
    if unit == "%" and _is_share(param):
        return float(number / 100)
    for quantity in (TIME, SIZE, RATE):
        size, own = quantity.size_of(unit), quantity.size_of(param.unit)
        if size is not None and own is not None:
            return float(number * size / own)
    return float(text)  # raises: the unit does not fit, or the number has an exponent and no unit


def example(param: Param) -> str:
    """Return a value that the parameter takes, in the ways to write it: `0.5 or 50%`; empty if it is no number."""
    if param.type not in ("number", "integer"):
        return ""
    if isinstance(param.default, int | float):
        number = float(param.default)
    else:
        low = 0.0 if param.low is None else param.low
        high = low + 10.0 if param.high is None else min(param.high, low + 10.0)
        number = round((low + high) / 2) if param.type == "integer" else round((low + high) / 2, 2)
    if _is_share(param):
        return f"{number:g} or {number * 100:g}%"
    if param.quantity is not None:
        return f"{number:g}{param.plain_unit}"
    return f"{number:g} or {number:g}%" if param.unit == "%" else f"{number:g}"


def _is_share(param: Param) -> bool:
    return param.unit == "" and param.type == "number" and param.high == 1
