"""Load of somebody else: datagrams from this host through the fabric, paced, dyed with ECT(1), read by nobody.

A child of the holder sends them, so that pacing and the holder's own work do not wait for each other; it ends when its
parent is gone, and with the unit.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from typing import Any

from inject.node.actuator import Refused
from inject.node.child import Child

__all__ = ["BackgroundActuator"]

# The discard service (RFC 863): that nobody listens is all right, the kernel answers once a second at most.
_DISCARD = 9
_ECT1 = 1
_SLICE_S = 0.01
_HEADERS = 28


class BackgroundActuator:
    """Sends datagrams of `size_bytes` from `source` to `destination` at `rate_bps`, on `flows` source ports in turn."""

    poll_s = 0.05

    def __init__(self, *, source: str, destination: str, rate_bps: int, flows: int, size_bytes: int) -> None:
        self._source, self._destination = source, destination
        self._rate_bps, self._flows, self._size_bytes = rate_bps, flows, size_bytes
        self._child = Child()

    def prepare(self) -> dict[str, Any]:
        """Refuse an address that is not this host's."""
        for sender in self._sockets():
            sender.close()
        return self.read()

    def revert_script(self) -> str:
        """Nothing: the child ends with the holder, by itself and with the unit."""
        return "true"

    def on(self) -> None:
        """Start sending."""
        senders = self._sockets()
        self._child.start(lambda: self._send(senders))
        for sender in senders:
            sender.close()

    def off(self) -> None:
        """Stop sending."""
        self._child.stop()

    def read(self) -> dict[str, Any]:
        """Whether the child is there, and how many datagrams the kernel has taken from it."""
        return {
            "applied": self._child.is_there(),
            "source": self._source,
            "destination": self._destination,
            "sent": self._child.count,
        }

    def hits(self) -> int:
        """Datagrams sent so far."""
        return self._child.count

    def close(self) -> None:
        """Nothing is held open."""

    def _sockets(self) -> list[socket.socket]:
        made = []
        for _ in range(self._flows):
            sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            made.append(sender)
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, _ECT1)
            try:
                sender.bind((self._source, 0))
            except OSError as error:
                for each in made:
                    each.close()
                raise Refused(f"{self._source} is not an address of this host: {error}") from None
        return made

    def _send(self, senders: list[socket.socket]) -> None:
        """Send until nobody wants it; what could not be sent in its slice is not made up for."""
        # The holder's class is for edges on time: load has to compete like any other process.
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        payload, per_s, owed = bytes(self._size_bytes - _HEADERS), self._rate_bps / 8 / self._size_bytes, 0.0
        turn = itertools.cycle(senders)
        before = time.monotonic()
        while self._child.wanted():
            now = time.monotonic()
            owed = min(owed + (now - before) * per_s, 2 * _SLICE_S * per_s + 1)
            before = now
            while owed >= 1:
                owed -= 1
                # No room, or no route while a link is down: lost, as it would be in the fabric.
                with contextlib.suppress(OSError):
                    next(turn).sendto(payload, (self._destination, _DISCARD))
                    self._child.add()
            time.sleep(_SLICE_S)
