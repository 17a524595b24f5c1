"""Traffic patterns, such as incast or a permutation, as (source, destination) pairs of RNICs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.topology import Topology

__all__ = ["PATTERNS", "ZONE_PATTERNS", "first_rnics", "pairs", "pairs_in"]

PATTERNS = ("incast", "outcast", "permutation", "all-pairs")
ZONE_PATTERNS = ("in-zone", "across-zones")
"""Patterns of all RNICs, to fill the links above the racks. All other patterns use the first RNIC of each host."""
MIN_ENDS = 2


def pairs(pattern: str, ends: Sequence[str], *, shift: int = 0) -> tuple[tuple[str, str], ...]:
    """Return (src, dst) of every flow of a pattern among the RNICs `ends`.

    incast: all RNICs send to the first RNIC. outcast: the first RNIC sends to all others. permutation: each RNIC sends
    to the RNIC that is `shift` positions further in the list; shift 0 means half of the list, which leads to the other
    rack if there are two. all-pairs: each RNIC sends to every other RNIC.

    Raises:
        UsageError: the pattern is unknown, there are too few ends, or the shift maps each RNIC to itself.
    """
    count = len(ends)
    if pattern not in PATTERNS:
        raise UsageError(f'no pattern "{pattern}"; choose one of {", ".join(PATTERNS)}')
    if count < MIN_ENDS:
        raise UsageError(f"{pattern} needs at least {MIN_ENDS} RNICs, got {count}")
    match pattern:
        case "incast":
            return tuple((src, ends[0]) for src in ends[1:])
        case "outcast":
            return tuple((ends[0], dst) for dst in ends[1:])
        case "permutation":
            step = shift or max(1, count // 2)
            if step % count == 0:
                raise UsageError(
                    f"a permutation of {count} RNICs with shift {step} maps each RNIC to itself; use another shift"
                )
            return tuple((src, ends[(index + step) % count]) for index, src in enumerate(ends))
        case _:
            return tuple((src, dst) for src in ends for dst in ends if src != dst)


def first_rnics(topology: Topology) -> list[str]:
    """Return the first RNIC of every host that has one."""
    return [f"{host.name}:{host.rnics[0].name}" for host in topology.hosts if host.rnics]


def pairs_in(topology: Topology, pattern: str) -> tuple[tuple[str, str], ...]:
    """Return (src, dst) of every flow of a pattern in a lab.

    in-zone: a permutation within each zone, with shift 0. across-zones: each RNIC sends to the RNIC at the same
    position in the next zone. Any other pattern: `pairs` among the first RNICs of all hosts.

    Raises:
        UsageError: as `pairs`; or the lab has no zones that fit the pattern.
    """
    if pattern not in ZONE_PATTERNS:
        return pairs(pattern, first_rnics(topology))
    rnics_by_zone: dict[str, list[str]] = {}
    for host in topology.hosts:
        rnics_by_zone.setdefault(host.zone, []).extend(f"{host.name}:{rnic.name}" for rnic in host.rnics)
    zones = [rnics_by_zone[name] for name in sorted(rnics_by_zone)]
    if pattern == "in-zone":
        return tuple(pair for rnics in zones for pair in pairs("permutation", rnics))
    if len(zones) < MIN_ENDS or len({len(rnics) for rnics in zones}) > 1:
        sizes = ", ".join(f"{name} has {len(rnics_by_zone[name])} RNICs" for name in sorted(rnics_by_zone))
        raise UsageError(f"across-zones needs at least two zones with the same number of RNICs; {sizes}")
    next_zones = [*zones[1:], zones[0]]
    return tuple(
        pair
        for rnics, next_rnics in zip(zones, next_zones, strict=True)
        for pair in zip(rnics, next_rnics, strict=True)
    )
