"""Place the ranks of a job on RNICs by a policy, and compute the bytes that then cross racks and zones. Pure.

    packed     ranks in the order of the inventory
    layered    the dimension that sends most stays within hosts; the next ones within racks, within zones, across zones
    min-cut    layered, then ranks are exchanged as long as fewer bytes cross zones, then racks, then hosts
    random     a random permutation

Min-cut is a local search over exchanges of two ranks (Kernighan and Lin, "An efficient heuristic procedure for
partitioning graphs", 1970) that starts from the layered order and from random ones. Its result need not be optimal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from faultbed.harness.model.routing_prediction import JobTraffic, bytes_by_dimension
from faultbed.testbed.model.topology import Topology

__all__ = ["POLICIES", "Crossing", "Policy", "crossing", "placed", "spares"]

Policy = Literal["random", "packed", "min-cut", "layered"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
_STARTS = 4
"""Number of random orders from which min-cut starts, besides the layered one."""
_TIERS = (0.0, 1.0, 1e3, 1e6)
"""Cost of a byte within a host, between hosts of a rack, between racks of a zone, and between zones. A saved byte of a
higher tier outweighs everything in the tiers below."""
_REFUSED = 1e9
"""Cost of a byte within a host if the lab cannot carry data between two RNICs of one host (`is_local_refused`)."""
_SAVED = 1e-9
"""Minimum share of the cost that an exchange must save; smaller savings are rounding errors."""

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """The bytes that cross racks and zones in an iteration.

    `zones` names the dimensions of the job's grid that have a group which sends between zones.
    """

    zones: tuple[str, ...]
    zone_bytes: float
    rack_bytes: float


def crossing(topology: Topology, traffic: JobTraffic, rnics: Sequence[str]) -> Crossing:
    """Return the bytes that cross racks and zones if rank i is on `rnics[i]`."""
    place = _places(topology, [*rnics] * traffic.ranks_per_rnic)
    zone_bytes = rack_bytes = 0.0
    zones = []
    for name, sent in bytes_by_dimension(traffic).items():
        between = [size for (src, dst), size in sent.items() if place[src][0] != place[dst][0]]
        zone_bytes += sum(between)
        rack_bytes += sum(size for (src, dst), size in sent.items() if place[src][1] != place[dst][1])
        zones += [name] if sum(between) else []
    return Crossing(zones=tuple(zones), zone_bytes=zone_bytes, rack_bytes=rack_bytes)


def placed(
    policy: Policy, topology: Topology, traffic: JobTraffic, rnics: Sequence[str], *, seed: int, is_local_refused: bool
) -> tuple[str, ...]:
    """Return the RNIC of each rank by a policy. If RNICs have several ranks each, the order of RNICs repeats.

    Args:
        policy: `packed`, `layered`, `min-cut` or `random`.
        topology: the lab.
        traffic: the traffic of the job.
        rnics: RNICs to choose from, at least as many as the job needs.
        seed: seed of random orders.
        is_local_refused: whether the lab cannot carry data between two RNICs of one host.
    """
    count = prod(size for _, size in traffic.grid) // traffic.ranks_per_rnic
    order = sorted(rnics, key=_order_in(topology))
    rng = np.random.default_rng(seed)
    if policy == "random":
        return tuple(order[int(number)] for number in rng.permutation(len(order))[:count])
    if policy == "packed":
        return tuple(order[:count])
    layered = _layered(traffic, order, count)
    if policy == "layered":
        return layered
    sent, cost = _sent(traffic, len(order)), _cost(topology, order, is_local_refused=is_local_refused)
    starts = [np.array([order.index(name) for name in (*layered, *(x for x in order if x not in set(layered)))])]
    starts += [rng.permutation(len(order)) for _ in range(_STARTS)]
    best = min((_exchanged(sent, cost, start) for start in starts), key=lambda at: _total(sent, cost, at))
    return tuple(order[int(number)] for number in best[:count])


def _places(topology: Topology, rnics: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return zone, rack switch and host of each RNIC."""
    hosts = [rnic.partition(":")[0] for rnic in rnics]
    switches = [topology.rnic_link(*rnic.split(":", 1)).a.node for rnic in rnics]
    return [(topology.host_by_name[host].zone, switch, host) for host, switch in zip(hosts, switches, strict=True)]


def _order_in(topology: Topology) -> Callable[[str], tuple[int, ...]]:
    """Return a sort key that groups RNICs by zone, rack and host."""
    zones: dict[str, int] = {}
    racks: dict[str, int] = {}
    key: dict[str, tuple[int, ...]] = {}
    for number, (name, (zone, rack, _)) in enumerate(
        zip(topology.rnic_names, _places(topology, topology.rnic_names), strict=True)
    ):
        key[name] = (zones.setdefault(zone, len(zones)), racks.setdefault(rack, len(racks)), number)
    return key.__getitem__


def _layered(traffic: JobTraffic, order: Sequence[str], count: int) -> tuple[str, ...]:
    """Return the RNIC of each rank: groups of the dimension that sends most are neighbours in `order`, and so on."""
    if traffic.ranks_per_rnic > 1:  # the order of RNICs repeats, so that the last dimension is on one RNIC already
        return tuple(order[:count])
    sent = {name: sum(pairs.values()) for name, pairs in bytes_by_dimension(traffic).items()}
    sizes = [size for _, size in traffic.grid]
    strides = [prod(sizes[:number]) for number in range(len(sizes))]
    nearest_first = sorted(range(len(sizes)), key=lambda number: -sent.get(traffic.grid[number][0], 0.0))
    chosen = [""] * count
    for position, name in enumerate(order[:count]):
        rank, left = 0, position
        for number in nearest_first:
            left, digit = divmod(left, sizes[number])
            rank += digit * strides[number]
        chosen[rank] = name
    return tuple(chosen)


def _sent(traffic: JobTraffic, places: int) -> Matrix:
    """Return the bytes between each pair of places, both directions added; a free place sends nothing."""
    count = prod(size for _, size in traffic.grid) // traffic.ranks_per_rnic
    sent = np.zeros((places, places))
    for pairs in bytes_by_dimension(traffic).values():
        for (src, dst), size_bytes in pairs.items():
            sent[src % count, dst % count] += size_bytes
    np.fill_diagonal(sent, 0.0)
    total = sent.sum()
    return (sent + sent.T) / (total or 1.0)


def _cost(topology: Topology, order: Sequence[str], *, is_local_refused: bool) -> Matrix:
    """Return the cost of a byte between each two places."""
    places = _places(topology, order)
    local = _REFUSED if is_local_refused else _TIERS[0]

    def cost(one: tuple[str, str, str], other: tuple[str, str, str]) -> float:
        if one[2] == other[2]:
            return local
        return _TIERS[3] if one[0] != other[0] else _TIERS[2] if one[1] != other[1] else _TIERS[1]

    costs = np.array([[cost(one, other) for other in places] for one in places])
    np.fill_diagonal(costs, 0.0)
    return costs


def _total(sent: Matrix, cost: Matrix, at: npt.NDArray[np.int64]) -> float:
    return float((sent * cost[np.ix_(at, at)]).sum())


def _exchanged(sent: Matrix, cost: Matrix, start: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Exchange the places of two ranks as long as that reduces the cost; for each rank, the best exchange is made."""
    at = start.copy()
    least_saving = _total(sent, cost, at) * _SAVED
    improved = True
    while improved:
        improved = False
        for rank in range(len(at)):
            here = cost[np.ix_(at, at)]
            # What each rank would cost at the place of `one`, and `one` at the place of each, without what they send
            # to each other, which an exchange leaves as it is.
            saved = (sent[rank] * here[rank]).sum() - here @ sent[rank] + (sent * here).sum(axis=1) - sent @ here[rank]
            saved -= 2 * sent[rank] * here[rank]
            saved[rank] = 0.0
            other = int(np.argmax(saved))
            if saved[other] > least_saving:
                at[[rank, other]] = at[[other, rank]]
                improved = True
    return at


def spares(topology: Topology, ranks: Sequence[str], rnics: Sequence[str]) -> tuple[str, ...]:
    """Return the RNICs that a placement leaves free, sorted by how many of its ranks are near."""
    occupied, order = _places(topology, ranks), topology.rnic_names
    hosts = {host for _, _, host in occupied}

    def nearness(name: str) -> tuple[int, int, int]:
        ((zone, rack, _),) = _places(topology, [name])
        return (
            -sum(rack == other for _, other, _ in occupied),
            -sum(zone == other for other, _, _ in occupied),
            order.index(name),
        )

    free = [name for name in rnics if name not in set(ranks) and name.partition(":")[0] not in hosts]
    return tuple(sorted(free, key=nearness))
