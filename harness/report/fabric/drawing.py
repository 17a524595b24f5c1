"""Draw the fabric as an inline SVG: switches, racks with hosts, RNICs and GPUs, and numbered faults.

Colours are CSS variables of the surrounding page (`--ink`, `--muted`, `--line`, `--panel`), so that the drawing follows
dark mode and print. Fault targets have the kind's colour *and* a numbered badge, because about a tenth of all readers
cannot rely on colour.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from faultbed.harness.record.evidence.workload_evidence import Connection
from faultbed.harness.report.fabric.drawing_layout import (
    HOST_H,
    HOST_W,
    PAD,
    SWITCH_H,
    SWITCH_W,
    Box,
    Layout,
    badge_position,
    box,
    ends_of,
    lay_out,
    link_of,
)
from faultbed.testbed.model.topology import Host, Link, Topology

__all__ = ["Mark", "badges", "fabric_parts", "fabric_svg"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A fault on the drawing: its number in the report's list, its colour and its target."""

    number: int
    colour: str
    target: str


def fabric_svg(topology: Topology, marks: Sequence[Mark], connections: Iterable[Connection] = ()) -> str:
    """Draw a topology. Links that queue pairs of `connections` cross are thicker."""
    layout = lay_out(topology)
    parts = [*fabric_parts(layout, topology, marks, connections), *badges(layout, topology, marks)]
    faults = "; ".join(f"fault {mark.number} on {mark.target}" for mark in marks) or "no fault"
    label = (
        f"Fabric drawing: {len(topology.racks)} racks, {len(topology.hosts)} hosts, "
        f"{len(topology.switches)} switches, {len(topology.links)} links; {faults}."
    )
    return (
        f'<svg class="fabric" viewBox="0 0 {layout.width:g} {layout.height:g}" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def fabric_parts(
    layout: Layout, topology: Topology, marks: Sequence[Mark], connections: Iterable[Connection] = ()
) -> list[str]:
    """Return the elements of the drawing without badges, lowest layer first."""
    carried = _carried(topology, connections)
    colours = {link_of(topology, mark.target): mark.colour for mark in marks}
    parts = [*_rack_boxes(layout)]
    parts += [_link(layout, topology, link, carried[link.name], colours.get(link.name)) for link in topology.links]
    parts += [_switch(layout, name, role=switch.role) for name, switch in topology.switch_by_name.items()]
    node_colours = {mark.target: mark.colour for mark in marks}
    parts += [part for host in topology.hosts for part in _host(layout, topology, host, node_colours)]
    return parts


def _carried(topology: Topology, connections: Iterable[Connection]) -> Counter[str]:
    """Return, by link name, the number of queue pairs that cross it, from each connection's path."""
    count: Counter[str] = Counter()
    for connection in connections:
        ends = {connection.src, connection.dst}
        for node, following in zip(connection.path, connection.path[1:], strict=False):
            for link in topology.links_of(node):
                facing = link.other(node).node == following
                if facing and (link.is_uplink or f"{link.b.node}:{link.rnic}" in ends):
                    count[link.name] += 1
    return count


def _rack_boxes(layout: Layout) -> list[str]:
    bottom = layout.host_y + HOST_H + PAD
    return [
        f'<rect class="rack" x="{begin:g}" y="{layout.rtsw_y - 34:g}" width="{end - begin:g}" '
        f'height="{bottom - layout.rtsw_y + 34:g}" rx="10"/>'
        f'<text class="rack-name" x="{(begin + end) / 2:g}" y="{bottom + 17:g}">{escape(rack)}</text>'
        for rack, (begin, end) in layout.racks.items()
    ]


def _link(layout: Layout, topology: Topology, link: Link, carried: int, colour: str | None) -> str:
    ax, ay, bx, by = ends_of(layout, topology, link)
    kind = "link used" if carried else "link"
    style = f' style="stroke:{escape(colour)};stroke-width:3.5"' if colour else ""
    queue_pairs = f"{carried} queue pair{'' if carried == 1 else 's'} of the workload"
    return (
        f'<line class="{kind}" x1="{ax:g}" y1="{ay:g}" x2="{bx:g}" y2="{by:g}"{style}>'
        f"<title>{escape(link.name)}: {queue_pairs}</title></line>"
    )


def _switch(layout: Layout, name: str, *, role: str) -> str:
    x, y = layout.switches[name]
    return (
        f'<g class="switch {escape(role)}"><rect x="{x - SWITCH_W / 2:g}" y="{y - SWITCH_H / 2:g}" '
        f'width="{SWITCH_W}" height="{SWITCH_H}" rx="6"/>'
        f'<text x="{x:g}" y="{y + 4.5:g}">{escape(name)}</text></g>'
    )


def _host(layout: Layout, topology: Topology, host: Host, colours: dict[str, str]) -> list[str]:
    x = layout.hosts[host.name]
    stroke = f' style="stroke:{escape(colours[host.name])};stroke-width:3"' if host.name in colours else ""
    parts = [
        (f'<g class="host"><rect x="{x:g}" y="{layout.host_y:g}" width="{HOST_W}" height="{HOST_H}" rx="7"{stroke}/>'),
        f'<text class="name" x="{x + HOST_W / 2:g}" y="{layout.host_y + 41:g}">{escape(host.name)}</text>',
    ]
    for name in (*(device.name for device in host.rnics), *(device.name for device in host.gpus)):
        place = f"{host.name}:{name}"
        chip = box(layout, topology, place)
        if chip is not None:
            parts.append(_chip(chip, name, colours.get(place)))
    return [*parts, "</g>"]


def _chip(chip: Box, name: str, colour: str | None) -> str:
    style = f' style="stroke:{escape(colour)};stroke-width:2.5"' if colour else ""
    return (
        f'<rect class="chip" x="{chip.x:g}" y="{chip.y:g}" '
        f'width="{chip.width:g}" height="{chip.height:g}" rx="4"{style}/>'
        f'<text class="chip-name" x="{chip.x + chip.width / 2:g}" y="{chip.y + 14:g}">{escape(name)}</text>'
    )


def badges(layout: Layout, topology: Topology, marks: Sequence[Mark]) -> list[str]:
    """Draw a numbered circle next to each fault's target that the lab has."""
    badges_at: Counter[tuple[float, float]] = Counter()
    parts = []
    for mark in marks:
        place = badge_position(layout, topology, mark.target)
        if place is None:
            continue
        x, y = place[0] + 20 * badges_at[place], place[1]
        badges_at[place] += 1
        parts.append(
            f'<g class="badge"><circle cx="{x:g}" cy="{y:g}" r="9.5" style="stroke:{escape(mark.colour)}"/>'
            f'<text x="{x:g}" y="{y + 4:g}">{mark.number}</text></g>'
        )
    return parts
