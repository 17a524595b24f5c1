"""Equal-cost paths of a Clos fabric: up any number of tiers, then down, never up again.

This is what eBGP selects in the design of RFC 7938 (section 5.2): the spines of a zone share an AS number, so a spine
rejects a path that has already been through another spine.
"""

from __future__ import annotations

import math

from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.topology import Link, Topology

__all__ = ["ValleyFreePaths"]


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
        self._down: dict[str, list[Link]] = {switch.name: [] for switch in topology.switches}
        for link in topology.uplinks:
            if link.name not in failed:
                self._up[link.a.node].append(link)  # `a` is the lower end
                self._down[link.b.node].append(link)
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
        down = [(self._below(link.other(switch).node, destination), link) for link in self._down[switch]]
        # A switch above the destination sends down: a path that goes down and up again would have a valley.
        if min((hops for hops, _ in down), default=math.inf) < math.inf:
            candidates = down
        else:
            candidates = [(self._hops_to(link.other(switch).node, destination), link) for link in self._up[switch]]
        fewest = min((hops for hops, _ in candidates), default=math.inf)
        return tuple(link for hops, link in candidates if hops == fewest < math.inf)

    def _below(self, switch: str, destination: str) -> float:
        """Return the hops from a switch down to the destination; infinite if it does not lie below."""
        if switch == destination:
            return 0
        links = self._down[switch]
        return min((1 + self._below(link.other(switch).node, destination) for link in links), default=math.inf)

    def _hops_to(self, switch: str, destination: str) -> float:
        """Return the hops of the shortest valley-free path to the destination."""
        key = switch, destination
        if key not in self._distance:
            down = self._below(switch, destination)
            links = self._up[switch] if down == math.inf else []
            up = min((1 + self._hops_to(link.other(switch).node, destination) for link in links), default=math.inf)
            self._distance[key] = min(down, up)
        return self._distance[key]
