"""Random permutations of a lab's RNICs in which every flow crosses the same tier. Pure.

tier     a flow goes                            and crosses
rack     to another host of the same rack       no link between switches
zone     to another rack of the same zone       uplinks of rack switches
fabric   to another zone                        uplinks of rack switches and of spines
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Literal

from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.topology import Host, Topology

__all__ = ["TIERS", "Tier", "permutation", "tiers_of"]

Tier = Literal["rack", "zone", "fabric"]
TIERS: tuple[Tier, ...] = ("rack", "zone", "fabric")
_TRIES = 200


def tiers_of(topology: Topology) -> tuple[Tier, ...]:
    """Return the tiers of a lab that a permutation of all RNICs can cross.

    A tier can be missing: if one rack has more RNICs than all other racks of its zone together, some of its RNICs have
    no partner in another rack.
    """
    return tuple(tier for tier in TIERS if _is_possible(topology, tier))


def permutation(topology: Topology, tier: Tier, *, seed: int, number: int) -> tuple[tuple[str, str], ...]:
    """Return (src, dst) of each flow of a random permutation across a tier.

    Each RNIC sends to one RNIC, and receives from one.

    Args:
        topology: the lab.
        tier: the tier that every flow crosses.
        seed: seed of the sequence of permutations.
        number: position in that sequence.

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
        sinks = _draw_sinks(list(host_of), host_of, tier, draw)
        if sinks is not None:
            return tuple(zip(host_of, sinks, strict=True))
    raise AssertionError(f"no permutation was drawn in {_TRIES} tries")


def _draw_sinks(ends: Sequence[str], host_of: Mapping[str, Host], tier: Tier, draw: random.Random) -> list[str] | None:
    """Draw a sink for each end: shuffle all ends, then swap sinks whose flow does not cross the tier.

    Returns None if this does not end with a permutation across the tier; then draw again.
    """
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
    """Return whether a permutation of all RNICs across a tier exists (Hall's theorem).

    A flow leaves its part (host, rack or zone) but stays in its group (rack, zone or fabric). Such a permutation exists
    if no part has more than half of the RNICs of its group.
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
