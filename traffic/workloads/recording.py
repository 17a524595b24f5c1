"""Record a run as a trace: what each rank did in each iteration, and when, on a common clock.

A recorded trace can be replayed (`faultbed.traffic.workloads.replay`) or exported for other tools
(`faultbed.traffic.traces.save`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from faultbed.traffic.engine.run_results import Iteration
from faultbed.traffic.schedules import ROOTED
from faultbed.traffic.traces import Operation, Trace
from faultbed.traffic.workloads import collective
from faultbed.traffic.workloads.collective import CollectiveResult, CollectiveSpec
from faultbed.traffic.workloads.job import JobResult, as_spec, groups
from faultbed.traffic.workloads.ranks import ITEM_BYTES

__all__ = ["of_collective", "of_job"]

BARRIER_BYTES = 4
"""Size of a barrier in a trace. The value has no meaning, but must not be 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Repeated:
    """One operation of a group of ranks, which every iteration repeats. `phase` is its place in the iteration."""

    collective: str
    members: tuple[int, ...]
    size_bytes: int
    phase: int = 0
    root: int | None = None
    counts: tuple[tuple[int, ...], ...] = ()


def of_collective(result: CollectiveResult) -> Trace:
    """Return the trace of a collective job: one operation per iteration (a send-recv: one message per rank)."""
    spec, members = result.spec, tuple(range(len(result.ranks)))
    if spec.collective == "send-recv":
        pairs = zip(members, members[1:] + members[:1], strict=True)
        repeated = [_Repeated(collective="p2p", members=pair, size_bytes=spec.size_bytes) for pair in pairs]
    else:
        repeated = [_repeated(spec, members)]
    return _trace("collective", repeated, result.iterations, spec.dtype)


def _repeated(spec: CollectiveSpec, members: tuple[int, ...]) -> _Repeated:
    root = spec.root if spec.collective in ROOTED else None
    size, counts = spec.size_bytes, collective.layout(spec, len(members)).counts
    if counts is None:
        size = BARRIER_BYTES if spec.collective == "barrier" else size
        return _Repeated(collective=spec.collective, members=members, size_bytes=size, root=root)
    sizes = counts * ITEM_BYTES[spec.dtype]
    busiest = int(max(sizes.sum(axis=0).max(), sizes.sum(axis=1).max()))
    rows = tuple(tuple(row) for row in sizes.tolist())
    return _Repeated(collective=spec.collective, members=members, size_bytes=busiest, counts=rows)


def of_job(result: JobResult) -> Trace:
    """Return the trace of a training job: one operation for each phase and group."""
    spec = result.spec
    repeated = [
        dataclasses.replace(_repeated(as_spec(spec, phase), members), phase=number)
        for number, phase in enumerate(spec.phases)
        for members in groups(spec.grid, phase.along)
    ]
    return _trace("job", repeated, result.iterations, spec.dtype)


def _trace(source: str, repeated: Sequence[_Repeated], iterations: Sequence[Sequence[Iteration]], dtype: str) -> Trace:
    operations: list[Operation] = []
    complete = list(zip(*iterations, strict=False))  # iterations that every rank has finished, each with all ranks
    first = complete[0] if complete else ()
    base_ns = min((_phase_start_ns(iteration, 0) for iteration in first), default=0)
    for of_ranks in complete:
        for operation in repeated:
            of_members = [of_ranks[member] for member in operation.members]
            starts = [_phase_start_ns(iteration, operation.phase) - base_ns for iteration in of_members]
            operations.append(
                Operation(
                    record=len(operations),
                    collective=operation.collective,
                    members=operation.members,
                    size_bytes=operation.size_bytes,
                    root=operation.root,
                    counts=operation.counts,
                    pauses_ns=(0,) * len(of_members),
                    not_before_ns=tuple(max(0, start) for start in starts),
                    duration_ns=min(_phase_duration_ns(iteration, operation.phase) for iteration in of_members),
                    dtype=dtype,
                )
            )
    return Trace(source=source, format="recorded", ranks=len(iterations), operations=tuple(operations))


def _phase_start_ns(iteration: Iteration, phase: int) -> int:
    """Return when a phase began; `phases_ns` are the ends of all phases, relative to the first one's beginning."""
    comm_began_ns = iteration.end_ns - iteration.comm_ns
    return comm_began_ns + (iteration.phases_ns[phase - 1] if phase else 0)


def _phase_duration_ns(iteration: Iteration, phase: int) -> int:
    if not iteration.phases_ns:  # a collective, which is one phase
        return iteration.comm_ns
    return iteration.phases_ns[phase] - (iteration.phases_ns[phase - 1] if phase else 0)
