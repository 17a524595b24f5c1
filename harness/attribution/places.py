"""The kind of place of a link or a switch, in the vocabulary of `faultbed.harness.findings`. Pure."""

from __future__ import annotations

from faultbed.harness.findings import Place
from faultbed.testbed.model.topology import Link, Topology

__all__ = ["place_of_link", "place_of_switch"]


def place_of_link(topology: Topology, link: Link) -> Place:
    """Return the kind of place of a link."""
    if not link.is_uplink:
        return "host-link"
    roles = {topology.switch_by_name[end.node].role for end in (link.a, link.b)}
    return "zone-uplink" if "atsw" in roles else "rtsw-ctsw-link"


def place_of_switch(topology: Topology, name: str) -> Place:
    """Return the kind of place of a switch. Findings have no kind for an ATSW: it counts with the uplinks of zones."""
    role = topology.switch_by_name[name].role
    return "rtsw" if role == "rtsw" else "ctsw" if role == "ctsw" else "zone-uplink"
