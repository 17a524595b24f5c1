"""What a collective puts on a fabric's links under each routing scheme, computed before anything runs.

Static schemes give one answer. Schemes that hash give another one for every set of queue pair numbers, so theirs is a
distribution over draws of such numbers. Fidelity: modelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from testbed.model.topology import Topology
from testbed.routing.offered_load import Fabric, offered_load, tier_mmr, uplink_mmr
from testbed.routing.schemes import Flow, Routing, scheme_named
from traffic.probes.ecmp_entropy import udp_sport
from traffic.schedules import build
from traffic.schedules.cost import NETWORKS, best_algorithm, shape_for
from traffic.schedules.traffic_matrix import pair_bytes

__all__ = ["AUTO", "CollectiveTraffic", "SchemePrediction", "Spread", "algorithm_of", "flows_of", "predict"]

AUTO = "auto"
_FIRST_QPN = 17  # rxe's lowest number of a user's queue pair
_LAST_QPN = 0xFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTraffic:
    """What a job sends: one collective over `qps_per_peer` queue pairs for each pair of ranks, shared evenly.

    With `ranks_per_rnic` there are that many times as many ranks, and the order of RNICs repeats.
    """

    collective: str = "all-to-all"
    algorithm: str = AUTO
    size_bytes: int = 1 << 20
    qps_per_peer: int = 1
    ranks_per_rnic: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Values over draws: mean and the 1st and 99th percentile. All three are equal where nothing is drawn."""

    mean: float
    p1: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemePrediction:
    """A scheme's answer.

    Attributes:
        scheme: its name.
        draws: number of draws; 1 for a static scheme.
        uplinks: MMR of what each switch sends up, by switch.
        tiers: MMR over the spines of a tier (`ctsw`, `atsw`), by tier.
    """

    scheme: str
    draws: int
    uplinks: dict[str, Spread] = field(default_factory=dict)
    tiers: dict[str, Spread] = field(default_factory=dict)


def algorithm_of(traffic: CollectiveTraffic, rnics: int) -> str:
    """Return the algorithm that the flows of a job on so many RNICs are computed with."""
    if traffic.algorithm != AUTO:
        return traffic.algorithm
    shape = shape_for(rnics * traffic.ranks_per_rnic, traffic.size_bytes)
    return best_algorithm(traffic.collective, shape, traffic.size_bytes, NETWORKS["rack"])


def flows_of(traffic: CollectiveTraffic, rnics: Sequence[str], rng: np.random.Generator) -> list[Flow]:
    """Return one flow for each queue pair of a collective between ranks on RNICs, with numbers drawn by `rng`.

    Flows between ranks on one RNIC are among them; they cross no link between switches.
    """
    ranks = [*rnics] * traffic.ranks_per_rnic
    shape = shape_for(len(ranks), traffic.size_bytes)
    sent = pair_bytes(build(traffic.collective, algorithm_of(traffic, len(rnics)), shape), traffic.size_bytes)
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


def predict(
    topology: Topology,
    ranks: Sequence[str],
    traffic: CollectiveTraffic,
    schemes: Mapping[str, Routing],
    *,
    failed: frozenset[str] = frozenset(),
    draws: int = 200,
    seed: int = 1,
) -> tuple[SchemePrediction, ...]:
    """Return what each scheme does to the same draws of queue pair numbers.

    Args:
        topology: the lab.
        ranks: RNICs in rank order, each once.
        traffic: what they send.
        schemes: parameters by the scheme's name.
        failed: names of links that carry nothing.
        draws: sets of queue pair numbers for schemes that hash.
        seed: of the draws.

    Raises:
        UsageError: no such scheme, link, collective or algorithm; or a rank that cannot reach another one.
    """
    answers = []
    for name, routing in schemes.items():
        rng = np.random.default_rng(seed)
        fabric = Fabric.of(topology, scheme_named(name), routing, failed=failed)
        # A static scheme whose next hop is dead hashes what it had on it.
        rounds = 1 if fabric.scheme.is_static and not failed else draws
        loads = [offered_load(fabric, flows_of(traffic, ranks, rng)) for _ in range(rounds)]
        answers.append(
            SchemePrediction(
                scheme=name,
                draws=rounds,
                uplinks=_spreads([uplink_mmr(topology, load) for load in loads]),
                tiers=_spreads([tier_mmr(topology, load) for load in loads]),
            )
        )
    return tuple(answers)


def _spreads(rounds: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    names = dict.fromkeys(name for one in rounds for name in one)
    return {name: _spread([one[name] for one in rounds if name in one]) for name in names}


def _spread(values: Sequence[float]) -> Spread:
    low, high = np.percentile(values, (1, 99))
    return Spread(mean=float(np.mean(values)), p1=float(low), p99=float(high))
