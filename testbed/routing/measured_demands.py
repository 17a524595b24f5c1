"""Estimate what each RNIC sends to each host from the counters of the ports to hosts. Pure. Fidelity: modelled.

Ports count what each RNIC sends and what each host receives, not who sends to whom. The gravity model divides what an
RNIC sends among the other hosts in proportion to what they receive (Zhang et al., "Fast accurate computation of
large-scale IP traffic matrices from link loads", SIGMETRICS 2003).
"""

from __future__ import annotations

from collections.abc import Mapping

from faultbed.testbed.model.topology import Topology
from faultbed.testbed.routing.placement_of_flows import Key

__all__ = ["measured_demands"]

_LEAST_SHARE = 0.01
"""An RNIC that sent a smaller share of the mean is silent: router advertisements and ARP are no demand."""


def measured_demands(topology: Topology, increments: Mapping[str, int]) -> dict[Key, float]:
    """Return the bytes of each source RNIC and destination host; empty if nothing was sent.

    Args:
        topology: the lab.
        increments: of counters by `switch/port.rx_bytes` and `switch/port.tx_bytes`; a port that was not read is
            unknown, and counts as silent.
    """
    sent: dict[str, float] = {}
    received: dict[str, float] = {}
    for link in topology.links:
        if not link.is_uplink:
            port, host = f"{link.a.node}/{link.a.netdev}", link.b.node
            sent[f"{host}:{link.rnic}"] = float(increments.get(f"{port}.rx_bytes", 0))
            received[host] = received.get(host, 0.0) + increments.get(f"{port}.tx_bytes", 0)
    least = _LEAST_SHARE * sum(sent.values()) / max(1, len(sent))
    demands: dict[Key, float] = {}
    for source, size_bytes in sent.items():
        others = {host: arrived for host, arrived in received.items() if host != source.partition(":")[0] and arrived}
        total = sum(others.values())
        for host, arrived in others.items() if size_bytes > least else ():
            demands[source, host] = size_bytes * arrived / total
    return demands
