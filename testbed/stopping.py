"""The time that a command has left once it was requested to stop (Ctrl-C, SIGTERM, SIGHUP).

A command ends within `FIRST_S` of the first signal, and within `SECOND_S` of the second one. Every wait for a machine,
thread or process therefore has a `Deadline`, which a request to stop shortens. Cleanup has stages, so that a machine
that hangs uses up the time of its own stage only: the workload ends, faults are cleared, the lab is compared.

The signals are handled by `faultbed.harness.cli.stop_signals`. Without it, for example in a pytest session, no request
is made here and a deadline is just its timeout.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

__all__ = [
    "COMPARE_S",
    "FAULTS_S",
    "FIRST_S",
    "SECOND_S",
    "STEP_S",
    "WORKLOAD_S",
    "Deadline",
    "activity",
    "allow",
    "hard_end_s",
    "is_owed",
    "is_requested",
    "leave_all",
    "owe",
    "report_activity",
    "request",
    "reset",
    "settle",
]

FIRST_S, SECOND_S = 30.0, 5.0
"""Within how many seconds of the first and of the second signal a command ends."""
WORKLOAD_S, FAULTS_S, COMPARE_S = 8.0, 16.0, 23.0
"""Seconds after the first signal at which the waits of each stage of the cleanup end."""
_AT_ONCE_S = 1.0
"""Seconds after the second signal at which every wait ends."""
_MARGIN_S = 1.0
"""Seconds before the promised end at which a command that is still busy is ended by force."""
STEP_S = 0.5
"""Longest single wait: a request to stop shortens a wait that has already begun."""
_LEAST_S = 0.2
"""A wait that begins when no time is left still lasts this long: an answer that is on its way counts."""

Leave = Callable[[Sequence[str]], str]
"""Called when a command is ended by force, with the sentences so far: leave the lab as it is, and return a sentence.
It must not wait for a machine."""


class _Request:
    """The process's request to stop. Signals arrive on one thread, and every thread reads."""

    def __init__(self) -> None:
        self.count = 0
        self.first_s = 0.0
        self.stage_s = WORKLOAD_S
        self.until_s: float | None = None
        self.hard_end_s: float | None = None
        self.activity = ""
        self.owed: dict[int, Leave] = {}


_request = _Request()
_lock = threading.Lock()


class Deadline:
    """The end of a wait: `timeout_s` from now, or earlier once the command was requested to stop."""

    def __init__(self, timeout_s: float) -> None:
        self._began_s = time.monotonic()
        self._end_s = self._began_s + max(0.0, timeout_s)

    @property
    def left_s(self) -> float:
        """Seconds left, at least 0."""
        until_s = _request.until_s
        end_s = self._end_s if until_s is None else min(self._end_s, max(until_s, self._began_s + _LEAST_S))
        return max(0.0, end_s - time.monotonic())

    @property
    def step_s(self) -> float:
        """Timeout of the next single wait, at most `STEP_S`; the caller then reads `is_over`."""
        return min(STEP_S, self.left_s)

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return self.left_s <= 0

    @property
    def waited(self) -> str:
        """How long the wait has been, for messages: `8 s`, or `3 s, because this command is ending`."""
        waited_s = time.monotonic() - self._began_s
        early = ", because this command is ending" if is_requested() and time.monotonic() < self._end_s else ""
        return f"{waited_s:.0f} s{early}"

    def wait(self, event: threading.Event) -> bool:
        """Wait until an event is set or no time is left; return whether it is set."""
        while not event.wait(self.step_s):
            if self.is_over:
                return event.is_set()
        return True

    def join(self, thread: threading.Thread) -> bool:
        """Wait until a thread ends or no time is left; return whether it has ended."""
        while thread.is_alive() and not self.is_over:
            thread.join(self.step_s)
        return not thread.is_alive()


def request() -> int:
    """Record a request to stop, and return how many there were. The second one ends all waits at once."""
    now_s = time.monotonic()
    _request.count += 1
    if _request.count == 1:
        _request.first_s = now_s
        _request.until_s, _request.hard_end_s = now_s + _request.stage_s, now_s + FIRST_S - _MARGIN_S
    elif _request.count == 2:  # noqa: PLR2004 (a third one changes nothing: the process ends in a moment)
        _request.until_s = min(_request.until_s or now_s, now_s) + _AT_ONCE_S
        _request.hard_end_s = min(_request.hard_end_s or now_s, now_s + SECOND_S - _MARGIN_S)
    return _request.count


def is_requested() -> bool:
    """Return whether the command was requested to stop."""
    return _request.count > 0


def allow(stage_s: float) -> None:
    """Begin a stage: its waits last until `stage_s` after the first request; after a second one they do not.

    The main thread may get here before the request is recorded, which another thread does.
    """
    if _request.count == 0:
        _request.stage_s = stage_s
    elif _request.count == 1:
        _request.until_s = max(_request.until_s or 0.0, _request.first_s + stage_s)


def hard_end_s() -> float | None:
    """Return when the process is to be ended by force (time.monotonic); None without a request to stop."""
    return _request.hard_end_s


def report_activity(text: str) -> None:
    """Record what the command is doing, for the line that answers a signal."""
    _request.activity = text


def activity() -> str:
    """Return what the command is doing; empty if it has not reported anything."""
    return _request.activity


def owe(key: object, leave: Leave) -> None:
    """Record what to do for something that still has to be restored, should the command be ended by force."""
    with _lock:
        _request.owed[id(key)] = leave


def settle(key: object) -> None:
    """Forget what `owe` has recorded: it was restored, or its state is recorded on disk."""
    with _lock:
        _request.owed.pop(id(key), None)


def is_owed() -> bool:
    """Return whether anything still has to be restored."""
    return bool(_request.owed)


def leave_all() -> list[str]:
    """Leave everything that still has to be restored as it is, the newest first, and return a sentence for each."""
    with _lock:
        owed = list(reversed(_request.owed.values()))
        _request.owed.clear()
    sentences: list[str] = []
    for leave in owed:
        if sentence := leave(tuple(sentences)):
            sentences.append(sentence)
    return sentences


def reset() -> None:
    """Forget the request and everything that is owed, for tests: one process runs many commands."""
    global _request  # noqa: PLW0603 (signals belong to the process, and so does the request)
    _request = _Request()
