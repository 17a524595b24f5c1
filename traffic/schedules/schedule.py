"""What a schedule is: moves of blocks between ranks, in steps, as frozen columns.

A buffer is cut into `chunks` blocks. A rank has an *input*, which nobody writes, and a *work* buffer, in which the
result comes to be. A move takes `span` blocks, from block `source` on at rank `src` (of its work buffer, or of its
input where `from_input`), to block `target` on at rank `dst`'s work buffer, to be reduced into it or to replace it.

Moves of one step see the buffers as they were before that step; a rank enters step s with a block only when what it
receives of that block in the steps before is in place. Ranks are otherwise not synchronised. Step -1 holds the local
copies (`src` = `dst`) that a rank makes before anything else.

Most algorithms look the same from every rank. Such a schedule lists the moves of the first `period` ranks only; the
next `period` ranks do the same, with ranks and blocks `period` further on, modulo their number. A ring of 24,576 ranks
is so two rows a step, not 24,576; `expanded` gives all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "MOVE",
    "Moves",
    "Schedule",
    "after",
    "expanded",
    "joined",
    "mirrored",
    "moves",
    "relisted",
    "step_count",
    "transposed",
]

MOVE = np.dtype([
    ("step", np.int32),
    ("src", np.int32),
    ("dst", np.int32),
    ("source", np.int32),
    ("target", np.int32),
    ("span", np.int32),
    ("reduce", np.bool_),
    ("from_input", np.bool_),
])  # fmt: skip
"""Columns of a move; see the module."""

Moves = npt.NDArray[np.void]
"""One-dimensional, of dtype `MOVE`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """A collective over `ranks` ranks whose buffer is cut into `chunks` blocks, by one algorithm.

    `moves` are those of the first `period` ranks, in order of their steps. `root` means something to broadcast and
    reduce only.
    """

    collective: str
    algorithm: str
    ranks: int
    chunks: int
    period: int
    moves: Moves
    root: int = 0

    def __post_init__(self) -> None:
        self.moves.setflags(write=False)

    @property
    def steps(self) -> int:
        """How many steps there are, the local one before the first not counted."""
        return step_count(self.moves)


def moves(
    *,
    step: npt.ArrayLike,
    src: npt.ArrayLike,
    dst: npt.ArrayLike,
    source: npt.ArrayLike,
    target: npt.ArrayLike | None = None,
    span: npt.ArrayLike = 1,
    reduce: bool = False,
    from_input: bool = False,
) -> Moves:
    """Moves out of columns (arrays of one length, or single values). `target` is `source` where it is left out."""
    columns = np.broadcast_arrays(step, src, dst, source, source if target is None else target, span)
    made = np.empty(columns[0].size, dtype=MOVE)
    for name, column in zip(MOVE.names or (), columns, strict=False):
        made[name] = column.ravel()
    made["reduce"], made["from_input"] = reduce, from_input
    return made


def step_count(of: Moves) -> int:
    """Number of steps that moves take."""
    return int(of["step"].max(initial=-1)) + 1


def after(first: Moves, second: Moves) -> Moves:
    """`second` in the steps that follow those of `first`."""
    later = second.copy()
    later["step"] += step_count(first)
    return joined(first, later)


def joined(*parts: Moves) -> Moves:
    """All moves in order of their steps; those of one step in the order given."""
    together = np.concatenate(parts)
    return together[np.argsort(together["step"], kind="stable")]


def transposed(of: Moves, *, ranks: int, chunks: int, period: int) -> Moves:
    """The same paths run backwards, reducing: an all-gather becomes a reduce-scatter, a broadcast a reduce.

    Right when every block reaches every rank on one path only, for then the paths are trees.
    """
    back = of[::-1].copy()
    back["step"] = step_count(of) - 1 - back["step"]
    back["src"], back["dst"] = of["dst"][::-1], of["src"][::-1]
    back["source"], back["target"] = of["target"][::-1], of["source"][::-1]
    back["reduce"] = True
    turn = back["src"] // period * period  # listed is what the first ranks send
    for name, size in (("src", ranks), ("dst", ranks), ("source", chunks), ("target", chunks)):
        back[name] = (back[name] - turn) % size
    return joined(back)


def mirrored(of: Moves, *, ranks: int, period: int) -> Moves:
    """The same the other way round the ranks (or round the periods): what went up goes down.

    Blocks are those of ranks. Only for moves of single blocks where the period is longer than one rank.
    """
    turns = ranks // period

    def turned(numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        turn, place = np.divmod(numbers, period)
        return -turn % turns * period + place

    back = of.copy()
    back["dst"] = turned(of["dst"])
    for name in ("source", "target"):
        back[name] = turned(of[name]) if period > 1 else (1 - of[name] - of["span"]) % ranks
    return back


def expanded(schedule: Schedule, *, turns: int | None = None) -> Moves:
    """The moves of all ranks (or of the first `turns` periods), none of them going over the end of a buffer."""
    listed, period = schedule.moves, schedule.period
    count = schedule.ranks // period if turns is None else turns
    every = listed[np.tile(np.arange(len(listed)), count)]
    shift = np.repeat(np.arange(count, dtype=np.int32) * period, len(listed))
    sizes = (("src", schedule.ranks), ("dst", schedule.ranks), ("source", schedule.chunks), ("target", schedule.chunks))
    for name, size in sizes:
        every[name] = (every[name] + shift) % size
    for name in ("source", "target"):
        every = _cut_at_end(every, name, schedule.chunks)
    return every[np.argsort(every["step"], kind="stable")]


def relisted(of: Moves, *, period: int, wanted: int, ranks: int, chunks: int) -> Moves:
    """Moves that list `period` ranks, listing the first `wanted` ranks."""
    if period == wanted:
        return of
    short = Schedule(collective="", algorithm="", ranks=ranks, chunks=chunks, period=period, moves=of)
    return expanded(short, turns=wanted // period)


def _cut_at_end(of: Moves, name: str, chunks: int) -> Moves:
    over = np.flatnonzero(of[name] + of["span"] > chunks)
    if not over.size:
        return of
    heads: npt.NDArray[Any] = chunks - of[name][over]
    tails = of[over]
    of = of.copy()
    of["span"][over] = heads
    for side in ("source", "target"):
        tails[side] = (tails[side] + heads) % chunks
    tails["span"] -= heads
    return np.insert(of, over + 1, tails)
