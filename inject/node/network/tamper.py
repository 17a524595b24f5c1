"""Data changed on its way: packets that the hop's rule takes out, one bit changed, ICRC made anew, put back at once.

The rule forwards to a dummy device, which loses them; a child of the holder reads them there before they are lost and
sends the changed ones out of the port. A changed packet is late by as much as that takes: those behind it make a gap,
and the receiver takes what closes it first, this one or the one sent again. `duplicate_request` says that the
other came too late.
"""

from __future__ import annotations

import socket
from typing import Any

from inject.node.actuator import Refused
from inject.node.child import Child
from inject.node.command import run
from inject.node.inside import ip, unless_gone
from inject.node.network.forge import changed
from inject.node.network.packet_rules import HopActuator

__all__ = ["TamperActuator"]

_ETH_P_ALL = 3
# linux/if_packet.h: past the queue and the hooks of the port.
_SOL_PACKET, _PACKET_QDISC_BYPASS = 263, 20
_LOOK_S = 0.5


class TamperActuator(HopActuator):
    """A hop whose packets go to the device `via`, and from there, changed, out of the port."""

    def __init__(self, *, via: str, **hop: Any) -> None:
        super().__init__(**hop)
        self._via = via
        self._laid = False
        self._child = Child()

    def prepare(self) -> dict[str, Any]:
        """As the hop; and refuse a device of our name."""
        run(["modprobe", "dummy", "numdummies=0"])
        before = super().prepare()
        if self._is_there():
            raise Refused(f"a device {self._via} is already there: a leftover? run `faultbed heal`")
        return before

    def revert_script(self) -> str:
        """Rule and device, whatever of them is there; the child ends with the unit."""
        link = f"{ip(self._netns)} link"
        device = f"{link} del {self._via} 2>/dev/null; ! {link} show {self._via} >/dev/null 2>&1"
        return f"{super().revert_script()} && {{ {unless_gone(self._netns, device)}; }}"

    def lay(self) -> None:
        """The device, to which nothing is sent yet."""
        self._laid = True
        run(["ip", "link", "add", self._via, "mtu", "65000", "up", "type", "dummy"], alive=self._alive)

    def on(self) -> None:
        """Who reads the device, then the rule."""
        if not self._laid:
            self.lay()
        with _packets(self._via) as taken, _packets(self._device) as out:
            out.setsockopt(_SOL_PACKET, _PACKET_QDISC_BYPASS, 1)
            self._child.start(lambda: self._change(taken, out))
        super().on()

    def off(self) -> None:
        """The rule first; a packet that is on its way then is sent again by its sender."""
        super().off()
        self._child.stop()
        if self._laid:
            run(["ip", "link", "del", self._via])
            self._laid = False

    def read(self) -> dict[str, Any]:
        """The hop's readback, whether the device is there, and how many packets were changed."""
        seen = super().read()
        there = self._is_there()
        seen |= {"via": self._via if there else None, "changed": self.hits()}
        seen["applied"] = bool(seen["applied"] and there) if self._there else there or bool(seen["applied"])
        return seen

    def hits(self) -> int:
        """Packets changed and put back so far."""
        return self._child.count

    def passed(self) -> None:
        """Not told: what the rule sends here is not yet changed."""

    def _is_there(self) -> bool:
        return self._via in (name for _, name in socket.if_nameindex())

    def _change(self, taken: socket.socket, out: socket.socket) -> None:
        """Change and put back. At the holder's priority: the packet sent again is under way."""
        taken.settimeout(_LOOK_S)
        while self._child.wanted():
            try:
                frame = taken.recv(65535)
            except TimeoutError:
                continue
            except OSError:  # the device is gone
                return
            other = changed(frame)
            out.send(other if other is not None else frame)
            if other is not None:
                self._child.add()


def _packets(device: str) -> socket.socket:
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
    try:
        wire.bind((device, _ETH_P_ALL))
    except OSError:
        wire.close()
        raise
    return wire
