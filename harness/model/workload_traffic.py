"""The traffic of a workload's ranks in an iteration, and the paths of their queue pairs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from faultbed.harness.experiment.workload_file import Collective, Flow, Job, Workload
from faultbed.harness.experiment.workload_specs import collective_spec, job_spec
from faultbed.harness.model.step_times import Paths
from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.routing.link_arrays import LinkArrays, Path, path_of_flow, path_of_nodes
from faultbed.testbed.routing.offered_load import Fabric
from faultbed.testbed.routing.placement_of_flows import Key
from faultbed.testbed.routing.schemes import Flow as QueuePair
from faultbed.traffic.engine.engine_client import FabricModel
from faultbed.traffic.probes.ecmp_entropy import udp_sport
from faultbed.traffic.schedules import Program, peers_of
from faultbed.traffic.workloads import collective, job
from faultbed.traffic.workloads.ranks import ITEM_BYTES

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "MOST_FLOWS",
    "RankTraffic",
    "demands_of_workload",
    "drawn_paths",
    "drawn_queue_pair",
    "rank_traffic",
    "recorded_paths",
    "workload_in",
]

MOST_FLOWS = 50_000
"""Maximum number of queue pairs: computing their paths one by one takes some seconds on one core."""

_FIRST_QPN, _LAST_QPN = 17, 0xFFFFFF
_BALANCING = "dqplb"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTraffic:
    """The ranks of a workload and their programs for an iteration.

    `ranks` has the RNIC of each rank. `qps` is the number of queue pairs to each peer, and `balances` whether they take
    over each other's data. `iterations` is None if the workload ends by its duration.
    """

    ranks: tuple[str, ...]
    programs: Sequence[Program]
    item_bytes: int
    size_bytes: int
    qps: int
    balances: bool
    compute_units: int
    iterations: int | None

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Every (sending rank, receiving rank), in order of first use."""
        return peers_of(self.programs)


def workload_in(planned: Mapping[str, Any]) -> Workload | None:
    """Return the workload of a plan or of recorded measurements; None if the model does not support its kind."""
    types: dict[str, type[Workload]] = {"collective": Collective, "grid": Job, "flow": Flow}
    kind = next((types[name] for name in types if name in planned), None)
    try:
        return None if kind is None else msgspec.convert(dict(planned), kind)
    except msgspec.ValidationError:  # another version recorded the run
        return None


def rank_traffic(workload: Workload, lab: FabricModel) -> RankTraffic:
    """Return the traffic of a collective's or a job's ranks in an iteration.

    Raises:
        UsageError: the model does not support the workload, or the workload does not fit the lab.
    """
    if isinstance(workload, Collective):
        places, _, programs = collective.fit(lab, collective_spec(workload))
        size_bytes = workload.size_bytes
    elif isinstance(workload, Job):
        if workload.storage is not None:
            raise UsageError("workload.storage: the model has no storage; remove the section, or run the job on a lab")
        if workload.resilience is not None:
            raise UsageError("workload.resilience: the model has no restarts; remove the section, or run it on a lab")
        places, programs, _ = job.fit(lab, job_spec(workload))
        size_bytes = sum(phase.size_bytes for phase in workload.phases)
    else:
        name = type(workload).__name__.removesuffix("Spec").lower()
        raise UsageError(f"workload: the model has no {name} workload; it has collectives, jobs (grid) and flows")
    return RankTraffic(
        ranks=tuple(place.name for place in places),
        programs=programs,
        item_bytes=ITEM_BYTES[workload.dtype],
        size_bytes=size_bytes,
        qps=workload.qps_per_peer,
        balances=workload.spread == _BALANCING and workload.qps_per_peer > 1,
        compute_units=workload.compute_units,
        iterations=workload.iterations,
    )


def demands_of_workload(workload: Workload, lab: FabricModel) -> dict[Key, float]:
    """Return the bytes that each RNIC sends to each host in an iteration; flows of one workload count alike.

    Raises:
        UsageError: this kind of workload has no schedule of bytes, or the workload does not fit the lab.
    """
    sent: dict[Key, float] = {}

    def add(source: str, destination: str, size_bytes: float) -> None:
        key = source, destination.partition(":")[0]
        if key[1] != source.partition(":")[0]:
            sent[key] = sent.get(key, 0.0) + size_bytes

    if isinstance(workload, Flow):
        for src, dst in workload.pairs:
            # The end that a read names first receives.
            add(*((dst, src) if workload.flow == "read" else (src, dst)), 1.0)
        return sent
    if isinstance(workload, Collective):
        places, _, programs = collective.fit(lab, collective_spec(workload))
    elif isinstance(workload, Job):
        places, programs, _ = job.fit(lab, job_spec(workload))
    else:
        kind = type(workload).__name__.lower()
        raise UsageError(f'a workload of the kind {kind} has no schedule of bytes; write demand = "measured"')
    ranks = [place.name for place in places]
    for program in programs:
        for _, dst, _, count in program["sends"]:
            add(ranks[program["rank"]], ranks[dst], float(count * ITEM_BYTES[workload.dtype]))
    return sent


def drawn_queue_pair(src: str, dst: str, rng: np.random.Generator) -> QueuePair:
    """Return a queue pair between two RNICs with random numbers."""
    local, remote = (int(number) for number in rng.integers(_FIRST_QPN, _LAST_QPN, size=2, endpoint=True))
    return QueuePair(src=src, dst=dst, size_bytes=1.0, src_port=udp_sport(local, remote), dst_qpn=remote)


def drawn_paths(traffic: RankTraffic, fabric: Fabric, arrays: LinkArrays, rng: np.random.Generator) -> Paths:
    """Return the path of each queue pair under a routing scheme, with random numbers of queue pairs.

    Raises:
        UsageError: too many queue pairs, or two ranks without a path between them.
    """
    pairs = traffic.pairs
    if len(pairs) * traffic.qps > MOST_FLOWS:
        raise UsageError(
            f"workload: {len(pairs) * traffic.qps} queue pairs, of at most {MOST_FLOWS}; use fewer ranks or queue "
            "pairs per peer, or a preset"
        )
    paths: dict[tuple[int, int], Sequence[Path]] = {}
    for src, dst in pairs:
        ends = traffic.ranks[src], traffic.ranks[dst]
        queue_pairs = [drawn_queue_pair(*ends, rng) for _ in range(traffic.qps)]
        paths[src, dst] = tuple(path_of_flow(fabric, arrays, queue_pair) for queue_pair in queue_pairs)
    return paths


def recorded_paths(
    traffic: RankTraffic,
    topology: Topology,
    arrays: LinkArrays,
    nodes: Mapping[tuple[str, str], Sequence[Sequence[str]]],
) -> Paths:
    """Return the paths that a run's queue pairs had; `nodes` has the nodes of each by (source RNIC, destination RNIC).

    Raises:
        UsageError: the run has no path of some pair of ranks.
    """
    paths: dict[tuple[int, int], Sequence[Path]] = {}
    for src, dst in traffic.pairs:
        ends = traffic.ranks[src], traffic.ranks[dst]
        known = [walk for walk in nodes.get(ends, ()) if walk] or _on_host(*ends)
        if not known:
            raise UsageError(f"the run recorded no path from {ends[0]} to {ends[1]}")
        paths[src, dst] = tuple(path_of_nodes(topology, arrays, *ends, walk) for walk in known)
    return paths


def _on_host(src: str, dst: str) -> list[tuple[str, ...]]:
    """Return the path of data between two RNICs of one host, which no switch reports."""
    host = src.partition(":")[0]
    return [(host,)] if host == dst.partition(":")[0] else []
