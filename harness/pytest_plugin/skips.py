"""Skip tests that the lab does not fit, and count the reasons for the summary of the session."""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

import pytest

__all__ = ["reasons", "skip", "summary_lines"]

_REASONS: pytest.StashKey[list[str]] = pytest.StashKey()


def skip(config: pytest.Config, reason: str) -> NoReturn:
    """Skip the running test because the lab does not fit it."""
    config.stash.setdefault(_REASONS, []).append(reason)
    pytest.skip(reason)


def reasons(config: pytest.Config) -> list[str]:
    """Return one reason for each test that this session has skipped because of the lab."""
    return config.stash.get(_REASONS, [])


def summary_lines(config: pytest.Config) -> list[str]:
    """Return the number of tests skipped because of the lab, then each reason with its count, most frequent first."""
    skipped = reasons(config)
    if not skipped:
        return []
    tests = "1 test was" if len(skipped) == 1 else f"{len(skipped)} tests were"
    return [
        f"{tests} skipped because the lab does not fit:",
        *(f"  {count} x {reason}" for reason, count in Counter(skipped).most_common()),
    ]
