"""By which port a switch would send a packet on: the kernel's own answer, hash and all (`ip route get`)."""

from __future__ import annotations

import contextlib
import socket
import struct

from testbed.node import netns
from testbed.node.netlink import Netlink, attribute, attributes

__all__ = ["ways"]

_GETROUTE = 26
_DST, _SRC, _IIF, _OIF, _PROTOCOL, _SPORT, _DPORT = 1, 2, 3, 4, 27, 28, 29
_MESSAGE = struct.Struct("=BBBBBBBBI")


def ways(namespace: str | None, flows: list[list[str | int]]) -> list[str | None]:
    """The port of each flow [source, destination, port it comes in by, UDP source port, UDP destination port].

    None where the kernel knows no way.

    Raises:
        OSError: there is no such namespace.
    """
    route = netns.open_route(namespace)
    try:
        names = dict(socket.if_nameindex())
        return [_way(route, names, *flow) for flow in flows]  # type: ignore[arg-type]
    finally:
        netns.enter(None)
        route.close()


def _way(route: Netlink, names: dict[int, str], src: str, dst: str, port: str, sport: int, dport: int) -> str | None:
    request = _MESSAGE.pack(socket.AF_INET, 32, 32, 0, 0, 0, 0, 0, 0)
    for kind, value in (
        (_DST, socket.inet_aton(dst)),
        (_SRC, socket.inet_aton(src)),
        (_IIF, struct.pack("=I", {name: index for index, name in names.items()}[port])),
        (_PROTOCOL, bytes([socket.IPPROTO_UDP])),
        (_SPORT, struct.pack("!H", sport)),
        (_DPORT, struct.pack("!H", dport)),
    ):
        request += attribute(kind, value)
    with contextlib.suppress(OSError):
        answer = route.ask(_GETROUTE, request)
        return names.get(struct.unpack("=I", attributes(answer[_MESSAGE.size :])[_OIF])[0])
    return None
