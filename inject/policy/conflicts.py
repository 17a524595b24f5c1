"""Conflicts between faults: two faults that would change the same resource at the same time are refused. Pure.

Each fault claims resources. A claim is a path from a whole to a part of it: `switch rtsw1`, `switch rtsw1 / bgpd`. A
fault that claims a whole (a switch that reboots, a host that is frozen) claims everything inside it. Two faults
conflict if a path of one equals a path of the other, or contains it. A link is inside both of its ends, and inside its
RNIC, so a claim of any of these includes the link. Faults that can be combined claim different parts: each packet fault
has its own table at the hop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from faultbed.inject.kinds.catalogue import Trait, has_trait
from faultbed.testbed.model.lab_kind import traits_of

if TYPE_CHECKING:
    from faultbed.inject.mechanisms.planned_fault import PlannedFault
    from faultbed.testbed.model.topology import Link, Topology

__all__ = ["Claim", "both_claim", "claims_of", "other_host", "touches"]

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A resource that only one fault may change at a time: its path, and its name for people."""

    path: Path
    resource: str

    def meets(self, other: Claim) -> bool:
        """Return whether one claim equals the other or contains it."""
        shorter = min(len(self.path), len(other.path))
        return self.path[:shorter] == other.path[:shorter]


def claims_of(planned: PlannedFault, topology: Topology) -> tuple[Claim, ...]:
    """Return everything that a planned fault claims, or may claim, while it is on."""
    if planned.candidates:
        return tuple(dict.fromkeys(claim for option in planned.candidates for claim in claims_of(option, topology)))
    kind, target = planned.kind, planned.target
    if has_trait(kind, Trait.WHOLE_TARGET):
        claims = [Claim(path=path, resource=target.text) for path in _target_paths(planned)]
        if target.kind == "switch":
            claims += [claim for link in topology.links_of(target.node) for claim in _state(link)]
        if not traits_of(planned.lab_kind).is_emulated and has_trait(kind, Trait.BUS_RESCAN):
            claims.append(Claim(path=("host", target.node, "pci"), resource=f"the PCI buses of {target.node}"))
        return tuple(claims)
    if has_trait(kind, Trait.LINK_STATE) and target.link is not None:
        one_way = has_trait(kind, Trait.ONE_HOP)
        return tuple(_state(target.link, sender=_sender(planned, target.link) if one_way else None))
    return tuple(_claimed_part(planned, topology))


def both_claim(
    fault: PlannedFault, other_fault: PlannedFault, topology: Topology, *, at_any_time: bool = False
) -> str | None:
    """Return the name of a resource that two faults would both change at one time; None: they do not conflict.

    Args:
        fault: a fault.
        other_fault: the fault to compare with it.
        topology: their lab.
        at_any_time: ignore their windows.
    """
    overlap = fault.spec.at_s < other_fault.ends_s and other_fault.spec.at_s < fault.ends_s
    if not (overlap or at_any_time):
        return None
    theirs = claims_of(other_fault, topology)
    met = [
        max(mine, other, key=lambda claim: len(claim.path))
        for mine in claims_of(fault, topology)
        for other in theirs
        if mine.meets(other)
    ]
    return min(met, key=lambda claim: (len(claim.path), claim.resource)).resource if met else None


def other_host(planned: PlannedFault, topology: Topology) -> str | None:
    """Return the host that a fault runs on if that is not its target (a sender of traffic); None: there is none."""
    place = planned.place
    away = not place.local and place.node in topology.host_by_name and place.node != planned.target.node
    # A host that takes down its own port is no other host, even if the target is named from the switch's end.
    link = planned.target.link
    return place.node if away and not (link is not None and link.b.node == place.node) else None


def touches(planned: PlannedFault, topology: Topology) -> tuple[str, ...]:
    """Return the names to reserve for a fault: target, another host that it runs on, host whose bus is rescanned."""
    if planned.candidates:
        return tuple(dict.fromkeys(name for option in planned.candidates for name in touches(option, topology)))
    other = other_host(planned, topology)
    scans = not traits_of(planned.lab_kind).is_emulated and has_trait(planned.kind, Trait.BUS_RESCAN)
    return (planned.target.text, *([other] if other else []), *([planned.target.node] if scans else []))


def _target_paths(planned: PlannedFault) -> list[Path]:
    """Return the path of a fault's whole target."""
    target = planned.target
    if target.rnic is not None:
        return [("host", target.node, "rnic", target.rnic.name)]
    if target.gpu is not None:
        return [("host", target.node, "gpu", target.gpu.name)]
    return [(target.kind, target.node)]


def _state(link: Link, *, sender: str | None = None) -> list[Claim]:
    """Return the claim of a link's state (in one direction), as a part of both of its ends."""
    part = ("link", link.name, *([f"from {sender}"] if sender else []))
    far: Path = ("host", link.b.node, "rnic", link.rnic) if link.rnic else ("switch", link.b.node)
    resource = f"link {link.name}"
    return [Claim(path=(*end, *part), resource=resource) for end in (("switch", link.a.node), far)]


def _sender(planned: PlannedFault, link: Link) -> str:
    """Return the node whose packets a one-way fault drops: the far end (`to` the target), or the target (`from`)."""
    target = planned.target
    # An RNIC is at its own end of the link; a switch port stands for the node that it faces.
    end = target.node if target.kind == "rnic" else link.other(target.node).node
    return link.other(end).node if planned.spec.params.get("direction", "to") == "to" else end


def _claimed_part(planned: PlannedFault, topology: Topology) -> list[Claim]:
    """Return the part that the fault's request names, inside the machine and inside its RNIC or GPU."""
    place, target, named = planned.place, planned.target, str(planned.request["claims"])
    node = place.name
    if node in topology.switch_by_name:
        root: Path = ("switch", node)
    else:
        root = ("host" if node in topology.host_by_name else "machine", node)
    words = [word for word in named.split("/") if word]
    part = tuple(words[1:] if words[0] == node else words)
    roots = [root]
    if target.node == node and target.rnic is not None:
        roots.append((*root, "rnic", target.rnic.name))
    if target.node == node and target.gpu is not None and not has_trait(planned.kind, Trait.LOG_ONLY):
        roots.append((*root, "gpu", target.gpu.name))
    return [Claim(path=(*root_path, *part), resource=f"{'/'.join(part)} of {' '.join(root)}") for root_path in roots]
