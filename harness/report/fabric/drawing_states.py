"""Draw the fabric at the moments of `fabric_states`: one plain drawing, with the differences on top for each moment.

The plain drawing is in the page once, as a definition that each moment refers to. Each state has a colour and a form: a
halo, dashes, dots or a double line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from faultbed.harness.record.evidence.workload_evidence import Connection
from faultbed.harness.report.fabric.drawing import Mark, badges, fabric_parts
from faultbed.harness.report.fabric.drawing_layout import Box, Layout, box, ends_of, lay_out
from faultbed.harness.report.fabric.fabric_states import Moment, State
from faultbed.testbed.model.topology import Topology

__all__ = ["moments_svg", "plain_svg"]

_PLAIN = "fabric-plain"
_MARGIN: dict[State, float] = {"fault": 3, "down": 1, "routes": 3, "recovered": 2}
"""Distance of a state's outline from a node's frame."""


def plain_svg(topology: Topology, connections: Iterable[Connection] = ()) -> str:
    """Return the definition that the drawings of `moments_svg` refer to. It shows nothing by itself."""
    parts = "".join(fabric_parts(lay_out(topology), topology, (), connections))
    return (
        f'<svg class="plain-fabric" aria-hidden="true"><defs><g class="fabric" id="{_PLAIN}">{parts}</g></defs></svg>'
    )


def moments_svg(topology: Topology, moments: Sequence[Moment], marks: Sequence[Mark]) -> tuple[str, ...]:
    """Return a drawing for each moment. `marks` are the badges of all faults; active ones are drawn."""
    layout = lay_out(topology)
    return tuple(_moment(layout, topology, moment, marks) for moment in moments)


def _moment(layout: Layout, topology: Topology, moment: Moment, marks: Sequence[Mark]) -> str:
    colours = {mark.target: mark.colour for mark in marks if mark.number in moment.faults}
    on = [mark for mark in marks if mark.number in moment.faults]
    parts = [f'<use href="#{_PLAIN}"/>']
    links = {link.name: link for link in topology.links}
    for name, states in moment.links.items():
        if name in links:
            ends = ends_of(layout, topology, links[name])
            parts += [_line(ends, state, _colour(name, colours)) for state in states]
    for name, states in moment.nodes.items():
        frame = box(layout, topology, name)
        if frame is not None:
            parts += [_frame(frame, state, _colour(name, colours)) for state in states]
    parts += badges(layout, topology, on)
    label = f"Fabric at {moment.at_s:.1f} s ({moment.title}): {moment.summary}."
    return (
        f'<svg class="fabric" viewBox="0 0 {layout.width:g} {layout.height:g}" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def _colour(name: str, colours: Mapping[str, str]) -> str | None:
    """Return a fault's own colour. A link may be named from either end."""
    first, _, rest = name.partition(":")
    return colours.get(name) or colours.get(f"{rest}:{first}")


def _style(state: State, colour: str | None) -> str:
    return f' style="stroke:{escape(colour)}"' if state == "fault" and colour else ""


def _line(ends: tuple[float, float, float, float], state: State, colour: str | None) -> str:
    ax, ay, bx, by = ends
    ends_attributes = f'x1="{ax:g}" y1="{ay:g}" x2="{bx:g}" y2="{by:g}"'
    # Dashes show what is below them, so cover it first.
    under = f'<line class="state under" {ends_attributes}/>' if state == "down" else ""
    return f'{under}<line class="state s-{state}" {ends_attributes}{_style(state, colour)}/>'


def _frame(frame: Box, state: State, colour: str | None) -> str:
    margin = _MARGIN[state]
    return (
        f'<rect class="state s-{state}" x="{frame.x - margin:g}" y="{frame.y - margin:g}" '
        f'width="{frame.width + 2 * margin:g}" height="{frame.height + 2 * margin:g}" rx="7"{_style(state, colour)}/>'
    )
