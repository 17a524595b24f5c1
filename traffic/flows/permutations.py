"""Random permutations of a lab's RNICs whose flows all cross the same tier. Pure.

rack     to another host of the same rack: no link between switches
zone     to another rack of the same zone: the uplinks of rack switches
fabric   to another zone: the uplinks of spines, too
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Literal

from testbed.errors import UsageError
from testbed.model.topology import Host, Topology

__all__ = ["TIERS", "Tier", "permutation", "tiers_of"]

Tier = Literal["rack", "zone", "fabric"]
TIERS: tuple[Tier, ...] = ("rack", "zone", "fabric")
_TRIES = 200


def tiers_of(topology: Topology) -> tuple[Tier, ...]:
    """Return the tiers of a lab that a permutation of all RNICs can cross.

    For example, if one rack has more RNICs than all others of its zone together, some of its RNICs have no partner in
    another rack.
    """
    return tuple(tier for tier in TIERS if _is_possible(topology, tier))


def permutation(topology: Topology, tier: Tier, *, seed: int, number: int) -> tuple[tuple[str, str], ...]:
    """Return one random permutation: every RNIC sends to one and receives from one, across that tier.

    Args:
        topology: the lab.
        tier: what every flow has to cross.
        seed: decides all permutations; the same seed gives the same ones.
        number: which of them.

    Raises:
        UsageError: the lab has no permutation of all RNICs across this tier.
    """
    if not _is_possible(topology, tier):
        raise UsageError(
            f"no permutation of all RNICs crosses the tier {tier}; choose one of {', '.join(tiers_of(topology))}"
        )
    host_of = {f"{host.name}:{rnic.name}": host for host in topology.hosts for rnic in host.rnics}
    draw = random.Random(f"{seed}/{tier}/{number}")  # noqa: S311 (a permutation, not a secret)
    for _ in range(_TRIES):
        sinks = _drawn(list(host_of), host_of, tier, draw)
        if sinks is not None:
            return tuple(zip(host_of, sinks, strict=True))
    raise AssertionError(f"no permutation was drawn in {_TRIES} tries")


def _drawn(ends: Sequence[str], host_of: Mapping[str, Host], tier: Tier, draw: random.Random) -> list[str] | None:
    """Return a random sink for each end: shuffle all, then swap those that do not cross the tier; None: none fits."""
    sinks = list(ends)
    draw.shuffle(sinks)

    def fits(source: int, sink: str) -> bool:
        return _crosses(host_of[ends[source]], host_of[sink], tier)

    for index in range(len(ends)):
        if fits(index, sinks[index]):
            continue
        partners = [
            partner
            for partner in range(len(ends))
            if fits(index, sinks[partner]) and (fits(partner, sinks[index]) or not fits(partner, sinks[partner]))
        ]
        if not partners:
            return None
        partner = draw.choice(partners)
        sinks[index], sinks[partner] = sinks[partner], sinks[index]
    return sinks if all(map(fits, range(len(ends)), sinks)) else None


def _crosses(source: Host, sink: Host, tier: Tier) -> bool:
    if tier == "rack":
        return source.rack == sink.rack and source.zone == sink.zone and source.name != sink.name
    if tier == "zone":
        return source.zone == sink.zone and source.rack != sink.rack
    return source.zone != sink.zone


def _is_possible(topology: Topology, tier: Tier) -> bool:
    """Return whether such permutations exist (Hall's theorem).

    In each group that flows stay in, no part that they must leave may have more than half of the RNICs.
    """
    groups: dict[str, dict[str, int]] = {}
    for host in topology.hosts:
        group, part = {
            "rack": (f"{host.zone}/{host.rack}", host.name),
            "zone": (host.zone, host.rack),
            "fabric": ("", host.zone),
        }[tier]
        parts = groups.setdefault(group, {})
        parts[part] = parts.get(part, 0) + len(host.rnics)
    sizes = [parts.values() for parts in groups.values() if sum(parts.values())]
    return bool(sizes) and all(2 * max(counts) <= sum(counts) for counts in sizes)
