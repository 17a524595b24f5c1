"""Read files that people write, strictly. An error names the value's path, and suggests what was meant.

demo.toml: workload.algoritm: no key "algoritm" here; did you mean algorithm?
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from faultbed.testbed.errors import ConfigError
from faultbed.testbed.finite import wrong_number
from faultbed.testbed.suggestions import hint

__all__ = ["Section", "convert", "fail", "one_of", "positive", "read"]

_T = TypeVar("_T")

_AT_PATH = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections of a file as they are written, before quantities are read."""


def fail(source: str, path: str, message: str) -> ConfigError:
    """Return the error about the value at `path` (empty: about the whole file)."""
    return ConfigError(f"{source}: {path}: {message}" if path else f"{source}: {message}")


def convert(
    raw: object, type_: type[_T], source: str, *, keys: Mapping[str, tuple[str, ...]], path: str = "", section: str = ""
) -> _T:
    """Convert the value at `path` of the file `source` to `type_`.

    `keys` are the known keys of each section, for hints.

    Raises:
        ConfigError: the value has another type, or a number in it is NaN, infinite or too large.
    """
    try:
        if wrong := wrong_number(raw):
            raise fail(source, ".".join(part for part in (path, wrong[0]) if part), wrong[1])
        return msgspec.convert(raw, type_)
    except RecursionError as error:
        raise fail(source, path, "nested too deep") from error
    except msgspec.ValidationError as error:
        raise fail(source, *_explain(str(error), path, section, keys)) from error


def _explain(message: str, prefix: str, section: str, keys: Mapping[str, tuple[str, ...]]) -> tuple[str, str]:
    """Split msgspec's message into the path inside the file and a sentence; hint at a misspelt key."""
    match = _AT_PATH.search(message)
    inner = match["path"] if match else ""
    sentence = _AT_PATH.sub("", message)
    path = ".".join(part for part in (prefix, inner) if part)
    if missing := _MISSING.match(sentence):
        return path, f"`{missing['name']}` is missing; add it"
    unknown = _UNKNOWN.match(sentence)
    if unknown:
        known = keys.get(re.sub(r"\[.*", "", inner) or section, ())
        sentence = f'no key "{unknown["name"]}" here; {hint(unknown["name"], known)}'
    return path, sentence[:1].lower() + sentence[1:]


def read(parser: Callable[[str], _T], text: str, source: str, path: str) -> _T:
    """Parse a text. A ValueError of the parser becomes a ConfigError with the path."""
    try:
        return parser(text)
    except ValueError as error:
        raise fail(source, path, str(error)) from error


def one_of(value: str, known: tuple[str, ...], source: str, path: str) -> None:
    """Raise ConfigError for a word that is not known."""
    if value not in known:
        raise fail(source, path, f'no {path.rpartition(".")[2]} "{value}"; {hint(value, known)}')


def positive(parser: Callable[[str], int], text: str, source: str, path: str) -> int:
    """Parse a quantity that must be above 0."""
    value = read(parser, text, source, path)
    if value <= 0:
        raise fail(source, path, "must be more than 0")
    return value
