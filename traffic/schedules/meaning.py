"""Definition of each collective in blocks: what a rank holds before, and what it must hold after.

Block c of rank s's input is written (s, c). The source `ALL` stands for the reduction over all ranks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from faultbed.testbed.errors import UsageError
from faultbed.traffic.schedules.schedule import Moves, Schedule, moves

__all__ = ["ALL", "COLLECTIVES", "REDUCING", "ROOTED", "input_blocks", "local_copies", "results"]

ALL = -1

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "broadcast",
    "reduce",
    "all-to-all",
    "all-to-allv",
    "send-recv",
    "barrier",
)
REDUCING = frozenset({"all-reduce", "reduce-scatter", "reduce"})
ROOTED = frozenset({"broadcast", "reduce"})


def input_blocks(schedule: Schedule, rank: int) -> tuple[int, int]:
    """Return the first block and the number of blocks of a rank's input."""
    match schedule.collective:
        case "all-gather" | "barrier":
            return rank, 1
        case "broadcast":
            return 0, schedule.chunks if rank == schedule.root else 0
        case _:
            return 0, schedule.chunks


def local_copies(collective: str, *, period: int, chunks: int, root: int) -> Moves:
    """Return the local step of a collective other than an exchange: it copies the input to the work buffer."""
    listed = np.arange(period)
    match collective:
        case "all-gather" | "barrier":
            return moves(step=-1, src=listed, dst=listed, source=listed, from_input=True)
        case "broadcast":
            return moves(step=-1, src=root, dst=root, source=0, span=chunks, from_input=True)
        case _:
            return moves(step=-1, src=listed, dst=listed, source=0, span=chunks, from_input=True)


def results(schedule: Schedule, rank: int) -> npt.NDArray[np.int64]:
    """Return what a rank's work buffer must hold at the end. Blocks that are not listed may hold anything.

    Returns:
        Rows of (first, span, source, block): work blocks [first, first + span) must equal blocks [block, block + span)
        of `source`'s input.

    Raises:
        UsageError: there is no such collective.
    """
    ranks, chunks = schedule.ranks, schedule.chunks
    all_ranks = np.arange(ranks)
    match schedule.collective:
        case "all-reduce":
            rows = [(0, chunks, ALL, 0)]
        case "reduce":
            rows = [(0, chunks, ALL, 0)] if rank == schedule.root else []
        case "reduce-scatter":
            rows = [(rank, 1, ALL, rank)]
        case "broadcast":
            rows = [(0, chunks, schedule.root, 0)]
        case "send-recv":
            rows = [(0, chunks, (rank - 1) % ranks, 0)]
        case "all-gather" | "barrier":
            return np.stack([all_ranks, np.ones_like(all_ranks), all_ranks, all_ranks], axis=1)
        case "all-to-all" | "all-to-allv":
            return np.stack([all_ranks, np.ones_like(all_ranks), all_ranks, np.full_like(all_ranks, rank)], axis=1)
        case unknown:
            raise UsageError(f'no collective "{unknown}"; choose one of {", ".join(COLLECTIVES)}')
    return np.array(rows, dtype=np.int64).reshape(-1, 4)
