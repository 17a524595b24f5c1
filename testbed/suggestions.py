"""Names in error messages: the known name that resembles an unknown one, and the first of many."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

__all__ = ["first_of", "hint", "nearest"]


def first_of(names: Sequence[object], most: int) -> str:
    """Return the first names of many: `host1, host2 and 5 more`."""
    more = len(names) - most
    return ", ".join(map(str, names[:most])) + (f" and {more} more" if more > 0 else "")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that resembles `word` most, if one does."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return matches[0] if matches else None


def hint(word: str, known: Sequence[str]) -> str:
    """Return the advice after an unknown word: `did you mean ring?`, or the words to choose from."""
    near = nearest(word, known)
    if near:
        return f"did you mean {near}?"
    return f"choose one of {', '.join(known)}" if known else "there is none"
