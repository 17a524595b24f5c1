"""Bursts of priority flow control (PFC) frames out of one interface, which pause the neighbour's priority.

A child of the holder sends them. It ends with the holder, and the neighbour sends again when the last frame's time is
over, even if the child is killed. Frame: IEEE 802.1Qbb, 802.3 annex 31D.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import Any

from faultbed.inject.node.actuator import Actuator, Refused
from faultbed.inject.node.child import Child
from faultbed.inject.node.management import management_interfaces

__all__ = ["PauseActuator", "pfc_frame"]

_TO = b"\x01\x80\xc2\x00\x00\x01"
_MAC_CONTROL, _PFC = 0x8808, 0x0101
_LONGEST = 0xFFFF
_SHORTEST_FRAME = 60
_NAP_S = 0.005


def pfc_frame(source: bytes, priority: int, quanta: int) -> bytes:
    """Return a frame that pauses one priority for `quanta` of 512 bit times; 0 ends the pause.

    Args:
        source: the sender's MAC, 6 bytes.
        priority: 0 to 7.
        quanta: 0 to 65,535.
    """
    times = [quanta if number == priority else 0 for number in range(8)]
    return (_TO + source + struct.pack("!HHH8H", _MAC_CONTROL, _PFC, 1 << priority, *times)).ljust(
        _SHORTEST_FRAME, b"\0"
    )


class PauseActuator(Actuator):
    """Pauses `priority` of the neighbour of `device` for `burst_s` of every `period_s`.

    One frame pauses for `pause_s`, so another one follows after half of that; a faster link needs more frames a second.
    """

    poll_s = 0.05

    def __init__(self, *, device: str, priority: int, burst_s: float, period_s: float, pause_s: float) -> None:
        self._device, self._priority = device, priority
        self._burst_s, self._period_s, self._pause_s = burst_s, period_s, pause_s
        self._child = Child()

    def prepare(self) -> dict[str, Any]:
        """Refuse a port that does not exist, or that carries the management connection."""
        if self._device in management_interfaces():
            raise Refused(f"{self._device} carries the management connection and is never a target; choose another")
        try:
            self._socket().close()
        except OSError as error:
            raise Refused(f"{self._device}: {error}") from None
        return self.read()

    def revert_script(self) -> str:
        return "true"

    def on(self) -> None:
        with self._socket() as wire:
            self._child.start(lambda: self._send(wire))

    def off(self) -> None:
        """End the child, and the pause."""
        self._child.stop()
        with self._socket() as wire:
            wire.send(pfc_frame(_mac(wire), self._priority, 0))

    def read(self) -> dict[str, Any]:
        """Report whether the child runs, and how many frames it has sent."""
        return {
            "applied": self._child.is_running(),
            "device": self._device,
            "priority": self._priority,
            "sent": self._child.count,
        }

    def hits(self) -> int:
        return self._child.count

    def _socket(self) -> socket.socket:
        wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
        try:
            wire.bind((self._device, 0))
        except OSError:
            wire.close()
            raise
        return wire

    def _send(self, wire: socket.socket) -> None:
        """Send bursts while the holder exists.

        Between two frames of a burst the child spins: a timer of the kernel is later than a fast link allows.
        """
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        source = _mac(wire)
        pause, go_on = (pfc_frame(source, self._priority, quanta) for quanta in (_LONGEST, 0))
        began = time.monotonic()
        while self._child.is_wanted():
            at_s = (time.monotonic() - began) % self._period_s
            if at_s >= self._burst_s:
                time.sleep(min(_NAP_S, self._period_s - at_s))
                continue
            ends = time.monotonic() + self._burst_s - at_s
            due = 0.0
            while (now := time.monotonic()) < ends:
                if now >= due:
                    due = now + self._pause_s / 2
                    if self._sent(wire, pause):
                        self._child.add()
            self._sent(wire, go_on)

    def _sent(self, wire: socket.socket, frame: bytes) -> bool:
        """Send one frame; return whether the kernel took it. It takes none while the link is down."""
        try:
            wire.send(frame)
        except OSError:
            return False
        return True


def _mac(wire: socket.socket) -> bytes:
    """Return the MAC of the interface to which a packet socket is bound (packet(7), sockaddr_ll)."""
    mac: bytes = wire.getsockname()[4]
    return mac
