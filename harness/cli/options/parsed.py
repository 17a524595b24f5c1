"""The text of an option, parsed, with the option's name in the error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from faultbed.testbed.errors import UsageError

__all__ = ["parsed"]

T = TypeVar("T")


def parsed(option: str, parser: Callable[[str], T], text: str) -> T:
    """Return what `parser` makes of the text of `option` (`--size`).

    Raises:
        UsageError: the parser raised ValueError; the message begins with the option and the text.
    """
    try:
        return parser(text)
    except ValueError as error:
        raise UsageError(f"{option} {text}: {error}") from error
