"""Waiting in tests: for a condition with a deadline, or for a fixed time if elapsed time is what the test is about."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def until(condition: Callable[[], object], *, within_s: float = 20.0, every_s: float = 0.02) -> float:
    """Wait for a condition. Return the seconds that it took.

    Raises:
        AssertionError: the condition did not become true within `within_s`.
    """
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < within_s, f"it did not happen in {within_s:g} s"
        wait_s(every_s)
    return time.monotonic() - begin


def wait_s(seconds: float) -> None:
    """Wait for a fixed time."""
    threading.Event().wait(seconds)
