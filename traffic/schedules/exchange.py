"""All-to-all and all-to-allv, where each rank has different data for each other rank; and send-recv.

All-to-all by recursive doubling is the algorithm of Bruck et al. (1997): ceil(log2 n) steps that each move half of the
blocks, for short messages.
"""

from __future__ import annotations

import numpy as np

from faultbed.traffic.schedules.schedule import Moves, after, joined, moves

__all__ = ["all_to_all", "send_recv"]


def all_to_all(algorithm: str, ranks: int, group: int) -> tuple[Moves, int]:
    """Return moves from block j of rank i's input to block i of rank j, including the local step, and their period."""
    match algorithm:
        case "full-mesh":
            peer = np.arange(1, ranks)
            own = moves(step=-1, src=0, dst=0, source=0, from_input=True)
            return joined(own, moves(step=0, src=0, dst=peer, source=peer, target=0, from_input=True)), 1
        case "recursive-doubling":
            return _doubling(ranks), 1
        case _:
            return _hierarchical(ranks, group), group


def _doubling(ranks: int) -> Moves:
    """Return moves by which a block with d ranks to go moves in step k if bit k of d is set.

    Rank r keeps that block in place r - d.
    """
    to_go = np.arange(ranks)
    parts = [moves(step=-1, src=0, dst=0, source=to_go, target=-to_go % ranks, from_input=True)]
    for step in range((ranks - 1).bit_length()):
        bit = 1 << step
        first = np.arange(bit, ranks, 2 * bit)  # distances first .. first + span - 1 have the bit
        span = np.minimum(bit, ranks - first)
        last = first + span - 1
        parts.append(moves(step=step, src=0, dst=bit, source=-last % ranks, target=(bit - last) % ranks, span=span))
    return joined(*parts)


def _hierarchical(ranks: int, group: int) -> Moves:
    """Return moves to the rank of the own group with the destination's local index, then across groups to it."""
    groups = ranks // group
    src, dst, place = (
        axis.ravel() for axis in np.meshgrid(np.arange(group), np.arange(group), np.arange(groups), indexing="ij")
    )
    source, target = place * group + dst, place * group + src
    own = src == dst
    local = moves(step=-1, src=src[own], dst=dst[own], source=source[own], target=target[own], from_input=True)
    within = moves(step=0, src=src[~own], dst=dst[~own], source=source[~own], target=target[~own], from_input=True)
    local_index, far = (axis.ravel() for axis in np.meshgrid(np.arange(group), np.arange(1, groups), indexing="ij"))
    across = moves(step=0, src=local_index, dst=far * group + local_index, source=far * group, target=0, span=group)
    return after(joined(local, within), across)


def send_recv() -> Moves:
    """Return the moves by which each rank sends its buffer to the next rank, as in the sendrecv test of nccl-tests."""
    return moves(step=0, src=0, dst=1, source=0, from_input=True)
