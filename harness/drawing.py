"""The fabric as an inline SVG: spines, rack switches, racks with their hosts, RNICs and GPUs, faults marked.

Colours are CSS variables of the page that the drawing is put in (`--ink`, `--muted`, `--line`, `--panel`), so
that it follows the page into dark mode and print. Faulted things carry the kind's colour *and* a numbered
badge: colour alone says nothing to a tenth of the readers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from harness.measurements import Connection
from testbed.errors import UsageError
from testbed.topology import Host, Link, Topology

__all__ = ["Mark", "fabric_svg"]

_HOST_W, _HOST_H, _GAP, _PAD = 92, 76, 10, 12
_SPINE_Y, _RTSW_Y, _HOST_Y = 30, 122, 236
_SWITCH_W, _SWITCH_H = 84, 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A fault on the drawing: its number in the report's list, its colour, what it was aimed at."""

    number: int
    colour: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Centres of switches and left edges of hosts; the drawing's size."""

    width: float
    height: float
    switches: dict[str, tuple[float, float]]
    hosts: dict[str, float]
    racks: dict[str, tuple[float, float]]


def fabric_svg(topology: Topology, marks: Sequence[Mark], connections: Iterable[Connection] = ()) -> str:
    """Draw a topology. Links that queue pairs cross are thicker; `connections` says which those are."""
    layout = _lay_out(topology)
    carried = _carried(topology, connections)
    colours = {_link_of(topology, mark.target): mark.colour for mark in marks}
    parts = [*_rack_boxes(layout)]
    parts += [_link(layout, topology, link, carried[link.name], colours.get(link.name)) for link in topology.links]
    parts += [_switch(layout, name, role=switch.role) for name, switch in topology.switch_by_name.items()]
    node_colours = {mark.target: mark.colour for mark in marks}
    parts += [part for host in topology.hosts for part in _host(layout, host, node_colours)]
    parts += _badges(layout, topology, marks)
    told = "; ".join(f"fault {mark.number} on {mark.target}" for mark in marks) or "no fault"
    label = (
        f"Fabric drawing: {len(topology.racks)} racks, {len(topology.hosts)} hosts, "
        f"{len(topology.switches)} switches, {len(topology.links)} links; {told}."
    )
    return (
        f'<svg class="fabric" viewBox="0 0 {layout.width:g} {layout.height:g}" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def _lay_out(topology: Topology) -> _Layout:
    x = float(_GAP)
    hosts: dict[str, float] = {}
    racks: dict[str, tuple[float, float]] = {}
    for rack in topology.racks:
        begin = x
        x += _PAD
        for host in topology.hosts:
            if host.rack == rack:
                hosts[host.name] = x
                x += _HOST_W + _GAP
        x += _PAD - _GAP
        racks[rack] = (begin, x)
        x += _GAP * 2
    width = max(x - _GAP, 240.0)
    switches: dict[str, tuple[float, float]] = {}
    for rack, (begin, end) in racks.items():
        inside = [switch for switch in topology.switches if switch.rack == rack]
        for index, switch in enumerate(inside):
            switches[switch.name] = (begin + (end - begin) * (index + 1) / (len(inside) + 1), _RTSW_Y)
    upper = [switch for switch in topology.switches if switch.name not in switches]
    for index, switch in enumerate(upper):
        switches[switch.name] = (width * (index + 1) / (len(upper) + 1), _SPINE_Y)
    return _Layout(width=width, height=_HOST_Y + _HOST_H + 40, switches=switches, hosts=hosts, racks=racks)


def _carried(topology: Topology, connections: Iterable[Connection]) -> Counter[str]:
    """Link name to the number of queue pairs that cross it, from the nodes of each connection's path."""
    count: Counter[str] = Counter()
    for connection in connections:
        ends = {connection.src, connection.dst}
        for one, other in zip(connection.path, connection.path[1:], strict=False):
            for link in topology.links_of(one):
                facing = link.other(one).node == other
                if facing and (link.is_uplink or f"{link.b.node}:{link.rnic}" in ends):
                    count[link.name] += 1
    return count


def _link_of(topology: Topology, target: str) -> str | None:
    try:
        found = topology.resolve(target)
    except UsageError:
        return None
    return found.link.name if found.link else None


def _rack_boxes(layout: _Layout) -> list[str]:
    bottom = _HOST_Y + _HOST_H + _PAD
    return [
        f'<rect class="rack" x="{begin:g}" y="{_RTSW_Y - 34:g}" width="{end - begin:g}" '
        f'height="{bottom - _RTSW_Y + 34:g}" rx="10"/>'
        f'<text class="rack-name" x="{(begin + end) / 2:g}" y="{bottom + 17:g}">{escape(rack)}</text>'
        for rack, (begin, end) in layout.racks.items()
    ]


def _rnic_x(layout: _Layout, host: Host, rnic: str) -> float:
    names = [one.name for one in host.rnics]
    return layout.hosts[host.name] + _HOST_W * (names.index(rnic) + 0.5) / len(names)


def _ends(layout: _Layout, topology: Topology, link: Link) -> tuple[float, float, float, float]:
    ax, ay = layout.switches[link.a.node]
    if link.rnic is None:
        bx, by = layout.switches[link.b.node]
        return ax, ay - _SWITCH_H / 2, bx, by + _SWITCH_H / 2
    host = topology.host_by_name[link.b.node]
    return ax, ay + _SWITCH_H / 2, _rnic_x(layout, host, link.rnic), float(_HOST_Y)


def _link(layout: _Layout, topology: Topology, link: Link, carried: int, colour: str | None) -> str:
    ax, ay, bx, by = _ends(layout, topology, link)
    kind = "link used" if carried else "link"
    style = f' style="stroke:{escape(colour)};stroke-width:3.5"' if colour else ""
    queue_pairs = f"{carried} queue pair{'' if carried == 1 else 's'} of the workload"
    return (
        f'<line class="{kind}" x1="{ax:g}" y1="{ay:g}" x2="{bx:g}" y2="{by:g}"{style}>'
        f"<title>{escape(link.name)}: {queue_pairs}</title></line>"
    )


def _switch(layout: _Layout, name: str, *, role: str) -> str:
    x, y = layout.switches[name]
    return (
        f'<g class="switch {escape(role)}"><rect x="{x - _SWITCH_W / 2:g}" y="{y - _SWITCH_H / 2:g}" '
        f'width="{_SWITCH_W}" height="{_SWITCH_H}" rx="6"/>'
        f'<text x="{x:g}" y="{y + 4.5:g}">{escape(name)}</text></g>'
    )


def _host(layout: _Layout, host: Host, colours: dict[str, str]) -> list[str]:
    x = layout.hosts[host.name]
    stroke = f' style="stroke:{escape(colours[host.name])};stroke-width:3"' if host.name in colours else ""
    parts = [
        (f'<g class="host"><rect x="{x:g}" y="{_HOST_Y}" width="{_HOST_W}" height="{_HOST_H}" rx="7"{stroke}/>'),
        f'<text class="name" x="{x + _HOST_W / 2:g}" y="{_HOST_Y + 41}">{escape(host.name)}</text>',
    ]
    width = _HOST_W / max(1, len(host.rnics)) - 6
    parts.extend(
        _chip(
            _rnic_x(layout, host, rnic.name),
            _HOST_Y + 3,
            width,
            rnic.name,
            colours.get(f"{host.name}:{rnic.name}"),
        )
        for rnic in host.rnics
    )
    for index, gpu in enumerate(host.gpus):
        centre = x + _HOST_W * (index + 0.5) / len(host.gpus)
        wide = _HOST_W / len(host.gpus) - 8
        parts.append(_chip(centre, _HOST_Y + 51, wide, gpu.name, colours.get(f"{host.name}:{gpu.name}")))
    return [*parts, "</g>"]


def _chip(centre: float, y: float, width: float, name: str, colour: str | None) -> str:
    style = f' style="stroke:{escape(colour)};stroke-width:2.5"' if colour else ""
    return (
        f'<rect class="chip" x="{centre - width / 2:g}" y="{y:g}" '
        f'width="{width:g}" height="20" rx="4"{style}/>'
        f'<text class="chip-name" x="{centre:g}" y="{y + 14:g}">{escape(name)}</text>'
    )


def _badges(layout: _Layout, topology: Topology, marks: Sequence[Mark]) -> list[str]:
    taken: Counter[tuple[float, float]] = Counter()
    parts = []
    for mark in marks:
        spot = _spot(layout, topology, mark.target)
        if spot is None:
            continue
        x, y = spot[0] + 20 * taken[spot], spot[1]
        taken[spot] += 1
        parts.append(
            f'<g class="badge"><circle cx="{x:g}" cy="{y:g}" r="9.5" style="stroke:{escape(mark.colour)}"/>'
            f'<text x="{x:g}" y="{y + 4:g}">{mark.number}</text></g>'
        )
    return parts


def _spot(layout: _Layout, topology: Topology, target: str) -> tuple[float, float] | None:
    """Where the badge of a fault on `target` goes."""
    try:
        found = topology.resolve(target)
    except UsageError:
        return None
    if found.kind == "port" and found.link is not None:
        ax, ay, bx, by = _ends(layout, topology, found.link)
        # Nearer to the lower end: links cross in the middle.
        return (ax * 0.62 + bx * 0.38, ay * 0.62 + by * 0.38)
    if found.kind == "switch":
        x, y = layout.switches[found.node]
        return x + _SWITCH_W / 2, y - _SWITCH_H / 2
    left = layout.hosts[found.node]
    if found.rnic is not None:
        return _rnic_x(layout, topology.host_by_name[found.node], found.rnic.name), _HOST_Y - 12.0
    if found.gpu is not None:
        return left + _HOST_W - 2.0, _HOST_Y + 61.0
    return left + _HOST_W, float(_HOST_Y)
