"""The values inside nested lists and mappings, with their paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["leaves"]


def leaves(raw: object) -> Iterator[tuple[str, Any]]:
    """Yield path and value of everything in decoded TOML, YAML or JSON that is no list and no mapping.

    A path is written like `faults[0].set.share`. Containers that occur more than once (YAML aliases) are read once.
    """
    return _leaves(raw, "", set())


def _leaves(raw: object, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(raw, Mapping):
        parts = [(f"{path}.{key}" if path else str(key), value) for key, value in raw.items()]
    elif isinstance(raw, list | tuple):
        parts = [(f"{path}[{index}]", value) for index, value in enumerate(raw)]
    else:
        yield path, raw
        return
    if id(raw) not in seen:
        seen.add(id(raw))
        for at, value in parts:
            yield from _leaves(value, at, seen)
