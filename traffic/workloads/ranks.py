"""Ranks on RNICs: their placement, the plan for their engines, and how each rank ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.selectors import select
from faultbed.testbed.model.topology import Topology
from faultbed.traffic import schedules
from faultbed.traffic.engine.engine_client import Fabric, endpoint
from faultbed.traffic.engine.flight_recorder import RankEnd
from faultbed.traffic.engine.run_results import Endpoint, Outcome, Window
from faultbed.traffic.engine.running_traffic import Running
from faultbed.traffic.engine.task_specs import (
    ConnectionSpec,
    Plan,
    QpParams,
    TaskPlan,
    check_entropy,
    shared_flow_label,
)
from faultbed.traffic.node.completions import CQ_ENTRIES

__all__ = [
    "ITEM_BYTES",
    "MAX_RANKS",
    "WARMUP",
    "RanksSpec",
    "check_completion_queues",
    "check_queue_pairs",
    "ends_of",
    "gpus_of",
    "group_size",
    "host_group_size",
    "place",
    "rank_of",
    "rank_plan",
    "task_name",
    "window_of",
    "work_requests",
    "writes_of",
]

WARMUP = 2
"""Default number of warm-up iterations, in which caches and QEMU's translations are still cold."""

CREDITS = 8
"""Credits of a queue pair that may be unacknowledged (`faultbed.traffic.node.ranks.recv_lane`)."""

MAX_RANKS = 128
MIN_SLOTS = 4
MAX_RING_SLOTS = 16
RING_LANES = 64
"""Rings grow beyond the window of a lane (`_ring_slots`) on an RNIC with at most this many lanes in each direction.
Each slot needs a receive, for which the completion queue must have room."""
MIN_SEGMENT_BYTES = 65536
SEGMENTS_PER_QP = 4
"""With `spray` and `dqplb`, the longest message is cut into this many segments for each queue pair, or more. With
`dqplb` a fast queue pair can then send some of a slow one's share."""

ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int32": 4}
"""Bytes per element, by type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksSpec:
    """Common parameters of collectives and jobs: placement of ranks, element type, queue pairs, and deadlines.

    `ranks` are RNIC names or selectors in rank order (empty: the first RNIC of every host). With `ranks_per_rnic` there
    are that many times as many ranks, and the order repeats: rank i is on RNIC i mod their number. Only reductions use
    `redop`. With `compute_units` above 0 every iteration begins with that much work on the host's GPU `gpu`. An
    operation that takes a rank longer than `deadline_s` is a failure. The first `warmup` iterations are executed and
    verified, but not counted.

    A rank has `qps_per_peer` queue pairs to each rank that it sends to, and `spread` puts its data on them as
    `faultbed.traffic.schedules.SPREADS` says. With `entropy` all queue pairs share that many flow labels, and
    therefore UDP source ports, in turn (0: each has its own).

    `segment_bytes` is the unit of pipelining, `slots` the number of segments that a rank may have in flight. Each
    segment costs a completion at both ends and a share of a credit, which is expensive on an emulated CPU: with
    segments of 64 KiB a soft lab took 1.3 to 1.8 times as long.
    """

    ranks: tuple[str, ...] = ()
    ranks_per_rnic: int = 1
    dtype: str = "fp32"
    redop: str = "sum"
    compute_units: int = 0
    warmup: int = 0
    gpu: str = "gpu0"
    qps_per_peer: int = 1
    spread: str = "split"
    entropy: int = 0
    segment_bytes: int = 262144
    slots: int = 8
    qp: QpParams = field(default_factory=QpParams)
    deadline_s: float = 120.0
    op_deadline_s: float = 10.0
    peer_deadline_s: float = 30.0
    stall_deadline_s: float = 60.0

    @property
    def has_substitutes(self) -> bool:
        """Whether the queue pairs of a pair of ranks can carry each other's segments: they are one lane then."""
        return self.spread in schedules.OUT_OF_ORDER and self.qps_per_peer > 1


def check_queue_pairs(spec: RanksSpec) -> None:
    """Reject queue pairs that are invalid on every lab.

    Raises:
        UsageError: a value is invalid; the message names it.
    """
    if not 1 <= spec.qps_per_peer <= schedules.MAX_QPS_PER_PEER:
        raise UsageError(f"qps_per_peer must be 1 to {schedules.MAX_QPS_PER_PEER}, got {spec.qps_per_peer}")
    if spec.spread not in schedules.SPREADS:
        known = ", ".join(schedules.SPREADS)
        raise UsageError(f'no spread "{spec.spread}" of messages over queue pairs; choose one of {known}')
    check_entropy(spec.entropy)


def place(lab: Fabric, spec: RanksSpec) -> tuple[Endpoint, ...]:
    """Return the RNICs of a job's ranks.

    Raises:
        UsageError: an RNIC does not exist, is named twice, or has no GPU for the compute phase; or the number of ranks
            or of warm-up iterations is out of range.
    """
    names = spec.ranks or tuple(host.name for host in lab.topology.hosts)
    ranks = tuple(endpoint(lab.topology, name) for text in names for name in select(lab.topology, text))
    twice = {rank.name for rank in ranks if ranks.count(rank) > 1}
    if twice:
        raise UsageError(
            f"name each RNIC once; {', '.join(sorted(twice))} is named twice (ranks_per_rnic gives RNICs several ranks)"
        )
    if spec.ranks_per_rnic < 1:
        raise UsageError(f"an RNIC has at least 1 rank, got ranks_per_rnic {spec.ranks_per_rnic}")
    ranks *= spec.ranks_per_rnic
    if spec.warmup < 0:
        raise UsageError(f"warm-up iterations cannot be negative, got {spec.warmup}")
    if len(ranks) > MAX_RANKS:
        raise UsageError(f"at most {MAX_RANKS} ranks, got {len(ranks)}")
    gpus_of(lab, spec, ranks)
    return ranks


def gpus_of(lab: Fabric, spec: RanksSpec, ranks: Sequence[Endpoint]) -> tuple[Mapping[str, Any], ...] | None:
    """Return the GPU of each rank in the form that its engine expects, or None without a compute phase.

    It is the GPU that the inventory assigns to the rank's RNIC, or else `spec.gpu` of its host.

    Raises:
        UsageError: a host has no such GPU.
    """
    if not spec.compute_units:
        return None
    gpus: list[Mapping[str, Any]] = []
    for rank in ranks:
        host = lab.topology.host_by_name[rank.host]
        assigned = next((rnic.gpu for rnic in host.rnics if rnic.name == rank.rnic), None)
        numbers = {gpu.name: number for number, gpu in enumerate(host.gpus)}
        gpu_name = assigned or spec.gpu
        number = numbers.get(gpu_name)
        if number is None:
            raise UsageError(f"{rank.host} has no GPU {gpu_name}; leave out the compute phase, or name another GPU")
        gpu = host.gpus[number]
        if gpu.kind == "soft":
            gpus.append({"socket": f"/run/faultbed/{gpu.name}.sock"})
        else:
            gpus.append({"pcie": gpu.pcie, "number": number})
    return tuple(gpus)


def group_size(topology: Topology, ranks: Sequence[Endpoint]) -> int:
    """Return how many consecutive ranks share a host, or else a rack; 1 if the groups have different sizes."""
    racks = {host.name: host.rack for host in topology.hosts}
    by_host = host_group_size(ranks)
    return by_host if by_host > 1 else _run_length([racks[rank.host] for rank in ranks])


def host_group_size(ranks: Sequence[Endpoint]) -> int:
    """Return how many consecutive ranks share a host; 1 if the groups have different sizes or there is only one."""
    return _run_length([rank.host for rank in ranks])


def _run_length(places: Sequence[str]) -> int:
    runs = [len(list(run)) for _, run in groupby(places)]
    equal = len(set(runs)) == 1 and len(runs) == len(set(places))
    return runs[0] if equal and runs[0] < len(places) else 1


def _lanes_of_busiest(spec: RanksSpec, programs: Sequence[schedules.Program]) -> float:
    """Return the lanes per direction of the rank that has most lanes: half of its sending and receiving ones.

    Each queue pair is a lane, except with `spray` and `dqplb`: then all queue pairs to one peer are one lane.
    """
    pairs = schedules.peers_of(programs)
    lanes_per_pair = 1 if spec.has_substitutes else spec.qps_per_peer
    lanes = Counter(rank for pair in pairs for rank in pair)
    return max(lanes.values(), default=0) / 2 * lanes_per_pair


def _segment_bytes(spec: RanksSpec, programs: Sequence[schedules.Program]) -> int:
    """Return the segment size: at most one of the parts of the longest message, and less if slots are few."""
    longest = -(-schedules.longest_message(programs) // _parts_of_a_message(spec, programs)) * ITEM_BYTES[spec.dtype]
    bytes_in_flight = round(spec.slots * spec.segment_bytes / max(1.0, _lanes_of_busiest(spec, programs)))
    share = bytes_in_flight // 2 // MIN_SEGMENT_BYTES * MIN_SEGMENT_BYTES
    return min(spec.segment_bytes, longest, max(MIN_SEGMENT_BYTES, share))


def _parts_of_a_message(spec: RanksSpec, programs: Sequence[schedules.Program]) -> int:
    """Return the smallest number of segments of the longest message that loads all queue pairs equally.

    Each further segment costs a completion at both ends: a ring all-reduce took 1.3 times as long with messages of
    256 KiB in four parts as with whole messages.
    """
    if spec.has_substitutes:
        return spec.qps_per_peer * SEGMENTS_PER_QP
    if spec.spread == "split":
        return spec.qps_per_peer
    return schedules.parts_for_equal_turns(programs, spec.qps_per_peer)


def _window(spec: RanksSpec, programs: Sequence[schedules.Program]) -> int:
    """Return the number of segments that a lane may have on the wire.

    The data in flight is limited per rank, not per lane: a rank with many lanes would flood the queues on its path.
    """
    return max(MIN_SLOTS, round(spec.slots / max(1.0, _lanes_of_busiest(spec, programs))))


def _ring_slots(spec: RanksSpec, programs: Sequence[schedules.Program]) -> int:
    """Return the slots of each lane's staging ring.

    With twice the slots of the window, a receiver can send credits only once per half ring; a credit costs as much as a
    small segment. The rings of a rank hold at most four times the data that it may have in flight.
    """
    window = _window(spec, programs)
    if spec.has_substitutes:
        # The ring also reorders: segments on fast queue pairs overtake those on a slow one and wait for them.
        return window * 2 * spec.qps_per_peer
    lanes = max(1.0, _lanes_of_busiest(spec, programs))
    if lanes * spec.ranks_per_rnic > RING_LANES:
        return window
    fitting = int(4 * spec.slots * spec.segment_bytes / lanes) // max(1, _segment_bytes(spec, programs))
    return max(window, min(MAX_RING_SLOTS, fitting))


def work_requests(window: int, slots: int) -> int:
    """Return the sends and receives that a queue pair of a lane holds (`RankTask.capacity`)."""
    return max(window, CREDITS) + 2 + slots + 4


def check_completion_queues(spec: RanksSpec, ranks: Sequence[Endpoint], programs: Sequence[schedules.Program]) -> None:
    """Reject queue pairs whose work requests together can overrun the completion queue of an RNIC.

    Raises:
        UsageError: they can; the message names the RNIC.
    """
    requests_each = work_requests(_window(spec, programs), _ring_slots(spec, programs))
    queue_pairs: Counter[str] = Counter()
    for (src, dst), writes in writes_of(spec, programs).items():
        queue_pairs.update({ranks[src].name: len(writes)})
        queue_pairs.update({ranks[dst].name: len(writes)})
    for rnic, number in queue_pairs.most_common(1):
        if number * requests_each > CQ_ENTRIES:
            raise UsageError(
                f"{rnic} would have {number} queue pairs with {requests_each} work requests each, "
                f"{number * requests_each} together, and "
                f"its completion queue holds {CQ_ENTRIES}; use fewer queue pairs per peer, ranks or slots"
            )


def writes_of(
    spec: RanksSpec, programs: Sequence[schedules.Program]
) -> dict[tuple[int, int], tuple[tuple[int, ...], ...]]:
    """Return the bytes of each write of one iteration, by (sending rank, receiving rank) and queue pair."""
    item = ITEM_BYTES[spec.dtype]
    writes = schedules.writes_by_queue_pair(
        programs, spec.qps_per_peer, spec.spread, _segment_bytes(spec, programs) // item
    )
    return {
        pair: tuple(tuple(size * item for size in mine) for mine in by_queue_pair)
        for pair, by_queue_pair in writes.items()
    }


def rank_plan(
    title: str,
    spec: RanksSpec,
    ranks: Sequence[Endpoint],
    programs: Sequence[schedules.Program],
    *,
    iterations: int | None,
    duration_s: float | None = None,
    gpus: Sequence[Mapping[str, Any]] | None = None,
    storage: Mapping[str, Any] | None = None,
) -> Plan:
    """Return tasks and connections for ranks that run programs, for `iterations` or for `duration_s`.

    `gpus` are those of ranks that compute (`gpus_of`). `storage` is the storage client's configuration
    (`faultbed.traffic.workloads.storage_service.StorageServer.client_spec`).
    """
    queue_pairs = [
        (src, dst, number)
        for (src, dst), by_queue_pair in writes_of(spec, programs).items()
        for number in range(len(by_queue_pair))
    ]
    connections = tuple(
        ConnectionSpec(
            index=index,
            src=task_name(src),
            dst=task_name(dst),
            flow_label=shared_flow_label(spec.qp, spec.entropy, index),
            has_substitutes=spec.has_substitutes,
        )
        for index, (src, dst, _) in enumerate(queue_pairs)
    )
    lanes = _lanes_by_rank(len(ranks), queue_pairs)
    common = {
        **_engine_spec(spec, programs),
        "iterations": iterations,
        "duration_ms": None if duration_s is None else round(duration_s * 1000),
        "storage": storage,
    }
    tasks = []
    for rank, place in enumerate(ranks):
        own = {"program": programs[rank], "lanes": lanes[rank], "gpu": None if gpus is None else gpus[rank]}
        tasks.append(TaskPlan(name=task_name(rank), kind="rank", endpoint=place, spec={**common, **own}, active=True))
    return Plan(
        what=title,
        tasks=tuple(tasks),
        connections=connections,
        peer_deadline_s=spec.peer_deadline_s,
        stall_deadline_s=spec.stall_deadline_s,
    )


def _lanes_by_rank(
    ranks: int, queue_pairs: Sequence[tuple[int, int, int]]
) -> list[list[tuple[int, Literal["out", "in"], int, int]]]:
    """Return the queue pairs of each rank, as (connection, direction, peer, number among those to this peer).

    `queue_pairs` are (sending rank, receiving rank, number), by the index of their connection.
    """
    lanes: list[list[tuple[int, Literal["out", "in"], int, int]]] = [[] for _ in range(ranks)]
    for index, (src, dst, number) in enumerate(queue_pairs):
        lanes[src].append((index, "out", dst, number))
        lanes[dst].append((index, "in", src, number))
    return lanes


def _engine_spec(spec: RanksSpec, programs: Sequence[schedules.Program]) -> dict[str, Any]:
    """Return the part of a task's configuration (`faultbed.traffic.node.ranks.rank.RankTask`) that all ranks share."""
    return {
        "qps_per_peer": spec.qps_per_peer,
        "spread": spec.spread,
        "dtype": spec.dtype,
        "redop": spec.redop,
        "segment_bytes": _segment_bytes(spec, programs),
        "slots": _ring_slots(spec, programs),
        "window": _window(spec, programs),
        "warmup": spec.warmup,
        "compute_units": spec.compute_units,
        "deadline_ms": round(spec.deadline_s * 1000),
        "op_deadline_ms": round(spec.op_deadline_s * 1000),
        "qp": spec.qp.to_dict(),
    }


def task_name(rank: int) -> str:
    """Return the name of a rank's task."""
    return f"rank{rank}"


def rank_of(task: str) -> int:
    """Return the rank number in a task name such as `rank3`."""
    return int(task.removeprefix("rank"))


def ends_of(running: Running[Any], ranks: Sequence[Endpoint]) -> tuple[RankEnd, ...]:
    """Return how each rank ended. A rank that finished before others failed has completed."""
    ends = []
    for rank, place in enumerate(ranks):
        flight = running.flights.get(task_name(rank))
        if running.failure is None or task_name(rank) in running.done:
            outcome: Outcome = "completed" if running.failure else running.outcome
            ends.append(RankEnd(rank=rank, endpoint=place.name, outcome=outcome, where=None))
        else:
            where = flight.standing if flight else "its engine sent no flight recorder at the end"
            ends.append(RankEnd(rank=rank, endpoint=place.name, outcome="failed", where=where))
    return tuple(ends)


def window_of(running: Running[Any]) -> Window:
    """Return the time from the first rank's start to the last rank's end, or to the detection of a failure."""
    starts = [done["start_ns"] for done in running.done.values()]
    ends = [done["end_ns"] for done in running.done.values()]
    return Window(
        start_ns=min(starts, default=running.started_ns),
        end_ns=running.ended_ns if running.failure else max(ends, default=running.ended_ns),
    )
