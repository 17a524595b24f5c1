"""Positions in a fabric drawing: switches tier by tier above hosts, rack by rack. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.topology import Host, Link, Topology

__all__ = [
    "HOST_H",
    "HOST_W",
    "PAD",
    "SWITCH_H",
    "SWITCH_W",
    "Box",
    "Layout",
    "badge_position",
    "box",
    "ends_of",
    "lay_out",
    "link_of",
    "rnic_x",
]

HOST_W, HOST_H, _GAP, PAD = 92, 76, 10, 12
"""Width and height of a host, gap between hosts, and padding of a rack, in SVG units."""
_TOP_Y, _TIER_DISTANCE, _HOST_DISTANCE = 30, 92, 114
"""Position of the highest tier, distance between tiers of switches, and from rack switches to hosts."""
SWITCH_W, SWITCH_H = 84, 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Centres of switches, left edges of hosts, the height of rack switches and hosts, and the size of the drawing."""

    width: float
    height: float
    rtsw_y: float
    host_y: float
    switches: dict[str, tuple[float, float]]
    hosts: dict[str, float]
    racks: dict[str, tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle of the drawing."""

    x: float
    y: float
    width: float
    height: float


def lay_out(topology: Topology) -> Layout:
    """Place racks from left to right with hosts and rack switches, spines above them, aggregation above these."""
    x = float(_GAP)
    hosts: dict[str, float] = {}
    racks: dict[str, tuple[float, float]] = {}
    for rack in topology.racks:
        begin = x
        x += PAD
        for host in topology.hosts:
            if host.rack == rack:
                hosts[host.name] = x
                x += HOST_W + _GAP
        x += PAD - _GAP
        racks[rack] = (begin, x)
        x += _GAP * 2
    width = max(x - _GAP, 240.0)
    tiers = [
        row for role in ("atsw", "ctsw") if (row := [switch for switch in topology.switches if switch.role == role])
    ]
    rtsw_y = float(_TOP_Y + _TIER_DISTANCE * max(1, len(tiers)))
    host_y = rtsw_y + _HOST_DISTANCE
    switches: dict[str, tuple[float, float]] = {}
    for rack, (begin, end) in racks.items():
        inside = [switch for switch in topology.switches if switch.rack == rack]
        for index, switch in enumerate(inside):
            switches[switch.name] = (begin + (end - begin) * (index + 1) / (len(inside) + 1), rtsw_y)
    for level, row in enumerate(tiers):
        upper = [switch for switch in row if switch.name not in switches]
        for index, switch in enumerate(upper):
            switches[switch.name] = (width * (index + 1) / (len(upper) + 1), _TOP_Y + _TIER_DISTANCE * level)
    return Layout(
        width=width,
        height=host_y + HOST_H + 40,
        rtsw_y=rtsw_y,
        host_y=host_y,
        switches=switches,
        hosts=hosts,
        racks=racks,
    )


def link_of(topology: Topology, target: str) -> str | None:
    """Return the name of the link that a target refers to, or None."""
    try:
        resolved = topology.resolve(target)
    except UsageError:
        return None
    return resolved.link.name if resolved.link else None


def rnic_x(layout: Layout, host: Host, rnic: str) -> float:
    """Return the centre of an RNIC, where its link ends."""
    names = [candidate.name for candidate in host.rnics]
    return layout.hosts[host.name] + HOST_W * (names.index(rnic) + 0.5) / len(names)


def box(layout: Layout, topology: Topology, place: str) -> Box | None:
    """Return the rectangle of a switch, host, RNIC or GPU; None if the lab has none of that name."""
    try:
        resolved = topology.resolve(place)
    except UsageError:
        return None
    if resolved.kind == "switch":
        x, y = layout.switches[resolved.node]
        return Box(x=x - SWITCH_W / 2, y=y - SWITCH_H / 2, width=SWITCH_W, height=SWITCH_H)
    if resolved.kind == "host":
        return Box(x=layout.hosts[resolved.node], y=layout.host_y, width=HOST_W, height=HOST_H)
    host = topology.host_by_name.get(resolved.node)
    if host is not None and resolved.rnic is not None:
        width = HOST_W / len(host.rnics) - 6
        return Box(x=rnic_x(layout, host, resolved.rnic.name) - width / 2, y=layout.host_y + 3, width=width, height=20)
    if host is not None and resolved.gpu is not None:
        width, index = HOST_W / len(host.gpus) - 8, host.gpus.index(resolved.gpu)
        centre = layout.hosts[host.name] + HOST_W * (index + 0.5) / len(host.gpus)
        return Box(x=centre - width / 2, y=layout.host_y + 51, width=width, height=20)
    return None


def ends_of(layout: Layout, topology: Topology, link: Link) -> tuple[float, float, float, float]:
    """Return the ends of a link's line: x and y at the lower switch, then at the other end."""
    ax, ay = layout.switches[link.a.node]
    if link.rnic is None:
        bx, by = layout.switches[link.b.node]
        return ax, ay - SWITCH_H / 2, bx, by + SWITCH_H / 2
    host = topology.host_by_name[link.b.node]
    return ax, ay + SWITCH_H / 2, rnic_x(layout, host, link.rnic), layout.host_y


def badge_position(layout: Layout, topology: Topology, target: str) -> tuple[float, float] | None:
    """Return the position of the badge of a fault on `target`."""
    try:
        resolved = topology.resolve(target)
    except UsageError:
        return None
    if resolved.kind == "port" and resolved.link is not None:
        ax, ay, bx, by = ends_of(layout, topology, resolved.link)
        # Closer to the lower end, because links cross in the middle.
        return (ax * 0.62 + bx * 0.38, ay * 0.62 + by * 0.38)
    if resolved.kind == "switch":
        x, y = layout.switches[resolved.node]
        return x + SWITCH_W / 2, y - SWITCH_H / 2
    left = layout.hosts[resolved.node]
    if resolved.rnic is not None:
        return rnic_x(layout, topology.host_by_name[resolved.node], resolved.rnic.name), layout.host_y - 12.0
    if resolved.gpu is not None:
        return left + HOST_W - 2.0, layout.host_y + 61.0
    return left + HOST_W, layout.host_y
