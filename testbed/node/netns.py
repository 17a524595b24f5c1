"""Enter a network namespace with this process, and count the packets of a port there."""

from __future__ import annotations

import os
import struct
import sys

from faultbed.testbed.node.netlink import Netlink, attribute, attributes

__all__ = ["enter", "identity", "open_route", "port_packets"]

# linux/rtnetlink.h, linux/if_link.h
_ROUTE, _GETLINK = 0, 18
_IFLA_IFNAME, _IFLA_STATS64 = 3, 23
_IFINFO = struct.Struct("=BxHiII")
_STATS = struct.Struct("=QQ")
_away = False
_home: int | None = None
"""The namespace in which the process started, opened before it is first left."""


def enter(netns: str | None) -> None:
    """Enter a network namespace; None: that in which the process started. Sockets opened from now on belong to it.

    Staying in the first namespace works with any Python.

    Raises:
        OSError: there is no namespace of that name, or this Python (before 3.12) cannot enter one.
    """
    global _away, _home  # noqa: PLW0603 (the namespace belongs to the process)
    if netns is None and not _away:
        return
    if sys.version_info < (3, 12):
        raise OSError("entering a network namespace needs Python 3.12 on the node")
    if _home is None:
        _home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    if netns is None:
        os.setns(_home, os.CLONE_NEWNET)
        _away = False
        return
    fd = os.open(f"/run/netns/{netns}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.setns(fd, os.CLONE_NEWNET)
        _away = True
    finally:
        os.close(fd)


def identity(netns: str | None) -> int:
    """Return a number that a namespace shares with no other, not even with a later one of its name; None: 0.

    Raises:
        OSError: there is no namespace of that name.
    """
    return os.stat(f"/run/netns/{netns}").st_ino if netns else 0


def port_packets(link: Netlink, netdev: str) -> tuple[int, int]:
    """Return how many packets a port has received and sent, in the namespace in which `link` was opened.

    Raises:
        OSError: there is no such port.
    """
    request = _IFINFO.pack(0, 0, 0, 0, 0) + attribute(_IFLA_IFNAME, netdev.encode() + b"\0")
    answer = link.request(_GETLINK, request)
    received, sent = _STATS.unpack_from(attributes(answer[_IFINFO.size :])[_IFLA_STATS64])
    return int(received), int(sent)


def open_route(netns: str | None) -> Netlink:
    """Open a routing socket in a namespace; the process stays in it."""
    enter(netns)
    return Netlink(_ROUTE)
