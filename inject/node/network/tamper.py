"""Corrupted data: one bit of each selected packet is flipped, its ICRC is recomputed, and the packet is sent on.

The hop's rule forwards the packets to a dummy device, which would drop them. A child of the holder reads them there and
sends the changed packets out of the port. Meanwhile later packets overtake the changed one, and the receiver sees a
gap. It accepts whichever packet closes the gap first: the changed one or its retransmission. If the retransmission
comes second, `duplicate_request` counts it.
"""

from __future__ import annotations

import socket
from typing import Any

from faultbed.inject.node.actuator import Refused
from faultbed.inject.node.child import Child
from faultbed.inject.node.command import run
from faultbed.inject.node.inside import ip, unless_gone
from faultbed.inject.node.network.forge import with_flipped_bit
from faultbed.inject.node.network.packet_rules import HopActuator

__all__ = ["TamperActuator"]

_ETH_P_ALL = 3
# linux/if_packet.h: bypasses the queue and the hooks of the port.
_SOL_PACKET, _PACKET_QDISC_BYPASS = 263, 20
_POLL_S = 0.5


class TamperActuator(HopActuator):
    """A hop whose packets go to the device `via`, and from there, changed, out of the port."""

    uses_set_up = True

    def __init__(self, *, via: str, **hop: Any) -> None:
        super().__init__(**hop)
        self._via = via
        self._is_set_up = False
        self._child = Child()

    def prepare(self) -> dict[str, Any]:
        """Refuse what the hop refuses, and a leftover device."""
        run(["modprobe", "dummy", "numdummies=0"])
        before = super().prepare()
        if self._has_device():
            raise Refused(f"a device {self._via} already exists, a leftover of a fault; run `faultbed heal`")
        return before

    def revert_script(self) -> str:
        """Return a script that removes rule and device, whichever exist; the child ends with the unit."""
        link = f"{ip(self._netns)} link"
        device = f"{link} del {self._via} 2>/dev/null; ! {link} show {self._via} >/dev/null 2>&1"
        return f"{super().revert_script()} && {{ {unless_gone(self._netns, device)}; }}"

    def set_up(self) -> None:
        """Create the device, to which no packet goes yet."""
        self._is_set_up = True
        run(["ip", "link", "add", self._via, "mtu", "65000", "up", "type", "dummy"])

    def on(self) -> None:
        """Start the child that reads the device, then add the rule."""
        if not self._is_set_up:
            self.set_up()
        with _packets(self._via) as detoured, _packets(self._device) as out:
            out.setsockopt(_SOL_PACKET, _PACKET_QDISC_BYPASS, 1)
            self._child.start(lambda: self._change(detoured, out))
        super().on()

    def off(self) -> None:
        """Remove the rule first; the sender retransmits packets that are in the device by then."""
        super().off()
        self._child.stop()
        if self._is_set_up:
            run(["ip", "link", "del", self._via])
            self._is_set_up = False

    def read(self) -> dict[str, Any]:
        """Report the hop's state, whether the device exists, and how many packets were changed."""
        state = super().read()
        exists = self._has_device()
        state |= {"via": self._via if exists else None, "changed": self.hits()}
        state["applied"] = bool(state["applied"] and exists) if self._has_table else exists or bool(state["applied"])
        return state

    def is_lost(self) -> bool:
        """Return whether rule, device or child are gone. Without its child the device drops packets unchanged."""
        return not (self.read()["applied"] and self._child.is_running())

    def hits(self) -> int:
        """Return the packets changed and sent on so far."""
        return self._child.count

    def passed(self) -> None:
        """Return None: the rule's count includes packets that are not changed yet."""

    def _has_device(self) -> bool:
        return self._via in (name for _, name in socket.if_nameindex())

    def _change(self, detoured: socket.socket, out: socket.socket) -> None:
        """Change packets and send them on, at the holder's priority: they must arrive before their retransmission."""
        detoured.settimeout(_POLL_S)
        while self._child.is_wanted():
            try:
                frame = detoured.recv(65535)
            except TimeoutError:
                continue
            except OSError:  # the device is gone
                return
            copy = with_flipped_bit(frame)
            out.send(copy if copy is not None else frame)
            if copy is not None:
                self._child.add()


def _packets(device: str) -> socket.socket:
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
    try:
        wire.bind((device, _ETH_P_ALL))
    except OSError:
        wire.close()
        raise
    return wire
