"""A training job: on a grid of ranks, compute, then collectives along its dimensions; again and again.

A grid {tp: 2, dp: 4} has eight ranks; the dimension named first varies fastest. A phase is one collective along one
dimension: each group of ranks that differ in that dimension only runs it, at the same time as all the others and
unaware of them. A rank goes from phase to phase as soon as its own group lets it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import prod

import numpy as np

from testbed.errors import UsageError
from testbed.finite import require_finite
from traffic import schedules
from traffic.engine import traffic_metrics
from traffic.engine.engine_client import Engines, Fabric, TrafficLab
from traffic.engine.flight_recorder import RankEnd
from traffic.engine.run_results import Checkpoint, Endpoint, Iteration, Window
from traffic.engine.running_traffic import OnEvent, Running, begin
from traffic.engine.samples import checkpoints_of
from traffic.schedules import cost
from traffic.workloads import collective
from traffic.workloads import storage_service as storage
from traffic.workloads.collective import AUTO, CollectiveSpec
from traffic.workloads.ranks import (
    RanksSpec,
    ends_of,
    gpus_of,
    group_size,
    host_group_size,
    place,
    rank_plan,
    task_name,
    window_of,
)
from traffic.workloads.ranks_result import RanksResult, told
from traffic.workloads.storage_service import Storage, StorageTimes

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
    "start",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPhase:
    """A collective of `size_bytes` (as nccl-tests counts it, in each group) along the dimension `along`."""

    along: str
    collective: str
    size_bytes: int
    algorithm: str = AUTO


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec(RanksSpec):
    """`iterations` of a compute phase and `phases` on a `grid` of ranks (dimension and its size, fastest first).

    There must be as many ranks as the grid has. A job goes by iterations: groups that know nothing of each other could
    not agree on a time to end. With `storage`, an iteration begins when its data is there, and some end with a
    checkpoint.
    """

    grid: tuple[tuple[str, int], ...]
    phases: tuple[JobPhase, ...]
    iterations: int = 10
    storage: Storage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTime:
    """Median time of one phase in one group: of each iteration the shortest of its ranks, who waited for nobody."""

    phase: int
    members: tuple[int, ...]
    time_ns: float
    busbw_gbytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult(RanksResult):
    """A job that is over. `iteration_p50_ns` and so on are of the slowest rank of each iteration."""

    spec: JobSpec
    algorithms: tuple[str, ...]
    ends: tuple[RankEnd, ...]
    window: Window
    iterations_completed: int
    groups: tuple[GroupTime, ...]
    checkpoints: tuple[Checkpoint, ...]
    storage_times: StorageTimes | None
    iteration_p50_ns: float
    iteration_p95_ns: float
    iteration_p99_ns: float


def groups(grid: Sequence[tuple[str, int]], along: str) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks that differ in one dimension only, in order of that dimension.

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
    """Refuse what cannot be meant on any lab.

    Raises:
        UsageError: in one sentence.
    """
    require_finite(spec)
    names = [name for name, _ in spec.grid]
    if not spec.grid or len(set(names)) != len(names) or any(size < 1 for _, size in spec.grid):
        said = ", ".join(f"{name}={size}" for name, size in spec.grid)
        raise UsageError(f'a grid has dimensions of different names and sizes from 1 on, as in tp=2,dp=2; got "{said}"')
    if spec.storage is not None:
        storage.check(spec.storage)
    if not spec.phases:
        raise UsageError("a job has at least one phase, as in dp:all-reduce:1MiB")
    for phase in spec.phases:
        size = len(groups(spec.grid, phase.along)[0])
        if size < schedules.MIN_RANKS:
            raise UsageError(f"{phase.collective} along {phase.along} is by groups of {size} rank, and needs 2")
        collective.check(as_spec(spec, phase))


def as_spec(spec: JobSpec, phase: JobPhase) -> CollectiveSpec:
    """What a group of a phase would be on its own."""
    common = {one.name: getattr(spec, one.name) for one in fields(RanksSpec) if one.name != "ranks"}
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
    """What every rank of the grid has to do in an iteration, and the algorithm of each phase.

    `sharing` tells of the members of a group how many that follow each other share a host or a rack, as
    `traffic.workloads.ranks.group_size`: a phase that is asked to be hierarchical is so by that. `together` tells how
    many share a host, as `host_group_size`: where all groups of a phase are alike in that, `auto` may choose
    hierarchical, too.

    Raises:
        UsageError: a phase that cannot be had.
    """
    world = prod(size for _, size in spec.grid)
    made: list[schedules.Program | None] = [None] * world
    algorithms, steps = [], 0
    for number, phase in enumerate(spec.phases):
        one = as_spec(spec, phase)
        teams = groups(spec.grid, phase.along)
        algorithm = phase.algorithm
        local = 1
        if algorithm == "hierarchical":
            local = _local(phase, {sharing(members) for members in teams})
        elif algorithm == AUTO and len(found := {together(members) for members in teams}) == 1:
            local = found.pop()
        shape = cost.shape_for(len(teams[0]), phase.size_bytes, group=local)
        if algorithm == AUTO:
            algorithm = cost.best_algorithm(phase.collective, shape, phase.size_bytes, network)
        schedule = schedules.build(phase.collective, algorithm, shape)
        for members in teams:
            for program in schedules.programs(schedule, collective.layout(one, len(members))):
                mine = schedules.told_apart(schedules.renamed(program, members, world), number)
                before = made[mine["rank"]]
                made[mine["rank"]] = mine if before is None else schedules.in_sequence(before, mine, steps=steps)
        algorithms.append(algorithm)
        steps += schedule.steps
    return [program for program in made if program is not None], tuple(algorithms)


def _local(phase: JobPhase, found: set[int]) -> int:
    """How many ranks that follow each other share a place, the same in all groups of a phase."""
    if len(found) != 1 or found == {1}:
        raise UsageError(
            f"hierarchical {phase.collective} along {phase.along} needs groups over several hosts (or else racks), "
            "each with the same number of their ranks, more than one, which follow each other; order ranks or grid so, "
            "or take another algorithm"
        )
    return found.pop()


def fit(lab: Fabric, spec: JobSpec) -> tuple[tuple[Endpoint, ...], list[schedules.Program], tuple[str, ...]]:
    """The ranks of a job on a lab, each rank's part of an iteration, and the algorithm of each phase.

    Raises:
        UsageError: what cannot be meant, or not on this lab, in one sentence.
    """
    check(spec)
    ranks = place(lab, spec)
    wanted = prod(size for _, size in spec.grid)
    if len(ranks) != wanted:
        said = " x ".join(f"{name} {size}" for name, size in spec.grid)
        raise UsageError(f"a grid of {said} has {wanted} ranks, but {len(ranks)} RNICs are named")
    programs, algorithms = job_programs(
        spec,
        cost.NETWORKS[lab.kind],
        sharing=lambda members: group_size(lab.topology, [ranks[rank] for rank in members]),
        # Not on a soft lab: its ranks of one host cannot talk to each other, and a hierarchy would have them do so.
        together=lambda members: 1 if lab.kind == "soft" else host_group_size([ranks[rank] for rank in members]),
    )
    return ranks, programs, algorithms


def start(
    lab: TrafficLab, spec: JobSpec, on_event: OnEvent | None = None, *, engines: Engines | None = None
) -> Running[JobResult]:
    """Start a job on a lab; on `engines` where some are lent.

    Raises:
        UsageError: the spec asks for something that is not there; nothing was started.
        LabError: it could not be started; nothing is left running.
    """
    ranks, programs, algorithms = fit(lab, spec)
    server = None if spec.storage is None else storage.serve(lab, spec.storage.host)
    plan = rank_plan(
        f"job of {len(ranks)} ranks",
        spec,
        ranks,
        programs,
        iterations=spec.iterations,
        gpus=gpus_of(lab, spec, ranks),
        storage=server.told(spec.storage, len(ranks)) if server and spec.storage else None,
    )
    beside = () if server is None else (server,)
    return begin(lab, plan, lambda running: _finish(running, spec, algorithms, ranks), on_event, engines, beside=beside)


def _group_times(spec: JobSpec, per_rank: Sequence[Sequence[Iteration]]) -> list[GroupTime]:
    found = []
    for number, phase in enumerate(spec.phases):
        for members in groups(spec.grid, phase.along):
            rows = zip(*(per_rank[rank] for rank in members), strict=False)
            times = [min(_phase_ns(item, number) for item in row) for row in rows]
            time_ns = traffic_metrics.percentile(times, 50) if times else 0.0
            factor = 0.0
            if phase.collective != "all-to-allv":
                factor = traffic_metrics.busbw_gbytes_per_s(phase.collective, len(members), phase.size_bytes, time_ns)
            found.append(GroupTime(phase=number, members=members, time_ns=time_ns, busbw_gbytes_per_s=factor))
    return found


def _phase_ns(item: Iteration, number: int) -> int:
    return item.phases_ns[number] - (item.phases_ns[number - 1] if number else 0)


def _finish(
    running: Running[JobResult], spec: JobSpec, algorithms: tuple[str, ...], ranks: tuple[Endpoint, ...]
) -> JobResult:
    common = told(running, ranks)
    per_rank = common["iterations"]
    stored = tuple(one for rank in range(len(ranks)) for one in checkpoints_of(running, task_name(rank), rank))
    whole = [max(item.end_ns - item.start_ns for item in row) for row in zip(*per_rank, strict=False)]
    return JobResult(
        **common,
        spec=spec,
        algorithms=algorithms,
        ends=ends_of(running, ranks),
        window=window_of(running),
        iterations_completed=len(whole),
        groups=tuple(_group_times(spec, per_rank)),
        checkpoints=stored,
        storage_times=None if spec.storage is None else storage.times_of(per_rank, stored),
        iteration_p50_ns=traffic_metrics.percentile(whole, 50),
        iteration_p95_ns=traffic_metrics.percentile(whole, 95),
        iteration_p99_ns=traffic_metrics.percentile(whole, 99),
    )
