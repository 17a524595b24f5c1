"""Egress port of a flow on a switch: the kernel's own decision, with its hash (`ip route get`)."""

from __future__ import annotations

import contextlib
import socket
import struct

from faultbed.testbed.node import netns
from faultbed.testbed.node.netlink import Netlink, attribute, attributes

__all__ = ["decisions", "egress_ports"]

_GETROUTE = 26
_DST, _SRC, _IIF, _OIF, _TABLE, _MARK, _PROTOCOL, _SPORT, _DPORT = 1, 2, 3, 4, 15, 16, 27, 28, 29
_LOOKUP_TABLE = 0x1000  # RTM_F_LOOKUP_TABLE: the answer names the table in which the route was found
_MESSAGE = struct.Struct("=BBBBBBBBI")


def egress_ports(namespace: str | None, flows: list[list[str | int]]) -> list[str | None]:
    """Return the port of each flow, which is as in `decisions`; None where the kernel has no route.

    Raises:
        OSError: there is no such namespace.
    """
    return [port for port, _ in decisions(namespace, flows)]


def decisions(namespace: str | None, flows: list[list[str | int]]) -> list[tuple[str | None, int]]:
    """Return the port of each flow, and the table in which the kernel found its route; (None, 0) without a route.

    Args:
        namespace: the switch; None: this machine.
        flows: [source, destination, port it comes in by, UDP source port, UDP destination port], and the packet's mark
            if it has one.

    Raises:
        OSError: there is no such namespace.
    """
    route = netns.open_route(namespace)
    try:
        names = dict(socket.if_nameindex())
        return [_decision(route, names, flow) for flow in flows]
    finally:
        netns.enter(None)
        route.close()


def _decision(route: Netlink, names: dict[int, str], flow: list[str | int]) -> tuple[str | None, int]:
    """Return the port and the table of one flow; `names` are the interfaces by index."""
    src, dst, port, sport, dport, *mark = flow
    index_of = {name: index for index, name in names.items()}
    request = _MESSAGE.pack(socket.AF_INET, 32, 32, 0, 0, 0, 0, 0, _LOOKUP_TABLE)
    for kind, value in (
        (_DST, socket.inet_aton(str(dst))),
        (_SRC, socket.inet_aton(str(src))),
        (_IIF, struct.pack("=I", index_of[str(port)])),
        (_PROTOCOL, bytes([socket.IPPROTO_UDP])),
        (_SPORT, struct.pack("!H", sport)),
        (_DPORT, struct.pack("!H", dport)),
        *((_MARK, struct.pack("=I", value)) for value in mark if value),
    ):
        request += attribute(kind, value)
    with contextlib.suppress(OSError):
        reply = attributes(route.request(_GETROUTE, request)[_MESSAGE.size :])
        table = struct.unpack("=I", reply[_TABLE])[0] if _TABLE in reply else 0
        return names.get(struct.unpack("=I", reply[_OIF])[0]), table
    return None, 0
