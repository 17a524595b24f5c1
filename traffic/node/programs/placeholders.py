"""Placeholders in the command of a program: `{rnic}` is data that becomes part of one word, never shell. Pure."""

from __future__ import annotations

import re

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["fill", "names_in"]

_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([a-z][a-z0-9_-]*)\}")


def names_in(text: str) -> tuple[str, ...]:
    """Return the names of the placeholders in a text, each once. `{{` and `}}` are braces."""
    found = (match[1] for match in _PLACEHOLDER.finditer(text))
    return tuple(dict.fromkeys(name for name in found if name))


def fill(words: Iterable[str], values: Mapping[str, str]) -> list[str]:
    """Return words with the values of their placeholders.

    Raises:
        KeyError: there is no value of that name.
    """
    return [_PLACEHOLDER.sub(lambda match: values[match[1]] if match[1] else match[0][0], word) for word in words]
