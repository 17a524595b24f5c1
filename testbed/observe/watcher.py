"""The controller's side of a machine's watcher (`faultbed.testbed.node.watch`): requests, samples and changes.

One process per machine runs as long as the lab is open, so that watching costs the traffic next to nothing.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from faultbed.testbed.errors import CommandFailed, FaultbedError, LabError, Unreachable
from faultbed.testbed.observe import clock
from faultbed.testbed.observe.clock import ClockOffset
from faultbed.testbed.stopping import Deadline

if TYPE_CHECKING:
    from faultbed.testbed.lab import Lab

__all__ = ["Watcher", "WatcherGone"]

_MODULE = "faultbed.testbed.node.watch"
_START_S = 60.0
_PUSHED = frozenset({"samples", "change", "kernel"})


class WatcherGone(Unreachable):
    """The watcher has ended, or its machine is gone; a new watcher may be started."""


class Watcher:
    """A running watcher. Thread-safe: one request at a time."""

    def __init__(self, lab: Lab, machine: str) -> None:
        self.machine = machine
        self._kernel_messages = lab.kernel_messages
        self._channel = lab.open_module(machine, _MODULE)
        self._request_lock = threading.Lock()
        self._seq = 0
        self._answers: queue.Queue[dict[str, Any] | FaultbedError] = queue.Queue()
        self.on_news: Callable[[Mapping[str, Any]], None] | None = None
        """Called with each batch of samples and each change while it follows, on the watcher's own thread."""
        try:
            # The first answer waits for the interpreter; the quickest one counts.
            self.offset = clock.measure(self._channel, timeout_s=_START_S)
        except BaseException:
            self._channel.close()
            raise
        threading.Thread(target=self._pump, name=f"watcher of {machine}", daemon=True).start()

    def request(self, request: Mapping[str, Any], *, timeout_s: float = 60.0) -> dict[str, Any]:
        """Send a request and return its answer.

        Raises:
            WatcherGone: the watcher has ended.
            CommandFailed: no answer in time.
            LabError: the watcher reported that the request failed.
        """
        with self._request_lock:
            self._seq += 1
            try:
                self._channel.send({**request, "seq": self._seq})
            except Unreachable as error:
                raise WatcherGone(str(error)) from error
            return self._answer(str(request["do"]), Deadline(timeout_s))

    def clock(self) -> ClockOffset:
        """Measure the machine's clock offset.

        Raises:
            WatcherGone: the watcher has ended.
            CommandFailed: no answer in time.
        """
        return clock.measure_by(lambda: int(self.request({"do": "clock"})["monotonic_ns"]))

    def renew_clock(self) -> None:
        """Measure the clock offset again, and keep the narrower one, or the new one if the clock has moved."""
        now = self.clock()
        self.offset = clock.renewed(self.offset, now)

    def _answer(self, request: str, deadline: Deadline) -> dict[str, Any]:
        while True:
            try:
                answer = self._answers.get(timeout=deadline.step_s)
            except queue.Empty:
                if not deadline.is_over:
                    continue
                raise CommandFailed(f"{self.machine}: no answer to `{request}` in {deadline.waited}") from None
            if isinstance(answer, FaultbedError):
                self._answers.put(answer)
                raise answer
            # Answers to requests that timed out may come late.
            if answer.get("seq") == self._seq:
                if answer["event"] == "error":
                    raise LabError(f"{self.machine}: {request}: {answer.get('error')}")
                return answer

    def _pump(self) -> None:
        while True:
            try:
                message = self._channel.receive(timeout_s=3600.0)
            except CommandFailed:  # no message within the timeout
                continue
            except FaultbedError as error:
                self._answers.put(WatcherGone(str(error)))
                return
            if message is None:
                self._answers.put(WatcherGone(f"{self.machine}: its watcher has ended{self._stderr()}"))
                return
            if message.get("event") not in _PUSHED:
                self._answers.put(message)
            elif message["event"] == "kernel":
                self._kernel_messages.keep(self.machine, message)
            elif self.on_news is not None:
                self.on_news(message)

    def _stderr(self) -> str:
        text = getattr(self._channel, "stderr", str)()
        return f": {text}" if text else ""

    def close(self) -> None:
        """Close the channel, which ends the watcher. Safe to call twice."""
        self._channel.close()
