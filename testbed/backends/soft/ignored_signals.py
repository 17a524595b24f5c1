"""A clean-up that nobody interrupts: the second Ctrl-C comes while the first one is being obeyed."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

__all__ = ["undisturbed"]

_ASKING_TO_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore what asks this process to stop; for work that is short and bounded.

    Elsewhere than in the main thread signals do not interrupt anyway.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _ASKING_TO_STOP}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: a handler that was not installed from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
