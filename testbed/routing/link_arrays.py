"""The links of a lab as arrays: a number and a capacity for each direction. Pure.

A direction is a link and the node that sends on it (`offered_load.Direction`). Host links have directions, too: the
RNIC's host sends up, the rack switch sends down. An RNIC's own name is the direction of data that stay on its host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.topology import Link, Topology
from faultbed.testbed.routing.max_min import Floats
from faultbed.testbed.routing.offered_load import Direction, Fabric, direction_shares
from faultbed.testbed.routing.schemes import Flow

__all__ = ["LinkArrays", "Path", "link_arrays", "path_of_flow", "path_of_nodes"]

Path = tuple[tuple[int, float], ...]
"""Numbers of the directions that a flow crosses, each with the share of its bytes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LinkArrays:
    """The directions of a lab's links, numbered.

    Attributes:
        directions: by number.
        capacity: bytes per second of each, shape (directions,); infinity: nothing is known that limits it.
        numbers: number by direction.
    """

    directions: tuple[Direction, ...]
    capacity: Floats
    numbers: Mapping[Direction, int]

    def name(self, number: int) -> str:
        """Return the name of a direction with the sender first, such as `rtsw1:ctsw1` or `ctsw1:rtsw1`."""
        link, sender = self.directions[number]
        first, *rest = link.split(":")
        return link if first == sender else ":".join([*rest, first])


def link_arrays(
    topology: Topology, *, rate_scale: float | None, host_bytes_per_s: float, local_bytes_per_s: float
) -> LinkArrays:
    """Return the directions of a lab's links with their capacities.

    A link has the speed of its inventory, divided by `rate_scale` on a soft lab that shapes its links. A link to an
    RNIC has at most `host_bytes_per_s`, the rate of the RNIC itself; a link between switches without a speed has no
    limit. `local_bytes_per_s` is the rate between two ranks on one host.
    """
    directions: list[Direction] = []
    capacity: list[float] = []
    for link in topology.links:
        for sender in (link.a.node, link.b.node):
            directions.append((link.name, sender))
            capacity.append(_bytes_per_s(link, sender, rate_scale, host_bytes_per_s))
    for rnic in topology.rnic_names:
        directions.append((rnic, rnic.partition(":")[0]))
        capacity.append(local_bytes_per_s)
    return LinkArrays(
        directions=tuple(directions),
        capacity=np.array(capacity),
        numbers={direction: number for number, direction in enumerate(directions)},
    )


def _bytes_per_s(link: Link, sender: str, rate_scale: float | None, host_bytes_per_s: float) -> float:
    speed_gbps = link.end(sender).speed_gbps
    own = math.inf if link.is_uplink else host_bytes_per_s
    return own if speed_gbps is None else min(own, speed_gbps * 1e9 / 8 / (rate_scale or 1.0))


def path_of_flow(fabric: Fabric, arrays: LinkArrays, flow: Flow) -> Path:
    """Return the directions that a flow crosses under a fabric's routing scheme, from RNIC to RNIC.

    Raises:
        UsageError: the flow has no path, because links have failed.
    """
    if (local := _local_path(arrays, flow.src, flow.dst)) is not None:
        return local
    ends = [_host_link(fabric.topology, rnic) for rnic in (flow.src, flow.dst)]
    shares = direction_shares(fabric, flow)
    return (
        (arrays.numbers[ends[0].name, ends[0].b.node], 1.0),
        *((arrays.numbers[direction], share) for direction, share in shares.items()),
        (arrays.numbers[ends[1].name, ends[1].a.node], 1.0),
    )


def path_of_nodes(topology: Topology, arrays: LinkArrays, src: str, dst: str, nodes: Sequence[str]) -> Path:
    """Return the directions of a recorded path: the nodes from the host of RNIC `src` to that of `dst`, both included.

    Raises:
        UsageError: two neighbours of the path have no link, or several.
    """
    if (local := _local_path(arrays, src, dst)) is not None:
        return local
    source, target = (_host_link(topology, rnic) for rnic in (src, dst))
    crossed = [(source.name, source.b.node)]
    for near, far in pairwise(nodes[1:-1]):
        links = [link for link in topology.links_of(near) if link.is_uplink and link.other(near).node == far]
        if len(links) != 1:
            raise UsageError(f"path from {src} to {dst}: {near} and {far} have {len(links)} links, not one")
        crossed.append((links[0].name, near))
    crossed.append((target.name, target.a.node))
    return tuple((arrays.numbers[direction], 1.0) for direction in crossed)


def _local_path(arrays: LinkArrays, src: str, dst: str) -> Path | None:
    """Return the path of data that stay on one host; None: they leave it."""
    host = src.partition(":")[0]
    return ((arrays.numbers[src, host], 1.0),) if host == dst.partition(":")[0] else None


def _host_link(topology: Topology, rnic: str) -> Link:
    host, _, name = rnic.partition(":")
    return topology.rnic_link(host, name)
