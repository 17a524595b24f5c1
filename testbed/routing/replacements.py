"""Search for the replacements of hosts that put a job's flows on the fewest links. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.routing.offered_load import Fabric, offered_load, uplink_mmr
from faultbed.testbed.routing.schemes import Flow

__all__ = ["MOST_FLOWS", "Replacement", "replacements"]

MOST_FLOWS = 5_000_000
"""Flows that one search may route: some minutes on one core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """A job's ranks after some hosts were replaced, and the rack switch whose uplinks it loads least evenly.

    Attributes:
        moved: (host that left, host that took its place).
        ranks: RNICs in rank order, as an experiment writes them.
        switch: name of that switch; empty if no switch sends anything up over more than one link.
        mmr: maximum over mean of the bytes on its uplinks.
    """

    moved: tuple[tuple[str, str], ...]
    ranks: tuple[str, ...]
    switch: str
    mmr: float


def replacements(
    fabric: Fabric,
    ranks: Sequence[str],
    flows_of: Callable[[Sequence[str]], Sequence[Flow]],
    *,
    replaced: int,
) -> Iterator[Replacement]:
    """Yield every placement in which `replaced` hosts of a job are replaced by hosts that have no rank.

    A host with too few RNICs replaces no host that needs more.

    Args:
        fabric: the lab, with a static scheme.
        ranks: RNICs (`host1:rxe0`) in rank order.
        flows_of: the job's flows for ranks at these RNICs.
        replaced: number of hosts; 0 yields the job as it is.

    Raises:
        UsageError: the scheme draws paths by hash, no host is free or has enough RNICs, or the search would take too
            long.
    """
    if not fabric.scheme.is_static:
        raise UsageError(
            f"routing conflicts: {fabric.scheme.name} chooses paths by queue pair, not by placement; "
            "`faultbed routing predict` shows the load that it causes"
        )
    hosts = list(dict.fromkeys(name.partition(":")[0] for name in ranks))
    spares = [host.name for host in fabric.topology.hosts if host.name not in hosts]
    if len(spares) < replaced or len(hosts) < replaced:
        raise UsageError(
            f"routing conflicts: cannot replace {replaced} of {len(hosts)} hosts; "
            f"{len(spares)} hosts of this lab have no rank"
        )
    count = math.comb(len(hosts), replaced) * math.perm(len(spares), replaced)
    flows = len(flows_of(ranks))
    if count * flows > MOST_FLOWS:
        raise UsageError(
            f"routing conflicts: {count} placements of {flows} flows are more than {MOST_FLOWS} flows; "
            "replace fewer hosts or give fewer ranks"
        )
    return _placements(fabric, ranks, flows_of, hosts=hosts, spares=spares, replaced=replaced)


def _placements(
    fabric: Fabric,
    ranks: Sequence[str],
    flows_of: Callable[[Sequence[str]], Sequence[Flow]],
    *,
    hosts: Sequence[str],
    spares: Sequence[str],
    replaced: int,
) -> Iterator[Replacement]:
    misfit, is_any = "", False
    for removed in combinations(hosts, replaced):
        for added in permutations(spares, replaced):
            moved = dict(zip(removed, added, strict=True))
            if why := _misfit(fabric.topology, ranks, moved):
                misfit = why
                continue
            is_any = True
            placed = tuple(_placed(fabric.topology, name, moved) for name in ranks)
            mmr = uplink_mmr(fabric.topology, offered_load(fabric, flows_of(placed)))
            worst = max(mmr, key=mmr.__getitem__, default="")
            yield Replacement(moved=tuple(moved.items()), ranks=placed, switch=worst, mmr=mmr.get(worst, 1.0))
    if not is_any:
        raise UsageError(f"routing conflicts: {misfit}")


def _misfit(topology: Topology, ranks: Sequence[str], moved: dict[str, str]) -> str:
    """Return why a host cannot take the place of another one; empty if all can."""
    for host, _, name in (rnic.partition(":") for rnic in ranks):
        if host in moved:
            at = [rnic.name for rnic in topology.host_by_name[host].rnics].index(name)
            count = len(topology.host_by_name[moved[host]].rnics)
            if at >= count:
                return f"{moved[host]} has {count} RNICs, so it cannot replace {host}:{name}"
    return ""


def _placed(topology: Topology, rnic: str, moved: dict[str, str]) -> str:
    """Return the RNIC of the same number on the host that took the place of a rank's host."""
    host, _, name = rnic.partition(":")
    if host not in moved:
        return rnic
    at = [rnic_entry.name for rnic_entry in topology.host_by_name[host].rnics].index(name)
    return f"{moved[host]}:{topology.host_by_name[moved[host]].rnics[at].name}"
