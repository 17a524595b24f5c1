"""The smallest part of an experiment that still fails: faults are removed until each remaining one is needed. Pure.

`smallest` is delta debugging (Zeller and Hildebrandt 2002, ddmin): first halves, then quarters, and so on, so that few
runs are needed where one fault is to blame. `without` is the experiment file with some of its faults, as text: comments
and everything else stay as they were.
"""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Callable, Sequence

from faultbed.harness.experiment.metrics import lookup
from faultbed.testbed.errors import UsageError

__all__ = ["Subset", "smallest", "without"]

Subset = tuple[int, ...]

_HEADER = re.compile(r"^\[(?!\[?\s*(?:faults|expect)\s*\.)", re.MULTILINE)
"""A section of the file. One within a fault, such as `[faults.set]`, belongs to the fault above it."""
_FAULT, _EXPECT = "[[faults]]", "[[expect]]"


def smallest(count: int, first_failing: Callable[[Sequence[Subset]], Subset | None]) -> Subset:
    """Return a subset of 0 .. count - 1 that fails and of which no single element can be removed.

    Args:
        count: number of elements, which together are known to fail.
        first_failing: the first of some subsets (ascending) that fails; None: none does. It may try several at a time.
            A subset that did not fail is not passed to it again.
    """
    harmless: set[Subset] = set()

    def failing(candidates: Sequence[Subset]) -> Subset | None:
        untried = [some for some in candidates if some not in harmless]
        first = first_failing(untried) if untried else None
        harmless.update(untried if first is None else untried[: untried.index(first)])
        return first

    left, parts = tuple(range(count)), 2
    while len(left) > 1:
        chunks = _split(left, parts)
        rests = [tuple(number for number in left if number not in chunk) for chunk in chunks] if parts > 2 else []  # noqa: PLR2004
        failing_part = failing((*chunks, *rests))
        if failing_part is not None:
            parts = max(2, parts - 1) if failing_part in rests else 2
            left = failing_part
        elif parts >= len(left):
            break
        else:
            parts = min(len(left), 2 * parts)
    return () if len(left) == 1 and failing([()]) is not None else left


def without(source: bytes, ids: Sequence[str], keep: Sequence[int]) -> bytes:
    """Return an experiment file with only some of its faults, without the expectations about the others.

    Args:
        source: the file.
        ids: the names of its faults, in its order. Implied names are written out.
        keep: which faults stay, ascending.

    Raises:
        UsageError: faults or expectations are not written as tables of their own (`[[faults]]`), so that the rest would
            be another experiment.
    """
    text = source.decode()
    starts = [match.start() for match in _HEADER.finditer(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *starts, len(text)])]
    faults = [piece for piece in pieces if piece.startswith(_FAULT)]
    whole = tomllib.loads(text)
    if len(faults) != len(whole.get("faults", ())) or len(ids) != len(faults):
        raise UsageError(
            "write each fault as a table of its own, [[faults]]; inline faults cannot be removed one by one"
        )
    stays = {ids[number] for number in keep}
    kept, number = [], -1
    for piece in pieces:
        if piece.startswith(_FAULT):
            number += 1
            if number in keep:
                kept.append(_with_id(piece, ids[number]))
            else:
                kept.append(_trailing_comments(piece))
        elif piece.startswith(_EXPECT) and not _has_metric(piece, stays):
            kept.append(_trailing_comments(piece))
        else:
            kept.append(piece)
    text_without = "".join(kept)
    kept_faults = [{**whole["faults"][number], "id": ids[number]} for number in keep]
    try:
        is_right = tomllib.loads(text_without).get("faults", []) == kept_faults
    except tomllib.TOMLDecodeError:
        is_right = False
    if not is_right:  # it would be another experiment, whose failure says nothing about this one
        raise UsageError("the faults of this file cannot be removed one by one; write each as a section [[faults]]")
    return text_without.encode()


def _split(some: tuple[int, ...], parts: int) -> list[tuple[int, ...]]:
    edges = [round(len(some) * part / parts) for part in range(parts + 1)]
    return [some[low:high] for low, high in itertools.pairwise(edges) if low < high]


def _with_id(piece: str, name: str) -> str:
    if "id" in tomllib.loads(piece)["faults"][0]:
        return piece
    head, _, rest = piece.partition("\n")
    return f'{head}\nid = "{name}"\n{rest}'


def _trailing_comments(piece: str) -> str:
    """Return the comments at the end of a removed table, which belong to the next table."""
    body = piece.rstrip("\n").split("\n")
    tail: list[str] = []
    while body and (body[-1].startswith("#") or not body[-1].strip()):
        tail.insert(0, body.pop())
    while tail and not tail[0].strip():
        tail.pop(0)
    return "\n".join(tail) + "\n" if tail else ""


def _has_metric(piece: str, ids: set[str]) -> bool:
    """Return whether a run with these faults has the metric that this `[[expect]]` section names."""
    metric = tomllib.loads(piece)["expect"][0].get("metric")
    known = lookup(metric, ids)
    return known is not None and (bool(ids) or not known.about_faults)
