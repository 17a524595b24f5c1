"""The state of a modelled fabric: its links and routing while faults are on and switches are drained. Pure.

Each fault kind declares its effect (`faultbed.inject.kinds.effect`). A kind without one is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from faultbed.inject.kinds.catalogue import CATALOGUE
from faultbed.inject.kinds.effect import Effect
from faultbed.inject.mechanisms.planned_fault import PlannedFault
from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.topology import Link, Topology
from faultbed.testbed.routing.link_arrays import LinkArrays
from faultbed.testbed.routing.offered_load import Fabric
from faultbed.testbed.routing.schemes import Choice, Routing, Scheme, Shares
from faultbed.testbed.suggestions import hint

__all__ = ["FabricState", "drained_links", "effect_of", "goodput_share", "state_of"]

_BYTES_PER_BIT = 1 / 8


@dataclass(frozen=True, kw_only=True, eq=False)
class FabricState:
    """A fabric and its links while some faults are on.

    A link has two directions, numbered as in `arrays`.

    Attributes:
        fabric: switches with a routing scheme, without failed links.
        arrays: capacity of each direction in bytes per second.
        goodput: remaining share of a queue pair's goodput, 0 to 1, by the number of a direction that loses packets.
        compute: remaining share of a GPU's speed, 0 to 1, by its name (`host1:gpu0`).
        cut_host_links: names of links between an RNIC and its switch that carry nothing.
    """

    fabric: Fabric
    arrays: LinkArrays
    goodput: dict[int, float] = field(default_factory=dict)
    compute: dict[str, float] = field(default_factory=dict)
    cut_host_links: frozenset[str] = frozenset()


def goodput_share(share: float, in_flight: int) -> float:
    """Return an upper bound of goodput under go-back-N, relative to goodput without loss.

    `share` of the packets is lost; each queue pair has `in_flight` packets outstanding.
    """
    return (1 - share) / (1 - share + in_flight * share)


def effect_of(fault: PlannedFault, where: str) -> Effect:
    """Return the effect of a fault.

    Raises:
        UsageError: its kind declares no effect, or none with these parameters; the message begins with `where`.
    """
    declared = CATALOGUE[fault.kind].effect
    effect = None if declared is None else declared(fault.spec.params)
    if effect is None:
        which = "with these parameters " if declared is not None else ""
        raise UsageError(
            f"{where}: {fault.kind} {which}declares no effect on capacity, paths, loss or compute; leave the fault "
            "out, or run the experiment on a lab"
        )
    return effect


def drained_links(topology: Topology, names: Sequence[str]) -> frozenset[str]:
    """Return the names of the links between switches that are out of use while `names` are drained.

    Args:
        topology: the lab's topology.
        names: switches, or links between switches, given from either end.

    Raises:
        UsageError: a name is neither; the message begins with `--drain`.
    """
    failed: set[str] = set()
    known = {link.name for link in topology.uplinks} | {f"{link.b.node}:{link.a.node}" for link in topology.uplinks}
    for name in names:
        if name in topology.switch_by_name:
            failed |= {link.name for link in topology.links_of(name) if link.is_uplink}
        elif name in known:
            link = topology.resolve(name).link
            failed |= {link.name} if link is not None else set()
        else:
            choices = [*topology.switch_by_name, *sorted(known)]
            raise UsageError(f'--drain {name}: no switch or link between switches "{name}"; {hint(name, choices)}')
    return frozenset(failed)


def state_of(
    topology: Topology,
    scheme: Scheme,
    routing: Routing,
    arrays: LinkArrays,
    *,
    failed: frozenset[str],
    faults: Sequence[tuple[PlannedFault, Effect]],
    in_flight: int,
) -> FabricState:
    """Return the state of a fabric while links have failed and faults are on.

    Args:
        topology: the lab's topology.
        scheme: the routing scheme without faults.
        routing: parameters of the routing scheme.
        arrays: capacity of each direction without faults, in bytes per second.
        failed: names of links between switches that are out of use.
        faults: faults that are on at the same time, each with its effect (`effect_of`).
        in_flight: outstanding packets of a queue pair.

    Raises:
        UsageError: the target of a fault is chosen only at run time, or is no port although its effect needs one.
    """
    cut = frozenset(failed)
    cut_host_links: set[str] = set()
    for fault, effect in faults:
        if fault.candidates:
            raise UsageError(
                f"{fault.spec.id}: the target of {fault.target.text} is known only while the workload runs, so "
                "nothing can be predicted; name an uplink"
            )
        links = _cut_by(topology, fault, effect)
        cut |= {link.name for link in links if link.is_uplink}
        cut_host_links |= {link.name for link in links if not link.is_uplink}
    chosen = scheme
    for fault, effect in faults:
        if effect.attracts:
            chosen = _attracted(chosen, _link_of(fault))
    capacity = arrays.capacity.copy()
    goodput: dict[int, float] = {}
    compute: dict[str, float] = {}
    for fault, effect in faults:
        if effect.compute < 1:
            name = f"{fault.target.node}:{fault.target.gpu.name}" if fault.target.gpu else fault.target.node
            compute[name] = compute.get(name, 1.0) * effect.compute
        if effect.rate_bps is not None or effect.load_bps or effect.lost:
            number = _direction(arrays, fault, effect.direction)
            rate = math.inf if effect.rate_bps is None else effect.rate_bps * _BYTES_PER_BIT
            capacity[number] = max(0.0, np.minimum(capacity[number], rate) - effect.load_bps * _BYTES_PER_BIT)
            if effect.lost:
                goodput[number] = goodput.get(number, 1.0) * goodput_share(effect.lost, in_flight)
    return FabricState(
        fabric=Fabric.of(topology, chosen, routing, failed=cut),
        arrays=replace(arrays, capacity=capacity),
        goodput=goodput,
        compute=compute,
        cut_host_links=frozenset(cut_host_links),
    )


def _cut_by(topology: Topology, fault: PlannedFault, effect: Effect) -> list[Link]:
    """Return the links that carry nothing while a fault is on."""
    if effect.cuts == "nothing":
        return []
    if fault.target.link is not None:
        return [fault.target.link]
    links = topology.links_of(fault.target.node)
    return [link for link in links if link.is_uplink or effect.cuts == "all"]


def _link_of(fault: PlannedFault) -> Link:
    if fault.target.link is None:
        raise UsageError(f"{fault.spec.id}: the model of {fault.kind} needs a port, and {fault.target.text} is none")
    return fault.target.link


def _direction(arrays: LinkArrays, fault: PlannedFault, direction: Literal["to", "from"]) -> int:
    """Return the number of the direction in which packets go to a fault's target, or come from it.

    If the target is a switch port, packets "to" it leave the switch through the port.
    """
    link = _link_of(fault)
    towards = link.a.node if fault.target.kind == "rnic" else fault.target.node
    return arrays.numbers[link.name, towards if direction == "to" else link.other(towards).node]


def _attracted(scheme: Scheme, link: Link) -> Scheme:
    """Return a scheme in which the switch at end a of `link` sends over it all packets for which it is a next hop."""

    def choose(choice: Choice) -> Shares:
        if choice.switch == link.a.node and link in choice.alive:
            return ((link, 1.0),)
        return scheme.choose(choice)

    return replace(scheme, choose=choose)
