"""Experiment files as TOML text, written from values. Pure."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

__all__ = ["experiment_toml", "inline", "lines"]

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def experiment_toml(raw: Mapping[str, Any]) -> bytes:
    """Return an experiment file with these sections and values.

    Raises:
        AssertionError: the text does not decode to the same values, which is a defect of this module.
    """
    plain = {key: value for key, value in raw.items() if not _is_section(value)}
    parts = lines(plain)
    for name, value in raw.items():
        if name in plain:
            continue
        for item in value if isinstance(value, list) else [value]:
            parts += ["", f"[[{_key(name)}]]" if isinstance(value, list) else f"[{_key(name)}]", *lines(item)]
    text = "\n".join(parts) + "\n"
    if tomllib.loads(text) != raw:
        raise AssertionError(f"not the same experiment when read again:\n{text}")
    return text.encode()


def lines(values: Mapping[str, Any]) -> list[str]:
    """Return a line `key = value` for each value of a section."""
    return [f"{_key(key)} = {inline(value)}" for key, value in values.items()]


def inline(value: Any) -> str:
    """Return a value on one line: a mapping as an inline table, a list or tuple as an array."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(lines(value)) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(inline(inner) for inner in value) + "]"
    # A JSON string, number or boolean is one of TOML, too, but for DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _is_section(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and bool(value) and isinstance(value[0], Mapping))


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else inline(key)
