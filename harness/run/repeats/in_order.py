"""Results that arrive in any order, in the order of what they are results of: decisions look at runs by their seeds."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

__all__ = ["in_order"]

T = TypeVar("T", bound=Hashable)
R = TypeVar("R")


def in_order(arriving: Iterable[tuple[T, R]], items: Sequence[T]) -> Iterator[R]:
    """Yield the result of each item, in the order of `items`, as soon as those before it are there.

    A run that ends early, for example because its workload died, would otherwise count before slower ones, and a rule
    that may stop after each run would look at a selection.

    Args:
        arriving: items with their results, each once.
        items: all items, each once.
    """
    waiting: dict[T, R] = {}
    following = iter(items)
    due = next(following, None)
    for item, result in arriving:
        waiting[item] = result
        while due in waiting:
            yield waiting.pop(due)
            due = next(following, None)
