"""Keys of what hooks and fixtures store on pytest's items and configuration. Imports nothing of the product."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from faultbed.harness.pytest_plugin.quarantine import Entry
    from faultbed.inject.prepared_fault import PreparedFault
    from faultbed.traffic.engine.running_traffic import Running

__all__ = [
    "ANY_FAILED",
    "AT_END",
    "BEGAN",
    "ENDED",
    "EXPERIMENTS",
    "EXPIRED",
    "FAILED",
    "FAULTS",
    "NOT_CLEARED",
    "NOT_STARTED",
    "OPENED_LAB",
    "PROOF_NOT_REQUIRED",
    "PROPERTIES",
    "QUARANTINED",
    "RAN",
    "RUNNING",
]

EXPERIMENTS: pytest.StashKey[tuple[Path, ...]] = pytest.StashKey()
"""On the session's configuration: files and folders of experiments, resolved."""

EXPIRED: pytest.StashKey[Entry] = pytest.StashKey()
"""On an item: its quarantine entry if the last day of that is over."""

QUARANTINED: pytest.StashKey[bool] = pytest.StashKey()
"""On an item: whether it is in quarantine, so that its failure is excused."""

BEGAN: pytest.StashKey[bool] = pytest.StashKey()
"""On an item: whether its set-up has begun."""

ENDED: pytest.StashKey[bool] = pytest.StashKey()
"""On an item: whether its teardown is over."""

FAILED: pytest.StashKey[bool] = pytest.StashKey()
"""On an item: whether its latest attempt has failed, excused or not."""

ANY_FAILED: pytest.StashKey[bool] = pytest.StashKey()
"""On an item: whether a phase or a subtest of its latest attempt has failed without an excuse (xfail)."""

PROPERTIES: pytest.StashKey[Iterable[tuple[str, object]]] = pytest.StashKey()
"""On an item: its JUnit properties before its first attempt."""

RUNNING: pytest.StashKey[list[Running[Any]]] = pytest.StashKey()
"""On an item: the workloads that it has started."""

FAULTS: pytest.StashKey[list[PreparedFault]] = pytest.StashKey()
"""On an item: the faults that it has prepared."""

NOT_STARTED: pytest.StashKey[list[str]] = pytest.StashKey()
"""On an item: the error of each workload that it could not start."""

NOT_CLEARED: pytest.StashKey[tuple[str, ...]] = pytest.StashKey()
"""On an item: one sentence for each of its faults that may still be in place."""

OPENED_LAB: pytest.StashKey[bool] = pytest.StashKey()
"""On an item: whether its latest attempt has opened the lab, also by `request.getfixturevalue`."""

PROOF_NOT_REQUIRED: pytest.StashKey[list[str]] = pytest.StashKey()
"""On the session's configuration: tests with faults that need not be proven (`prove=False`)."""

AT_END: pytest.StashKey[list[str]] = pytest.StashKey()
"""On the session's configuration, from the end of the session on: errors of fixtures of an interrupted test."""

RAN: pytest.StashKey[bool] = pytest.StashKey()
"""On the session's configuration: whether an item has run."""
