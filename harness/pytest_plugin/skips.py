"""Skip tests that the lab does not fit, and count the reasons for the summary of the session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

import pytest

__all__ = ["add_worker_reasons", "reasons", "report_to_controller", "skip", "summary_lines"]

_REASONS: pytest.StashKey[list[str]] = pytest.StashKey()
_SKIPS, _HAS_RUN = "faultbed_skips", "faultbed_has_run"
"""Results that a worker of pytest-xdist sends to its controller."""


def skip(config: pytest.Config, reason: str) -> NoReturn:
    """Skip the running test because the lab does not fit it."""
    config.stash.setdefault(_REASONS, []).append(reason)
    pytest.skip(reason)


def reasons(config: pytest.Config) -> list[str]:
    """Return one reason for each test that this session has skipped because of the lab."""
    return config.stash.get(_REASONS, [])


def report_to_controller(config: pytest.Config, *, has_run: bool) -> None:
    """Report to the controller of pytest-xdist why this worker has skipped tests, and whether it has run any test."""
    if hasattr(config, "workeroutput"):
        config.workeroutput |= {_SKIPS: reasons(config), _HAS_RUN: has_run}


def add_worker_reasons(config: pytest.Config, output: Mapping[str, Any]) -> bool:
    """Add a worker's reasons to those of the session; return whether it has run a test. A crashed worker sends none."""
    config.stash.setdefault(_REASONS, []).extend(output.get(_SKIPS, ()))
    return bool(output.get(_HAS_RUN, False))


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
