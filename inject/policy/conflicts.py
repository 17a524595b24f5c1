"""What each fault claims, so that two that would spoil each other at one time are refused with the thing named. Pure.

A claim is a path from a whole thing to a part of it: `switch rtsw1`, `switch rtsw1 / bgpd`. A fault that claims a whole
thing (a switch that reboots, a host that is frozen) claims all that is inside it; two faults collide when a path of one
is that of the other, or leads to it. A link is inside what is at both of its ends, and inside its RNIC: whoever takes
one of them takes the link. Faults that compose (each packet fault has a table of its own in the hop) have parts of
their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inject.fault_plan import PlannedFault
    from testbed.model.topology import Link, Topology

__all__ = ["Claim", "both_claim", "claims_of", "other_host", "touches"]

Path = tuple[str, ...]

# Kinds that leave nothing of their target as it is: what else is done inside it meanwhile is lost, or cannot be told.
_WHOLE = frozenset({"switch.reboot", "host.freeze", "host.reboot", "rnic.reset", "rnic.remove", "gpu.lost"})
# Kinds that decide whether anything passes over a link. The claim of `link.oneway` is one direction of that.
_STATE = frozenset({"link.down", "link.flap"})
# On a rack the device is found again by a rescan of all buses of its host, which would bring back another one, too.
_RESCANNED = frozenset({"rnic.remove", "gpu.lost"})
# Something is said of the GPU, by the log of its host; nothing is done to it.
_SAID = frozenset({"gpu.xid"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A thing that a fault has for itself: its path, and what a person calls it."""

    path: Path
    thing: str

    def meets(self, other: Claim) -> bool:
        """Whether one is the other, or inside it."""
        shorter = min(len(self.path), len(other.path))
        return self.path[:shorter] == other.path[:shorter]


def claims_of(planned: PlannedFault, topology: Topology) -> tuple[Claim, ...]:
    """Everything that a planned fault has for itself while it is on."""
    kind, target = planned.kind, planned.target
    if kind in _WHOLE:
        claims = [Claim(path=path, thing=target.text) for path in _whole(planned)]
        if target.kind == "switch":
            claims += [claim for link in topology.links_of(target.node) for claim in _state(link)]
        if planned.lab_kind == "rack" and kind in _RESCANNED:
            claims.append(Claim(path=("host", target.node, "pci"), thing=f"the PCI buses of {target.node}"))
        return tuple(claims)
    if kind in _STATE and target.link is not None:
        return tuple(_state(target.link))
    if kind == "link.oneway" and target.link is not None and target.port is not None:
        return tuple(_state(target.link, sender=_sender(planned, target.link)))
    return tuple(_own(planned, topology))


def both_claim(one: PlannedFault, two: PlannedFault, topology: Topology, *, at_any_time: bool = False) -> str | None:
    """What two faults would both change at one time, in words; None: they go together.

    Args:
        one: a fault.
        two: another one.
        topology: their lab.
        at_any_time: do not look at their windows.
    """
    overlap = one.at_s < two.at_s + two.for_s and two.at_s < one.at_s + one.for_s
    if not (overlap or at_any_time):
        return None
    theirs = claims_of(two, topology)
    met = [
        max(mine, other, key=lambda claim: len(claim.path))
        for mine in claims_of(one, topology)
        for other in theirs
        if mine.meets(other)
    ]
    return min(met, key=lambda claim: (len(claim.path), claim.thing)).thing if met else None


def other_host(planned: PlannedFault, topology: Topology) -> str | None:
    """The host from which a fault is done to another thing: that of elephants which are sent to the target."""
    place = planned.place
    away = not place.local and place.node in topology.host_by_name and place.node != planned.target.node
    # What a host does to its own port, by the name that the switch gives the link, is done to that link.
    link = planned.target.link
    return place.node if away and not (link is not None and link.b.node == place.node) else None


def touches(planned: PlannedFault, topology: Topology) -> tuple[str, ...]:
    """Names of what must be held for a fault: its target, the host that does it, the one whose buses it scans."""
    other = other_host(planned, topology)
    scans = planned.lab_kind == "rack" and planned.kind in _RESCANNED
    return (planned.target.text, *([other] if other else []), *([planned.target.node] if scans else []))


def _whole(planned: PlannedFault) -> list[Path]:
    target = planned.target
    if target.rnic is not None:
        return [("host", target.node, "rnic", target.rnic.name)]
    if target.gpu is not None:
        return [("host", target.node, "gpu", target.gpu.name)]
    return [(target.kind, target.node)]


def _state(link: Link, *, sender: str | None = None) -> list[Claim]:
    """Whether anything passes a link (in one direction), as a part of what is at either end."""
    part = ("link", link.name, *([f"from {sender}"] if sender else []))
    far: Path = ("host", link.b.node, "rnic", link.rnic) if link.rnic else ("switch", link.b.node)
    thing = f"link {link.name}"
    return [Claim(path=(*end, *part), thing=thing) for end in (("switch", link.a.node), far)]


def _sender(planned: PlannedFault, link: Link) -> str:
    """Where what a one-way fault stops comes from: towards the target, or from it."""
    target = planned.target
    # An RNIC is what is at its own end of the link; of a switch port the target is what the port faces.
    aimed = target.node if target.kind == "rnic" else link.other(target.node).node
    return link.other(aimed).node if planned.params.get("direction", "to") == "to" else aimed


def _own(planned: PlannedFault, topology: Topology) -> list[Claim]:
    """The part that the fault's request names, inside the machine, and inside the RNIC or GPU that it is done to."""
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
    if target.node == node and target.gpu is not None and planned.kind not in _SAID:
        roots.append((*root, "gpu", target.gpu.name))
    return [Claim(path=(*each, *part), thing=f"{'/'.join(part)} of {' '.join(root)}") for each in roots]
