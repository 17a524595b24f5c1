"""Predict the load that a job puts on a fabric's links under each routing scheme, before anything runs.

For a static scheme, the prediction is one number. For a scheme that hashes, the load depends on the queue pair numbers,
and the prediction is a distribution over random draws of them. Fidelity: modelled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.routing.offered_load import Fabric, offered_load, tier_mmr, uplink_mmr
from faultbed.testbed.routing.placement_of_flows import Key, place
from faultbed.testbed.routing.schemes import Flow, Routing, scheme_named
from faultbed.traffic.probes.ecmp_entropy import udp_sport
from faultbed.traffic.schedules import build
from faultbed.traffic.schedules.cost import NETWORKS, best_algorithm, shape_for
from faultbed.traffic.schedules.traffic_matrix import pair_bytes
from faultbed.traffic.workloads.collective import AUTO
from faultbed.traffic.workloads.job import JobPhase, groups

__all__ = [
    "ALL_RANKS",
    "JobTraffic",
    "SchemePrediction",
    "Spread",
    "bytes_by_dimension",
    "demands_of",
    "flows_of",
    "job_traffic",
    "predict",
]

ALL_RANKS = "ranks"
"""Name of the only dimension of a job that is one collective of all its ranks."""

_FIRST_QPN = 17  # rxe's lowest number of a user's queue pair
_LAST_QPN = 0xFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTraffic:
    """What a job sends in one iteration: collectives of the groups along the dimensions of its grid of ranks.

    Attributes:
        grid: (dimension, size), fastest first.
        phases: the collectives, each with its algorithm.
        qps_per_peer: queue pairs for each pair of ranks; they share its bytes evenly.
        ranks_per_rnic: number of ranks on each RNIC; rank i is on RNIC i modulo the number of RNICs.
    """

    grid: tuple[tuple[str, int], ...]
    phases: tuple[JobPhase, ...]
    qps_per_peer: int = 1
    ranks_per_rnic: int = 1

    @property
    def is_one_collective(self) -> bool:
        """Whether it is a single collective of all ranks, not a job on a grid."""
        return len(self.grid) == len(self.phases) == 1 and self.grid[0][0] == ALL_RANKS


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean, 1st and 99th percentile over random draws; all three are equal if nothing is drawn."""

    mean: float
    p1: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemePrediction:
    """How evenly a job loads the links under one scheme.

    Attributes:
        scheme: name of the scheme.
        draws: number of random draws; 1 for a static scheme.
        uplinks: MMR of the bytes on a switch's uplinks, by switch.
        tiers: MMR of the bytes through the switches of a tier (`ctsw`, `atsw`), by tier.
    """

    scheme: str
    draws: int
    uplinks: dict[str, Spread] = field(default_factory=dict)
    tiers: dict[str, Spread] = field(default_factory=dict)


def job_traffic(
    phases: Sequence[JobPhase],
    *,
    rnics: int,
    lab_kind: str,
    grid: tuple[tuple[str, int], ...] = (),
    qps_per_peer: int = 1,
    ranks_per_rnic: int = 1,
) -> JobTraffic:
    """Return what a job on `rnics` RNICs sends, with the algorithms that `auto` chooses on a lab of that kind.

    Without a `grid`, all ranks are one dimension, `ALL_RANKS`.

    Raises:
        UsageError: the grid has other ranks than the job, lacks a phase's dimension, or a collective has no algorithm.
    """
    ranks = rnics * ranks_per_rnic
    grid = grid or ((ALL_RANKS, ranks),)
    if prod(size for _, size in grid) != ranks:
        sizes = " x ".join(f"{name} {size}" for name, size in grid)
        raise UsageError(f"a grid of {sizes} has {prod(size for _, size in grid)} ranks, but the job has {ranks}")
    chosen = []
    for phase in phases:
        shape = shape_for(len(groups(grid, phase.along)[0]), phase.size_bytes)
        auto = phase.algorithm == AUTO
        algorithm = (
            best_algorithm(phase.collective, shape, phase.size_bytes, NETWORKS[lab_kind]) if auto else phase.algorithm
        )
        chosen.append(replace(phase, algorithm=algorithm))
    return JobTraffic(grid=grid, phases=tuple(chosen), qps_per_peer=qps_per_peer, ranks_per_rnic=ranks_per_rnic)


def bytes_by_dimension(traffic: JobTraffic) -> dict[str, dict[tuple[int, int], float]]:
    """Return the bytes from rank to rank in an iteration, for each dimension that has a phase."""
    sent: dict[str, dict[tuple[int, int], float]] = {}
    for phase in traffic.phases:
        teams = groups(traffic.grid, phase.along)
        schedule = build(phase.collective, phase.algorithm, shape_for(len(teams[0]), phase.size_bytes))
        of_dimension = sent.setdefault(phase.along, {})
        for (src, dst), size_bytes in pair_bytes(schedule, phase.size_bytes).items():
            for members in teams:
                pair = members[src], members[dst]
                of_dimension[pair] = of_dimension.get(pair, 0.0) + size_bytes
    return sent


def flows_of(traffic: JobTraffic, rnics: Sequence[str], rng: np.random.Generator) -> list[Flow]:
    """Return one flow for each queue pair, with the bytes of an iteration and a random queue pair number.

    Phases share the queue pairs between two ranks, so they share flows. Flows between ranks on one RNIC are included;
    they cross no link between switches.
    """
    ranks = [*rnics] * traffic.ranks_per_rnic
    sent: dict[tuple[int, int], float] = {}
    for pairs in bytes_by_dimension(traffic).values():
        for pair, size_bytes in pairs.items():
            sent[pair] = sent.get(pair, 0.0) + size_bytes
    numbers = rng.integers(_FIRST_QPN, _LAST_QPN, size=(len(sent), traffic.qps_per_peer, 2), endpoint=True)
    return [
        Flow(
            src=ranks[src],
            dst=ranks[dst],
            size_bytes=size_bytes / traffic.qps_per_peer,
            src_port=udp_sport(int(local), int(remote)),
            dst_qpn=int(remote),
        )
        for (((src, dst), size_bytes), drawn) in zip(sent.items(), numbers, strict=True)
        for local, remote in drawn
    ]


def demands_of(flows: Iterable[Flow]) -> dict[Key, float]:
    """Return the bytes by (source RNIC, destination host), the key by which traffic engineering places flows."""
    demands: dict[Key, float] = {}
    for flow in flows:
        key = flow.src, flow.dst.partition(":")[0]
        demands[key] = demands.get(key, 0.0) + flow.size_bytes
    return demands


def predict(
    topology: Topology,
    ranks: Sequence[str],
    traffic: JobTraffic,
    schemes: Mapping[str, Routing],
    *,
    failed: frozenset[str] = frozenset(),
    draws: int = 200,
    seed: int = 1,
) -> tuple[SchemePrediction, ...]:
    """Predict how evenly a job loads the links under each scheme, for the same draws of queue pair numbers.

    Args:
        topology: the lab.
        ranks: RNICs in rank order, each once.
        traffic: the traffic of the job.
        schemes: parameters by the scheme's name; those of `te` are computed from the traffic and the failed links.
        failed: names of links that carry nothing.
        draws: number of random draws of queue pair numbers, for schemes that hash.
        seed: seed of the draws.

    Raises:
        UsageError: no such scheme, link, collective or algorithm; or a rank that cannot reach another one.
    """
    predictions = []
    for name, routing in schemes.items():
        rng = np.random.default_rng(seed)
        scheme, parameters = scheme_named(name), routing
        if scheme.is_placed:
            placement = place(topology, demands_of(flows_of(traffic, ranks, rng)), failed=failed)
            parameters = replace(routing, uplinks=placement.uplink)
        fabric = Fabric.of(topology, scheme, parameters, failed=failed)
        # Even a static scheme hashes the flows of a failed next hop, so that its load depends on the draws.
        rounds = 1 if fabric.scheme.is_static and not failed else draws
        loads = [offered_load(fabric, flows_of(traffic, ranks, rng)) for _ in range(rounds)]
        predictions.append(
            SchemePrediction(
                scheme=name,
                draws=rounds,
                uplinks=_spreads([uplink_mmr(topology, load) for load in loads]),
                tiers=_spreads([tier_mmr(topology, load) for load in loads]),
            )
        )
    return tuple(predictions)


def _spreads(rounds: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    names = dict.fromkeys(name for values in rounds for name in values)
    return {name: _spread([values[name] for values in rounds if name in values]) for name in names}


def _spread(values: Sequence[float]) -> Spread:
    low, high = np.percentile(values, (1, 99))
    return Spread(mean=float(np.mean(values)), p1=float(low), p99=float(high))
