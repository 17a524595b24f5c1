"""Read the routes of a switch that matter to a routing scheme: BGP's, the scheme's, and those of other programs."""

from __future__ import annotations

import socket

from faultbed.testbed.node.routing.kernel import LOCAL, MAIN, Hop, Kernel, Route
from faultbed.testbed.node.routing.owned_numbers import PROTOCOL

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["SwitchRoutes", "read_routes"]

_OF_FRR = (11, 186)  # RTPROT_ZEBRA, RTPROT_BGP (linux/rtnetlink.h)


class SwitchRoutes:
    """Routes of a switch, read at one time.

    Args:
        prefixes: the prefixes that the scheme routes, in CIDR notation.

    Attributes:
        main: usable next hops of the main table by prefix of the scheme.
        foreign: (table, prefix, protocol) of routes in the main table to a prefix of the scheme that FRR did not
            install, of all routes there to a part of such a prefix, and of all routes of the local table that have an
            address of such a prefix: the kernel looks there first.
        by_table: the first route of the tables of schemes by (table, prefix), also if it is not the scheme's.
        repeated: (table, prefix) with more than one route. Which of them the kernel takes depends on their order.
        installed: keys of the scheme's routes by (table, prefix): the group, or 0 and the key of each next hop.
    """

    def __init__(self, prefixes: Collection[str]) -> None:
        self.main: dict[str, list[Hop]] = {}
        self.foreign: set[tuple[int, str, int]] = set()
        self.by_table: dict[tuple[int, str], Route] = {}
        self.repeated: set[tuple[int, str]] = set()
        self.installed: dict[tuple[int, str], tuple[object, ...]] = {}
        self._prefixes = prefixes
        self._networks = [_network(prefix) for prefix in prefixes]

    def add(self, route: Route) -> None:
        """Take in one route of the main or the local table, or of a table in the range of schemes."""
        if route.table == MAIN:
            self._add_main(route)
            return
        if route.table == LOCAL:
            if self._overlaps(route.prefix):
                self.foreign.add((LOCAL, route.prefix, route.protocol))
            return
        if self.by_table.setdefault((route.table, route.prefix), route) is not route:
            self.repeated.add((route.table, route.prefix))
        if route.protocol == PROTOCOL:
            if route.group:
                key: tuple[object, ...] = (route.group,)
            elif all(hop.is_usable for hop in route.hops):
                key = (0, *(hop.key for hop in route.hops))
            else:  # a next hop is dead or has no carrier: the key differs, so that the route is written again
                key = ("dead",)
            self.installed[route.table, route.prefix] = key

    def _add_main(self, route: Route) -> None:
        if route.prefix not in self._prefixes:
            if self._is_part(route.prefix):
                self.foreign.add((MAIN, route.prefix, route.protocol))
            return
        if route.hops and route.prefix not in self.main:
            self.main[route.prefix] = [hop for hop in route.hops if hop.is_usable]
        if route.protocol not in _OF_FRR:
            self.foreign.add((MAIN, route.prefix, route.protocol))

    def _is_part(self, prefix: str) -> bool:
        """Return whether all addresses of a prefix are in one of the scheme's prefixes."""
        address, length = _network(prefix)
        return any(length > own and (address ^ base) >> (32 - own) == 0 for base, own in self._networks)

    def _overlaps(self, prefix: str) -> bool:
        """Return whether a prefix has an address of one of the scheme's prefixes."""
        address, length = _network(prefix)
        return any((address ^ base) >> (32 - min(length, own)) == 0 for base, own in self._networks)


def read_routes(kernel: Kernel, prefixes: Collection[str]) -> SwitchRoutes:
    """Read the routes of the namespace in which `kernel` was made.

    Raises:
        OSError: the kernel refused.
    """
    found = SwitchRoutes(prefixes)
    for route in kernel.routes(every_kind=True, has_local=True):
        found.add(route)
    return found


def _network(prefix: str) -> tuple[int, int]:
    """Return address and length of a prefix in CIDR notation."""
    address, _, length = prefix.partition("/")
    return int.from_bytes(socket.inet_aton(address), "big"), int(length)
