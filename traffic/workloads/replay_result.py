"""Results of a replay: the time of each operation of the trace, and of the whole trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from faultbed.traffic.engine import traffic_metrics
from faultbed.traffic.engine.run_results import Endpoint, Iteration, Outcome, QpError, Rebuild
from faultbed.traffic.engine.running_traffic import Running
from faultbed.traffic.engine.samples import iterations_of
from faultbed.traffic.traces import Trace
from faultbed.traffic.workloads.ranks import task_name, window_of
from faultbed.traffic.workloads.ranks_result import RanksResult, common_results
from faultbed.traffic.workloads.replay_batches import Batch, ReplaySpec

__all__ = ["Execution", "OperationTime", "ReplayResult", "RoundsResult", "operation_times_ns", "result", "rounds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTime:
    """An operation of a trace and its median time over all replays.

    The time in one replay is that of the fastest member: the last one to start, which did not wait for the others.
    """

    record: int
    collective: str
    algorithm: str
    members: tuple[int, ...]
    size_bytes: int
    time_ns: float
    busbw_gbytes_per_s: float
    recorded_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Result of a replay. `time_ns` is from the first rank's start to the last rank's end, summed over batches.

    For a failed replay, `operations` are those that were completed.
    """

    spec: ReplaySpec
    source: str
    outcome: Outcome
    where: str | None
    ranks: tuple[str, ...]
    operations: tuple[OperationTime, ...]
    wrong_elements: int
    time_ns: int
    qp_errors: tuple[QpError, ...]
    rebuilds: tuple[Rebuild, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsResult(RanksResult):
    """Result of replaying a trace that is one batch. A round, also called an iteration, replays the whole trace once.

    `iteration_p50_ns`, `_p95_ns` and `_p99_ns` are percentiles over the rounds; the length of a round is that of its
    slowest rank.
    """

    spec: ReplaySpec
    source: str
    iterations_completed: int
    operations: tuple[OperationTime, ...]
    iteration_p50_ns: float
    iteration_p95_ns: float
    iteration_p99_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """A finished replay with the data of every rank. `runs[i]` is the index of a batch and the run that replayed it."""

    spec: ReplaySpec
    trace: Trace
    ranks: tuple[Endpoint, ...]
    batches: tuple[Batch, ...]
    runs: tuple[tuple[int, Running[Any]], ...]

    @property
    def outcome(self) -> Outcome:
        """The worst outcome of all runs."""
        outcomes = {running.outcome for _, running in self.runs}
        return "failed" if "failed" in outcomes else "recovered" if "recovered" in outcomes else "completed"

    @property
    def where(self) -> str | None:
        """Where the replay failed, or None."""
        return next((running.failure for _, running in self.runs if running.failure is not None), None)

    @property
    def wrong_elements(self) -> int:
        """Number of wrong elements over all ranks, those of the warm-up included."""
        counted = sum(item.wrong_elements for per_rank in self.iterations for rank in per_rank for item in rank)
        return counted + sum(running.warmup_wrong for _, running in self.runs)

    @property
    def iterations(self) -> tuple[tuple[tuple[Iteration, ...], ...], ...]:
        """Iterations by run and rank: `iterations[i][r]` are those of rank r in run i."""
        return tuple(
            tuple(iterations_of(running, task_name(rank)) for rank in range(len(self.ranks)))
            for _, running in self.runs
        )


def rounds(done: Execution) -> RoundsResult:
    """Return the result of a replay that was one batch."""
    ((_, running),) = done.runs
    per_rank, batch = done.iterations[0], done.batches[0]
    lengths = [max(item.end_ns - item.start_ns for item in row) for row in zip(*per_rank, strict=False)]
    times_ns = [operation_times_ns(batch, index, per_rank) for index in range(len(batch.operations))]
    return RoundsResult(
        **common_results(running, done.ranks),
        spec=done.spec,
        source=done.trace.source,
        iterations_completed=len(lengths),
        operations=tuple(_time(batch, index, times) for index, times in enumerate(times_ns) if times),
        iteration_p50_ns=traffic_metrics.percentile(lengths, 50),
        iteration_p95_ns=traffic_metrics.percentile(lengths, 95),
        iteration_p99_ns=traffic_metrics.percentile(lengths, 99),
    )


def result(done: Execution) -> ReplayResult:
    """Return the result of a replay of any number of batches."""
    times: dict[tuple[int, int], list[int]] = {}
    for (number, _), per_rank in zip(done.runs, done.iterations, strict=True):
        for index in range(len(done.batches[number].operations)):
            times.setdefault((number, index), []).extend(operation_times_ns(done.batches[number], index, per_rank))
    return ReplayResult(
        spec=done.spec,
        source=done.trace.source,
        outcome=done.outcome,
        where=done.where,
        ranks=tuple(rank.name for rank in done.ranks),
        operations=tuple(
            _time(done.batches[at], index, took_ns) for (at, index), took_ns in sorted(times.items()) if took_ns
        ),
        wrong_elements=done.wrong_elements,
        time_ns=sum(window_of(running).duration_ns for _, running in done.runs),
        qp_errors=tuple(item for _, running in done.runs for item in running.qp_errors),
        rebuilds=tuple(item for _, running in done.runs for item in running.rebuilds),
    )


def operation_times_ns(batch: Batch, index: int, per_rank: Sequence[Sequence[Iteration]]) -> list[int]:
    """Return the time of an operation in each iteration that all of its members finished.

    Args:
        batch: the batch of the operation.
        index: index of the operation in the batch.
        per_rank: the iterations of each rank.

    Returns:
        Nanoseconds, of the fastest member in each iteration: it entered last and did not wait for the others.
    """
    ends = list(zip(batch.phases[index], batch.gates[index], strict=True))
    rows = zip(*(per_rank[member] for member in batch.operations[index].members), strict=False)
    return [min(_took_ns(item, *end) for item, end in zip(row, ends, strict=True)) for row in rows]


def _took_ns(item: Iteration, phase: int, gate: int | None) -> int:
    began_ns = item.phases_ns[phase - 1] if phase else 0
    paused_ns = item.paused_ns[gate] if gate is not None and gate < len(item.paused_ns) else 0
    return max(0, item.phases_ns[phase] - began_ns - paused_ns)


def _time(batch: Batch, index: int, times_ns: Sequence[int]) -> OperationTime:
    operation, time_ns = batch.operations[index], traffic_metrics.percentile(times_ns, 50)
    count = len(operation.members)
    if operation.counts:
        busiest = max(sum(row) - row[place] for place, row in enumerate(operation.counts))
        busbw = traffic_metrics.algbw_gbytes_per_s(busiest, time_ns)
    else:
        name = "send-recv" if operation.collective == "p2p" else operation.collective
        busbw = traffic_metrics.busbw_gbytes_per_s(name, count, operation.size_bytes, time_ns)
    return OperationTime(
        record=operation.record,
        collective=operation.collective,
        algorithm=batch.algorithms[index],
        members=operation.members,
        size_bytes=operation.size_bytes,
        time_ns=time_ns,
        busbw_gbytes_per_s=busbw,
        recorded_ns=operation.duration_ns,
    )
