"""Tests that are skipped because the lab does not fit them: each with its reason, counted at the end of the session."""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

import pytest

__all__ = ["lines", "reasons", "skip"]

_REASONS: pytest.StashKey[list[str]] = pytest.StashKey()


def skip(config: pytest.Config, reason: str) -> NoReturn:
    """Skip the running test because the lab does not fit it."""
    config.stash.setdefault(_REASONS, []).append(reason)
    pytest.skip(reason)


def reasons(config: pytest.Config) -> list[str]:
    """Return the reason of every test that this session has skipped so."""
    return config.stash.get(_REASONS, [])


def lines(config: pytest.Config) -> list[str]:
    """Return the summary: how many tests the lab does not fit, then each reason with its count, most frequent first."""
    found = reasons(config)
    if not found:
        return []
    tests = "1 test was" if len(found) == 1 else f"{len(found)} tests were"
    return [
        f"{tests} skipped because the lab does not fit:",
        *(f"  {count} x {reason}" for reason, count in Counter(found).most_common()),
    ]
