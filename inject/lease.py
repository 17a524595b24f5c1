"""The lease of one fault: a channel to its holder, kept alive, and whether a target that lost it has reverted."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inject.channels import START_S, UNIT_PREFIX, open_holder, revert_file
from inject.node.holder import REVERT_DIR
from testbed.errors import FaultbedError, FaultError, Unreachable
from testbed.observe import clock

if TYPE_CHECKING:
    from inject.fault_plan import PlannedFault
    from testbed.lab import Lab
    from testbed.remote.remote_node import Channel

__all__ = ["ANSWER_S", "Lease"]

ANSWER_S = 60.0
FRESH_S = 5.0
"""Age of a clock's measurement from which it is taken again before arming."""


class Lease:
    """A holder that stands ready on its target, and keeps its fault as long as it hears from us.

    Every question renews the lease, and so does a beat every fifth of `ttl_s`. `where` is what messages call the fault.
    """

    def __init__(self, lab: Lab, planned: PlannedFault, *, ttl_s: float) -> None:
        self.instance = f"{planned.id}-{secrets.token_hex(3)}"
        self.ttl_s = ttl_s
        self.patience_s = float(planned.request.get("patience_s", 0.0))
        self.offset = clock.ClockOffset(offset_ns=0, error_ns=0)
        self._measured_s = time.monotonic()
        place = planned.place
        self.where = f"{planned.kind} on {planned.target.text} ({'here' if place.local else place.node})"
        self._lab = lab
        self._planned = planned
        self._channel: Channel | None = None
        self._asked = 0
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._beats = threading.Thread(target=self._beat, name=f"lease of {planned.id}", daemon=True)

    def begin(self) -> None:
        """Open the channel, measure the clock, begin to beat.

        Raises:
            FaultError: the holder did not start.
            Unreachable: its target does not answer.
        """
        with self._lock:  # a clear meanwhile (Ctrl-C) waits until there is a holder to be told
            self._channel = open_holder(self._lab, self._planned, instance=self.instance, ttl_s=self.ttl_s)
            ready = self._channel.receive(timeout_s=START_S)
            if ready is None or ready.get("event") != "ready":
                raise FaultError(f"{self.where}: the holder did not start{_said(self._channel)}")
            self.offset = clock.measure(self._channel)
            self._measured_s = time.monotonic()
            self._beats.start()

    def renew_clock(self) -> None:
        """Measure the target's clock again if that was long ago: a run prepares its faults minutes before it arms them.

        Raises:
            FaultError: it could not tell.
            Unreachable: it is gone.
        """
        if time.monotonic() - self._measured_s > FRESH_S:
            self.offset = clock.renewed(self.offset, self._clock())
            self._measured_s = time.monotonic()

    def widen_clock(self) -> None:
        """Measure the target's clock at the end; the error of its times holds both measurements from then on."""
        with contextlib.suppress(FaultbedError):  # a holder that does not answer any more has told all that it will
            self.offset = clock.widened(self.offset, self._clock())

    def _clock(self) -> clock.ClockOffset:
        return clock.measure_by(lambda: int(self.ask({"do": "clock"})["monotonic_ns"]), rounds=3)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The holder's answer.

        Raises:
            FaultError: it could not do what it was asked to.
            Unreachable: it is gone, or was let go; its target reverts by itself.
        """
        with self._lock:
            if self._channel is None:
                raise Unreachable(f"{self.where}: its holder has been let go")
            self._asked += 1
            self._channel.send({**request, "seq": self._asked})
            answer = self._answer(self._channel, time.monotonic() + ANSWER_S + self.patience_s)
        if answer is None:
            raise Unreachable(f"{self.where}: its holder has ended; the target reverts by itself")
        if answer.get("event") == "error":
            raise FaultError(f"{self.where}: {answer.get('error')} (while asked to {answer.get('where')})")
        return answer

    def _answer(self, channel: Channel, deadline: float) -> dict[str, Any] | None:
        """The answer to what was asked last; not one that is owed to a question which Ctrl-C ended."""
        while True:
            answer = channel.receive(timeout_s=max(0.0, deadline - time.monotonic()))
            if answer is None or answer.get("seq") == self._asked:
                return answer
            if "seq" not in answer and answer.get("event") == "error":  # it could not read the question
                return answer

    def let_go(self) -> None:
        """Stop beating and close the channel; a holder that still holds reverts at once."""
        self._stop.set()
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        if self._beats.is_alive() and self._beats is not threading.current_thread():
            self._beats.join(timeout=2)

    def pause(self, seconds: float) -> None:
        """Wait, no longer than until it is let go."""
        self._stop.wait(seconds)

    def has_reverted(self) -> bool:
        """Whether the target has reverted by itself; only where the holder is gone does this say something.

        Raises:
            LabError: the target does not tell.
        """
        if self._planned.place.local:
            return not revert_file(self._lab, self.instance).exists()
        stored = f"{REVERT_DIR}/{self.instance}.revert"
        script = f"[ ! -e {stored} ] && ! systemctl is-active --quiet {self.unit}"
        node = self._lab.carrier(self._planned.place.node)
        return node.run(["sh", "-c", script], check=False, timeout_s=5).rc == 0

    @property
    def unit(self) -> str:
        """Name of the transient systemd unit of a holder on a target."""
        return f"{UNIT_PREFIX}{self.instance}"

    @property
    def guardian_pid(self) -> int | None:
        """Process id of the guardian of a local holder."""
        return getattr(self._channel, "guardian_pid", None)

    def to_node(self, at_ns: int) -> int:
        """The target's time of a controller time."""
        return at_ns - self.offset.offset_ns

    def in_our_time(self, observed: Mapping[str, Any]) -> dict[str, Any]:
        """What a holder has observed, with its times as the controller's.

        `between_ns` is as much wider as the clock may be wrong: the first hit came between these two.
        """
        ours = dict(observed)
        for name in ("first_ns", "last_ns", "armed_at_ns", "clear_ns"):
            if ours.get(name) is not None:
                ours[name] = self.offset.to_controller(ours[name])
        if (between := ours.get("between_ns")) is not None:
            low_ns, high_ns = (self.offset.to_controller(at_ns) for at_ns in between)
            ours["between_ns"] = (low_ns - self.offset.error_ns, high_ns + self.offset.error_ns)
        ours["edges"] = [(self.offset.to_controller(at), on) for at, on in observed.get("edges", ())]
        ours["changes"] = [
            (self.offset.to_controller(begin), self.offset.to_controller(end), on)
            for begin, end, on in observed.get("changes", ())
        ]
        return ours

    def _beat(self) -> None:
        while not self._stop.wait(self.ttl_s / 5):
            # Whoever holds the lock is asking something, and every question renews the lease.
            if self._lock.acquire(blocking=False):
                try:
                    self.ask({"do": "beat"})
                except FaultbedError:
                    return
                finally:
                    self._lock.release()


def _said(channel: Channel) -> str:
    said = getattr(channel, "stderr", str)()
    return f"; it said: {said}" if said else ""
