"""Field types of the experiment file. A field is declared once; everything else is derived from its declaration.

    size_bytes: Annotated[int, Size("Bytes of the whole buffer.", key="size", above=0)]

A declaration has the field's sentence, its range and, if it differs from the attribute, its key in the file. From it
come the decoder (`faultbed.harness.experiment.declare.section`), the JSON Schema, the options of `faultbed traffic`,
the values of `run --set`, what a fuzz draws, and the tables of the documentation.

A value has three forms: `raw`, as TOML decodes it; decoded, as the attribute holds it; and text, on a command line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal

from faultbed.testbed.finite import what_is_wrong
from faultbed.testbed.suggestions import hint
from faultbed.testbed.units import RATE, SIZE, TIME, Quantity

__all__ = [
    "Choice",
    "Count",
    "Duration",
    "FieldType",
    "Flag",
    "Number",
    "Parsed",
    "Ranged",
    "Rate",
    "Scalar",
    "Selector",
    "Several",
    "Size",
    "Text",
    "expected",
    "shown",
]

Scalar = str | int | float | bool
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_MOST_SHOWN = 40
"""Characters of a wrong value that a message repeats."""


def shown(raw: object) -> str:
    """Return a value of a file as a message repeats it: text in quotes, and the beginning of what is long."""
    if isinstance(raw, bool):
        return str(raw).lower()
    if isinstance(raw, Mapping):
        return "a table"
    if isinstance(raw, list | tuple):
        return "a list"
    text = str(raw)
    short = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
    return f'"{short}"' if isinstance(raw, str) else short


def expected(what: str, raw: object, remedy: str) -> ValueError:
    """Return the error about a value of another type."""
    return ValueError(f"expected {what}, got {shown(raw)}; {remedy}")


@dataclass(frozen=True, slots=True)
class FieldType:
    """Base of the field types.

    Attributes:
        says: what the field is, in one sentence.
        key: its key in the file; empty: the attribute's name.
        options: further names of its option on the command line.
    """

    says: str
    _: KW_ONLY
    key: str = ""
    options: tuple[str, ...] = ()

    kind: ClassVar[str]
    """What a person calls the type, for tables."""

    @property
    def range(self) -> str:
        """The allowed values, for tables and help; empty if every value of the type is allowed."""
        return ""

    def read(self, raw: Any) -> Any:
        """Return the decoded value.

        Raises:
            ValueError: the value is invalid; the message has the value, what is wrong and what to write.
        """
        raise NotImplementedError

    def write(self, value: Any) -> Any:
        """Return the raw form of a decoded value."""
        return value

    def raw_of(self, text: str) -> Any:
        """Return the raw form of the text of an option or of `--set`."""
        return text

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the raw form."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Text(FieldType):
    """Text, optionally of a `pattern`, which `pattern_says` describes."""

    _: KW_ONLY
    pattern: str = ""
    pattern_says: str = ""

    kind = "text"

    @property
    def range(self) -> str:
        """The pattern in words."""
        return self.pattern_says

    def read(self, raw: Any) -> str:
        """Return the text."""
        if not isinstance(raw, str):
            raise expected("text", raw, "write it in quotes")
        if self.pattern and not re.fullmatch(self.pattern, raw):
            raise ValueError(f"{shown(raw)} must be {self.pattern_says}; correct it")
        return raw

    def schema(self) -> dict[str, Any]:
        """Return the schema of text."""
        return {"type": "string", **({"pattern": f"^{self.pattern}$"} if self.pattern else {})}


@dataclass(frozen=True, slots=True)
class Selector(Text):
    """The name of an object of the lab, such as `host1:rxe0`, or a selector, such as `host[0]:rnic[0]`."""

    kind = "name or selector"


@dataclass(frozen=True, slots=True)
class Choice(FieldType):
    """One of several words."""

    _: KW_ONLY
    among: Sequence[str]

    kind = "word"

    @property
    def range(self) -> str:
        """The allowed words, in order."""
        return ", ".join(self.among)

    def read(self, raw: Any) -> str:
        """Return the word."""
        if isinstance(raw, str) and raw in self.among:
            return raw
        if not isinstance(raw, str):
            raise expected("text", raw, f"choose one of {self.range}")
        raise ValueError(f"no {self.key} {shown(raw)}; {hint(raw, tuple(self.among))}")

    def schema(self) -> dict[str, Any]:
        """Return the schema of the words."""
        return {"enum": list(self.among)}


@dataclass(frozen=True, slots=True)
class Flag(FieldType):
    """True or false."""

    kind = "true or false"

    def read(self, raw: Any) -> bool:
        """Return the flag."""
        if not isinstance(raw, bool):
            raise expected("true or false", raw, "write one without quotes")
        return raw

    def raw_of(self, text: str) -> Any:
        """Return true or false, or the text as it is."""
        return {"true": True, "false": False}.get(text, text)

    def schema(self) -> dict[str, Any]:
        """Return the schema of a flag."""
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Ranged(FieldType):
    """Base of numbers: from `least` to `most`, or more than `above`. None: no limit. `because` explains a limit."""

    _: KW_ONLY
    least: float | None = None
    most: float | None = None
    above: float | None = None
    because: str = ""

    def _spelled(self, value: float) -> str:
        return f"{value:g}" if isinstance(value, float) else str(value)

    @property
    def range(self) -> str:
        """The range, such as `1 to 64`."""
        low = self.least if self.above is None else self.above
        begin = "" if low is None else self._spelled(low)
        if self.above is not None:
            begin = f"more than {begin}"
        if self.most is None:
            return begin if self.above is not None or not begin else f"at least {begin}"
        end = self._spelled(self.most)
        if self.above is not None:
            return f"{begin}, at most {end}"
        return f"{begin} to {end}" if begin else f"at most {end}"

    def _within(self, value: float, raw: object) -> None:
        """Refuse a value outside the range."""
        if (
            (self.least is not None and value < self.least)
            or (self.above is not None and value <= self.above)
            or (self.most is not None and value > self.most)
        ):
            reason = f" ({self.because})" if self.because else ""
            raise ValueError(f"{shown(raw)} is out of range; write {self.range}{reason}")

    def _bounds(self) -> dict[str, Any]:
        bounds = {"minimum": self.least, "maximum": self.most, "exclusiveMinimum": self.above}
        return {name: bound for name, bound in bounds.items() if bound is not None}


@dataclass(frozen=True, slots=True)
class Count(Ranged):
    """A whole number without a unit; with `among`, one of these."""

    _: KW_ONLY
    among: tuple[int, ...] = ()

    kind = "whole number"

    @property
    def range(self) -> str:
        """The numbers, or the range."""
        return ", ".join(map(str, self.among)) or Ranged.range.__get__(self)

    def read(self, raw: Any) -> int:
        """Return the number."""
        if isinstance(raw, bool) or not isinstance(raw, int):
            raise expected("a whole number", raw, f"write one such as {self._example}")
        if wrong := what_is_wrong(raw):
            raise ValueError(wrong)
        self._within(raw, raw)
        if self.among and raw not in self.among:
            raise ValueError(f"{raw} is not allowed; choose one of {self.range}")
        return raw

    @property
    def _example(self) -> str:
        return str(max(1, round(self.least or 0)))

    def raw_of(self, text: str) -> Any:
        """Return the number, or the text as it is."""
        return int(text) if re.fullmatch(r"[+-]?[0-9]{1,20}", text) else text

    def schema(self) -> dict[str, Any]:
        """Return the schema of the range."""
        return {"type": "integer", **self._bounds(), **({"enum": list(self.among)} if self.among else {})}


@dataclass(frozen=True, slots=True)
class Number(Ranged):
    """A number without a unit."""

    kind = "number"

    def read(self, raw: Any) -> float:
        """Return the number."""
        if isinstance(raw, bool) or not isinstance(raw, int | float):
            raise expected("a number", raw, "write one such as 0.5, without quotes")
        if wrong := what_is_wrong(raw):
            raise ValueError(wrong)
        self._within(raw, raw)
        return float(raw)

    def raw_of(self, text: str) -> Any:
        """Return the number, or the text as it is."""
        if not _NUMBER.fullmatch(text):
            return text
        return int(text) if text.lstrip("+-").isdecimal() else float(text)

    def schema(self) -> dict[str, Any]:
        """Return the schema of the range."""
        return {"type": "number", **self._bounds()}


@dataclass(frozen=True, slots=True)
class _WithUnit(Ranged):
    """Base of quantities: text of a number and a unit. Limits are in the unit of the decoded value."""

    quantity: ClassVar[Quantity]

    @property
    def _scale(self) -> float:
        """Smallest units of the quantity in one unit of the decoded value."""
        return 1

    def _spelled(self, value: float) -> str:
        smallest = value * self._scale
        return self.quantity.format(round(smallest) if smallest == round(smallest) else smallest)

    def read(self, raw: Any) -> float:
        """Return the quantity."""
        if not isinstance(raw, str):
            raise self._without_unit(raw)
        smallest = self.quantity.parse_whole(raw)
        value = smallest if self._scale == 1 else smallest / self._scale
        self._within(value, raw)
        return value

    def _without_unit(self, raw: object) -> ValueError:
        if isinstance(raw, int | float) and not isinstance(raw, bool):
            if wrong := what_is_wrong(raw):
                return ValueError(wrong)
            if raw < 0:  # no unit would mend it
                allowed = self.range or f"at least {self.quantity.zero}"
                return ValueError(f"{shown(raw)} is out of range; write {allowed}")
            return ValueError(self.quantity.without_unit(shown(raw)))
        return expected(f"a {self.quantity.name}", raw, f'write one such as "{self.quantity.example}"')

    def write(self, value: Any) -> Any:
        """Return the text of a quantity."""
        return self._spelled(value)

    def schema(self) -> dict[str, Any]:
        """Return the schema of a number with a unit."""
        units = "|".join([*self.quantity.units, *self.quantity.aliases])
        return {"type": "string", "pattern": rf"^\s*[0-9]+(\.[0-9]+)?\s*({units})\s*$"}


@dataclass(frozen=True, slots=True)
class Size(_WithUnit):
    """A size in bytes, such as "64KiB"."""

    kind = "size"
    quantity = SIZE


@dataclass(frozen=True, slots=True)
class Duration(_WithUnit):
    """A time, such as "5ms", decoded to the unit `to`."""

    _: KW_ONLY
    to: Literal["ns", "ms", "s"] = "ns"

    kind = "time"
    quantity = TIME

    @property
    def _scale(self) -> float:
        return TIME.units[self.to]


@dataclass(frozen=True, slots=True)
class Rate(_WithUnit):
    """A rate in bits per second, such as "400Gb/s"."""

    kind = "rate"
    quantity = RATE

    def read(self, raw: Any) -> float:
        """Return the rate."""
        if not isinstance(raw, str):
            raise self._without_unit(raw)
        value = float(RATE.parse(raw))
        self._within(value, raw)
        return value


@dataclass(frozen=True, slots=True)
class Parsed(FieldType):
    """Text of a form of its own, such as the grid `tp=2,dp=2`: `parser` reads it and `writer` writes it."""

    _: KW_ONLY
    parser: Callable[[str], Any]
    writer: Callable[[Any], str]
    example: str

    kind = "text"

    @property
    def range(self) -> str:
        """An example of the text."""
        return f"such as {self.example}"

    def read(self, raw: Any) -> Any:
        """Return what the text means."""
        if not isinstance(raw, str):
            raise expected("text", raw, f'write it as in "{self.example}"')
        return self.parser(raw)

    def write(self, value: Any) -> Any:
        """Return the text."""
        return self.writer(value)

    def schema(self) -> dict[str, Any]:
        """Return the schema of text."""
        return {"type": "string", "examples": [self.example]}


@dataclass(frozen=True, slots=True)
class Several(FieldType):
    """A list of values of one type; at least `least` of them. With `or_one`, a single value stands for a list of it."""

    _: KW_ONLY
    of: FieldType
    least: int = 0
    or_one: bool = False

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The type of the values."""
        return f"{self.of.kind}, or a list" if self.or_one else f"list: {self.of.kind}"

    @property
    def range(self) -> str:
        """The range of each value."""
        return self.of.range

    def read(self, raw: Any) -> tuple[Any, ...]:
        """Return the values.

        Raises:
            ValueError: no list, or too short a list. The decoder reads each value by itself, so that an error of one
                names its position.
        """
        return tuple(self.of.read(item) for item in self.items(raw))

    def items(self, raw: Any) -> Sequence[Any]:
        """Return the raw values.

        Raises:
            ValueError: no list, or too short a list.
        """
        if self.or_one and not isinstance(raw, list | tuple):
            return [raw]
        if not isinstance(raw, list | tuple):
            raise expected("a list", raw, "write it in brackets: [...]")
        if len(raw) < self.least:
            raise ValueError("an empty list: name at least one")
        return raw

    def write(self, value: Any) -> Any:
        """Return the raw values."""
        return [self.of.write(item) for item in value]

    def raw_of(self, text: str) -> Any:
        """Return the raw form of one value."""
        return self.of.raw_of(text)

    def schema(self) -> dict[str, Any]:
        """Return the schema of the list."""
        several = {"type": "array", "items": self.of.schema(), **({"minItems": self.least} if self.least else {})}
        return {"anyOf": [self.of.schema(), several]} if self.or_one else several
