"""Equal-cost paths of a Clos fabric: up any number of tiers, then down, never up again.

This is what eBGP selects in the design of RFC 7938 (section 5.2): the spines of a zone share an AS number, so a spine
rejects a path that has already been through another spine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.topology import Link, Topology

__all__ = ["ValleyFreePaths"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Down:
    """How a switch sends down to a destination: in how many hops, and over which links."""

    hops: int
    links: list[Link]


class ValleyFreePaths:
    """Next hops of every switch towards every rack switch.

    Args:
        topology: the lab.
        failed: names of links between switches that carry nothing.

    Raises:
        UsageError: `failed` names a link that is no link between switches of this lab.
    """

    def __init__(self, topology: Topology, *, failed: frozenset[str] = frozenset()) -> None:
        if unknown := failed - {link.name for link in topology.uplinks}:
            raise UsageError(f"no link between switches is called {', '.join(sorted(unknown))}; see `faultbed status`")
        self._up: dict[str, list[Link]] = {switch.name: [] for switch in topology.switches}
        self._number: dict[str, int] = {}
        for number, link in enumerate(topology.uplinks):
            if link.name not in failed:
                self._up[link.a.node].append(link)  # `a` is the lower end
                self._number.setdefault(link.name, number)
        self._down: dict[str, dict[str, _Down]] = {}
        self._distance: dict[tuple[str, str], float] = {}
        self._hops: dict[tuple[str, str], tuple[Link, ...]] = {}

    def next_hops(self, switch: str, destination: str) -> tuple[Link, ...]:
        """Return the links over which `switch` reaches the switch `destination` in the fewest hops.

        Links are in the order of the inventory. There are none if the switch is the destination itself, or cut off.
        """
        key = switch, destination
        if key not in self._hops:
            self._hops[key] = self._shortest(switch, destination)
        return self._hops[key]

    def _shortest(self, switch: str, destination: str) -> tuple[Link, ...]:
        if switch == destination:
            return ()
        # A switch above the destination sends down: a path that goes down and up again would have a valley.
        if switch in (below := self._above(destination)):
            return tuple(sorted(below[switch].links, key=lambda link: self._number[link.name]))
        candidates = [(self._hops_to(link.other(switch).node, destination), link) for link in self._up[switch]]
        fewest = min((hops for hops, _ in candidates), default=math.inf)
        return tuple(link for hops, link in candidates if hops == fewest < math.inf)

    def _above(self, destination: str) -> dict[str, _Down]:
        """Return how each switch above a destination sends down to it; the destination itself needs no link."""
        if destination not in self._down:
            ways = self._down[destination] = {destination: _Down(hops=0, links=[])}
            level = [destination]
            while level:
                reached: dict[str, None] = {}
                for switch in level:
                    for link in self._up[switch]:
                        way = ways.setdefault(link.b.node, _Down(hops=ways[switch].hops + 1, links=[]))
                        if way.hops > ways[switch].hops:
                            way.links.append(link)
                            reached[link.b.node] = None
                level = list(reached)
        return self._down[destination]

    def _hops_to(self, switch: str, destination: str) -> float:
        """Return the hops of the shortest valley-free path to the destination."""
        key = switch, destination
        if key not in self._distance:
            way = self._above(destination).get(switch)
            links = self._up[switch] if way is None else []
            up = min((1 + self._hops_to(link.other(switch).node, destination) for link in links), default=math.inf)
            self._distance[key] = way.hops if way is not None else up
        return self._distance[key]
