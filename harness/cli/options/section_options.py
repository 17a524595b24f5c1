"""Options of a command that are derived from a section of the experiment file: same names, ranges and defaults.

    @section_options(Collective, without=("collective",), defaults={"iterations": 10})
    def collective(..., **options): work = section_from(Collective, {"collective": name, **options})

A key `qps_per_peer` is the option `--qps-per-peer`. Keys of a section within the section, such as
`[workload.storage]`, are options, too. A section that another option reads, such as `qp`, is left out with `without`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import click

from faultbed.harness.experiment.declare.field_types import Choice, FieldType, Flag, Ranged, Several
from faultbed.harness.experiment.declare.section import Field, Section, Table, Wrong, fields_of
from faultbed.testbed.errors import UsageError

__all__ = ["FieldParam", "section_from", "section_options"]

F = TypeVar("F", bound=Callable[..., Any])


class FieldParam(click.ParamType[Any]):
    """The value of a declared field, as text of the command line or decoded already."""

    def __init__(self, type_: FieldType) -> None:
        self.type = type_
        self.name = type_.kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the decoded value, or fail as a usage error."""
        if not isinstance(value, str):
            return value
        try:
            return self.type.read(self.type.raw_of(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def section_options(
    section: type[Section], *, without: Collection[str] = (), defaults: Mapping[str, Any] | None = None
) -> Callable[[F], F]:
    """Return a decorator that adds an option for each declared field of a section.

    Args:
        section: the section.
        without: attributes that the command takes as arguments, or not at all.
        defaults: decoded values of fields without a default in the file.
    """
    made = list(_options(section, without, defaults or {}))

    def add(command: F) -> F:
        for option in reversed(made):
            command = option(command)
        return command

    return add


def section_from(section: type[Section], options: Mapping[str, Any]) -> Any:
    """Return what a run uses of a section whose values are options; `options` has them by attribute.

    Raises:
        UsageError: options contradict each other.
    """
    values: dict[str, Any] = {}
    for field in fields_of(section):
        if field.name in options:
            values[field.name] = options[field.name]
        elif isinstance(field.type, Table):
            values |= _nested(field, field.type.section, options)
    work = section(**values)
    for path, sentence in work.problems():
        raise UsageError(f"--{_dashed(path)}: {sentence}" if path else sentence)
    try:
        return work.decoded("")
    except Wrong as error:
        raise UsageError(f"--{_dashed(error.path)}: {error}") from error


def _options(
    section: type[Section], without: Collection[str], defaults: Mapping[str, Any]
) -> Iterator[Callable[[Any], Any]]:
    for field in fields_of(section):
        if field.name in without:
            continue
        if isinstance(field.type, Table):
            for inner in fields_of(field.type.section):
                yield _option(inner, f"{field.name}_{inner.name}", inner.default, required=False)
        else:
            default = defaults.get(field.name, field.default)
            yield _option(field, field.name, default, required=field.required and field.name not in defaults)


def _option(field: Field, name: str, default: Any, *, required: bool) -> Callable[[Any], Any]:
    type_, words = field.type, [f"--{_dashed(field.key)}", *field.type.options]
    text = f"{type_.says} Range: {type_.range}." if isinstance(type_, Ranged) and type_.range else type_.says
    if isinstance(type_, Flag):
        pair = f"--{_dashed(field.key)}/--no-{_dashed(field.key)}" if default else words[0]
        return click.option(pair, name, is_flag=True, default=default, help=type_.says)
    if isinstance(type_, Several):
        return click.option(
            *words, name, multiple=True, required=required, type=FieldParam(type_.of), help=f"{type_.says} Repeatable."
        )
    shown = None if default is None else type_.write(default)
    kind: Any = click.Choice(type_.among) if isinstance(type_, Choice) else FieldParam(type_)
    return click.option(
        *words,
        name,
        type=kind,
        metavar=None if isinstance(type_, Choice) else type_.kind.upper().replace(" ", "-"),
        default=shown,
        show_default=shown not in (None, ""),
        required=required,
        help=text,
    )


def _nested(field: Field, section: type[Section], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section within a section whose options were given; none, if its required ones were not."""
    names = {inner.name: inner for inner in fields_of(section)}
    given = {name: options[f"{field.name}_{name}"] for name in names if f"{field.name}_{name}" in options}
    absent = [inner for name, inner in names.items() if inner.required and given.get(name) is None]
    if not absent:
        return {field.name: section_from(section, given)} if given else {}
    optional = [(names[name], value) for name, value in given.items() if not names[name].required]
    changed = [inner for inner, value in optional if value != inner.default]
    if changed:
        words = ", ".join(f"--{_dashed(inner.key)}" for inner in changed)
        needed = " and ".join(_longest(inner) for inner in absent)
        raise UsageError(f"{words}: needs {needed}; {absent[0].type.says[:1].lower()}{absent[0].type.says[1:]}")
    return {}


def _longest(field: Field) -> str:
    return field.type.options[0] if field.type.options else f"--{_dashed(field.key)}"


def _dashed(key: str) -> str:
    return key.replace("_", "-")
