"""A ranking job: embeddings by a skewed all-to-allv, forward and backward, and an all-reduce of the dense part.

Each rank holds a shard of the embedding tables and requests rows from the other ranks. The demand for the shards is as
uneven as `skew` says (Zipf). Forward, rows go from the hot shards to all ranks; backward, their gradients return.
"""

from __future__ import annotations

from dataclasses import dataclass

from faultbed.testbed.errors import UsageError
from faultbed.testbed.finite import require_finite
from faultbed.traffic import schedules
from faultbed.traffic.engine import traffic_metrics
from faultbed.traffic.engine.engine_client import TrafficLab
from faultbed.traffic.engine.running_traffic import OnEvent, Running
from faultbed.traffic.traces import Operation, Trace
from faultbed.traffic.workloads import replay
from faultbed.traffic.workloads.ranks import RanksSpec, check_queue_pairs, place
from faultbed.traffic.workloads.ranks_result import RanksResult, common_results
from faultbed.traffic.workloads.replay_result import Execution, operation_times_ns

__all__ = ["RankingResult", "RankingSpec", "check", "run", "start", "step"]

MIN_RANKS = 2
PARTS = 3
"""Number of operations in an iteration: forward, backward and dense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingSpec(RanksSpec):
    """A ranking job. An iteration sends rows to all ranks, computes for `dense_ms`, returns gradients, and all-reduces.

    Each rank receives `embedding_bytes` of rows; the share from rank j's shard is proportional to 1 / (j + 1)^skew. The
    all-reduce has `dense_bytes`.
    """

    embedding_bytes: int = 1 << 20
    skew: float = 1.0
    dense_bytes: int = 1 << 18
    dense_ms: float = 0.0
    iterations: int = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingResult(RanksResult):
    """Result of a ranking job.

    `forward_ns`, `backward_ns` and `dense_ns` are median times of the operations, each of its fastest rank, which did
    not wait for others. Times of iterations are those of the slowest rank. `mmr` is the maximum over the mean of the
    bytes that ranks send forward; 1 is even.
    """

    spec: RankingSpec
    iterations_completed: int
    mmr: float
    forward_ns: float
    backward_ns: float
    dense_ns: float
    iteration_p50_ns: float
    iteration_p95_ns: float
    iteration_p99_ns: float


def check(spec: RankingSpec, ranks: int) -> None:
    """Reject a spec that is invalid on every lab.

    Raises:
        UsageError: a value is invalid; the message names it.
    """
    require_finite(spec)
    check_queue_pairs(spec)
    if ranks < MIN_RANKS:
        raise UsageError(f"a ranking job needs at least 2 ranks, got {ranks}")
    for name in ("embedding_bytes", "dense_bytes"):
        size = getattr(spec, name)
        if size <= 0 or size % 4:
            raise UsageError(f"{name} must be a multiple of 4 above 0, got {size}")
    if spec.iterations < 1:
        raise UsageError(f"a ranking job has at least 1 iteration, got {spec.iterations}")
    if spec.skew < 0 or spec.dense_ms < 0:
        raise UsageError("skew and dense_ms cannot be negative")


def step(spec: RankingSpec, ranks: int) -> Trace:
    """Return the operations of one iteration as a trace."""
    requested = schedules.skewed_counts(spec.embedding_bytes // 4, ranks, spec.skew) * 4
    all_ranks = tuple(range(ranks))
    parts = [
        ("all-to-allv", requested.T, 0.0),
        ("all-to-allv", requested, spec.dense_ms),
        ("all-reduce", None, 0.0),
    ]
    operations = tuple(
        Operation(
            record=number,
            collective=name,
            members=all_ranks,
            size_bytes=spec.dense_bytes
            if counts is None
            else int(max(counts.sum(axis=0).max(), counts.sum(axis=1).max())),
            counts=() if counts is None else tuple(tuple(row) for row in counts.tolist()),
            pauses_ns=(round(pause_ms * 1e6),) * ranks,
            not_before_ns=(0,) * ranks,
        )
        for number, (name, counts, pause_ms) in enumerate(parts)
    )
    return Trace(source="ranking", format="made", ranks=ranks, operations=operations)


def start(lab: TrafficLab, spec: RankingSpec, on_event: OnEvent | None = None) -> Running[RankingResult]:
    """Start a ranking job.

    Raises:
        UsageError: the spec names something that the lab does not have; nothing was started.
        LabError: the job could not be started; nothing is left running.
    """
    ranks = len(place(lab, spec))
    check(spec, ranks)
    trace = step(spec, ranks)
    return replay.start_trace(
        lab, spec, trace, lambda done: _result(spec, done), repeat=spec.iterations, on_event=on_event
    )


def run(lab: TrafficLab, spec: RankingSpec, on_event: OnEvent | None = None) -> RankingResult:
    """Run a ranking job and wait for its end. Raises the exceptions of `start`."""
    with start(lab, spec, on_event) as running:
        return running.wait(replay.timeout_s(running, spec.iterations))


def _result(spec: RankingSpec, done: Execution) -> RankingResult:
    ((_, running),) = done.runs
    per_rank = done.iterations[0]
    iteration_ns = [max(item.end_ns - item.start_ns for item in row) for row in zip(*per_rank, strict=False)]
    forward, backward, dense = (
        traffic_metrics.percentile(operation_times_ns(done.batches[0], index, per_rank), 50) for index in range(PARTS)
    )
    sent = [sum(row) - row[rank] for rank, row in enumerate(done.trace.operations[0].counts)]
    return RankingResult(
        **common_results(running, done.ranks),
        spec=spec,
        iterations_completed=len(iteration_ns),
        mmr=max(sent) * len(sent) / sum(sent),
        forward_ns=forward,
        backward_ns=backward,
        dense_ns=dense,
        iteration_p50_ns=traffic_metrics.percentile(iteration_ns, 50),
        iteration_p95_ns=traffic_metrics.percentile(iteration_ns, 95),
        iteration_p99_ns=traffic_metrics.percentile(iteration_ns, 99),
    )
