"""Load of somebody else: datagrams from this host through the fabric, paced, dyed with ECT(1), read by nobody.

A child of the holder sends them, so that pacing and the holder's own work do not wait for each other; it ends when its
parent is gone, and with the unit.
"""

from __future__ import annotations

import itertools
import mmap
import os
import signal
import socket
import struct
import time
from typing import Any

from inject.node.actuator import Refused

__all__ = ["BackgroundActuator"]

# The discard service (RFC 863): that nobody listens is all right, the kernel answers once a second at most.
_DISCARD = 9
_ECT1 = 1
_SLICE_S = 0.01
_COUNT = struct.Struct("=Q")


class BackgroundActuator:
    """Sends datagrams of `size_bytes` from `source` to `destination` at `rate_bps`, on `flows` source ports in turn."""

    poll_s = 0.05

    def __init__(self, *, source: str, destination: str, rate_bps: int, flows: int, size_bytes: int) -> None:
        self._source, self._destination = source, destination
        self._rate_bps, self._flows, self._size_bytes = rate_bps, flows, size_bytes
        self._sent = mmap.mmap(-1, mmap.PAGESIZE)
        self._child = 0

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
        holder = os.getpid()
        self._child = os.fork()
        if not self._child:
            try:
                _send(senders, (self._destination, _DISCARD), self._rate_bps, self._size_bytes, holder, self._sent)
            finally:
                os._exit(1)
        for sender in senders:
            sender.close()

    def off(self) -> None:
        """Stop sending."""
        child, self._child = self._child, 0
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    def read(self) -> dict[str, Any]:
        """Whether the child is there, and how many datagrams the kernel has taken from it."""
        if self._child and os.waitpid(self._child, os.WNOHANG) != (0, 0):
            self._child = 0
        return {
            "applied": bool(self._child),
            "source": self._source,
            "destination": self._destination,
            "sent": self.hits(),
        }

    def hits(self) -> int:
        """Datagrams sent so far."""
        count: int = _COUNT.unpack_from(self._sent)[0]
        return count

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


def _send(
    senders: list[socket.socket], to: tuple[str, int], rate_bps: int, size_bytes: int, holder: int, sent: mmap.mmap
) -> None:
    """Send until the holder is gone; what could not be sent in its slice is not made up for."""
    # The holder's class is for edges on time: load has to compete like any other process.
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    payload, count, owed = bytes(size_bytes - 28), 0, 0.0
    turn = itertools.cycle(senders)
    before = time.monotonic()
    while os.getppid() == holder:
        now = time.monotonic()
        owed = min(owed + (now - before) * rate_bps / 8 / size_bytes, 2 * _SLICE_S * rate_bps / 8 / size_bytes + 1)
        before = now
        while owed >= 1:
            owed -= 1
            try:
                next(turn).sendto(payload, to)
            except OSError:  # no room, or no route while a link is down: lost, as it would be in the fabric
                continue
            count += 1
            _COUNT.pack_into(sent, 0, count)
        time.sleep(_SLICE_S)
