"""What each link carried in a run, in each direction, and how evenly equal-cost links were used. Pure.

Bytes are those sent by the port at the sending end between the readings before and after the run. The port at the far
end counts if it has more (the netdev of a hardware RNIC does not count RDMA). Control traffic is included.

    MMR   maximum over mean, 1 is even, n is all on one of n: over all links from one layer of switches to the next
    JFI   Jain's fairness index, (sum x)^2 / (n sum x^2), 1 is even, 1/n is all on one: over a switch's uplinks
          (R. Jain, D. Chiu, W. Hawe, DEC-TR-301, 1984)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.testbed.model.topology import Link, Port, Topology
from faultbed.testbed.observe import counters
from faultbed.testbed.routing.offered_load import max_over_mean
from faultbed.traffic.engine.traffic_metrics import jain_index

__all__ = ["Direction", "Fan", "Layer", "LinkLoad", "fans", "jain", "layers", "link_loads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Direction:
    """What one direction of a link carried.

    `size_bytes` is None if no port was read. `at_least` means that a counter was reset between the readings. `share` is
    the share of all bytes that the switch and its equal-cost links carried in this direction (`link_loads`); None: they
    are not all known.
    `expected_bytes` is the expected load (`faultbed.harness.analysis.links.expected_load`); None: unknown.
    """

    src: str
    dst: str
    size_bytes: int | None
    at_least: bool
    share: float | None = None
    expected_bytes: float | None = None

    @property
    def is_known(self) -> bool:
        """Whether all its bytes are known: a port was read, and its counter was not reset."""
        return self.size_bytes is not None and not self.at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLoad:
    """A link: `up` is from the lower end to the upper one (host to rack switch, rack switch to spine)."""

    name: str
    is_uplink: bool
    up: Direction
    down: Direction


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """All links from switches of one role to those of another, in one direction."""

    src: str
    dst: str
    count: int
    mmr: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fan:
    """The uplinks of one switch."""

    switch: str
    count: int
    mmr: float
    jfi: float


def link_loads(run: RunEvidence) -> tuple[LinkLoad, ...]:
    """Return every link, those between switches first.

    The shares of a rack switch's uplinks add up to 1 per direction.
    """
    topology = run.lab.topology
    hosts = (link for link in topology.links if not link.is_uplink)
    loads = [_load(run, link) for link in (*topology.uplinks, *hosts)]
    sums: dict[tuple[str, bool], float] = {}
    for load in loads:
        if load.is_uplink:
            for is_up, direction in ((True, load.up), (False, load.down)):
                key = load.up.src, is_up
                known = direction.size_bytes if direction.is_known else None
                sums[key] = sums.get(key, 0) + (math.nan if known is None else known)

    def shared(load: LinkLoad, direction: Direction, *, is_up: bool) -> Direction:
        whole = sums.get((load.up.src, is_up), 0)
        if not load.is_uplink or direction.size_bytes is None or not whole or math.isnan(whole):
            return direction
        return replace(direction, share=direction.size_bytes / whole)

    return tuple(
        replace(load, up=shared(load, load.up, is_up=True), down=shared(load, load.down, is_up=False)) for load in loads
    )


def layers(loads: Sequence[LinkLoad], topology: Topology) -> tuple[Layer, ...]:
    """Return both directions between each two roles of switches.

    A direction is left out if it has only one link, no traffic, or a link whose bytes are unknown.
    """
    by_roles: dict[tuple[str, str], list[Direction]] = {}
    for load in loads:
        if load.is_uplink:
            for direction in (load.up, load.down):
                roles = topology.switch_by_name[direction.src].role, topology.switch_by_name[direction.dst].role
                by_roles.setdefault(roles, []).append(direction)
    return tuple(
        Layer(src=src, dst=dst, count=len(directions), mmr=mmr)
        for (src, dst), directions in by_roles.items()
        if (mmr := max_over_mean(_sizes(directions))) is not None
    )


def fans(loads: Sequence[LinkLoad], topology: Topology) -> tuple[Fan, ...]:
    """Return what each switch sent over its uplinks.

    A switch is left out if it has only one uplink, sent nothing, or has an uplink whose bytes are unknown.
    """
    fans_found = []
    for switch in topology.switches:
        sizes = _sizes([load.up for load in loads if load.is_uplink and load.up.src == switch.name])
        mmr, jfi = max_over_mean(sizes), jain(sizes)
        if mmr is not None and jfi is not None:
            fans_found.append(Fan(switch=switch.name, count=len(sizes), mmr=mmr, jfi=jfi))
    return tuple(fans_found)


def _sizes(directions: Sequence[Direction]) -> list[int]:
    """Return the bytes of directions to compare; an empty list if a direction's bytes are not known."""
    if not all(direction.is_known for direction in directions):
        return []
    return [direction.size_bytes or 0 for direction in directions]


def jain(sizes: Sequence[float]) -> float | None:
    """Return Jain's index, 1/n to 1; None with fewer than two links or without traffic."""
    return jain_index(sizes) if len(sizes) > 1 else None


def _load(run: RunEvidence, link: Link) -> LinkLoad:
    return LinkLoad(
        name=link.name,
        is_uplink=link.is_uplink,
        # The lower end of a host link is its `b`: `Link.a` is always a switch.
        up=_direction(run, *((link.a, link.b) if link.is_uplink else (link.b, link.a))),
        down=_direction(run, *((link.b, link.a) if link.is_uplink else (link.a, link.b))),
    )


def _direction(run: RunEvidence, src: Port, dst: Port) -> Direction:
    sizes, at_least = [], False
    for port, name in ((src, "tx_bytes"), (dst, "rx_bytes")):
        key = f"{port.netdev}.{name}"
        before, after = (
            run.telemetry.counters_before.get(port.node, {}).get(key),
            run.telemetry.counters_after.get(port.node, {}).get(key),
        )
        if before is not None and after is not None:
            sizes.append(counters.delta(before, after))
            at_least |= bool(
                counters.why_reset(run.telemetry.counters_before, run.telemetry.counters_after, f"{port.node}/{key}")
            )
    return Direction(src=src.node, dst=dst.node, size_bytes=max(sizes, default=None), at_least=at_least)
