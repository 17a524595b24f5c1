"""The line of each value of a TOML text, by its path. tomllib has no positions, so that lines are found with its help.

A statement of TOML is one line, unless a string or an array goes on. A text is cut into statements by decoding line
after line: a statement ends where what was read since the one before is TOML by itself. So the library decides what a
string, a comment or a key is. An item of an array that takes several lines is found by closing the array after a line.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["line_of", "located"]

_MOST_LINES = 400
"""Lines of a statement that are decoded together. Beyond it the rest of the text counts as one statement: time grows
with the square of it."""


def located(source: str, text: str, path: str) -> str:
    """Return where a value is, as messages begin: `demo.toml:12: faults[1].target`."""
    line = line_of(text, path) if path else None
    place = source if line is None else f"{source}:{line}"
    return f"{place}: {path}" if path else place


def line_of(text: str, path: str) -> int | None:
    """Return the line (from 1) of the value at a path, or else of the nearest section around it; None: unknown."""
    wanted = tuple(steps_of(path))
    best: tuple[int, int] | None = None
    for line, statement, at, value in _statements(text):
        if at == wanted[: len(at)]:
            rest = wanted[len(at) :]
            depth, offset = _within(statement, value, rest)
            if best is None or len(at) + depth > best[0]:
                best = (len(at) + depth, line + offset)
    return None if best is None else best[1]


def steps_of(path: str) -> Iterator[str | int]:
    """Return the keys and indices of a path: `faults[0].set.share` has four."""
    position = 0
    while position < len(path):
        if path[position] == ".":
            position += 1
        elif path[position] == "[":
            end = path.index("]", position)
            yield int(path[position + 1 : end])
            position = end + 1
        elif path[position] == '"':
            end = path.find('"', position + 1)
            end = len(path) if end < 0 else end
            yield path[position + 1 : end]
            position = end + 1
        else:
            ends = [at for sign in ".[" if (at := path.find(sign, position)) >= 0]
            end = min(ends, default=len(path))
            yield path[position:end]
            position = end


@functools.lru_cache(maxsize=2)
def _statements(text: str) -> tuple[tuple[int, str, tuple[str | int, ...], Any], ...]:
    """Return all statements of a text; an error of a file asks for the line of each of its problems."""
    return tuple(_each_statement(text))


def _each_statement(text: str) -> Iterator[tuple[int, str, tuple[str | int, ...], Any]]:
    """Return each section header and each assignment: its first line, its text, its path and its value."""
    header: tuple[str | int, ...] = ()
    counts: dict[tuple[str | int, ...], int] = {}
    for line, statement, content in _cut(text):
        is_header = statement.lstrip().startswith("[")
        keys, value = _chain(content)
        if is_header:
            header = _placed(keys, counts, is_item=isinstance(value, list))
            yield line, statement, header, None
        else:
            yield from _assigned(line, statement, header, content)


def _cut(text: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Cut a text into statements: first line, text, and what tomllib makes of it alone."""
    pending: list[str] = []
    for number, bare in enumerate(text.split("\n"), 1):  # splitlines would split at U+2028 and others, too
        line = bare + "\n"
        if not pending and (not line.strip() or line.lstrip().startswith("#")):
            continue
        pending.append(line)
        if len(pending) > _MOST_LINES:
            return
        try:
            content = tomllib.loads("".join(pending))
        except (ValueError, RecursionError):
            continue
        yield number - len(pending) + 1, "".join(pending), content
        pending = []


def _chain(content: Mapping[str, Any]) -> tuple[tuple[str, ...], Any]:
    """Return the keys of a header, and an empty table or a list of one."""
    keys: list[str] = []
    value: Any = content
    while isinstance(value, Mapping) and value:
        key = next(iter(value))
        keys.append(key)
        value = value[key]
    return tuple(keys), value


def _placed(keys: tuple[str, ...], counts: dict[tuple[str | int, ...], int], *, is_item: bool) -> tuple[str | int, ...]:
    """Return the path of a header: a list of sections on the way means its last one."""
    path: tuple[str | int, ...] = ()
    for position, key in enumerate(keys):
        path = (*path, key)
        if is_item and position == len(keys) - 1:
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path = (*path, counts[path])
    return path


def _assigned(
    line: int, statement: str, header: tuple[str | int, ...], content: Mapping[str, Any]
) -> Iterator[tuple[int, str, tuple[str | int, ...], Any]]:
    """Return an assignment: `a.b = { c = 1 }` is one of a.b, and its value holds the rest."""
    path, value = header, content
    while isinstance(value, Mapping) and len(value) == 1:
        key, inner = next(iter(value.items()))
        path = (*path, key)
        value = inner
        yield line, statement, path, value


def _within(statement: str, value: Any, rest: tuple[str | int, ...]) -> tuple[int, int]:
    """Return how many steps of `rest` a value has, and how many lines below its beginning the last of them is."""
    depth, at = 0, value
    for step in rest:
        try:
            at = at[step]
        except (KeyError, IndexError, TypeError):
            break
        depth += 1
    lines = statement.rstrip("\n").split("\n")
    if not rest or not isinstance(rest[0], int) or depth == 0 or len(lines) == 1:
        return depth, 0
    for offset in range(len(lines)):
        try:
            closed = tomllib.loads("\n".join(lines[: offset + 1]) + "\n]")
        except (ValueError, RecursionError):
            continue
        items = _chain_to_list(closed)
        if items is not None and len(items) > rest[0]:
            return depth, offset
    return depth, 0


def _chain_to_list(content: Any) -> list[Any] | None:
    while isinstance(content, Mapping) and len(content) == 1:
        content = next(iter(content.values()))
    return content if isinstance(content, list) else None
