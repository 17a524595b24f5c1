"""Look at a lab around a command that faultbed does not know: quiet time, the command at work, and the time after."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from faultbed.inject.evidence.outside_fault import OutsideFault
from faultbed.testbed.errors import LabError
from faultbed.testbed.lab import Lab
from faultbed.testbed.observe import counters, fingerprint, telemetry
from faultbed.testbed.observe.fingerprint import Fingerprint
from faultbed.testbed.observe.telemetry import CHANGES_LOST, Change

__all__ = ["watch_lab"]

_LOOK_S = 0.5
"""Pause between two looks at the whole state; what the kernels report between them is heard at once."""


@dataclass(kw_only=True)
class _Seen:
    """What was seen while a command was at work."""

    changed: dict[tuple[str, str], str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def add(self, node: str, subject: str, line: str) -> None:
        """Record a difference, under its node and the interface that its subject names."""
        self.changed.setdefault((node, _interface(subject)), line)


def watch_lab(
    lab: Lab, act: Callable[[], None], *, quiet_s: float, hold_s: float, say: Callable[[str], None]
) -> OutsideFault:
    """Watch a lab for `quiet_s`, then while `act` runs and for `hold_s` after it, and compare its state at the end.

    Raises:
        LabError: the lab could not be read before the command; it was not run.
    """
    heard: list[Change] = []
    with telemetry.start(lab, on_change=heard.append) as following:
        say(f"watching the quiet lab for {quiet_s:g} s")
        before = fingerprint.capture(lab)
        first, first_s = counters.read(lab), time.monotonic()
        time.sleep(quiet_s)
        second, second_s = counters.read(lab), time.monotonic()
        seen = _Seen(unknown=fingerprint.unknown(before))
        seen.unknown += [f"the lab was not quiet before the command: {_line(change)}" for change in _real(heard)[:1]]
        heard.clear()
        say("the command is at work")
        with _looking(lab, before, seen):
            act()
            time.sleep(hold_s)
        left: list[str] = []
        third, third_s = second, time.monotonic()
        try:
            third, third_s = counters.read(lab), time.monotonic()
            say("comparing the lab with its state before")
            left = fingerprint.settle(lab, before)
        except LabError as error:
            seen.unknown.append(str(error))
        recorded = following.stop()
    for change in _real(heard):
        seen.add(change.node, change.subject, _line(change))
    seen.unknown += [f"{one.name}: {one.lost}" for one in recorded.machines if one.lost is not None]
    seen.unknown += [f"{change.node}: the kernel dropped reports" for change in heard if change.subject == CHANGES_LOST]
    seen.unknown += [f"{node} has booted meanwhile" for node in counters.restarted(first, third)]
    return OutsideFault(
        changed=seen.changed,
        left=left,
        before=counters.flat_deltas(first, second),
        during=counters.flat_deltas(second, third),
        before_s=second_s - first_s,
        during_s=third_s - second_s,
        unknown=seen.unknown,
    )


@contextlib.contextmanager
def _looking(lab: Lab, before: Fingerprint, seen: _Seen) -> Iterator[None]:
    """Compare the state of a lab with that before, again and again on a thread, during a `with` block."""
    is_over = threading.Event()

    def look() -> None:
        try:
            while not is_over.wait(_LOOK_S):
                now = fingerprint.capture(lab)
                for node, subject, line in fingerprint.differences(before, now):
                    seen.add(node, subject, line)
                seen.unknown += fingerprint.unknown(now)
        except Exception as error:  # noqa: BLE001 (a look that ended for any reason has not seen what came after it)
            seen.unknown.append(f"the lab was no longer looked at: {error}")

    thread = threading.Thread(target=look, name="looks at the lab", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        while thread.is_alive():  # in small steps, so that Ctrl-C reaches the main thread
            thread.join(0.2)


def _real(changes: Iterable[Change]) -> list[Change]:
    return [change for change in changes if change.subject not in ("kernel", CHANGES_LOST)]


def _line(change: Change) -> str:
    return f"{change.node}: {change.subject} {'is gone' if change.text is None else f'is {change.text}'}"


def _interface(subject: str) -> str:
    """Return the interface that a subject names, such as `ctsw1` of `link ctsw1`; empty if it names none."""
    words = iter(subject.split())
    next(words, None)
    return next(words, "")
