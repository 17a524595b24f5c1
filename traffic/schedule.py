"""Collective schedules as frozen data: who sends which chunk to whom, in which step, to be reduced or copied.

One schedule has three readers: the executor on the nodes (`program` is what a node gets), the checker
(`traffic.check`) and, later, the cost model. A schedule knows ranks and chunks, never bytes; `chunk_range` cuts a
buffer of any length into chunks, so sizes that ranks do not divide need no padding.

The ring is the one of Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009):
n-1 reduce-scatter steps, n-1 all-gather steps, each rank sending 2(n-1)/n of the buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from testbed.errors import UsageError

__all__ = [
    "ALGORITHMS",
    "Move",
    "MoveOp",
    "Schedule",
    "build",
    "chunk_range",
    "peers_of",
    "program",
    "ring_all_reduce",
]

MIN_RANKS = 2

MoveOp = Literal["reduce", "copy"]


class Move(NamedTuple):
    """One chunk on its way: `src` sends it, `dst` adds it to its own (`reduce`) or takes it (`copy`)."""

    src: int
    dst: int
    chunk: int
    op: MoveOp


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A collective over `ranks` ranks whose buffer is cut into `chunks` chunks.

    Moves of one step see the buffers as they were before that step; a rank enters step s with a chunk only when what
    it receives of that chunk in the steps before is in place. Ranks are otherwise not synchronised.
    """

    collective: str
    algorithm: str
    ranks: int
    chunks: int
    steps: tuple[tuple[Move, ...], ...]


def ring_all_reduce(ranks: int) -> Schedule:
    """Ring all-reduce: in step s rank r sends chunk (r - s) mod n, first to be reduced, from step n-1 on to be copied.

    Raises:
        UsageError: fewer than two ranks.
    """
    if ranks < MIN_RANKS:  # two ends make a collective
        raise UsageError(f"an all-reduce needs at least 2 ranks, got {ranks}")
    steps = tuple(
        tuple(
            Move(rank, (rank + 1) % ranks, (rank - step) % ranks, "reduce" if step < ranks - 1 else "copy")
            for rank in range(ranks)
        )
        for step in range(2 * (ranks - 1))
    )
    return Schedule(collective="all-reduce", algorithm="ring", ranks=ranks, chunks=ranks, steps=steps)


ALGORITHMS: dict[tuple[str, str], Callable[[int], Schedule]] = {("all-reduce", "ring"): ring_all_reduce}
"""Schedule makers by (collective, algorithm)."""


def build(collective: str, algorithm: str, ranks: int) -> Schedule:
    """Make a schedule by name.

    Raises:
        UsageError: unknown collective or algorithm, or too few ranks; the message lists what there is.
    """
    maker = ALGORITHMS.get((collective, algorithm))
    if maker is None:
        known = ", ".join(f"{c} by {a}" for c, a in sorted(ALGORITHMS))
        raise UsageError(f'no algorithm "{algorithm}" for collective "{collective}"; there is {known}')
    return maker(ranks)


def chunk_range(elements: int, chunks: int, index: int) -> tuple[int, int]:
    """Offset and length, in elements, of one chunk; the first `elements % chunks` chunks are one element longer."""
    small, extra = divmod(elements, chunks)
    return index * small + min(index, extra), small + (1 if index < extra else 0)


def peers_of(schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """Every (src, dst) pair that moves anything, in order of first use: the connections an executor needs."""
    return tuple(dict.fromkeys((move.src, move.dst) for step in schedule.steps for move in step))


def program(schedule: Schedule, *, rank: int, elements: int) -> dict[str, Any]:
    """What one rank has to do, as plain JSON data for its node.

    `sends` are `[step, dst, offset, count]`, `recvs` are `[step, src, offset, count, op]`, both in step order, with
    offsets and counts in elements. Empty chunks are left out on both sides alike.
    """
    sends: list[list[int]] = []
    recvs: list[list[int | str]] = []
    for number, step in enumerate(schedule.steps):
        for move in step:
            if rank not in (move.src, move.dst):
                continue
            offset, count = chunk_range(elements, schedule.chunks, move.chunk)
            if not count:
                continue
            if move.src == rank:
                sends.append([number, move.dst, offset, count])
            else:
                recvs.append([number, move.src, offset, count, move.op])
    return {"rank": rank, "ranks": schedule.ranks, "elements": elements, "sends": sends, "recvs": recvs}
