"""What round trips of probes add to the findings of a run: which place makes them long, network or host. Pure.

Probes tell what no counter of rxe tells: that packets wait and are not lost. A link or a switch over which round trips
take much longer than on like paths is *congestion* there, whatever makes them wait: a queue, a delay, a limited rate. A
host all of whose round trips are long is busy, for their times are taken by its processes (`traffic.rtt`). What is
already found at that place gets the round trips as one more line of evidence, and is no second finding.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from harness.attribution.places import place_of_link, place_of_switch
from harness.findings import Cause, Finding, Place
from testbed.topology import Link, Topology
from traffic import rtt
from traffic.metrics import percentile
from traffic.rtt import PathTimes, SlowPlace

__all__ = ["with_round_trips"]

_SURE, _BUSY = 0.7, 0.5
"""How sure long round trips make us of a link or switch, and of a host; shared out among those they cannot tell."""


def with_round_trips(topology: Topology, found: Sequence[Finding], paths: Sequence[PathTimes]) -> list[Finding]:
    """The findings, with those of the round trips."""
    known = list(found)
    for slow in rtt.locate(paths):
        words = _words(slow, paths)
        places = _places(topology, slow)
        names = {name for _, name in places} | {name.partition(":")[0] for _, name in places}
        at = next((index for index, one in enumerate(known) if one.name in names), None)
        if at is not None:
            known[at] = msgspec.structs.replace(known[at], evidence=(*known[at].evidence, words))
        elif places:
            place, name = places[0]
            cause: Cause = "busy-host" if place == "rank" else "congestion"
            sure = (_BUSY if place == "rank" else _SURE) / len(places)
            known.append(Finding(cause=cause, place=place, name=name, confidence=sure, evidence=(words,)))
    return known


def _places(topology: Topology, slow: SlowPlace) -> list[tuple[Place, str]]:
    """Links, else switches, else hosts that the votes cannot tell apart, each once: both ways of a link are one."""
    links: dict[str, Place] = {}
    nodes: dict[str, Place] = {}
    for place in (slow.place, *slow.alike):
        if len(place) > 1:
            link = _link(topology, *place)
            if link is not None:
                links[link.name] = place_of_link(topology, link)
        elif place[0] in topology.switch_by_name:
            nodes[place[0]] = place_of_switch(topology, place[0])
        elif place[0] in topology.host_by_name:
            nodes[place[0]] = "rank"
    chosen = links or {name: kind for name, kind in nodes.items() if kind != "rank"} or nodes
    return [(kind, name) for name, kind in chosen.items()]


def _link(topology: Topology, near: str, far: str) -> Link | None:
    """The link between two nodes of a path, of which one may be an RNIC (`host1:rxe0`)."""
    ends = {near, far}
    for link in topology.links:
        lower = link.b.node if link.rnic is None else f"{link.b.node}:{link.rnic}"
        if {link.a.node, lower} == ends:
            return link
    return None


def _words(slow: SlowPlace, paths: Sequence[PathTimes]) -> str:
    """The evidence: how long, against what, how many; and what the processes at the ends took of it."""
    crossing = [one for one in paths if one.responder is not None and _crosses(one, slow.place)]
    others = [one for one in paths if one.responder is not None and not _crosses(one, slow.place)]
    held = ""
    if crossing and others:
        here, there = (
            percentile([one.responder.median_ns for one in each if one.responder is not None], 50) / 1e6
            for each in (crossing, others)
        )
        held = f"; responders took {here:.2f} ms of it, elsewhere {there:.2f} ms"
    return (
        f"probes over {' or '.join(slow.names)} took {slow.times:.1f} times what they take on like paths, "
        f"{slow.slow} of {slow.answered} more than {rtt.SLOW:g} times{held} ({rtt.STAMPS} times)"
    )


def _crosses(one: PathTimes, place: tuple[str, ...]) -> bool:
    return place in one.crossed
