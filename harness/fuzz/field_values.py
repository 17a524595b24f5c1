"""Values that a fuzz draws for a declared field of a workload: a few usual ones, as written in a file. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from faultbed.harness.experiment.declare.field_types import (
    Choice,
    Count,
    Duration,
    FieldType,
    Flag,
    Number,
    Rate,
    Selector,
    Several,
    Size,
)
from faultbed.harness.experiment.declare.section import Field, Table, fields_of

__all__ = ["values_of"]


def values_of(field: Field, rnics: Sequence[str]) -> tuple[Any, ...]:
    """Return values for a field that differ from its default; `rnics` are those of the lab.

    A number stays near its default: a timeout of microseconds, or thousands of queue pairs, would fail on any lab and
    hide defects. Return an empty list for a type that is not drawn.
    """
    type_ = field.type
    if isinstance(type_, Table):
        return tuple({inner.key: value} for inner in fields_of(type_.section) for value in values_of(inner, rnics))
    if isinstance(type_, Several):
        return (["host[*]:rnic[-1]"],) if isinstance(type_.of, Selector) else ()
    return tuple(value for value in _candidates(field, rnics) if _is_other(field, value))


def _candidates(field: Field, rnics: Sequence[str]) -> Sequence[Any]:
    type_, near = field.type, field.default or 0
    if isinstance(type_, Selector):
        return rnics
    if isinstance(type_, Choice):
        return type_.among
    if isinstance(type_, Count):
        return type_.among or (near + 1, near + 3, near - 1)
    by_type: Mapping[type[FieldType], Sequence[Any]] = {
        Flag: (not near,),
        Number: (0.5, 1.0, 2.0),
        Size: ("64KiB", "4KiB", "256KiB", "1MiB"),
        Duration: ("5ms", "50ms"),
        Rate: ("20Mb/s", "2Mb/s"),
    }
    return by_type.get(type(type_), ())


def _is_other(field: Field, value: Any) -> bool:
    try:
        return bool(field.type.read(value) != field.default)
    except ValueError:
        return False
