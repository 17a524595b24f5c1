"""What an experiment needs of a lab: `rdma`, `gpu`, `uplinks >= 2`, `hosts >= 4`.

rdma       every host has at least one RNIC
gpu        every host has at least one GPU
hosts      number of hosts
racks      number of racks
zones      number of zones
rnics      RNICs of the host that has fewest
uplinks    uplinks of the rack switch that has fewest: the width of ECMP between racks
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from faultbed.testbed.model.topology import Topology
from faultbed.testbed.suggestions import hint

__all__ = ["Need", "parse_need", "unmet"]

_FEATURES = ("rdma", "gpu")
_COUNTS = ("hosts", "racks", "zones", "rnics", "uplinks")
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_NEED = re.compile(r"\s*(?P<name>[a-z]+)\s*(?:(?P<op>>=|<=|==|>|<)\s*(?P<number>[0-9]+)\s*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """One need. A feature has no comparison; a count has one."""

    name: str
    comparison: str | None = None
    number: int = 1

    def __str__(self) -> str:
        return self.name if self.comparison is None else f"{self.name} {self.comparison} {self.number}"


def parse_need(text: str) -> Need:
    """Read `rdma` or `uplinks >= 2`.

    Raises:
        ValueError: no such need, or a comparison where none belongs.
    """
    match = _NEED.fullmatch(text)
    known = (*_FEATURES, *_COUNTS)
    if match is None or match["name"] not in known:
        raise ValueError(f'no need "{text}"; {hint(text.split(" ", maxsplit=1)[0], known)}')
    if match["name"] in _FEATURES:
        if match["op"]:
            raise ValueError(f'"{match["name"]}" has no number; write it without "{match["op"]} {match["number"]}"')
        return Need(name=match["name"])
    if not match["op"]:
        raise ValueError(f'"{match["name"]}" is a number; write "{match["name"]} >= 2"')
    return Need(name=match["name"], comparison=match["op"], number=int(match["number"]))


def _count(name: str, topology: Topology) -> int:
    if name == "hosts":
        return len(topology.hosts)
    if name == "racks":
        return len(topology.racks)
    if name == "zones":
        return len(topology.zones)
    if name in ("rnics", "rdma"):
        return min((len(host.rnics) for host in topology.hosts), default=0)
    if name == "gpu":
        return min((len(host.gpus) for host in topology.hosts), default=0)
    return min(
        (
            sum(link.is_uplink and link.a.node == switch.name for link in topology.links)
            for switch in topology.switches
            if switch.role == "rtsw"
        ),
        default=0,
    )


def unmet(needs: tuple[Need, ...], topology: Topology) -> tuple[str, ...]:
    """Return a sentence for each need that the lab does not meet."""
    sentences = []
    for need in needs:
        have = _count(need.name, topology)
        if not _COMPARISONS[need.comparison or ">="](have, need.number):
            sentences.append(
                f"needs {need}; a host of this lab has none"
                if need.comparison is None
                else f"needs {need}; this lab has {have}"
            )
    return tuple(sentences)
