"""Answer Ctrl-C, SIGTERM and SIGHUP: report within a second what the command is doing, and end it by its deadline.

Each signal raises KeyboardInterrupt on the main thread, so that every cleanup runs. A thread of its own watches for
signals, too (`signal.set_wakeup_fd`), because the main thread may be inside a call that does not return. It reports
that the command is ending if that takes longer than a moment. If the command is still there at its deadline
(`faultbed.testbed.stopping`), the thread ends the process: the holders of its faults see the end of their channels and
revert, or their leases expire.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from faultbed.harness.exit_code import ExitCode
from faultbed.testbed import stopping

__all__ = ["answer"]

_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_QUIET_S = 0.3
"""A command that ends within this time needs no line that it is ending."""
_RECORD_S = 1.0
"""How long recording the state of the lab may take at the deadline: its disk may be slow."""


def answer(say: Callable[[str], None]) -> None:
    """Answer the signals for the rest of this process; call it on the main thread. `say` prints a line for the user."""
    readable, writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    for number in _STOP:
        if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` ignores SIGHUP: the command outlives its terminal
            signal.signal(number, _as_interrupt)
    threading.Thread(target=_watch, args=(readable, say), name="stop signals", daemon=True).start()


def _as_interrupt(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001 (signal's signature)
    raise KeyboardInterrupt


def _watch(readable: int, say: Callable[[str], None]) -> None:
    while True:
        end_s = stopping.hard_end_s()
        left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
        if select.select([readable], [], [], left_s)[0]:
            for number in os.read(readable, 4096):
                if number in _STOP:
                    # On a thread: a terminal that is stopped by Ctrl-S would block this one.
                    count = stopping.request()
                    threading.Thread(target=_report, args=(signal.Signals(number), count, say), daemon=True).start()
        elif (end_s := stopping.hard_end_s()) is not None and time.monotonic() >= end_s:
            _end_by_force(say)


def _report(number: signal.Signals, count: int, say: Callable[[str], None]) -> None:
    if count == 1:
        time.sleep(_QUIET_S)
        doing = f" during: {stopping.activity()}" if stopping.activity() else ""
        say(
            f"{number.name}{doing}; ending, which takes at most {stopping.FIRST_S:g} s; a second one ends it within "
            f"{stopping.SECOND_S:g} s and leaves what is not yet cleared to its lease"
        )
    elif count == 2:  # noqa: PLR2004 (a further one changes nothing)
        say(f"{number.name} again: ending within {stopping.SECOND_S:g} s")


def _end_by_force(say: Callable[[str], None]) -> NoReturn:
    """End the process, which has not ended by its deadline. The sentence has only what was observed."""
    code = ExitCode.DIRTY if stopping.is_owed() else ExitCode.ERROR
    ending = threading.Thread(target=lambda: say(_sentence()), daemon=True)
    ending.start()
    ending.join(_RECORD_S)
    os._exit(code)


def _sentence() -> str:
    state = "; ".join(stopping.leave_all()) or "`faultbed status` shows the state of the lab"
    return f"interrupted, and ended by force because something did not answer in time: {state}"
