"""Selectors of a place on the path of queue pairs: `path[host1:rxe0>host3:rxe0]`, chosen when a fault is armed. Pure.

The place is the uplink by which packets from the first RNIC to the second one leave its rack switch. For faults of
switches it is the switch at the other end of that uplink. Faults that act on packets as they arrive have the port that
faces the second RNIC, and those of rack switches have the one of that port; so has every fault if there is one rack.
"""

from __future__ import annotations

import re
from typing import Literal

from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.topology import Target, Topology

__all__ = ["Pair", "PlaceOnPath", "ends_in", "names_on_path", "place_of", "text_of"]

Pair = tuple[str, str]
"""The RNICs from which and to which packets go."""

PlaceOnPath = Literal["uplink", "receiver", "spine", "rack switch"]
"""A port on a path (the uplink that packets take, or the port that faces the receiver), or a switch."""

_PATH = re.compile(r"path\[(?P<src>.*)>(?P<dst>.*)\]")


def ends_in(text: str) -> Pair | None:
    """Return the two ends as they are written in a text such as `path[client>server]`; None: it is no path."""
    match = _PATH.fullmatch(text)
    return None if match is None else (match["src"].strip(), match["dst"].strip())


def text_of(ends: Pair) -> str:
    """Return the selector of the path between two ends."""
    return f"path[{ends[0]}>{ends[1]}]"


def names_on_path(topology: Topology, ends: Pair, *, at: PlaceOnPath) -> tuple[str, ...]:
    """Return the names of all ports, or all switches, that may be this place on a path between two RNICs.

    Raises:
        UsageError: an end is no RNIC, or both are the same one.
    """
    for end in ends:
        if topology.resolve(end).kind != "rnic":
            raise UsageError(f'"{text_of(ends)}": {end} is no RNIC; name RNICs or roles, as in path[client>server]')
    if ends[0] == ends[1]:
        raise UsageError(f'"{text_of(ends)}": the path ends where it begins; name two RNICs')
    near, far = (topology.resolve(end).link for end in ends)
    assert near is not None  # noqa: S101 (an RNIC has a link)
    assert far is not None  # noqa: S101
    if near.a.node == far.a.node or at in ("receiver", "rack switch"):
        return (far.name if at in ("uplink", "receiver") else far.a.node,)
    spines = [link.other(near.a.node).node for link in topology.links_of(near.a.node) if link.is_uplink]
    return tuple(dict.fromkeys(f"{near.a.node}:{spine}" if at == "uplink" else spine for spine in spines))


def place_of(topology: Topology, target: Target) -> PlaceOnPath:
    """Return which place on a path a target is."""
    if target.link is not None:
        return "uplink" if target.link.is_uplink else "receiver"
    switch = topology.switch_by_name.get(target.node)
    return "spine" if switch is not None and switch.role != "rtsw" else "rack switch"
