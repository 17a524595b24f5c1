"""What identifies a check in several verdicts: a metric with two bounds has two checks of one name. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from faultbed.harness.verdict import Check

__all__ = ["Place", "comparison_of", "places"]

Place = tuple[str, str, int]
"""What identifies a check in all runs: its name, its comparison, and its number among those that share both."""


def places(checks: Sequence[Check]) -> Iterator[tuple[Place, Check]]:
    """Yield the checks of one run, each with its place."""
    seen: Counter[tuple[str, str]] = Counter()
    for check in checks:
        question = check.name, comparison_of(check)
        yield (*question, seen[question]), check
        seen[question] += 1


def comparison_of(check: Check) -> str:
    """Return how a check compares, such as `observed >= bound`; the first sentence of its rule if it has no number."""
    return re.split(r"[.,]", check.rule)[0]
