"""Parameters of an experiment file by their paths: which there are, and the file with other values. Pure.

    faults[0].set.share    workload.size    workload.qp.timeout    workload.phases[1]    expect[0].max

A path is written as error messages print it. It names a value that the file has or may have: a key of a section, or a
parameter of a fault's kind.

A value is text, which the declared type of its path turns into a number, true or false, or leaves as it is. Values of
one path are separated by commas; a value that contains a comma is written in double quotes.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from faultbed.harness.experiment.declare.field_types import FieldType, Several
from faultbed.harness.experiment.declare.section import (
    AnyScalar,
    Named,
    Section,
    Tables,
    fields_of,
    join,
    section_of,
)
from faultbed.harness.experiment.declare.toml_lines import steps_of
from faultbed.harness.experiment.experiment_file import Experiment, ExperimentFile, decode, decode_table, table_of
from faultbed.harness.experiment.toml_text import experiment_toml
from faultbed.inject.kinds.catalogue import CATALOGUE
from faultbed.testbed.errors import ConfigError, UsageError
from faultbed.testbed.suggestions import first_of, nearest

__all__ = ["Parameter", "known_paths", "parse", "parse_settings", "with_values"]

_FIXED = frozenset({"name", "seed"})
"""Keys that name a run: a sweep names its runs itself, and --seed chooses the seed."""
_MAX_TEXT = 4000
"""Characters of one `--over` or `--set`."""
_MAX_LISTED = 12
"""Paths that an error message lists."""
_PARAMETER = AnyScalar("Parameter of a fault's kind.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A path and the values that a sweep gives it, in the order of the command line."""

    path: str
    values: tuple[str, ...]


def parse(text: str) -> Parameter:
    """Read `PATH=V1,V2,...`.

    Raises:
        UsageError: no path, no value, an empty value, or a value that appears twice.
    """
    path, rest = _split("--over", text, 'PATH=V1,V2,..., such as "faults[0].set.share=0.001,0.01"')
    values = tuple(value.strip() for value in next(csv.reader([rest], skipinitialspace=True)))
    if "" in values:
        raise UsageError(f"--over {text}: a value is empty; remove the comma")
    if twice := sorted({value for value in values if values.count(value) > 1}):
        raise UsageError(f"--over {text}: {twice[0]} appears twice; use --repeat to run a point several times")
    return Parameter(path=path, values=values)


def parse_settings(texts: Sequence[str]) -> dict[str, str]:
    """Read the values of `--set`, each `PATH=VALUE`, by path.

    Raises:
        UsageError: no path, no value, or a path that is set twice.
    """
    settings: dict[str, str] = {}
    for text in texts:
        path, value = _split("--set", text, "PATH=VALUE, such as workload.size=1MiB")
        if path in settings:
            raise UsageError(f"--set {text}: {path} is set twice, first to {settings[path]}; remove one")
        settings[path] = value.strip()
    return settings


def _split(option: str, text: str, example: str) -> tuple[str, str]:
    path, equals, rest = text.partition("=")
    path = path.strip()
    if not equals or not path or not rest.strip():
        raise UsageError(f"{option} {text[:_MAX_TEXT]}: write {example}")
    if len(text) > _MAX_TEXT or not text.isprintable():
        raise UsageError(f"{option} {path[:40]}: a control character, or more than {_MAX_TEXT} characters; correct it")
    return path, rest


def known_paths(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Return every path of an experiment file (decoded from TOML) that has a value, or may have one."""
    return tuple(_types_by_path(raw))


def _types_by_path(raw: Mapping[str, Any]) -> dict[str, FieldType]:
    """Return the declared type of every path that has a value, or may have one."""
    known = {path: type_ for path, type_ in _fields_in(ExperimentFile, raw, "") if path not in _FIXED}
    for index, fault in enumerate(raw.get("faults") or ()):
        kind = CATALOGUE.get(str(fault.get("kind")))
        known |= {f"faults[{index}].set.{param.name}": _PARAMETER for param in (kind.params if kind else ())}
    return known


def _fields_in(section: type[Section], raw: Mapping[str, Any], path: str) -> Iterator[tuple[str, FieldType]]:
    for field in fields_of(section):
        place, value, type_ = join(path, field.key), raw.get(field.key), field.type
        if isinstance(type_, Tables):
            for index, item in enumerate(value or ()):
                yield from _fields_in(type_.section, item, f"{place}[{index}]")
        elif inner := section_of(type_, value):
            yield from _fields_in(inner, value or {}, place)
        elif isinstance(type_, Named):
            yield from ((join(place, name), type_.of) for name in value or {})
        else:
            yield place, type_
            if isinstance(type_, Several) and isinstance(value, list):
                yield from ((f"{place}[{index}]", type_.of) for index in range(len(value)))


def with_values(content: bytes, values: Mapping[str, str], *, source: str) -> tuple[bytes, Experiment]:
    """Return the experiment file with these values by path, as TOML, and the experiment that it is.

    Comments of the file are lost. `source` is what messages call the file.

    Raises:
        ConfigError: a path is none of `known_paths` (the message has the nearest one), or a value is invalid there.
    """
    decode(content, source=source)  # so that errors of the file itself are not blamed on the values
    raw = table_of(content, source=source)
    known = _types_by_path(raw)
    for path, text in values.items():
        if path not in known:
            near = nearest(path, known)
            advice = f"did you mean {near}?" if near else f"choose one of {first_of(tuple(known), _MAX_LISTED)}"
            raise ConfigError(f"{source}: {path}: this experiment has no such parameter; {advice}")
        _place(raw, path, _raw_of(known[path], text))
    try:
        return experiment_toml(raw), decode_table(raw, source=source)
    except ConfigError as error:
        settings = ", ".join(f"{path}={text}" for path, text in values.items())
        raise ConfigError(f"{error} (with {settings})") from error


def _raw_of(type_: FieldType, text: str) -> Any:
    """Return the value that a text stands for in an experiment file; values of a list are separated by commas."""
    if not isinstance(type_, Several):
        return type_.raw_of(text)
    items = [type_.of.raw_of(item.strip()) for item in next(csv.reader([text], skipinitialspace=True), [])]
    return items[0] if type_.or_one and len(items) == 1 else items


def _place(raw: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a known path. Missing sections on the way (such as `set`) are created."""
    *way, last = steps_of(path)
    section: Any = raw
    for step in way:
        section = section.setdefault(step, {}) if isinstance(step, str) else section[step]
    section[last] = value
