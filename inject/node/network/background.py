"""Background load: UDP datagrams through the fabric, paced or in bursts, marked with ECT(1), without a receiver.

A child of the holder sends them, so that pacing and the holder's work do not delay each other. It ends with the holder.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from typing import Any

from faultbed.inject.node.actuator import Actuator, Refused, enter_netns
from faultbed.inject.node.child import Child

__all__ = ["BackgroundActuator"]

# The discard service (RFC 863). No program listens there, and the kernel answers at most once a second.
_DISCARD = 9
_ECT1 = 1
_SLICE_S = 0.01
_HEADERS = 28


class BackgroundActuator(Actuator):
    """Sends datagrams of `size_bytes` to `destination` at `rate_bps`, on `flows` source ports of each source in turn.

    A source is a network namespace (None: this machine's) and an address there. With `burst_s` all sources send for
    that time in every `period_s`.
    """

    poll_s = 0.05

    def __init__(
        self,
        *,
        sources: list[tuple[str | None, str]],
        destination: str,
        rate_bps: int,
        flows: int,
        size_bytes: int,
        burst_s: float = 0.0,
        period_s: float = 0.0,
    ) -> None:
        self._sources, self._destination = sources, destination
        self._rate_bps, self._flows, self._size_bytes = rate_bps, flows, size_bytes
        self._burst_s, self._period_s = burst_s, period_s
        self._child = Child()

    def prepare(self) -> dict[str, Any]:
        """Refuse an address that does not exist here."""
        for sender in self._sockets():
            sender.close()
        return self.read()

    def revert_script(self) -> str:
        return "true"

    def on(self) -> None:
        senders = self._sockets()
        self._child.start(lambda: self._send(senders))
        for sender in senders:
            sender.close()

    def off(self) -> None:
        self._child.stop()

    def read(self) -> dict[str, Any]:
        """Report whether the child runs, and how many datagrams it has sent."""
        return {
            "applied": self._child.is_running(),
            "source": ", ".join(address for _, address in self._sources),
            "destination": self._destination,
            "sent": self._child.count,
        }

    def hits(self) -> int:
        return self._child.count

    def _sockets(self) -> list[socket.socket]:
        """Open a socket for each flow: first one of each source, then the second of each, and so on."""
        by_source: list[list[socket.socket]] = []
        try:
            for namespace, address in self._sources:
                enter_netns(namespace)
                by_source.append([])
                for _ in range(self._flows):
                    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
                    by_source[-1].append(sender)
                    sender.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, _ECT1)
                    sender.bind((address, 0))
        except OSError as error:
            for opened in itertools.chain(*by_source):
                opened.close()
            raise Refused(f"{address} is not an address of this machine: {error}") from None
        return list(itertools.chain(*zip(*by_source)))  # noqa: B905 - Python 3.9 on nodes has no `strict`

    def _send(self, senders: list[socket.socket]) -> None:
        """Send while the holder exists; datagrams that miss their slice are not sent later."""
        # The holder's scheduling class makes edges punctual; this load competes like a normal process.
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        payload = bytes(self._size_bytes - _HEADERS)
        per_s = self._rate_bps / 8 / self._size_bytes
        due = 0.0  # datagrams that should have been sent by now
        turn = itertools.cycle(senders)
        began = before = time.monotonic()
        while self._child.is_wanted():
            now = time.monotonic()
            if self._period_s and (now - began) % self._period_s >= self._burst_s:
                time.sleep(min(_SLICE_S, self._period_s - (now - began) % self._period_s))
                due, before = 0.0, time.monotonic()
                continue
            due = min(due + (now - before) * per_s, 2 * _SLICE_S * per_s + 1)
            before = now
            while due >= 1:
                due -= 1
                # Without buffer space, or a route while a link is down, the datagram is lost as it would be in the
                # fabric.
                with contextlib.suppress(OSError):
                    next(turn).sendto(payload, (self._destination, _DISCARD))
                    self._child.add()
            time.sleep(_SLICE_S)
