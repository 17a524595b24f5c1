"""The controller's side of a machine's watcher (`testbed.node.watch`): questions, samples and changes.

One process a machine for as long as the lab is open, so that looking costs the watched traffic next to nothing.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from testbed.errors import CommandFailed, FaultbedError, LabError, Unreachable
from testbed.observe import clock
from testbed.observe.clock import ClockOffset

if TYPE_CHECKING:
    from testbed.lab import Lab

__all__ = ["Watcher", "WatcherGone"]

_MODULE = "testbed.node.watch"
_START_S = 60.0
_PUSHED = frozenset({"samples", "change"})


class WatcherGone(Unreachable):
    """The program has ended, or its machine; a new one may be started."""


class Watcher:
    """A watcher that runs. Thread-safe: one question at a time."""

    def __init__(self, lab: Lab, machine: str) -> None:
        lab.ensure_code(machine)
        self.machine = machine
        self._channel = lab.node(machine).open(lab.python(_MODULE))
        self._asking = threading.Lock()
        self._seq = 0
        self._answers: queue.Queue[dict[str, Any] | FaultbedError] = queue.Queue()
        self.on_news: Callable[[Mapping[str, Any]], None] | None = None
        """Given each batch of samples and each change, on the watcher's own thread, while it follows."""
        try:
            # The first answer waits for the interpreter; of all of them, the quickest counts.
            self.offset = clock.measure(self._channel, timeout_s=_START_S)
        except BaseException:
            self._channel.close()
            raise
        threading.Thread(target=self._pump, name=f"watcher of {machine}", daemon=True).start()

    def ask(self, request: Mapping[str, Any], *, timeout_s: float = 60.0) -> dict[str, Any]:
        """One question, one answer.

        Raises:
            WatcherGone: it has ended.
            CommandFailed: no answer in time.
            LabError: it could not tell.
        """
        with self._asking:
            self._seq += 1
            try:
                self._channel.send({**request, "seq": self._seq})
            except Unreachable as error:
                raise WatcherGone(str(error)) from error
            return self._answer(str(request["do"]), time.monotonic() + timeout_s, timeout_s)

    def clock(self) -> ClockOffset:
        """The machine's clock as it is now.

        Raises:
            WatcherGone: it has ended.
            CommandFailed: no answer in time.
        """
        return clock.measure_by(lambda: int(self.ask({"do": "clock"})["monotonic_ns"]))

    def renew_clock(self) -> None:
        """Measure its offset again: the narrower one counts, but when the clock has moved, what it is now."""
        now = self.clock()
        self.offset = clock.renewed(self.offset, now)

    def _answer(self, what: str, deadline: float, timeout_s: float) -> dict[str, Any]:
        while True:
            try:
                answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise CommandFailed(f"{self.machine}: no {what} in {timeout_s:.0f} s") from None
            if isinstance(answer, FaultbedError):
                self._answers.put(answer)
                raise answer
            # What was asked by someone who gave up waiting may be answered late.
            if answer.get("seq") == self._seq:
                if answer["event"] == "error":
                    raise LabError(f"{self.machine}: asked for {what}: {answer.get('error')}")
                return answer

    def _pump(self) -> None:
        while True:
            try:
                message = self._channel.receive(timeout_s=3600.0)
            except CommandFailed:  # silence is no news
                continue
            except FaultbedError as error:
                self._answers.put(WatcherGone(str(error)))
                return
            if message is None:
                self._answers.put(WatcherGone(f"{self.machine}: its watcher has ended{self._said()}"))
                return
            if message.get("event") not in _PUSHED:
                self._answers.put(message)
            elif self.on_news is not None:
                self.on_news(message)

    def _said(self) -> str:
        said = getattr(self._channel, "stderr", str)()
        return f": {said}" if said else ""

    def close(self) -> None:
        """End it. Safe to call twice."""
        self._channel.close()
