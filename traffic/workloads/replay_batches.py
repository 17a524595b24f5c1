"""Convert a trace to programs: the work of each rank, in as many batches as its memory requires. Pure.

All operations of a batch form one program per rank, so that only their own data and pauses separate them. A trace that
does not fit a rank's memory is cut into several batches. Elements have the type `dtype`, whatever the trace's type was;
sizes in bytes are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from faultbed.testbed.errors import UsageError
from faultbed.testbed.finite import require_finite
from faultbed.traffic import schedules
from faultbed.traffic.engine.task_specs import check_qp
from faultbed.traffic.schedules import cost
from faultbed.traffic.traces import Operation, Trace
from faultbed.traffic.workloads.collective import REDOPS
from faultbed.traffic.workloads.ranks import ITEM_BYTES, RanksSpec, check_queue_pairs

__all__ = ["CONVERTED_JOB_BYTES", "Batch", "ReplaySpec", "batches", "check", "whole"]

MAX_OPERATIONS = 256
"""Maximum number of operations per batch. It limits the length of the line that configures an engine."""
CONVERTED_JOB_BYTES = 256 << 20
"""Memory of a rank for a job that was converted to a trace. Such a job must be one batch."""
CONVERTED_JOB_OPERATIONS = 2048
"""Maximum number of operations of such a job. The pattern that distinguishes operations repeats after 4,099."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySpec(RanksSpec):
    """How a trace is replayed, `repeat` times.

    With `pauses`, ranks pause between operations as in the trace, `speed` times as fast. `batch_bytes` limits the
    memory of a rank; an operation that needs more is rejected.
    """

    repeat: int = 1
    pauses: bool = True
    speed: float = 1.0
    batch_bytes: int = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Operations that run as one program per rank.

    `phases[i][m]` is the index of operation i in the program of its member m. `gates[i][m]` is the index of the pause
    before it among that program's pauses, or None. `pauses_ns` is the sum of all pauses.
    """

    operations: tuple[Operation, ...]
    algorithms: tuple[str, ...]
    programs: tuple[schedules.Program, ...]
    phases: tuple[tuple[int, ...], ...]
    gates: tuple[tuple[int | None, ...], ...]
    pauses_ns: int


def check(spec: ReplaySpec) -> None:
    """Reject a spec that is invalid on every lab.

    Raises:
        UsageError: a value is invalid; the message names it.
    """
    require_finite(spec)
    if spec.dtype not in ITEM_BYTES or ITEM_BYTES[spec.dtype] != 4:  # noqa: PLR2004  # sizes are multiples of 4
        raise UsageError(f'a replay carries fp32 or int32, got "{spec.dtype}"')
    if spec.redop not in REDOPS:
        raise UsageError(f'no reduction "{spec.redop}"; choose one of {", ".join(REDOPS)}')
    if spec.repeat < 1:
        raise UsageError(f"a replay runs at least once, got {spec.repeat}")
    if spec.speed <= 0:
        raise UsageError(f"the speed of a replay must be above 0, got {spec.speed:g}")
    check_queue_pairs(spec)
    check_qp(spec.qp)


def _shape(operation: Operation) -> tuple[str, schedules.Shape]:
    """Return the collective that stands for an operation; a message is a broadcast to one rank."""
    root = 0 if operation.root is None else operation.members.index(operation.root)
    name = "broadcast" if operation.collective == "p2p" else operation.collective
    return name, cost.shape_for(len(operation.members), operation.size_bytes, root=root)


def _layout(operation: Operation) -> schedules.Layout:
    if operation.collective == "barrier":
        return schedules.Layout(elements=len(operation.members))
    if operation.counts:
        counts = np.array(operation.counts, dtype=np.int64) // 4
        return schedules.Layout(elements=int(counts.sum(axis=1).max()), counts=counts)
    return schedules.Layout(elements=operation.size_bytes // 4)


class _BatchBuilder:
    """Builds a batch, operation by operation. `programs` are those of all ranks so far; None: a rank has none yet."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.programs: list[schedules.Program | None] = [None] * ranks
        self.operations: list[Operation] = []
        self.algorithms: list[str] = []
        self.phases: list[tuple[int, ...]] = []
        self.gates: list[tuple[int | None, ...]] = []
        self.steps = self.pauses_ns = 0

    def elements(self, rank: int) -> int:
        program = self.programs[rank]
        return 0 if program is None else int(program["elements"])

    def add(
        self,
        operation: Operation,
        algorithm: str,
        schedule: schedules.Schedule,
        parts: Sequence[schedules.Program],
        waits: Sequence[tuple[int, int]],
    ) -> None:
        """Append an operation to the programs of its members; `parts` and `waits` are in the members' order."""
        phases: list[int] = []
        gates: list[int | None] = []
        for part, (pause_ns, not_before_ns) in zip(parts, waits, strict=True):
            added = schedules.with_own_pattern(
                schedules.with_world_ranks(part, operation.members, self.ranks), len(self.operations)
            )
            before = self.programs[added["rank"]]
            phase = 0 if before is None else len(before["fences"]) + 1
            pauses = [] if before is None else before["pauses"]
            gates.append(len(pauses) if pause_ns or not_before_ns else None)
            if pause_ns or not_before_ns:
                pauses = [*pauses, [phase, pause_ns, not_before_ns]]
            program = added if before is None else schedules.in_sequence(before, added, steps=self.steps)
            self.programs[added["rank"]] = {**program, "pauses": pauses}
            phases.append(phase)
        self.pauses_ns += max(pause_ns for pause_ns, _ in waits)
        self.pauses_ns = max(self.pauses_ns, *(not_before_ns for _, not_before_ns in waits))
        self.steps += schedule.steps
        self.operations.append(operation)
        self.algorithms.append(algorithm)
        self.phases.append(tuple(phases))
        self.gates.append(tuple(gates))

    def done(self) -> Batch:
        return Batch(
            operations=tuple(self.operations),
            algorithms=tuple(self.algorithms),
            programs=tuple(
                _empty_program(rank, self.ranks) if program is None else program
                for rank, program in enumerate(self.programs)
            ),
            phases=tuple(self.phases),
            gates=tuple(self.gates),
            pauses_ns=self.pauses_ns,
        )


def _empty_program(rank: int, ranks: int) -> schedules.Program:
    """Return the program of a rank that takes no part in a batch."""
    lists = ("fills", "copies", "sends", "recvs", "fences", "results", "pauses")
    return {"rank": rank, "ranks": ranks, "input": 0, "elements": 1, "groups": [[rank]], **{name: [] for name in lists}}


def batches(
    trace: Trace, spec: ReplaySpec, network: cost.Network, *, most_operations: int = MAX_OPERATIONS
) -> tuple[Batch, ...]:
    """Return the programs of all ranks, in as many batches as their memory requires, of at most `most_operations` each.

    Raises:
        UsageError: an operation is not supported or too large.
    """
    finished = []
    builder = _BatchBuilder(trace.ranks)
    base_ns: int | None = None
    for operation in trace.operations:
        name, shape = _shape(operation)
        algorithm = cost.best_algorithm(name, shape, operation.size_bytes, network)
        schedule = schedules.build(name, algorithm, shape)
        parts = schedules.programs(schedule, _layout(operation))
        largest = max(part["elements"] for part in parts) * 4
        if largest > spec.batch_bytes:
            raise UsageError(
                f"{trace.source}: record {operation.record}: {operation.collective} of {operation.size_bytes} bytes "
                f"needs {largest} bytes per rank, and the limit is {spec.batch_bytes}; scale the trace down"
            )
        most = max(
            builder.elements(member) + part["elements"] for member, part in zip(operation.members, parts, strict=True)
        )
        if builder.operations and (most * 4 > spec.batch_bytes or len(builder.operations) >= most_operations):
            finished.append(builder.done())
            builder, base_ns = _BatchBuilder(trace.ranks), None
        base_ns = min(operation.not_before_ns) if base_ns is None else base_ns
        builder.add(operation, algorithm, schedule, parts, _waits(operation, spec, base_ns))
    return (*finished, builder.done())


def whole(trace: Trace, spec: ReplaySpec, network: cost.Network) -> Batch:
    """Return the whole trace as one batch.

    Raises:
        UsageError: it does not fit into one batch, or has an operation that is not supported.
    """
    larger = dataclasses.replace(spec, batch_bytes=CONVERTED_JOB_BYTES)
    single = batches(trace, larger, network, most_operations=CONVERTED_JOB_OPERATIONS)
    if len(single) > 1:
        raise UsageError(
            f"{trace.source} exceeds what a rank can hold at once ({CONVERTED_JOB_OPERATIONS} operations, "
            f"{CONVERTED_JOB_BYTES >> 20} MiB); scale it down, or use a part of it"
        )
    return single[0]


def _waits(operation: Operation, spec: ReplaySpec, base_ns: int) -> list[tuple[int, int]]:
    """Return, by member, the pause after the previous operation and the earliest start after the batch's beginning."""
    if not spec.pauses:
        return [(0, 0)] * len(operation.members)
    return [
        (round(pause_ns / spec.speed), round(max(0, not_before_ns - base_ns) / spec.speed))
        for pause_ns, not_before_ns in zip(operation.pauses_ns, operation.not_before_ns, strict=True)
    ]
