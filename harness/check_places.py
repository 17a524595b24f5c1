"""What identifies a check in several verdicts: a metric with two bounds has two checks of one name. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from faultbed.harness.verdict import Check

__all__ = ["Place", "places"]

Place = tuple[str, str, int]
"""What identifies a check in all runs: its name, its comparison, and its number among those that share both."""


def places(checks: Sequence[Check]) -> Iterator[tuple[Place, Check]]:
    """Yield the checks of one run, each with its place."""
    seen: Counter[tuple[str, str]] = Counter()
    for check in checks:
        question = check.name, check.comparison or ""
        yield (*question, seen[question]), check
        seen[question] += 1
