"""A training job on a grid of ranks: each iteration computes, then runs collectives along the grid's dimensions.

A grid {tp: 2, dp: 4} has eight ranks; the first dimension varies fastest. A phase is one collective along one
dimension. Every group of ranks that differ only in that dimension runs it, independently of the other groups. A rank
enters the next phase as soon as its own group has finished.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any

import numpy as np

from faultbed.testbed.errors import UsageError
from faultbed.testbed.finite import require_finite
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.traffic import schedules
from faultbed.traffic.engine import traffic_metrics
from faultbed.traffic.engine.engine_client import Engines, Fabric, TrafficLab
from faultbed.traffic.engine.flight_recorder import RankEnd
from faultbed.traffic.engine.run_results import Checkpoint, Endpoint, Iteration, Window
from faultbed.traffic.engine.running_traffic import OnEvent, Running, begin
from faultbed.traffic.engine.samples import checkpoints_of
from faultbed.traffic.schedules import cost
from faultbed.traffic.workloads import collective, storage_readers
from faultbed.traffic.workloads import storage_service as storage
from faultbed.traffic.workloads.collective import AUTO, CollectiveSpec
from faultbed.traffic.workloads.ranks import (
    RanksSpec,
    check_completion_queues,
    ends_of,
    gpus_of,
    group_size,
    host_group_size,
    place,
    rank_plan,
    task_name,
    window_of,
)
from faultbed.traffic.workloads.ranks_result import RanksResult, common_results
from faultbed.traffic.workloads.storage_readers import ReaderResult, StorageReaders
from faultbed.traffic.workloads.storage_service import Storage, StorageTimes

__all__ = [
    "GroupTime",
    "JobPhase",
    "JobResult",
    "JobSpec",
    "as_spec",
    "check",
    "fit",
    "groups",
    "job_programs",
    "result_fields",
    "start",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPhase:
    """A collective of `size_bytes` (per group, as nccl-tests counts it) along the dimension `along`."""

    along: str
    collective: str
    size_bytes: int
    algorithm: str = AUTO


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec(RanksSpec):
    """`iterations` of a compute phase and `phases` on a `grid` of ranks (dimension and size, fastest first).

    There must be as many ranks as the grid has. The duration is a number of iterations, because independent groups
    could not agree on a time to end. With `storage`, an iteration begins when its data has arrived, and some iterations
    end with a checkpoint.
    """

    grid: tuple[tuple[str, int], ...]
    phases: tuple[JobPhase, ...]
    iterations: int = 10
    storage: Storage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTime:
    """Median time of one phase in one group.

    Each iteration counts by its fastest rank, which did not wait for others.
    """

    phase: int
    members: tuple[int, ...]
    time_ns: float
    busbw_gbytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult(RanksResult):
    """Result of a training job. `iteration_p50_ns` and so on are over the slowest rank of each iteration."""

    spec: JobSpec
    algorithms: tuple[str, ...]
    ends: tuple[RankEnd, ...]
    window: Window
    iterations_completed: int
    groups: tuple[GroupTime, ...]
    checkpoints: tuple[Checkpoint, ...]
    storage_times: StorageTimes | None
    readers: tuple[ReaderResult, ...] = ()
    iteration_p50_ns: float
    iteration_p95_ns: float
    iteration_p99_ns: float


def groups(grid: Sequence[tuple[str, int]], along: str) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks that differ in one dimension only, in order of that dimension.

    Raises:
        UsageError: the grid has no such dimension.
    """
    names = [name for name, _ in grid]
    if along not in names:
        raise UsageError(f'the grid has no dimension "{along}"; it has {", ".join(names)}')
    sizes = [size for _, size in reversed(grid)]  # numpy's last axis varies fastest
    axis = len(names) - 1 - names.index(along)
    lines = np.moveaxis(np.arange(prod(sizes)).reshape(sizes), axis, -1).reshape(-1, sizes[axis])
    return tuple(tuple(line) for line in lines.tolist())


def check(spec: JobSpec) -> None:
    """Reject a spec that is invalid on every lab.

    Raises:
        UsageError: a value is invalid; the message names it.
    """
    require_finite(spec)
    names = [name for name, _ in spec.grid]
    if not spec.grid or len(set(names)) != len(names) or any(size < 1 for _, size in spec.grid):
        sizes = ", ".join(f"{name}={size}" for name, size in spec.grid)
        raise UsageError(
            f'a grid needs dimensions with different names and sizes of at least 1, such as tp=2,dp=2; got "{sizes}"'
        )
    if spec.storage is not None:
        storage.check(spec.storage)
    if not spec.phases:
        raise UsageError("a job has at least one phase, such as dp:all-reduce:1MiB")
    for phase in spec.phases:
        size = len(groups(spec.grid, phase.along)[0])
        if size < schedules.MIN_RANKS:
            raise UsageError(f"{phase.collective} along {phase.along} has groups of {size} rank; it needs at least 2")
        collective.check(as_spec(spec, phase))


def as_spec(spec: JobSpec, phase: JobPhase) -> CollectiveSpec:
    """Return the collective that a group of a phase runs."""
    common = {field.name: getattr(spec, field.name) for field in fields(RanksSpec) if field.name != "ranks"}
    return CollectiveSpec(
        collective=phase.collective,
        algorithm=phase.algorithm,
        size_bytes=phase.size_bytes,
        iterations=spec.iterations,
        **common,
    )


def job_programs(
    spec: JobSpec,
    network: cost.Network,
    sharing: Callable[[tuple[int, ...]], int] = lambda _: 1,
    together: Callable[[tuple[int, ...]], int] = lambda _: 1,
) -> tuple[list[schedules.Program], tuple[str, ...]]:
    """Return every rank's program for an iteration, and the algorithm of each phase.

    For the members of a group, `sharing` returns how many consecutive ranks share a host or a rack
    (`faultbed.traffic.workloads.ranks.group_size`); a hierarchical phase uses that as its group size. `together`
    returns how many share a host (`host_group_size`). If that is equal in all groups of a phase, `auto` may choose
    hierarchical, too.

    Raises:
        UsageError: a phase does not support its shape.
    """
    world = prod(size for _, size in spec.grid)
    by_rank: list[schedules.Program | None] = [None] * world
    algorithms, steps = [], 0
    for number, phase in enumerate(spec.phases):
        spec_of_phase = as_spec(spec, phase)
        teams = groups(spec.grid, phase.along)
        algorithm = phase.algorithm
        local = 1
        if algorithm == "hierarchical":
            local = _local(phase, {sharing(members) for members in teams})
        elif algorithm == AUTO and len(group_sizes := {together(members) for members in teams}) == 1:
            local = group_sizes.pop()
        shape = cost.shape_for(len(teams[0]), phase.size_bytes, group=local)
        if algorithm == AUTO:
            algorithm = cost.best_algorithm(phase.collective, shape, phase.size_bytes, network)
        schedule = schedules.build(phase.collective, algorithm, shape)
        for members in teams:
            for program in schedules.programs(schedule, collective.layout(spec_of_phase, len(members))):
                rank_program = schedules.with_own_pattern(schedules.with_world_ranks(program, members, world), number)
                before = by_rank[rank_program["rank"]]
                by_rank[rank_program["rank"]] = (
                    rank_program if before is None else schedules.in_sequence(before, rank_program, steps=steps)
                )
        algorithms.append(algorithm)
        steps += schedule.steps
    return [program for program in by_rank if program is not None], tuple(algorithms)


def _local(phase: JobPhase, group_sizes: set[int]) -> int:
    """Return how many consecutive ranks share a host or rack; it must be equal in all groups of a phase."""
    if len(group_sizes) != 1 or group_sizes == {1}:
        raise UsageError(
            f"hierarchical {phase.collective} along {phase.along} needs groups that span several hosts (or racks), "
            "with the same number of consecutive ranks, at least 2, on each; reorder the ranks or the grid, or choose "
            "another algorithm"
        )
    return group_sizes.pop()


def fit(lab: Fabric, spec: JobSpec) -> tuple[tuple[Endpoint, ...], list[schedules.Program], tuple[str, ...]]:
    """Return the ranks of a job on a lab, each rank's program, and the algorithm of each phase.

    Raises:
        UsageError: the spec is invalid, or does not fit this lab.
    """
    check(spec)
    ranks = place(lab, spec)
    expected = prod(size for _, size in spec.grid)
    if len(ranks) != expected:
        sizes = " x ".join(f"{name} {size}" for name, size in spec.grid)
        raise UsageError(f"a grid of {sizes} has {expected} ranks, but {len(ranks)} RNICs are given")
    emulated = traits_of(lab.kind).is_emulated
    programs, algorithms = job_programs(
        spec,
        cost.NETWORKS[lab.kind],
        sharing=lambda members: group_size(lab.topology, [ranks[rank] for rank in members]),
        # Not on a soft lab: ranks on one host cannot reach each other there, and a hierarchy would need that.
        together=lambda members: 1 if emulated else host_group_size([ranks[rank] for rank in members]),
    )
    check_completion_queues(spec, ranks, programs)
    if spec.storage is not None:
        storage_readers.reader_hosts(lab.topology, spec.storage, {rank.host for rank in ranks})
    return ranks, programs, algorithms


def start(
    lab: TrafficLab, spec: JobSpec, on_event: OnEvent | None = None, *, engines: Engines | None = None
) -> Running[JobResult]:
    """Start a job on a lab, on new engines unless `engines` are given.

    Raises:
        UsageError: the spec names something that the lab does not have; nothing was started.
        LabError: the job could not be started; nothing is left running.
    """
    ranks, programs, algorithms = fit(lab, spec)
    with contextlib.ExitStack() as undo:
        server = readers = None
        if spec.storage is not None:
            server = storage.serve(lab, spec.storage.host, keep=spec.storage.keep)
            undo.callback(server.close)
            readers = storage_readers.start(lab, spec.storage, server, {rank.host for rank in ranks})
            undo.callback(readers.close)
        plan = rank_plan(
            f"job of {len(ranks)} ranks",
            spec,
            ranks,
            programs,
            iterations=spec.iterations,
            gpus=gpus_of(lab, spec, ranks),
            storage=server.client_spec(spec.storage, len(ranks)) if server and spec.storage else None,
        )
        running = begin(
            lab,
            plan,
            lambda running: _finish(running, spec, algorithms, ranks, readers),
            on_event,
            engines,
            services=tuple(service for service in (readers, server) if service is not None),
        )
        undo.pop_all()
    if readers is not None:
        readers.begin()
    return running


def _group_times(spec: JobSpec, per_rank: Sequence[Sequence[Iteration]]) -> list[GroupTime]:
    group_times = []
    for number, phase in enumerate(spec.phases):
        for members in groups(spec.grid, phase.along):
            rows = zip(*(per_rank[rank] for rank in members), strict=False)
            times = [min(_phase_ns(item, number) for item in row) for row in rows]
            time_ns = traffic_metrics.percentile(times, 50) if times else 0.0
            busbw = 0.0
            if phase.collective != "all-to-allv":
                busbw = traffic_metrics.busbw_gbytes_per_s(phase.collective, len(members), phase.size_bytes, time_ns)
            group_times.append(GroupTime(phase=number, members=members, time_ns=time_ns, busbw_gbytes_per_s=busbw))
    return group_times


def _phase_ns(item: Iteration, number: int) -> int:
    return item.phases_ns[number] - (item.phases_ns[number - 1] if number else 0)


def _finish(
    running: Running[JobResult],
    spec: JobSpec,
    algorithms: tuple[str, ...],
    ranks: tuple[Endpoint, ...],
    readers: StorageReaders | None,
) -> JobResult:
    common = common_results(running, ranks)
    stored = tuple(
        checkpoint for rank in range(len(ranks)) for checkpoint in checkpoints_of(running, task_name(rank), rank)
    )
    fields = result_fields(running, spec, algorithms, ranks, common["iterations"], stored)
    if readers is not None:
        fields["readers"] = readers.results(fields["window"])
        common["clock_error_ns"] |= readers.clock_error_ns
    return JobResult(**common, **fields)


def result_fields(
    running: Running[Any],
    spec: JobSpec,
    algorithms: tuple[str, ...],
    ranks: Sequence[Endpoint],
    per_rank: Sequence[Sequence[Iteration]],
    stored: tuple[Checkpoint, ...],
) -> dict[str, Any]:
    """Return the fields of `JobResult` that are not those of every result on ranks.

    `per_rank` are the iterations, `stored` the checkpoints of all ranks.
    """
    iteration_ns = [max(item.end_ns - item.start_ns for item in row) for row in zip(*per_rank, strict=False)]
    return {
        "spec": spec,
        "algorithms": algorithms,
        "ends": ends_of(running, ranks),
        "window": window_of(running),
        "iterations_completed": len(iteration_ns),
        "groups": tuple(_group_times(spec, per_rank)),
        "checkpoints": stored,
        "storage_times": None if spec.storage is None else storage.times_of(per_rank, stored),
        "iteration_p50_ns": traffic_metrics.percentile(iteration_ns, 50),
        "iteration_p95_ns": traffic_metrics.percentile(iteration_ns, 95),
        "iteration_p99_ns": traffic_metrics.percentile(iteration_ns, 99),
    }
