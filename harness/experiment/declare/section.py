"""Sections of the experiment file: classes whose annotated fields declare their keys, and the strict decoder of them.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Probe(Section):
        rate: Annotated[float, Number("Datagrams a second on each queue pair.", above=0, most=1000)] = 0.5

A field of a section that is annotated without a field type is no key of the file: the program fills it in. The decoder
reads all fields, and collects every problem of a file instead of stopping at the first one.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, cast

from faultbed.harness.experiment.declare.field_types import FieldType, Number, Scalar, expected
from faultbed.testbed.errors import UsageError
from faultbed.testbed.finite import what_is_wrong
from faultbed.testbed.suggestions import hint

__all__ = [
    "AnyScalar",
    "Field",
    "Named",
    "OneOf",
    "Problem",
    "Section",
    "Table",
    "Tables",
    "Wrong",
    "deeper",
    "fields_of",
    "join",
    "read_fields",
    "read_section",
    "section_of",
]

_KEY = re.compile(r"[A-Za-z0-9_:-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is wrong with a file: the `path` of the value, a sentence, and the path of the line, if that is another."""

    path: str
    sentence: str
    line_of: str = ""


class Wrong(UsageError):
    """A value of a section is wrong: its path within the section (empty: all of it), and a sentence."""

    def __init__(self, path: str, sentence: str) -> None:
        super().__init__(sentence)
        self.path = path


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Base of the sections. `decoded` returns what a run uses; the section itself, if it is that already."""

    def problems(self) -> Iterable[tuple[str, str]]:
        """Return the contradictions between fields: a path within the section (empty: all of it) and a sentence."""
        return ()

    def decoded(self, source: str) -> Any:  # noqa: ARG002 - sections that read other files resolve their paths by it
        """Return what a run uses. `source` is the path of the file.

        Raises:
            UsageError: the section is invalid as a whole.
        """
        return self


@dataclass(frozen=True, slots=True)
class Table(FieldType):
    """A section within another one."""

    _: KW_ONLY
    section: type[Section]

    kind: ClassVar[str] = "section"

    def schema(self) -> dict[str, Any]:
        """Return a reference to the section's schema."""
        return {"$ref": f"#/$defs/{self.section.__name__}"}


@dataclass(frozen=True, slots=True)
class Tables(Table):
    """A list of sections."""

    kind: ClassVar[str] = "list of sections"

    def remedy(self, path: str) -> str:
        """Return how the list is written."""
        return f"write [[{path}]]"

    def schema(self) -> dict[str, Any]:
        """Return the schema of the list."""
        return {"type": "array", "items": Table.schema(self)}


@dataclass(frozen=True, slots=True)
class OneOf(FieldType):
    """A section of one of several kinds. Each has a key of its own, which names the kind; `remedy` says how."""

    _: KW_ONLY
    kinds: Mapping[str, type[Section]]
    remedy: str

    kind: ClassVar[str] = "section"

    def kind_of(self, raw: Mapping[str, Any]) -> type[Section] | None:
        """Return the section class whose own key the table has; None: it has none or several of these keys."""
        found = [section for key, section in self.kinds.items() if key in raw]
        return found[0] if len(found) == 1 else None

    def schema(self) -> dict[str, Any]:
        """Return the schema of the kinds."""
        return {"anyOf": [{"$ref": f"#/$defs/{section.__name__}"} for section in self.kinds.values()]}


@dataclass(frozen=True, slots=True)
class AnyScalar(FieldType):
    """A number, a text, true or false, of which another field decides the type."""

    kind: ClassVar[str] = "number or text"

    def read(self, raw: Any) -> Scalar:
        """Return the value."""
        if not isinstance(raw, str | int | float | bool):
            raise expected("a number or text", raw, "write one value")
        if wrong := what_is_wrong(raw):
            raise ValueError(wrong)
        return raw

    def raw_of(self, text: str) -> Any:
        """Return a number, true or false, or the text as it is."""
        return {"true": True, "false": False}.get(text, Number("").raw_of(text))

    def schema(self) -> dict[str, Any]:
        """Return the schema of a value."""
        return {"type": ["number", "string", "boolean"]}


@dataclass(frozen=True, slots=True)
class Named(FieldType):
    """A table of values of one type by names that the lab or another field defines."""

    _: KW_ONLY
    of: FieldType

    kind: ClassVar[str] = "table"

    def remedy(self, path: str) -> str:
        """Return how the table is written."""
        return f"write {path.rpartition('.')[2]} = {{ name = value }}"

    @property
    def range(self) -> str:
        """The range of each value."""
        return self.of.range

    def schema(self) -> dict[str, Any]:
        """Return the schema of the table."""
        return {"type": "object", "additionalProperties": self.of.schema()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A declared field: its attribute, key and type, and whether it is required. `default` is a decoded value."""

    name: str
    key: str
    type: FieldType
    required: bool
    default: Any


def fields_of(section: type[Section]) -> tuple[Field, ...]:
    """Return the declared fields of a section, in their order."""
    return _fields_of(cast("Any", section))


@functools.cache
def _fields_of(section: Any) -> tuple[Field, ...]:
    hints = typing.get_type_hints(section, include_extras=True)
    declared = []
    for field in dataclasses.fields(section):
        types = [meta for meta in getattr(hints[field.name], "__metadata__", ()) if isinstance(meta, FieldType)]
        for type_ in types:
            key = type_.key or field.name
            made = field.default_factory
            default = field.default if made is dataclasses.MISSING else made()
            declared.append(
                Field(
                    name=field.name,
                    key=key,
                    type=dataclasses.replace(type_, key=key),
                    required=default is dataclasses.MISSING,
                    default=None if default is dataclasses.MISSING else default,
                )
            )
    return tuple(declared)


def section_of(type_: FieldType, raw: Any) -> type[Section] | None:
    """Return the section class of a raw value; None: it is no section, or of no one kind."""
    if isinstance(type_, OneOf):
        return type_.kind_of(raw) if isinstance(raw, Mapping) else None
    return type_.section if isinstance(type_, Table) else None


def join(path: str, key: str) -> str:
    """Return the path of a key in the section at `path`; a key with dots or spaces is quoted."""
    spelled = key if _KEY.fullmatch(key) else f'"{key}"'
    return f"{path}.{spelled}" if path else spelled


def read_section(section: type[Section], raw: Any, path: str, problems: list[Problem], source: str) -> Any | None:
    """Return what a run uses of the section at `path`; None: it is invalid, and `problems` has the reasons."""
    before = len(problems)
    values = read_fields(section, raw, path, problems, source)
    if len(problems) > before:
        return None
    made = section(**values)
    problems += [Problem(path=deeper(path, inner), sentence=sentence) for inner, sentence in made.problems()]
    if len(problems) > before:
        return None
    try:
        return made.decoded(source)
    except UsageError as error:
        inner = error.path if isinstance(error, Wrong) else ""
        problems.append(Problem(path=deeper(path, inner), sentence=str(error)))
        return None


def read_fields(section: type[Section], raw: Any, path: str, problems: list[Problem], source: str) -> dict[str, Any]:
    """Return the valid values of the section at `path` by attribute; `problems` gets what is wrong with the others.

    A list of sections has None in place of an invalid one.
    """
    if not isinstance(raw, Mapping):
        problems.append(Problem(path=path, sentence=str(expected("a section", raw, f"write [{path}]"))))
        return {}
    declared = fields_of(section)
    known = tuple(field.key for field in declared)
    for key in raw:
        if key not in known:
            sentence = f'no key "{key}" here; {hint(key, known)}'
            problems.append(Problem(path=path, sentence=sentence, line_of=join(path, key)))
    values: dict[str, Any] = {}
    for field in declared:
        if field.key in raw:
            before = len(problems)
            value = _read(field.type, raw[field.key], join(path, field.key), problems, source)
            if len(problems) == before or isinstance(field.type, Tables):
                values[field.name] = value
    absent = [f"`{field.key}`" for field in declared if field.required and field.key not in raw]
    if absent:
        are = "is missing; add it" if len(absent) == 1 else "are missing; add them"
        problems.append(Problem(path=path, sentence=f"{' and '.join(absent)} {are}"))
    return values


def _read(type_: FieldType, raw: Any, path: str, problems: list[Problem], source: str) -> Any:
    if isinstance(type_, Tables | Named) and not isinstance(
        raw, list | tuple if isinstance(type_, Tables) else Mapping
    ):
        problems.append(Problem(path=path, sentence=str(expected(f"a {type_.kind}", raw, type_.remedy(path)))))
        return ()
    if isinstance(type_, Tables):
        places = [(f"{path}[{index}]", item) for index, item in enumerate(raw)]
        return tuple(read_section(type_.section, item, place, problems, source) for place, item in places)
    if isinstance(type_, Named):
        return {key: _read_value(type_.of, value, join(path, key), problems) for key, value in raw.items()}
    if isinstance(type_, OneOf) and isinstance(raw, Mapping) and type_.kind_of(raw) is None:
        problems.append(Problem(path=path, sentence=type_.remedy))
        return None
    if isinstance(type_, Table | OneOf):
        return read_section(section_of(type_, raw) or Section, raw, path, problems, source)
    return _read_value(type_, raw, path, problems)


def _read_value(type_: FieldType, raw: Any, path: str, problems: list[Problem]) -> Any:
    items = getattr(type_, "items", None)
    try:
        if items is None:
            return type_.read(raw)
        listed: Sequence[Any] = items(raw)
    except ValueError as error:
        problems.append(Problem(path=path, sentence=str(error)))
        return None
    is_list = isinstance(raw, list | tuple)
    places = list(_places(path, listed, is_list=is_list))
    return tuple(_read_value(type_.of, item, place, problems) for place, item in places)  # type: ignore[attr-defined]


def _places(path: str, listed: Sequence[Any], *, is_list: bool) -> Iterator[tuple[str, Any]]:
    for index, item in enumerate(listed):
        yield (f"{path}[{index}]" if is_list else path), item


def deeper(path: str, inner: str) -> str:
    """Return the path of what is at `inner` in the section at `path`; either may be empty."""
    return f"{path}.{inner}" if path and inner else path or inner
