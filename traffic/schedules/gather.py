"""All-gather, reduce-scatter (its transpose) and all-reduce (a reduce-scatter followed by an all-gather).

Ring: Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009); each rank sends
2(n-1)/n of the buffer. Recursive doubling and halving for any number of ranks is the concatenation of Bruck, Ho,
Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications" (1997), and its transpose; ceil(log2
n) steps each. Reduce-scatter by halving followed by all-gather by doubling is the all-reduce of Rabenseifner,
"Optimization of collective reduction operations" (2004). A barrier is the all-gather by doubling of one element per
rank, so its data can be checked.
"""

from __future__ import annotations

import numpy as np

from faultbed.traffic.schedules.schedule import Moves, after, joined, moves

__all__ = ["all_gather", "all_reduce_by_doubling"]


def all_gather(algorithm: str, ranks: int, group: int) -> tuple[Moves, int]:
    """Return moves that bring block r of rank r to all ranks, and their period. Only `hierarchical` uses `group`."""
    match algorithm:
        case "ring":
            return _ring(ranks), 1
        case "recursive-doubling":
            return _doubling(ranks), 1
        case "full-mesh":
            return moves(step=0, src=0, dst=np.arange(1, ranks), source=0), 1
        case _:
            return _hierarchical(ranks, group), group


def _ring(ranks: int) -> Moves:
    """Return the moves of a ring: in step s rank r forwards block r - s, which it received in the previous step."""
    step = np.arange(ranks - 1)
    return moves(step=step, src=0, dst=1, source=-step % ranks)


def _doubling(ranks: int) -> Moves:
    """Return moves by which rank r sends, in step k, the 2^k blocks that end with its own to rank r + 2^k.

    The last step sends the rest.
    """
    step = np.arange((ranks - 1).bit_length())
    reach = 1 << step
    span = np.minimum(reach, ranks - reach)
    return moves(step=step, src=0, dst=reach, source=(1 - span) % ranks, span=span)


def _hierarchical(ranks: int, group: int) -> Moves:
    """Return the moves of a ring across the groups for each local index, then of a full mesh within each group."""
    groups = ranks // group
    step, local = (axis.ravel() for axis in np.meshgrid(np.arange(groups - 1), np.arange(group), indexing="ij"))
    across = moves(step=step, src=local, dst=(local + group) % ranks, source=(local - step * group) % ranks)
    src, dst, place = (
        axis.ravel() for axis in np.meshgrid(np.arange(group), np.arange(group), np.arange(groups), indexing="ij")
    )
    other = src != dst
    within = moves(step=0, src=src[other], dst=dst[other], source=(place * group + src)[other])
    return after(across, within)


def all_reduce_by_doubling(ranks: int) -> Moves:
    """Return moves that exchange whole buffers (one block) with the rank whose number differs in one bit.

    It suits short messages. Ranks beyond the largest power of two send their data to a partner first, and receive the
    result at the end.
    """
    power = 1 << (ranks.bit_length() - 1)
    extra = np.arange(power, ranks)
    parts = [moves(step=0, src=extra, dst=extra - power, source=0, reduce=True)] if extra.size else []
    begin, rank = len(parts), np.arange(power)
    rounds = power.bit_length() - 1
    parts += [moves(step=begin + k, src=rank, dst=rank ^ (1 << k), source=0, reduce=True) for k in range(rounds)]
    if extra.size:
        parts.append(moves(step=begin + rounds, src=extra - power, dst=extra, source=0))
    return joined(*parts)
