"""What kind of place a link or a switch is, in the words of `harness.findings`. Pure."""

from __future__ import annotations

from harness.findings import Place
from testbed.model.topology import Link, Topology

__all__ = ["place_of_link", "place_of_switch"]


def place_of_link(topology: Topology, link: Link) -> Place:
    """What kind of place a link is."""
    if not link.is_uplink:
        return "host-link"
    roles = {topology.switch_by_name[end.node].role for end in (link.a, link.b)}
    return "zone-uplink" if "atsw" in roles else "rtsw-ctsw-link"


def place_of_switch(topology: Topology, name: str) -> Place:
    """What kind of place a switch is."""
    role = topology.switch_by_name[name].role
    return "rtsw" if role == "rtsw" else "ctsw" if role == "ctsw" else "zone-uplink"
