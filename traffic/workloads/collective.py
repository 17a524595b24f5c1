"""A repeated collective over ranks, one RNIC per rank: its parameters, its start and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from faultbed.testbed.errors import UsageError
from faultbed.testbed.finite import require_finite
from faultbed.testbed.suggestions import nearest
from faultbed.traffic import schedules
from faultbed.traffic.engine import traffic_metrics
from faultbed.traffic.engine.engine_client import Engines, Fabric, TrafficLab
from faultbed.traffic.engine.flight_recorder import RankEnd
from faultbed.traffic.engine.latency_split import LatencySplit, latency_split
from faultbed.traffic.engine.run_results import Endpoint, Window
from faultbed.traffic.engine.running_traffic import OnEvent, Running, begin
from faultbed.traffic.engine.task_specs import check_qp
from faultbed.traffic.schedules import cost
from faultbed.traffic.workloads.ranks import (
    ITEM_BYTES,
    RanksSpec,
    check_completion_queues,
    check_queue_pairs,
    ends_of,
    gpus_of,
    group_size,
    host_group_size,
    place,
    rank_plan,
    window_of,
)
from faultbed.traffic.workloads.ranks_result import RanksResult, common_results

__all__ = ["AUTO", "REDOPS", "CollectiveResult", "CollectiveSpec", "check", "fit", "layout", "start"]

REDOPS = ("sum", "max", "avg")
AUTO = "auto"
MAX_BYTES = 1 << 30
NOT_SYNCHRONISING = frozenset({"broadcast", "reduce", "send-recv"})
"""Collectives that one rank can finish before another one has begun. They end with a barrier, which is timed too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSpec(RanksSpec):
    """One collective of `size_bytes`; ranks, element type, segment size and deadlines are in `RanksSpec`.

    `size_bytes` is the whole buffer as nccl-tests counts it: of all ranks together for all-gather and reduce-scatter.
    The `skew` of an all-to-allv is the exponent of a Zipf law: 0 is even; a larger value sends more to rank 0.
    `algorithm` "auto" selects the fastest one by the cost model. Only broadcast and reduce use `root`. Input and output
    are separate buffers, unless `in_place` is set. Give `duration_s` or `iterations`.
    """

    collective: str = "all-reduce"
    algorithm: str = AUTO
    size_bytes: int = 1 << 20
    root: int = 0
    skew: float = 0.0
    in_place: bool = False
    duration_s: float | None = None
    iterations: int | None = None

    @property
    def elements(self) -> int:
        """Number of elements in `size_bytes`."""
        return self.size_bytes // ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveResult(RanksResult):
    """Result of a collective job.

    `algorithm` is the one that ran, also for "auto". `ends[r]` is how the job ended for rank r. `flights` are the
    flight recorders of a failed run. `iterations[r]` are those of rank r. `time_ns` is the median time of an operation
    (`faultbed.traffic.engine.traffic_metrics.operation_times_ns`); `time_p95_ns` and so on are its tail. algbw and
    busbw are those of nccl-tests for the median, in GB/s (10^9 bytes). `wrong_elements` is the sum over all ranks and
    iterations, including changed inputs; `checked_elements` is the number of elements that were verified.
    `latency_split` is None if no operation was completed by all ranks.
    """

    spec: CollectiveSpec
    algorithm: str
    ends: tuple[RankEnd, ...]
    window: Window
    iterations_completed: int
    checked_elements: int
    time_ns: float
    time_p95_ns: float
    time_p99_ns: float
    time_max_ns: float
    algbw_gbytes_per_s: float
    busbw_gbytes_per_s: float
    straggler: traffic_metrics.Straggler | None
    latency_split: LatencySplit | None = None


def _check_buffer(spec: CollectiveSpec) -> None:
    if spec.dtype not in ITEM_BYTES:
        raise UsageError(f'no data type "{spec.dtype}"; choose one of {", ".join(ITEM_BYTES)}')
    if spec.redop not in REDOPS:
        raise UsageError(f'no reduction "{spec.redop}"; choose one of {", ".join(REDOPS)}')
    item = ITEM_BYTES[spec.dtype]
    if spec.size_bytes <= 0 or spec.size_bytes % item:
        raise UsageError(
            f"the size of a collective must be a multiple of {item} bytes ({spec.dtype}) above 0, got {spec.size_bytes}"
        )
    if spec.skew < 0:
        raise UsageError(f"skew cannot be negative, got {spec.skew:g}")
    if spec.size_bytes > MAX_BYTES:
        raise UsageError(f"the size of a collective is at most {MAX_BYTES} bytes, got {spec.size_bytes}")
    if spec.segment_bytes <= 0 or spec.segment_bytes % item:
        raise UsageError(f"segment size must be a multiple of {item} bytes above 0, got {spec.segment_bytes}")


def _check_algorithm(spec: CollectiveSpec) -> None:
    known = (AUTO, *schedules.algorithms_for(spec.collective))
    if spec.algorithm not in known:
        near = nearest(spec.algorithm, known)
        problem = f'no algorithm "{spec.algorithm}" for {spec.collective}; choose one of {", ".join(known)}'
        raise UsageError(f"{problem}; did you mean {near}?" if near else problem)


def check(spec: CollectiveSpec) -> None:
    """Reject a spec that is invalid on every lab.

    Raises:
        UsageError: a value is invalid; the message names it.
    """
    require_finite(spec)
    _check_algorithm(spec)
    _check_buffer(spec)
    if spec.deadline_s <= 0:
        raise UsageError(f"a collective's deadline must be above 0 s, got {spec.deadline_s:g} s")
    if (spec.duration_s is None) == (spec.iterations is None):
        raise UsageError("give a collective either a duration or a number of iterations")
    if spec.duration_s is not None and spec.duration_s <= 0:
        raise UsageError(f"a collective's duration must be above 0 s, got {spec.duration_s:g} s")
    if spec.iterations is not None and spec.iterations < 1:
        raise UsageError(f"a collective needs at least 1 iteration, got {spec.iterations}")
    if not 2 <= spec.slots <= 1024:  # noqa: PLR2004
        raise UsageError(f"slots must be 2 to 1024, got {spec.slots}")
    if spec.compute_units < 0:
        raise UsageError(f"compute units cannot be negative, got {spec.compute_units}")
    check_queue_pairs(spec)
    check_qp(spec.qp)


def _schedule(lab: Fabric, spec: CollectiveSpec, ranks: Sequence[Endpoint]) -> schedules.Schedule:
    algorithm = spec.algorithm
    # For `auto`, only ranks that share a host are near: ranks that share a rack still use their RNICs.
    group = host_group_size(ranks) if algorithm == AUTO else group_size(lab.topology, ranks)
    shape = cost.shape_for(len(ranks), spec.size_bytes, group=group, root=spec.root)
    if algorithm == AUTO:
        algorithm = cost.best_algorithm(spec.collective, shape, spec.size_bytes, cost.NETWORKS[lab.kind])
    elif algorithm == "hierarchical" and group == 1:
        raise UsageError(
            f"hierarchical {spec.collective} needs ranks on several hosts (or racks), with the same number of "
            "consecutive ranks, at least 2, on each; reorder the ranks, or choose another algorithm"
        )
    return schedules.build(spec.collective, algorithm, shape)


def layout(spec: CollectiveSpec, ranks: int) -> schedules.Layout:
    """Return the block lengths of a collective over `ranks` ranks."""
    if spec.collective == "barrier":
        return schedules.Layout(elements=ranks)
    if spec.collective == "all-to-allv":
        counts = schedules.skewed_counts(spec.elements, ranks, spec.skew)
        return schedules.Layout(elements=spec.elements, counts=counts)
    return schedules.Layout(elements=spec.elements)


def fit(lab: Fabric, spec: CollectiveSpec) -> tuple[tuple[Endpoint, ...], schedules.Schedule, list[schedules.Program]]:
    """Return the ranks of a collective on a lab, its schedule, and each rank's program.

    Raises:
        UsageError: the spec is invalid, or does not fit this lab.
    """
    check(spec)
    ranks = place(lab, spec)
    schedule = _schedule(lab, spec, ranks)
    programs = schedules.programs(
        schedule, layout(spec, len(ranks)), in_place=spec.in_place, closing_barrier=spec.collective in NOT_SYNCHRONISING
    )
    check_completion_queues(spec, ranks, programs)
    return ranks, schedule, programs


def start(
    lab: TrafficLab, spec: CollectiveSpec, on_event: OnEvent | None = None, *, engines: Engines | None = None
) -> Running[CollectiveResult]:
    """Start a collective job on a lab. Several jobs can share `engines`, one after the other.

    Raises:
        UsageError: the spec names something that the lab does not have; nothing was started.
        LabError: the job could not be started; nothing is left running.
    """
    ranks, schedule, programs = fit(lab, spec)
    plan = rank_plan(
        f"{spec.collective} ({schedule.algorithm}) over {len(ranks)} ranks",
        spec,
        ranks,
        programs,
        iterations=spec.iterations,
        duration_s=spec.duration_s,
        gpus=gpus_of(lab, spec, ranks),
    )
    return begin(lab, plan, lambda running: _finish(running, spec, schedule, programs, ranks), on_event, engines)


def _busbw(spec: CollectiveSpec, programs: Sequence[Mapping[str, Any]], time_ns: float) -> float:
    """Return busbw as nccl-tests counts it; for an all-to-allv, from the bytes of its busiest RNIC."""
    if spec.collective != "all-to-allv":
        return traffic_metrics.busbw_gbytes_per_s(spec.collective, len(programs), spec.size_bytes, time_ns)
    busiest = max(sum(row[3] for row in program[direction]) for program in programs for direction in ("sends", "recvs"))
    return traffic_metrics.algbw_gbytes_per_s(busiest * ITEM_BYTES[spec.dtype], time_ns)


def _finish(
    running: Running[CollectiveResult],
    spec: CollectiveSpec,
    schedule: schedules.Schedule,
    programs: Sequence[Mapping[str, Any]],
    ranks: tuple[Endpoint, ...],
) -> CollectiveResult:
    common = common_results(running, ranks)
    per_rank = common["iterations"]
    times = traffic_metrics.operation_times_ns(per_rank)
    time_ns, p95_ns, p99_ns, max_ns = (
        traffic_metrics.percentile(times, percent) if times else 0.0 for percent in (50, 95, 99, 100)
    )
    elements = [sum(count for _, count, *_ in program["results"]) for program in programs]
    return CollectiveResult(
        **common,
        spec=spec,
        algorithm=schedule.algorithm,
        ends=ends_of(running, ranks),
        window=window_of(running),
        iterations_completed=len(times),
        checked_elements=sum(len(done) * size for done, size in zip(per_rank, elements, strict=True)),
        time_ns=time_ns,
        time_p95_ns=p95_ns,
        time_p99_ns=p99_ns,
        time_max_ns=max_ns,
        algbw_gbytes_per_s=traffic_metrics.algbw_gbytes_per_s(spec.size_bytes, time_ns),
        busbw_gbytes_per_s=_busbw(spec, programs, time_ns),
        straggler=traffic_metrics.straggler(per_rank) if all(per_rank) else None,
        latency_split=latency_split(per_rank),
    )
