"""Names of the links that are down, by what either of their ends reports."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from faultbed.testbed.errors import FaultbedError
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.observe import counters
from faultbed.testbed.observe.counters import Snapshot, value_at

if TYPE_CHECKING:
    from faultbed.testbed.lab import Lab

__all__ = ["down_links", "read_down_links"]


def down_links(topology: Topology, snapshot: Snapshot) -> frozenset[str]:
    """Return the names of the links with an end that is down or has no carrier. An end that was not read is up."""
    return frozenset(
        link.name
        for link in topology.links
        for port in (link.a, link.b)
        if 0 in (value_at(snapshot, f"{port.node}/{port.netdev}.{state}") for state in ("up", "carrier"))
    )


def read_down_links(lab: Lab, nodes: Iterable[str], *, timeout_s: float) -> frozenset[str]:
    """Read the states of the ports of some nodes, and return the names of the links that are down.

    A node that does not answer in time is left out.
    """
    snapshot: dict[str, dict[str, int]] = {}
    for machine_nodes in lab.carried(nodes).values():
        try:
            snapshot |= counters.read(lab, machine_nodes, timeout_s=timeout_s)
        except FaultbedError:
            continue
    return down_links(lab.topology, snapshot)
