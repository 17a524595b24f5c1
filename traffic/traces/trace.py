"""A trace in a form independent of its file format: operations in an order that every rank can follow.

A trace of one rank is a list of `Part`s: what that rank does. `faultbed.traffic.traces.join` joins the parts of all
ranks into `Operation`s: what their members do together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from dataclasses import dataclass

from faultbed.testbed.errors import UsageError

__all__ = ["MOST_RANKS", "Note", "Operation", "Part", "RankTrace", "Trace", "fitted", "group_of"]

MOST_RANKS = 1 << 17
"""Highest number of ranks in a trace. A damaged number of ranks must not take all memory."""
_LISTED = 8
_MOST_BYTES = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A record of `file` that is not replayed as it is. `blocks`: a replay without it would be a different workload."""

    file: str
    record: int
    what: str
    blocks: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank does in an operation; `members` and `root` are ranks of the world, in the group's order.

    `size_bytes` is the whole buffer, as `faultbed.traffic.workloads.collective.CollectiveSpec` counts it. A
    `collective` of "p2p" goes from `members[0]` to `members[1]`, and its `root` is the end whose trace contains this
    part. `sends` and `receives` are bytes by member, for an all-to-allv. The rank pauses for `pause_ns` before the
    operation, and does not begin it before `not_before_ns` after the start of the trace.
    """

    record: int
    collective: str
    members: tuple[int, ...]
    size_bytes: int
    root: int | None = None
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    pause_ns: int = 0
    not_before_ns: int = 0
    duration_ns: int = 0
    dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """Contents of one file. `rank` is None if it stands for all ranks; `world` is the number of ranks it knows of."""

    file: str
    rank: int | None
    world: int
    parts: tuple[Part, ...]
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A collective of `members` (ranks of the world), or "p2p" from the first to the second of two members.

    `record` is the record number in the first member's trace. `counts[i][j]` are the bytes from member i to member j,
    for an all-to-allv. `pauses_ns` and `not_before_ns` are by member (see `Part`). `duration_ns` is the recorded
    duration, 0 if the trace does not say.
    """

    record: int
    collective: str
    members: tuple[int, ...]
    size_bytes: int
    pauses_ns: tuple[int, ...]
    not_before_ns: tuple[int, ...]
    root: int | None = None
    counts: tuple[tuple[int, ...], ...] = ()
    duration_ns: int = 0
    dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A complete trace, with `operations` in an order in which each rank finds its own."""

    source: str
    format: str
    ranks: int
    operations: tuple[Operation, ...]
    notes: tuple[Note, ...] = ()


def group_of(ranks: Collection[object]) -> tuple[int, ...]:
    """Return the ranks of a group, in its order.

    Raises:
        ValueError: one is no rank, one is listed twice, or there are too many.
    """
    if len(ranks) > MOST_RANKS:
        raise ValueError(f"a group of {len(ranks):,} ranks; at most {MOST_RANKS:,} are read")
    checked = tuple(rank for rank in ranks if isinstance(rank, int) and 0 <= rank < MOST_RANKS)
    if len(checked) < len(ranks):
        wrong = next(rank for rank in ranks if rank not in checked)
        raise ValueError(f"the group {_listed(ranks)} has {wrong!r}, which is no rank")
    if len(set(checked)) < len(checked):
        raise ValueError(f"the group {_listed(ranks)} has a rank twice")
    return checked


def _listed(ranks: Collection[object]) -> str:
    shown = list(ranks)[:_LISTED]
    return f"{shown}" if len(ranks) <= _LISTED else f"{shown} and {len(ranks) - _LISTED:,} more"


def fitted(trace: Trace, *, ranks: int, scale: float = 1.0) -> Trace:
    """Return the operations of a trace that only its first `ranks` ranks take part in, with sizes scaled by `scale`.

    Sizes are rounded up to multiples of 4 bytes, or of 4 bytes per member if all blocks have equal size, and are never
    0.

    Raises:
        UsageError: the scale is not above 0, nothing is left, or a scaled size is no number of bytes.
    """
    if scale <= 0:
        raise UsageError(f"the scale of a trace must be above 0, got {scale:g}")
    for operation in trace.operations:
        if operation.size_bytes > _MOST_BYTES or not math.isfinite(operation.size_bytes * scale):
            raise UsageError(
                f"{trace.source}: record {operation.record}: the size of this {operation.collective}, times {scale:g}, "
                "is no number of bytes; correct the trace or its scale"
            )
    kept = tuple(shrunk for operation in trace.operations if (shrunk := _cut(operation, ranks, scale)) is not None)
    if not kept:
        raise UsageError(f"{trace.source}: no operation is among its first {ranks} ranks{_left_out(trace)}")
    return dataclasses.replace(trace, ranks=min(ranks, trace.ranks), operations=kept)


def _left_out(trace: Trace) -> str:
    """Return which records are not replayed and why; a trace may have nothing else."""
    records_by_reason: dict[str, list[int]] = {}
    for note in trace.notes:
        records_by_reason.setdefault(note.what, []).append(note.record)
    named = [
        f"record{'s' if len(records) > 1 else ''} {_listed(records).replace('[', '').replace(']', '')}: {what}"
        for what, records in list(records_by_reason.items())[:_LISTED]
    ]
    return f"; not replayed: {'; '.join(named)}" if named else ""


def _cut(operation: Operation, ranks: int, scale: float) -> Operation | None:
    places = [index for index, member in enumerate(operation.members) if member < ranks]
    if len(places) < 2 or (operation.collective == "p2p" and len(places) < len(operation.members)):  # noqa: PLR2004
        return None
    members = tuple(operation.members[place] for place in places)
    grain = 4 * len(members) if operation.collective in ("all-gather", "reduce-scatter", "all-to-all") else 4
    of_whole = operation.size_bytes * scale
    if grain > 4:  # noqa: PLR2004  # the block of each member keeps its size
        of_whole = of_whole * len(members) / len(operation.members)
    counts = tuple(
        tuple(_rounded(operation.counts[row][column] * scale, 4, least=0) for column in places)
        for row in (places if operation.counts else ())
    )
    largest = max((sum(row) for row in (*counts, *zip(*counts, strict=True))), default=0)
    return dataclasses.replace(
        operation,
        members=members,
        root=operation.root if operation.root in members else members[0] if operation.root is not None else None,
        size_bytes=max(4, largest) if counts else _rounded(of_whole, grain, least=grain),
        counts=counts,
        pauses_ns=tuple(operation.pauses_ns[place] for place in places),
        not_before_ns=tuple(operation.not_before_ns[place] for place in places),
    )


def _rounded(size: float, grain: int, *, least: int) -> int:
    return max(least, -(-round(size) // grain) * grain)
