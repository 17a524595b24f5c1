"""An interface that is administratively down, or has a smaller MTU.

Raw rtnetlink, so that an edge costs one system call and no `ip` process.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

from faultbed.inject.node.actuator import Actuator, Refused, enter_netns
from faultbed.inject.node.command import require
from faultbed.inject.node.inside import ip, unless_gone
from faultbed.inject.node.management import management_interfaces
from faultbed.testbed.node.netlink import ACK, REQUEST, Netlink, attribute, attributes

__all__ = ["LinkActuator", "MtuActuator"]

# linux/rtnetlink.h, linux/if_link.h, linux/if.h
_RTM_NEWLINK, _RTM_GETLINK = 16, 18
_IFLA_IFNAME, _IFLA_MTU, _IFLA_CARRIER, _IFLA_CARRIER_DOWN = 3, 4, 33, 48
_IFF_UP = 1
_INFO = struct.Struct("=BxHiII")


class LinkActuator(Actuator):
    """Takes one interface down.

    Args:
        netns: the namespace of the interface; None: that of this process.
        device: the interface.
        able: (command, pattern, message if it does not match) of a required capability; None: nothing is required.
    """

    loss_check_s = 0.2

    def __init__(self, *, netns: str | None, device: str, able: list[Any] | None = None) -> None:
        self._netns, self._device, self._able = netns, device, able
        self._index = 0
        self._route: Netlink | None = None

    def prepare(self) -> dict[str, Any]:
        """Refuse an interface that is down, carries the management connection, or lacks the capability."""
        enter_netns(self._netns)
        self._route = Netlink(socket.NETLINK_ROUTE)
        state = self.read()
        if not state["up"]:
            raise Refused(
                f"{self._device} is already down, and no fault took it down; bring it up, or run `faultbed heal`"
            )
        if self._netns is None and self._device in management_interfaces():
            raise Refused(f"{self._device} carries the management connection and is never a target; choose another")
        if self._able:
            require(*self._able)
        return state

    def revert_script(self) -> str:
        """Return a script that brings the interface up. If the namespace is gone, so is the interface."""
        link = f"{ip(self._netns)} link"
        return unless_gone(
            self._netns, f"{link} set dev {self._device} up && {link} show dev {self._device} up | grep -q ."
        )

    def on(self) -> None:
        self._set(up=False)

    def off(self) -> None:
        self._set(up=True)

    def read(self) -> dict[str, Any]:
        """Report flags and carrier from the kernel: `up`, `carrier`, `carrier_down_count`."""
        name = attribute(_IFLA_IFNAME, self._device.encode() + b"\0")
        body = self._request(_RTM_GETLINK, _INFO.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + name)
        _family, _kind, index, flags, _change = _INFO.unpack_from(body)
        attrs = attributes(body[_INFO.size :])
        self._index = index
        up = bool(flags & _IFF_UP)
        return {
            "applied": not up,
            "device": self._device,
            "up": up,
            "carrier": int(attrs.get(_IFLA_CARRIER, b"\0")[0]),
            "mtu": int.from_bytes(attrs.get(_IFLA_MTU, b"\0"), "little"),
            "carrier_down_count": int.from_bytes(attrs.get(_IFLA_CARRIER_DOWN, b"\0"), "little"),
        }

    def close(self) -> None:
        if self._route is not None:
            self._route.close()

    def _set(self, *, up: bool) -> None:
        info = _INFO.pack(socket.AF_UNSPEC, 0, self._index, _IFF_UP if up else 0, _IFF_UP)
        self._request(_RTM_NEWLINK, info, flags=REQUEST | ACK)

    def _request(self, kind: int, body: bytes, *, flags: int = REQUEST) -> bytes:
        if self._route is None:
            raise Refused("not prepared")
        try:
            return self._route.request(kind, body, flags=flags)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}: {self._device}") from None


class MtuActuator(LinkActuator):
    """Reduces the MTU of one interface to `mtu`."""

    def __init__(self, *, netns: str | None, device: str, mtu: int) -> None:
        super().__init__(netns=netns, device=device)
        self._mtu, self._normal = mtu, 0

    def prepare(self) -> dict[str, Any]:
        """Refuse an interface that `LinkActuator` refuses, and one whose MTU is not larger than the requested one."""
        self._normal = super().prepare()["mtu"]
        if self._normal <= self._mtu:
            raise Refused(f"{self._device} has an MTU of {self._normal} already; choose an mtu smaller than that")
        return self.read()

    def revert_script(self) -> str:
        """Return a script that restores the MTU."""
        link = f"{ip(self._netns)} link"
        return unless_gone(
            self._netns,
            f"{link} set dev {self._device} mtu {self._normal} && "
            f"{link} show dev {self._device} | grep -q ' mtu {self._normal} '",
        )

    def on(self) -> None:
        self._resize(self._mtu)

    def off(self) -> None:
        self._resize(self._normal)

    def read(self) -> dict[str, Any]:
        """Report the interface; `applied` while its MTU is the requested one."""
        state = super().read()
        return state | {"applied": state["mtu"] == self._mtu}

    def _resize(self, mtu: int) -> None:
        info = _INFO.pack(socket.AF_UNSPEC, 0, self._index, 0, 0)
        self._request(_RTM_NEWLINK, info + attribute(_IFLA_MTU, struct.pack("=I", mtu)), flags=REQUEST | ACK)
