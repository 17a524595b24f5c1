"""Where to put the ranks of a job: policies, and what each makes cross racks and zones. Pure.

    packed     ranks in the order of the inventory
    layered    the dimension that sends most within hosts, then racks, then zones; the one that sends least across
    min-cut    layered, improved by exchanging ranks while fewer bytes cross zones, then racks, then hosts
    random     a permutation that is drawn

Min-cut is a local search over exchanges of two ranks (Kernighan and Lin, "An efficient heuristic procedure for
partitioning graphs", 1970), from the layered order and from drawn ones: good, and not proven to be the best.
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
"""Drawn orders from which min-cut also searches."""
_TIERS = (0.0, 1.0, 1e3, 1e6)
"""Cost of a byte within a host, between hosts of a rack, racks of a zone, and zones: a byte of the next tier counts
more than anything that an exchange could save below."""
_REFUSED = 1e9
"""Cost of a byte within a host where the fabric does not carry it (`refuse_local`)."""
_SAVED = 1e-9
"""Share of the cost that an exchange must save; less is rounding."""

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """What a placement sends in an iteration, in bytes.

    `zones` are the dimensions of which some group sends from zone to zone.
    """

    zones: tuple[str, ...]
    zone_bytes: float
    rack_bytes: float


def crossing(topology: Topology, traffic: JobTraffic, rnics: Sequence[str]) -> Crossing:
    """Return what crosses racks and zones if the ranks are on these RNICs, in rank order."""
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
    """Return the RNIC of each rank by a policy; with several ranks on an RNIC, the order repeats.

    Args:
        policy: how to place.
        topology: the lab.
        traffic: what the ranks send.
        rnics: RNICs to choose from, at least as many as the job needs. What is left over is free for spares.
        seed: of what is drawn.
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
    """Return a sort key of RNICs: neighbours in a host, then in a rack and in a zone stand together."""
    zones: dict[str, int] = {}
    racks: dict[str, int] = {}
    key: dict[str, tuple[int, ...]] = {}
    for number, (name, (zone, rack, _)) in enumerate(
        zip(topology.rnic_names, _places(topology, topology.rnic_names), strict=True)
    ):
        key[name] = (zones.setdefault(zone, len(zones)), racks.setdefault(rack, len(racks)), number)
    return key.__getitem__


def _layered(traffic: JobTraffic, order: Sequence[str], count: int) -> tuple[str, ...]:
    """Return ranks along the dimensions, the one that sends most first, on neighbours in `order`."""
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
    """Return the bytes between each two RNICs of the job, in both directions together; free places send nothing."""
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
    """Exchange the places of two ranks while that saves cost, the best exchange of each rank first."""
    at = start.copy()
    least = _total(sent, cost, at) * _SAVED
    improved = True
    while improved:
        improved = False
        for one in range(len(at)):
            here = cost[np.ix_(at, at)]
            # What each rank would cost at the place of `one`, and `one` at the place of each, without what they send
            # to each other, which an exchange leaves as it is.
            saved = (sent[one] * here[one]).sum() - here @ sent[one] + (sent * here).sum(axis=1) - sent @ here[one]
            saved -= 2 * sent[one] * here[one]
            saved[one] = 0.0
            other = int(np.argmax(saved))
            if saved[other] > least:
                at[[one, other]] = at[[other, one]]
                improved = True
    return at


def spares(topology: Topology, ranks: Sequence[str], rnics: Sequence[str]) -> tuple[str, ...]:
    """Return the RNICs that a placement leaves free, those next to most of its ranks first."""
    used, order = _places(topology, ranks), topology.rnic_names
    hosts = {host for _, _, host in used}

    def nearness(name: str) -> tuple[int, int, int]:
        ((zone, rack, _),) = _places(topology, [name])
        return (
            -sum(rack == other for _, other, _ in used),
            -sum(zone == other for other, _, _ in used),
            order.index(name),
        )

    free = [name for name in rnics if name not in set(ranks) and name.partition(":")[0] not in hosts]
    return tuple(sorted(free, key=nearness))
