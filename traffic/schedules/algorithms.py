"""Schedules by name: the algorithms of each collective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from faultbed.testbed.errors import UsageError
from faultbed.traffic.schedules import exchange, gather, rooted
from faultbed.traffic.schedules.meaning import COLLECTIVES, local_copies
from faultbed.traffic.schedules.schedule import Moves, Schedule, after, joined, mirrored, transposed

__all__ = ["ALGORITHMS", "MIN_RANKS", "Shape", "algorithms_for", "build"]

MIN_RANKS = 2
MAX_PIECES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Parameters of a schedule.

    `group` consecutive ranks share a host (or a rack); only `hierarchical` uses it. `pieces` is the number of blocks
    into which chains and trees cut the buffer for pipelining; each of two trees gets that many.
    """

    ranks: int
    group: int = 1
    root: int = 0
    pieces: int = 4


AlgorithmMoves = tuple[Moves, int, int]
"""Moves, their period, and the number of blocks into which the buffer is cut."""

_REVERSE_OF = {"recursive-halving": "recursive-doubling"}
"""The all-gather or broadcast algorithm that a reduction by this algorithm runs backwards, if it has another name."""


def _all_gather(algorithm: str, shape: Shape) -> AlgorithmMoves:
    return *gather.all_gather(algorithm, shape.ranks, shape.group), shape.ranks


def _reduce_scatter(algorithm: str, shape: Shape) -> AlgorithmMoves:
    """Return the transpose of the mirrored all-gather. It sends to higher ranks, on the all-gather's connections."""
    gathered, period = gather.all_gather(_REVERSE_OF.get(algorithm, algorithm), shape.ranks, shape.group)
    gathered = mirrored(gathered, ranks=shape.ranks, period=period)
    return transposed(gathered, ranks=shape.ranks, chunks=shape.ranks, period=period), period, shape.ranks


def _all_reduce(algorithm: str, shape: Shape) -> AlgorithmMoves:
    if algorithm == "recursive-doubling":
        return gather.all_reduce_by_doubling(shape.ranks), shape.ranks, 1
    if algorithm == "double-binary-tree":
        return rooted.tree_all_reduce(shape.ranks, shape.pieces), shape.ranks, 2 * shape.pieces
    scatter, period, chunks = _reduce_scatter(algorithm, shape)
    return after(scatter, _all_gather(_REVERSE_OF.get(algorithm, algorithm), shape)[0]), period, chunks


def _broadcast(algorithm: str, shape: Shape) -> AlgorithmMoves:
    moves = rooted.broadcast(algorithm, shape.ranks, shape.group, shape.pieces, shape.root)
    return moves, shape.ranks, rooted.chunks_of(algorithm, shape.pieces)


def _reduce(algorithm: str, shape: Shape) -> AlgorithmMoves:
    moves, period, chunks = _broadcast(_REVERSE_OF.get(algorithm, algorithm), shape)
    return transposed(moves, ranks=shape.ranks, chunks=chunks, period=period), period, chunks


def _all_to_all(algorithm: str, shape: Shape) -> AlgorithmMoves:
    return *exchange.all_to_all(algorithm, shape.ranks, shape.group), shape.ranks


_MAKERS: dict[str, tuple[Callable[[str, Shape], AlgorithmMoves], tuple[str, ...]]] = {
    "all-reduce": (
        _all_reduce,
        ("ring", "recursive-doubling", "recursive-halving", "full-mesh", "double-binary-tree", "hierarchical"),
    ),
    "all-gather": (_all_gather, ("ring", "recursive-doubling", "full-mesh", "hierarchical")),
    "reduce-scatter": (_reduce_scatter, ("ring", "recursive-halving", "full-mesh", "hierarchical")),
    "broadcast": (_broadcast, ("ring", "recursive-doubling", "full-mesh", "double-binary-tree", "hierarchical")),
    "reduce": (_reduce, ("ring", "recursive-halving", "full-mesh", "double-binary-tree", "hierarchical")),
    "all-to-all": (_all_to_all, ("full-mesh", "recursive-doubling", "hierarchical")),
    "all-to-allv": (_all_to_all, ("full-mesh",)),
    "send-recv": (lambda _, __: (exchange.send_recv(), 1, 1), ("ring",)),
    "barrier": (_all_gather, ("recursive-doubling",)),
}
_LOCAL_INCLUDED = frozenset({"all-to-all", "all-to-allv", "send-recv"})

ALGORITHMS = tuple((collective, name) for collective, (_, names) in _MAKERS.items() for name in names)
"""All pairs (collective, algorithm)."""


def algorithms_for(collective: str) -> tuple[str, ...]:
    """Return the names of a collective's algorithms.

    Raises:
        UsageError: there is no such collective.
    """
    if collective not in _MAKERS:
        raise UsageError(f'no collective "{collective}"; choose one of {", ".join(COLLECTIVES)}')
    return _MAKERS[collective][1]


def build(collective: str, algorithm: str, shape: Shape) -> Schedule:
    """Build a schedule by name.

    Raises:
        UsageError: the collective or the algorithm is unknown, or does not support the shape.
    """
    known = algorithms_for(collective)
    if algorithm not in known:
        raise UsageError(f'no algorithm "{algorithm}" for {collective}; choose one of {", ".join(known)}')
    _check(collective, algorithm, shape)
    moves, period, chunks = _MAKERS[collective][0](algorithm, shape)
    if collective not in _LOCAL_INCLUDED:
        moves = joined(local_copies(collective, period=period, chunks=chunks, root=shape.root), moves)
    return Schedule(
        collective=collective,
        algorithm=algorithm,
        ranks=shape.ranks,
        chunks=chunks,
        period=period,
        moves=moves,
        root=shape.root,
    )


def _check(collective: str, algorithm: str, shape: Shape) -> None:
    if shape.ranks < MIN_RANKS:
        raise UsageError(f"{collective} needs at least {MIN_RANKS} ranks, got {shape.ranks}")
    if not 0 <= shape.root < shape.ranks:
        raise UsageError(f"the root of {collective} must be a rank from 0 to {shape.ranks - 1}, got {shape.root}")
    if not 1 <= shape.pieces <= MAX_PIECES:
        raise UsageError(f"{collective} can be cut into 1 to {MAX_PIECES} pieces, got {shape.pieces}")
    if algorithm == "hierarchical" and (shape.group < 1 or shape.ranks % shape.group):
        raise UsageError(
            f"hierarchical {collective} needs groups of equal size: "
            f"{shape.ranks} ranks are not a multiple of {shape.group}"
        )
