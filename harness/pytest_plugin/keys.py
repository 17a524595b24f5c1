"""Notes that hooks and fixtures keep on pytest's items and session for each other. Imports nothing of the product."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from harness.pytest_plugin.quarantine import Entry
    from traffic.engine.running_traffic import Running

__all__ = [
    "AT_END",
    "EXPERIMENTS",
    "EXPIRED",
    "FAILED",
    "NOT_CLEARED",
    "NOT_REQUIRED",
    "QUARANTINED",
    "RAN",
    "RUNNING",
]

EXPERIMENTS: pytest.StashKey[tuple[Path, ...]] = pytest.StashKey()
"""On the session's configuration: the files and folders of experiments that it asks for, resolved."""

EXPIRED: pytest.StashKey[Entry] = pytest.StashKey()
"""On an item: its quarantine entry, whose last day is over."""

QUARANTINED: pytest.StashKey[bool] = pytest.StashKey()
"""On an item: it is in quarantine, and a failure is excused."""

FAILED: pytest.StashKey[bool] = pytest.StashKey()
"""On an item: one of its phases has failed."""

RUNNING: pytest.StashKey[list[Running[Any]]] = pytest.StashKey()
"""On an item: the workloads that it has started."""

NOT_CLEARED: pytest.StashKey[tuple[str, ...]] = pytest.StashKey()
"""On an item: one sentence for each of its faults that may still be in place."""

NOT_REQUIRED: pytest.StashKey[list[str]] = pytest.StashKey()
"""On the session's configuration: tests with faults that need not be proven (`prove=False`)."""

AT_END: pytest.StashKey[list[str]] = pytest.StashKey()
"""On the session's configuration, from the end of the session on: what fixtures of an interrupted test found wrong."""

RAN: pytest.StashKey[bool] = pytest.StashKey()
"""On the session's configuration: an item has run."""
