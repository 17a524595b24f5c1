"""Broadcast from a root, reduce (its transpose), and the double binary tree.

The double binary tree is that of Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction
and scan" (2009): two binary trees over the ranks, each carrying half of the blocks, with every rank interior in at most
one of them. Blocks are pipelined down chains and trees, so `pieces` of them overlap.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from faultbed.traffic.schedules.schedule import Moves, after, joined, moves, transposed

__all__ = ["broadcast", "chunks_of", "tree_all_reduce"]

Ints = npt.NDArray[np.int64]


def chunks_of(algorithm: str, pieces: int) -> int:
    """Return into how many blocks an algorithm cuts the buffer."""
    return {"ring": pieces, "double-binary-tree": 2 * pieces}.get(algorithm, 1)


def broadcast(algorithm: str, ranks: int, group: int, pieces: int, root: int) -> Moves:
    """Return moves that bring all blocks of the root to all ranks. Their period is `ranks`."""
    match algorithm:
        case "ring":
            from_zero = _chain(ranks, pieces)
        case "recursive-doubling":
            from_zero = _binomial(np.arange(ranks))
        case "full-mesh":
            from_zero = moves(step=0, src=0, dst=np.arange(1, ranks), source=0)
        case "double-binary-tree":
            from_zero = _from_root(ranks, pieces)
        case _:
            return _hierarchical(ranks, group, root)
    from_zero["src"], from_zero["dst"] = (from_zero["src"] + root) % ranks, (from_zero["dst"] + root) % ranks
    return from_zero


def _chain(ranks: int, pieces: int) -> Moves:
    """Return moves by which each rank forwards to the next rank what it received in the previous step."""
    rank, piece = (axis.ravel() for axis in np.meshgrid(np.arange(ranks - 1), np.arange(pieces), indexing="ij"))
    return joined(moves(step=rank + piece, src=rank, dst=rank + 1, source=piece))


def _binomial(ranks: Ints) -> Moves:
    """Return moves by which, in step k, each of the first 2^k of `ranks` sends to the rank 2^k positions further on."""
    parts = []
    for step in range((len(ranks) - 1).bit_length()):
        dst = np.arange(1 << step, min(2 << step, len(ranks)))
        parts.append(moves(step=step, src=ranks[dst - (1 << step)], dst=ranks[dst], source=0))
    return joined(*parts) if parts else moves(step=[], src=[], dst=[], source=[])


def _hierarchical(ranks: int, group: int, root: int) -> Moves:
    """Return moves to the ranks with the root's local index in every group, then within all groups at once."""
    home, local = divmod(root, group)
    groups = ranks // group
    heads = (np.arange(groups) + home) % groups * group + local
    local_offsets = np.arange(1, group)
    head, other = (axis.ravel() for axis in np.meshgrid(heads, local_offsets, indexing="ij"))
    within = moves(step=0, src=head, dst=head - local + (local + other) % group, source=0)
    return after(_binomial(heads), within)


def _parents(size: int) -> tuple[Ints, Ints]:
    """Return the parents (0 at the root) and the depths of an in-order binary tree over labels 1..size.

    The children of label v are v -+ half of its lowest bit, or the nearest label that exists. Odd labels are leaves.
    """
    label = np.arange(1, size + 1)
    low = label & -label
    up, down = label + low, label - low
    # A label whose bit 2*low is set is a right child, so that its parent is smaller. If the parent would be larger than
    # the last label, the next ancestor that exists is the parent.
    parent = np.where(label & (2 * low), down, up)
    while (over := parent > size).any():
        bit = parent & -parent
        parent = np.where(over, parent - bit, parent)
    depth = np.zeros(size, dtype=np.int64)
    at = parent.copy()
    while (inside := at > 0).any():
        depth += inside
        at = np.where(inside, np.append(0, parent)[at], 0)
    return parent, depth


def _trees(size: int) -> list[tuple[Ints, Ints, Ints, int]]:
    """Return (child, parent, depth of child, root) of both trees over 0..size-1; the second is shifted by one."""
    parent, depth = _parents(size)
    below = np.flatnonzero(parent > 0)
    top = int(np.flatnonzero(parent == 0)[0])
    return [
        ((below + turn) % size, (parent[below] - 1 + turn) % size, depth[below], (top + turn) % size) for turn in (0, 1)
    ]


def _down(tree: int, edges: tuple[Ints, Ints, Ints, int], pieces: int, *, later: int, offset: int) -> Moves:
    child, parent, depth, _ = edges
    edge, piece = (axis.ravel() for axis in np.meshgrid(np.arange(len(child)), np.arange(pieces), indexing="ij"))
    return moves(
        step=depth[edge] - 1 + piece + later,
        src=parent[edge] + offset,
        dst=child[edge] + offset,
        source=tree * pieces + piece,
    )


def _from_root(ranks: int, pieces: int) -> Moves:
    """Return moves by which rank 0 feeds the roots of two trees over the other ranks, and the trees broadcast."""
    parts = []
    for number, tree in enumerate(_trees(ranks - 1)):
        piece = np.arange(pieces)
        parts.append(moves(step=piece, src=0, dst=1 + tree[3], source=number * pieces + piece))
        parts.append(_down(number, tree, pieces, later=1, offset=1))
    return joined(*parts)


def tree_all_reduce(ranks: int, pieces: int) -> Moves:
    """Return moves that reduce up both trees to their roots, then broadcast down.

    Blocks are pipelined: the broadcast of a block begins as soon as the root has reduced it completely.
    """
    down = [_down(number, tree, pieces, later=0, offset=0) for number, tree in enumerate(_trees(ranks))]
    up = transposed(joined(*down), ranks=ranks, chunks=2 * pieces, period=ranks)
    # Transposing reverses the order of blocks: the last one arrives first. Renumber them in the order of arrival.
    number, piece = np.divmod(up["source"], pieces)
    up["source"] = up["target"] = number * pieces + pieces - 1 - piece
    levels = int(up["step"].max()) + 2 - pieces
    back = joined(*down)
    back["step"] += levels
    return joined(up, back)
