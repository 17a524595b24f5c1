"""The lease of one fault: a channel to its holder, and the heartbeats that keep it alive.

If the holder is lost, the lease also determines whether its target has reverted by itself.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from faultbed.inject.leases.channels import START_S, UNIT_PREFIX, open_holder, revert_file
from faultbed.inject.node.holder import REVERT_DIR
from faultbed.testbed.errors import FaultbedError, FaultError, Unreachable
from faultbed.testbed.observe import clock
from faultbed.testbed.stopping import Deadline

if TYPE_CHECKING:
    from faultbed.inject.leases.leased import Leased
    from faultbed.testbed.lab import Lab
    from faultbed.testbed.remote.remote_node import Channel

__all__ = ["ANSWER_S", "Lease"]

ANSWER_S = 60.0
"""Deadline of a holder's answer, in addition to the patience that its fault requests."""
FRESH_S = 5.0
"""A clock offset older than this is measured again before arming."""


class Lease:
    """The controller's side of a holder, which keeps its fault as long as it hears from the controller.

    Every request renews the lease. A thread sends a heartbeat every fifth of `ttl_s`. `where` names the fault in
    messages.
    """

    def __init__(self, lab: Lab, planned: Leased, *, ttl_s: float) -> None:
        self.instance = f"{planned.id}-{secrets.token_hex(3)}"
        self.ttl_s = ttl_s
        self.patience_s = float(planned.request.get("patience_s", 0.0))
        self.offset = clock.ClockOffset(offset_ns=0, error_ns=0)
        self.drifted_ns = 0
        """Lower bound of how far the target's clock and the controller's moved apart between arming and clearing."""
        self._measured_s = time.monotonic()
        place = planned.place
        self.where = f"{planned.kind} on {planned.target_text} ({'here' if place.local else place.node})"
        self._lab = lab
        self._planned = planned
        self._channel: Channel | None = None
        self._seq = 0
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._beats = threading.Thread(target=self._beat, name=f"lease of {planned.id}", daemon=True)

    def begin(self) -> None:
        """Open the channel, measure the clock offset, and start the heartbeats.

        Raises:
            FaultError: the holder did not start.
            Unreachable: its target does not answer.
        """
        with self._lock:  # a `clear` from another thread (Ctrl-C) waits until there is a holder to clear
            self._channel = open_holder(self._lab, self._planned, instance=self.instance, ttl_s=self.ttl_s)
            ready = self._channel.receive(timeout_s=START_S)
            if ready is None or ready.get("event") != "ready":
                raise FaultError(f"{self.where}: the holder did not start{_stderr_of(self._channel)}")
            self.offset = clock.measure(self._channel)
            self._measured_s = time.monotonic()
            self._beats.start()

    def renew_clock(self) -> None:
        """Measure the target's clock offset again if it is old: a run prepares its faults minutes before it arms them.

        Raises:
            FaultError: the holder could not report its time.
            Unreachable: the holder is gone.
        """
        if time.monotonic() - self._measured_s > FRESH_S:
            self.offset = clock.renewed(self.offset, self._clock())
            self._measured_s = time.monotonic()

    def widen_clock(self) -> None:
        """Measure the clock offset again after clearing, and widen its error to cover both measurements."""
        with contextlib.suppress(FaultbedError):  # a holder that is gone gives no second measurement
            now = self._clock()
            self.drifted_ns = clock.drifted_ns(self.offset, now)
            self.offset = clock.widened(self.offset, now)

    def _clock(self) -> clock.ClockOffset:
        return clock.measure_by(lambda: int(self.request({"do": "clock"})["monotonic_ns"]), rounds=3)

    def request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request to the holder and return its answer.

        Raises:
            FaultError: the holder reported an error.
            Unreachable: the holder is gone, or its lease was released; its target reverts by itself.
        """
        with self._lock:
            if self._channel is None:
                raise Unreachable(f"{self.where}: its lease was released")
            self._seq += 1
            self._channel.send({**request, "seq": self._seq})
            answer = self._answer(self._channel, Deadline(ANSWER_S + self.patience_s))
        if answer is None:
            raise Unreachable(f"{self.where}: its holder has ended; the target reverts by itself")
        if answer.get("event") == "error":
            raise FaultError(f"{self.where}: {answer.get('error')} (request: {answer.get('where')})")
        return answer

    def _answer(self, channel: Channel, deadline: Deadline) -> dict[str, Any] | None:
        """Receive the answer to the last request, skipping answers to requests that Ctrl-C interrupted."""
        while True:
            answer = channel.receive(timeout_s=deadline.left_s)
            if answer is None or answer.get("seq") == self._seq:
                return answer
            if "seq" not in answer and answer.get("event") == "error":  # the holder could not parse the request
                return answer

    def release(self) -> None:
        """Stop the heartbeats and close the channel; a holder whose fault is on reverts at once."""
        self._stop.set()
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        if self._beats.is_alive() and self._beats is not threading.current_thread():
            self._beats.join(timeout=2)

    def pause(self, seconds: float) -> None:
        """Wait for `seconds`, or until the lease is released."""
        self._stop.wait(seconds)

    def has_reverted(self) -> bool:
        """Return whether the target has reverted by itself; meaningful only if the holder is gone.

        Raises:
            LabError: the target does not answer.
        """
        if self._planned.place.local:
            return not revert_file(self._lab, self.instance).exists()
        stored = f"{REVERT_DIR}/{self.instance}.revert"
        script = f"[ ! -e {stored} ] && ! systemctl is-active --quiet {self.unit}"
        node = self._lab.carrier(self._planned.place.node)
        return node.run(["sh", "-c", script], check=False, timeout_s=5).rc == 0

    def wait_until_reverted(self, error: FaultbedError) -> tuple[bool, str]:
        """Wait until a target whose holder is gone has reverted by itself, at most until the lease is over.

        Args:
            error: why the controller considers the holder gone.

        Returns:
            Whether the target has reverted, and the last error.
        """
        deadline = Deadline(self.ttl_s + 2 + self.patience_s)
        while True:
            try:
                if self.has_reverted():
                    return True, str(error)
            except FaultbedError as unreachable:
                error = unreachable
            if deadline.is_over:
                return False, str(error)
            self.pause(0.2)

    @property
    def unit(self) -> str:
        """Name of the holder's transient systemd unit on the target."""
        return f"{UNIT_PREFIX}{self.instance}"

    @property
    def guardian_pid(self) -> int | None:
        """Process id of a local holder's guardian; None for other holders."""
        return getattr(self._channel, "guardian_pid", None)

    def to_node(self, at_ns: int) -> int:
        """Convert a controller time to the target's time."""
        return at_ns - self.offset.offset_ns

    def _beat(self) -> None:
        while not self._stop.wait(self.ttl_s / 5):
            # If the lock is taken, another thread sends a request, and every request renews the lease.
            if self._lock.acquire(blocking=False):
                try:
                    self.request({"do": "beat"})
                except FaultbedError:
                    return
                finally:
                    self._lock.release()


def _stderr_of(channel: Channel) -> str:
    output = getattr(channel, "stderr", str)()
    return f"; its output: {output}" if output else ""
