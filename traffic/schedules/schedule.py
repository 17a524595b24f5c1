"""Definition of a schedule: moves of blocks between ranks, in steps, as frozen columns.

A buffer is cut into `chunks` blocks. A rank has an *input*, which is never written, and a *work* buffer, in which the
result is built. A move takes `span` blocks of rank `src`, from block `source` on. They come from its work buffer, or
from its input if `from_input` is set. They go to rank `dst`'s work buffer from block `target` on, where they are
reduced into it or replace it.

Moves of one step see the buffers as they were before that step. A rank sends a block in step s only when all it
receives for that block in earlier steps is in place. Ranks are not synchronised otherwise. Step -1 holds the local
copies (`src` = `dst`) that a rank makes first.

Most algorithms look the same from every rank. Such a schedule lists the moves of the first `period` ranks only. The
next `period` ranks make the same moves, with ranks and blocks shifted by `period` (modulo their number). A ring of
24,576 ranks therefore needs one row per step, not 24,576; `expanded` returns all of them.
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
"""Columns of a move, explained in the module's docstring."""

Moves = npt.NDArray[np.void]
"""A one-dimensional array of dtype `MOVE`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """A collective over `ranks` ranks by one algorithm, with its buffer cut into `chunks` blocks.

    `moves` are those of the first `period` ranks, in step order. Only broadcast and reduce use `root`.
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
        """Number of steps, not counting the local step."""
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
    """Build moves from columns (arrays of equal length, or single values). `target` defaults to `source`."""
    columns = np.broadcast_arrays(step, src, dst, source, source if target is None else target, span)
    rows = np.empty(columns[0].size, dtype=MOVE)
    for name, column in zip(MOVE.names or (), columns, strict=False):
        rows[name] = column.ravel()
    rows["reduce"], rows["from_input"] = reduce, from_input
    return rows


def step_count(rows: Moves) -> int:
    """Return the number of steps that moves take."""
    return int(rows["step"].max(initial=-1)) + 1


def after(first: Moves, second: Moves) -> Moves:
    """Append `second` to `first`: its steps follow those of `first`."""
    later = second.copy()
    later["step"] += step_count(first)
    return joined(first, later)


def joined(*parts: Moves) -> Moves:
    """Return all moves in step order. Moves of one step keep the order given."""
    together = np.concatenate(parts)
    return together[np.argsort(together["step"], kind="stable")]


def transposed(rows: Moves, *, ranks: int, chunks: int, period: int) -> Moves:
    """Return the moves backwards, with reduction: an all-gather becomes a reduce-scatter, a broadcast a reduce.

    This is correct if every block reaches every rank on only one path, because then the paths are trees.
    """
    back = rows[::-1].copy()
    back["step"] = step_count(rows) - 1 - back["step"]
    back["src"], back["dst"] = rows["dst"][::-1], rows["src"][::-1]
    back["source"], back["target"] = rows["target"][::-1], rows["source"][::-1]
    back["reduce"] = True
    # Only moves that the first `period` ranks send are listed: shift each move to one of these ranks.
    shift = back["src"] // period * period
    for name, size in (("src", ranks), ("dst", ranks), ("source", chunks), ("target", chunks)):
        back[name] = (back[name] - shift) % size
    return joined(back)


def mirrored(rows: Moves, *, ranks: int, period: int) -> Moves:
    """Return the moves in the opposite direction around the ring of ranks, or around the ring of periods.

    Block numbers are rank numbers. With a period of several ranks, periods are mirrored and ranks keep their place in
    their period; only moves of single blocks are supported.
    """
    turns = ranks // period

    def turned(numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        turn, place = np.divmod(numbers, period)
        return -turn % turns * period + place

    back = rows.copy()
    back["dst"] = turned(rows["dst"])
    for name in ("source", "target"):
        back[name] = turned(rows[name]) if period > 1 else (1 - rows[name] - rows["span"]) % ranks
    return back


def expanded(schedule: Schedule, *, turns: int | None = None) -> Moves:
    """Return the moves of all ranks (or of the first `turns` periods), split where they wrap at the end of a buffer."""
    listed, period = schedule.moves, schedule.period
    count = schedule.ranks // period if turns is None else turns
    all_moves = listed[np.tile(np.arange(len(listed)), count)]
    shift = np.repeat(np.arange(count, dtype=np.int32) * period, len(listed))
    sizes = (("src", schedule.ranks), ("dst", schedule.ranks), ("source", schedule.chunks), ("target", schedule.chunks))
    for name, size in sizes:
        all_moves[name] = (all_moves[name] + shift) % size
    for name in ("source", "target"):
        all_moves = _cut_at_end(all_moves, name, schedule.chunks)
    return all_moves[np.argsort(all_moves["step"], kind="stable")]


def relisted(rows: Moves, *, period: int, new_period: int, ranks: int, chunks: int) -> Moves:
    """Convert moves that list `period` ranks to a list of the first `new_period` ranks."""
    if period == new_period:
        return rows
    short = Schedule(collective="", algorithm="", ranks=ranks, chunks=chunks, period=period, moves=rows)
    return expanded(short, turns=new_period // period)


def _cut_at_end(rows: Moves, name: str, chunks: int) -> Moves:
    """Split each move whose blocks, by its column `name`, go beyond the end of the buffer and wrap to its beginning."""
    over = np.flatnonzero(rows[name] + rows["span"] > chunks)
    if not over.size:
        return rows
    heads: npt.NDArray[Any] = chunks - rows[name][over]
    tails = rows[over]
    rows = rows.copy()
    rows["span"][over] = heads
    for side in ("source", "target"):
        tails[side] = (tails[side] + heads) % chunks
    tails["span"] -= heads
    return np.insert(rows, over + 1, tails)
