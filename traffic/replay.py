"""A trace, replayed: each rank goes through its operations in the trace's order, groups beside groups.

All operations of a batch are one program a rank, so that nothing but their own data and pauses is between them; a trace
that does not fit a rank's memory is cut into several batches, one after the other on the same engines. Elements are
carried as `dtype`, whatever the trace's were: sizes in bytes are kept, and every element is checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

import numpy as np

from testbed.errors import UsageError
from traffic import cost, metrics, schedules
from traffic.collective import REDOPS
from traffic.engine import Engines, TrafficLab
from traffic.plan import Plan, check_qp
from traffic.ranks import ITEM_BYTES, RanksSpec, place, rank_plan, task_name, window_of
from traffic.ranks_result import RanksResult, told
from traffic.results import Endpoint, Iteration, Outcome, QpError, Rebuild
from traffic.run import OnEvent, Running, begin
from traffic.samples import iterations_of
from traffic.traces import Operation, Trace

__all__ = [
    "Batch",
    "Execution",
    "OperationTime",
    "ReplayResult",
    "ReplaySpec",
    "RoundsResult",
    "batches",
    "check",
    "execute",
    "operation_times_ns",
    "patience_s",
    "run",
    "start",
    "start_made",
    "whole",
]

Made = TypeVar("Made")
MAX_OPERATIONS = 256
"""Of one batch: what is told to an engine in one line stays small."""

SPARE_S = 60.0
MADE_BYTES = 256 << 20
"""Memory of a rank for a job that was made into a trace: it is one batch, or its parts could not be told apart."""
MADE_OPERATIONS = 2048
"""Of such a job. The pattern by which operations are told apart comes again after 4,099."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySpec(RanksSpec):
    """How a trace is replayed, `repeat` times.

    With `pauses`, ranks wait between operations as they did (or computed) in the trace, `speed` times as fast.
    `batch_bytes` bounds the memory of a rank; an operation that needs more is refused.
    """

    repeat: int = 1
    pauses: bool = True
    speed: float = 1.0
    batch_bytes: int = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Operations that run as one program a rank.

    `phases[i][m]` is which phase of its rank operation i is, by member; `gates[i][m]` which pause is before it, if any.
    """

    operations: tuple[Operation, ...]
    algorithms: tuple[str, ...]
    programs: tuple[schedules.Program, ...]
    phases: tuple[tuple[int, ...], ...]
    gates: tuple[tuple[int | None, ...], ...]
    pauses_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTime:
    """An operation and its median time: of each replay the shortest of its members, who waited for nobody."""

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
    """A replay that is over. `time_ns` is from the first rank's start to the last one's end, summed over batches.

    Where it failed, `operations` are those that were over.
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
        """Plain data, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsResult(RanksResult):
    """A replay that was one batch, round after round, and is over: an iteration is the whole trace once.

    Of each round `iteration_p50_ns` and so on are its slowest rank's; `operations` have their medians over the rounds.
    """

    spec: ReplaySpec
    source: str
    iterations_completed: int
    operations: tuple[OperationTime, ...]
    iteration_p50_ns: float
    iteration_p95_ns: float
    iteration_p99_ns: float


def check(spec: ReplaySpec) -> None:
    """Refuse what cannot be meant on any lab.

    Raises:
        UsageError: in one sentence.
    """
    if spec.dtype not in ITEM_BYTES or ITEM_BYTES[spec.dtype] != 4:  # noqa: PLR2004  # sizes are multiples of 4
        raise UsageError(f'a replay carries fp32 or int32, got "{spec.dtype}"')
    if spec.redop not in REDOPS:
        raise UsageError(f'no reduction "{spec.redop}"; there is {", ".join(REDOPS)}')
    if spec.repeat < 1:
        raise UsageError(f"a replay runs at least once, got {spec.repeat}")
    if spec.speed <= 0:
        raise UsageError(f"the speed of a replay must be above 0, got {spec.speed:g}")
    check_qp(spec.qp)


def _shape(one: Operation) -> tuple[str, schedules.Shape]:
    """The collective that an operation is here: a message is a broadcast to one."""
    root = 0 if one.root is None else one.members.index(one.root)
    name = "broadcast" if one.collective == "p2p" else one.collective
    return name, cost.shape_for(len(one.members), one.size_bytes, root=root)


def _layout(one: Operation) -> schedules.Layout:
    if one.collective == "barrier":
        return schedules.Layout(elements=len(one.members))
    if one.counts:
        counts = np.array(one.counts, dtype=np.int64) // 4
        return schedules.Layout(elements=int(counts.sum(axis=1).max()), counts=counts)
    return schedules.Layout(elements=one.size_bytes // 4)


class _Making:
    """A batch in the making."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.made: list[schedules.Program | None] = [None] * ranks
        self.operations: list[Operation] = []
        self.algorithms: list[str] = []
        self.phases: list[tuple[int, ...]] = []
        self.gates: list[tuple[int | None, ...]] = []
        self.steps = self.pauses_ns = 0

    def elements(self, rank: int) -> int:
        program = self.made[rank]
        return 0 if program is None else int(program["elements"])

    def add(self, one: Operation, algorithm: str, schedule: schedules.Schedule, parts: Sequence[schedules.Program],
            waits: Sequence[tuple[int, int]]) -> None:  # fmt: skip
        phases: list[int] = []
        gates: list[int | None] = []
        for part, (pause_ns, not_before_ns) in zip(parts, waits, strict=True):
            mine = schedules.told_apart(schedules.renamed(part, one.members, self.ranks), len(self.operations))
            before = self.made[mine["rank"]]
            phase = 0 if before is None else len(before["fences"]) + 1
            pauses = [] if before is None else before["pauses"]
            gates.append(len(pauses) if pause_ns or not_before_ns else None)
            if pause_ns or not_before_ns:
                pauses = [*pauses, [phase, pause_ns, not_before_ns]]
            whole = mine if before is None else schedules.in_sequence(before, mine, steps=self.steps)
            self.made[mine["rank"]] = {**whole, "pauses": pauses}
            phases.append(phase)
        self.pauses_ns += max(pause_ns for pause_ns, _ in waits)
        self.pauses_ns = max(self.pauses_ns, *(not_before_ns for _, not_before_ns in waits))
        self.steps += schedule.steps
        self.operations.append(one)
        self.algorithms.append(algorithm)
        self.phases.append(tuple(phases))
        self.gates.append(tuple(gates))

    def done(self) -> Batch:
        return Batch(
            operations=tuple(self.operations),
            algorithms=tuple(self.algorithms),
            programs=tuple(_nothing(rank, self.ranks) if one is None else one for rank, one in enumerate(self.made)),
            phases=tuple(self.phases),
            gates=tuple(self.gates),
            pauses_ns=self.pauses_ns,
        )


def _nothing(rank: int, ranks: int) -> schedules.Program:
    """The program of a rank that a batch does not need."""
    lists = ("fills", "copies", "sends", "recvs", "fences", "results", "pauses")
    return {"rank": rank, "ranks": ranks, "input": 0, "elements": 1, "groups": [[rank]], **{name: [] for name in lists}}


def batches(
    trace: Trace, spec: ReplaySpec, network: cost.Network, *, most_operations: int = MAX_OPERATIONS
) -> tuple[Batch, ...]:
    """The programs of all ranks, in as many batches as their memory needs, each of `most_operations` at most.

    Raises:
        UsageError: an operation that cannot be had, or is too large.
    """
    found = []
    making = _Making(trace.ranks)
    base_ns: int | None = None
    for one in trace.operations:
        name, shape = _shape(one)
        algorithm = cost.best_algorithm(name, shape, one.size_bytes, network)
        schedule = schedules.build(name, algorithm, shape)
        parts = schedules.programs(schedule, _layout(one))
        largest = max(part["elements"] for part in parts) * 4
        if largest > spec.batch_bytes:
            raise UsageError(
                f"{trace.source}: record {one.record}: {one.collective} of {one.size_bytes} bytes needs {largest} "
                f"bytes of a rank, and {spec.batch_bytes} are the most; scale the trace down"
            )
        most = max(making.elements(member) + part["elements"] for member, part in zip(one.members, parts, strict=True))
        if making.operations and (most * 4 > spec.batch_bytes or len(making.operations) >= most_operations):
            found.append(making.done())
            making, base_ns = _Making(trace.ranks), None
        base_ns = min(one.not_before_ns) if base_ns is None else base_ns
        making.add(one, algorithm, schedule, parts, _waits(one, spec, base_ns))
    return (*found, making.done())


def whole(trace: Trace, spec: ReplaySpec, network: cost.Network) -> Batch:
    """All of a trace as one batch.

    Raises:
        UsageError: it is more than that, or has an operation that cannot be had.
    """
    larger = dataclasses.replace(spec, batch_bytes=MADE_BYTES)
    made = batches(trace, larger, network, most_operations=MADE_OPERATIONS)
    if len(made) > 1:
        raise UsageError(
            f"{trace.source} is more than a rank can have at once ({MADE_OPERATIONS} operations, {MADE_BYTES >> 20} "
            "MiB); scale it down, or cut it"
        )
    return made[0]


def _waits(one: Operation, spec: ReplaySpec, base_ns: int) -> list[tuple[int, int]]:
    """By member: how long after what was before, and how long after the beginning of the batch."""
    if not spec.pauses:
        return [(0, 0)] * len(one.members)
    return [
        (round(pause_ns / spec.speed), round(max(0, not_before_ns - base_ns) / spec.speed))
        for pause_ns, not_before_ns in zip(one.pauses_ns, one.not_before_ns, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """A replay that is over, rank by rank: `runs[i]` are the number of a batch and what ran of it."""

    spec: ReplaySpec
    trace: Trace
    ranks: tuple[Endpoint, ...]
    batches: tuple[Batch, ...]
    runs: tuple[tuple[int, Running[Any]], ...]

    @property
    def outcome(self) -> Outcome:
        """As of all runs together."""
        outcomes = {running.outcome for _, running in self.runs}
        return "failed" if "failed" in outcomes else "recovered" if "recovered" in outcomes else "completed"

    @property
    def where(self) -> str | None:
        """Where it failed, if it did."""
        return next((running.failure for _, running in self.runs if running.failure is not None), None)

    @property
    def wrong_elements(self) -> int:
        """Summed over all ranks."""
        return sum(item.wrong_elements for per_rank in self.iterations for rank in per_rank for item in rank)

    @property
    def iterations(self) -> tuple[tuple[tuple[Iteration, ...], ...], ...]:
        """What rank r did in run i: `iterations[i][r]`."""
        return tuple(
            tuple(iterations_of(running, task_name(rank)) for rank in range(len(self.ranks)))
            for _, running in self.runs
        )


def run(lab: TrafficLab, spec: ReplaySpec, trace: Trace, on_event: OnEvent | None = None) -> ReplayResult:
    """Replay a trace (`traffic.traces.load`, `fitted`) and wait for its end; rank i on the i-th RNIC.

    Raises:
        UsageError: it cannot be had on this lab; nothing was started.
        LabError: it could not be started; nothing is left running.
    """
    return _result(execute(lab, spec, trace, on_event))


def execute(lab: TrafficLab, spec: ReplaySpec, trace: Trace, on_event: OnEvent | None = None) -> Execution:
    """As `run`, with all that the ranks told."""
    check(spec)
    ranks = _ranks(lab, spec, trace)
    made = batches(trace, spec, cost.NETWORKS[lab.kind])
    plans = [_plan(spec, ranks, batch, number, len(made)) for number, batch in enumerate(made)]
    ended: list[tuple[int, Running[Any]]] = []
    times = 1 if len(made) == 1 else spec.repeat  # one batch is repeated by its ranks
    with Engines.start(lab, dict.fromkeys(rank.host for rank in ranks)) as engines:
        for number, plan in [pair for _ in range(times) for pair in enumerate(plans)]:
            with begin(lab, plan, _itself, on_event, engines) as running:
                ended.append((number, running.wait(patience_s(running, spec.repeat))))
            if running.failure is not None:
                break
    return Execution(spec=spec, trace=trace, ranks=ranks, batches=made, runs=tuple(ended))


def _ranks(lab: TrafficLab, spec: ReplaySpec, trace: Trace) -> tuple[Endpoint, ...]:
    found = place(lab, spec)
    if trace.ranks > len(found):
        raise UsageError(
            f"{trace.source} is of {trace.ranks} ranks, and there are {len(found)} RNICs; shrink it to what its first "
            f"{len(found)} ranks do among themselves"
        )
    return found[: trace.ranks]


def start_made(
    lab: TrafficLab,
    spec: RanksSpec,
    trace: Trace,
    finish: Callable[[Execution], Made],
    *,
    repeat: int,
    on_event: OnEvent | None = None,
) -> Running[Made]:
    """Start what a job was made into, on the ranks of the job's spec; `finish` makes its result.

    Raises:
        UsageError: it cannot be had on this lab, or is more than one batch; nothing was started.
        LabError: it could not be started; nothing is left running.
    """
    common = {one.name: getattr(spec, one.name) for one in fields(RanksSpec)}
    as_replay = ReplaySpec(**common, repeat=repeat, batch_bytes=MADE_BYTES)
    check(as_replay)
    return _start_whole(lab, as_replay, place(lab, spec), trace, finish, on_event)


def start(lab: TrafficLab, spec: ReplaySpec, trace: Trace, on_event: OnEvent | None = None) -> Running[RoundsResult]:
    """Start a replay of a trace as one batch, `spec.repeat` rounds of it; rank i on the i-th RNIC.

    Raises:
        UsageError: it cannot be had on this lab, or is more than one batch; nothing was started.
        LabError: it could not be started; nothing is left running.
    """
    check(spec)
    ranks = _ranks(lab, spec, trace)
    return _start_whole(lab, spec, ranks, trace, _rounds, on_event)


def _start_whole(
    lab: TrafficLab,
    spec: ReplaySpec,
    ranks: tuple[Endpoint, ...],
    trace: Trace,
    finish: Callable[[Execution], Made],
    on_event: OnEvent | None,
) -> Running[Made]:
    batch = whole(trace, spec, cost.NETWORKS[lab.kind])

    def ended(running: Running[Made]) -> Made:
        return finish(Execution(spec=spec, trace=trace, ranks=ranks, batches=(batch,), runs=((0, running),)))

    return begin(lab, _plan(spec, ranks, batch, 0, 1), ended, on_event)


def _rounds(done: Execution) -> RoundsResult:
    ((_, running),) = done.runs
    per_rank, batch = done.iterations[0], done.batches[0]
    lengths = [max(item.end_ns - item.start_ns for item in row) for row in zip(*per_rank, strict=False)]
    took = [operation_times_ns(batch, index, per_rank) for index in range(len(batch.operations))]
    return RoundsResult(
        **told(running, done.ranks),
        spec=done.spec,
        source=done.trace.source,
        iterations_completed=len(lengths),
        operations=tuple(_time(batch, index, times) for index, times in enumerate(took) if times),
        iteration_p50_ns=metrics.percentile(lengths, 50),
        iteration_p95_ns=metrics.percentile(lengths, 95),
        iteration_p99_ns=metrics.percentile(lengths, 99),
    )


def patience_s(running: Running[Any], rounds: int) -> float:
    """How long to wait for so many rounds of what `start_made` has started."""
    each_s: float = max(task.spec["deadline_ms"] for task in running.plan.tasks) / 1000
    return SPARE_S + running.plan.stall_deadline_s + rounds * each_s


def _deadline_s(spec: ReplaySpec, batch: Batch) -> float:
    """Of a rank's way through a batch: `deadline_s` is that of one operation, and a rank may have to wait for them all.

    Also for those that it has no part in: each of its own may come after one of another group, through a rank that is
    in both. A run in which nothing moves ends by its stall deadline, long before.
    """
    return spec.deadline_s * max(1, len(batch.operations)) + batch.pauses_ns / 1e9


def _itself(running: Running[Any]) -> Running[Any]:
    return running


def _plan(spec: ReplaySpec, ranks: Sequence[Endpoint], batch: Batch, number: int, of: int) -> Plan:
    patient = dataclasses.replace(
        spec,
        deadline_s=_deadline_s(spec, batch),
        stall_deadline_s=spec.stall_deadline_s + batch.pauses_ns / 1e9,
    )
    return rank_plan(
        f"replay of {len(batch.operations)} operations" + (f" (batch {number + 1} of {of})" if of > 1 else ""),
        patient,
        ranks,
        batch.programs,
        iterations=spec.repeat if of == 1 else 1,
    )


def _result(done: Execution) -> ReplayResult:
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
        operations=tuple(_time(done.batches[at], index, took) for (at, index), took in sorted(times.items()) if took),
        wrong_elements=done.wrong_elements,
        time_ns=sum(window_of(running).duration_ns for _, running in done.runs),
        qp_errors=tuple(item for _, running in done.runs for item in running.qp_errors),
        rebuilds=tuple(item for _, running in done.runs for item in running.rebuilds),
    )


def operation_times_ns(batch: Batch, index: int, per_rank: Sequence[Sequence[Iteration]]) -> list[int]:
    """Time of one operation in each iteration that all its members have finished: of the member that waited least."""
    ends = list(zip(batch.phases[index], batch.gates[index], strict=True))
    rows = zip(*(per_rank[member] for member in batch.operations[index].members), strict=False)
    return [min(_took_ns(item, *end) for item, end in zip(row, ends, strict=True)) for row in rows]


def _took_ns(item: Iteration, phase: int, gate: int | None) -> int:
    began_ns = item.phases_ns[phase - 1] if phase else 0
    paused_ns = item.paused_ns[gate] if gate is not None and gate < len(item.paused_ns) else 0
    return max(0, item.phases_ns[phase] - began_ns - paused_ns)


def _time(batch: Batch, index: int, took: Sequence[int]) -> OperationTime:
    one, time_ns = batch.operations[index], metrics.percentile(took, 50)
    count = len(one.members)
    if one.counts:
        busiest = max(sum(row) - row[place] for place, row in enumerate(one.counts))
        busbw = metrics.algbw_gbytes_per_s(busiest, time_ns)
    else:
        name = "send-recv" if one.collective == "p2p" else one.collective
        busbw = metrics.busbw_gbytes_per_s(name, count, one.size_bytes, time_ns)
    return OperationTime(
        record=one.record,
        collective=one.collective,
        algorithm=batch.algorithms[index],
        members=one.members,
        size_bytes=one.size_bytes,
        time_ns=time_ns,
        busbw_gbytes_per_s=busbw,
        recorded_ns=one.duration_ns,
    )
