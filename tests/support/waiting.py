"""Waiting in tests: for what is to happen, with a deadline; for time to pass only where that is the subject."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def until(condition: Callable[[], object], *, within_s: float = 20.0, every_s: float = 0.02) -> float:
    """Wait for a condition; how long it took in seconds.

    Raises:
        AssertionError: it did not become true in time.
    """
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < within_s, f"it did not happen in {within_s:g} s"
        wait_s(every_s)
    return time.monotonic() - begin


def wait_s(seconds: float) -> None:
    """Let time pass."""
    threading.Event().wait(seconds)
