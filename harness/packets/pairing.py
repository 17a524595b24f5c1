"""Match responses to requests: pair two QPNs by their PSNs. Pure.

A request names the responder's QP, a response the requester's, and no header names both. The link between them is the
PSN: a response carries the PSN of a request that has already passed this port. Between one pair of addresses, each
requester is paired with at most one group of responses, so that as many responses as possible carry such a PSN (an
assignment problem).

A pairing counts only if no other one explains the packets as well. Otherwise all queue pairs that could exchange
partners are ambiguous. This happens if their PSNs lie within one window of each other and their UDP source ports are
equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from faultbed.testbed.packets.bth import distance

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from faultbed.testbed.packets.columns import Packets

    Indices = NDArray[np.int64]
    Scores = NDArray[np.float64]

__all__ = ["NEAR", "Pairing", "Requests", "pair"]

NEAR = 1 << 16
"""A packet this many PSNs from all others belongs to another connection: no window is that large."""
_TRIED = 256
"""Responses of each group that are examined."""
_UNLIKELY = 0.45
"""Score of a response whose PSN is near but answers no request seen: from before the capture, or a violation. A group
of only such responses is not paired (`_LEAST`), unless its UDP source port matches."""
_SAME_PORT = 0.1
"""Score of an equal UDP source port. rxe, and RNICs whose ports come from a symmetric flow label, use one port for both
directions."""
_LEAST = 0.47
"""Minimum score of a pair, and the score of a queue pair without responses."""
_TINY = 1e-6
_MARGIN = 0.05
"""A pairing must be better than any other by this much."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Requests:
    """Packets of one requester: their positions in the capture, their unwrapped PSNs, and how many PSNs each takes."""

    places: Indices
    psn: Indices
    span: Indices


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """For each requester: the index of its responses among the candidates (-1: none), and whether it is ambiguous.

    `left` are the candidates that belong to no requester.
    """

    partner: tuple[int, ...]
    is_ambiguous: tuple[bool, ...]
    left: tuple[int, ...]


def pair(packets: Packets, requests: Sequence[Requests], candidates: Sequence[Indices]) -> Pairing:
    """Pair requesters with groups of responses between the same two addresses at one port."""
    if not candidates:
        return Pairing(partner=(-1,) * len(requests), is_ambiguous=(False,) * len(requests), left=())
    scores = np.stack([_score(packets, requester, candidates) for requester in requests])
    if scores.shape == (1, 1):
        is_pair = bool(scores[0, 0] > _LEAST)
        return Pairing(partner=(0 if is_pair else -1,), is_ambiguous=(False,), left=() if is_pair else (0,))
    return _plain(scores) or _assign(scores)


def _plain(scores: Scores) -> Pairing | None:
    """Return the pairing if every requester has its own best partner by more than `_MARGIN`; else None."""
    rows, columns = np.arange(scores.shape[0]), scores.shape[1]
    best = scores.argmax(axis=1)
    without_best = scores.copy()
    without_best[rows, best] = _LEAST
    if len(set(best.tolist())) < len(rows) or (scores[rows, best] - without_best.max(axis=1) < _MARGIN).any():
        return None
    left = tuple(sorted(set(range(columns)) - set(best.tolist())))
    return Pairing(partner=tuple(best.tolist()), is_ambiguous=(False,) * len(rows), left=left)


def _score(packets: Packets, requests: Requests, candidates: Sequence[Indices]) -> Scores:
    """Return how well each group of responses matches a requester, from 0 to 1, plus `_SAME_PORT` for an equal port."""
    tried = [group[np.linspace(0, len(group) - 1, min(_TRIED, len(group))).astype(np.int64)] for group in candidates]
    sizes = np.array([len(sample) for sample in tried])
    every = np.concatenate(tried)
    before = np.searchsorted(requests.places, every) - 1
    # A response from before the first request is no evidence.
    follows = before >= 0
    before = np.maximum(before, 0)
    top = np.maximum.accumulate(requests.psn + requests.span)
    last = requests.psn[before]
    answer = last + distance(packets.psn[every], last % (1 << 24))
    # A READ may take more PSNs than any window has.
    is_near = (answer > last - NEAR) & (answer < last + requests.span[before] + NEAR)
    is_seen = (answer < top[before]) & (answer >= requests.psn.min())
    points = np.where(follows & is_near, np.where(is_seen, 1.0, _UNLIKELY), 0.0)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    total = np.add.reduceat(points, starts)
    counted = np.add.reduceat(follows.astype(np.float64), starts)
    share = np.divide(total, counted, out=np.zeros(len(total)), where=counted > 0)
    sport = packets.sport[requests.places[0]]
    is_same_port = np.array([packets.sport[group[0]] == sport for group in candidates])
    score: Scores = share + np.where(is_same_port & (share > 0), _SAME_PORT, 0.0)
    return score


def _assign(scores: Scores) -> Pairing:
    # Imported here because it takes half a second, and most captures do not need it.
    from scipy.optimize import linear_sum_assignment  # noqa: PLC0415

    rows, columns = scores.shape
    # One dummy partner per requester: no pair has a score below `_LEAST`.
    _, chosen = linear_sum_assignment(np.hstack([scores, np.full((rows, rows), _LEAST)]), maximize=True)
    partner = np.where(chosen < columns, chosen, -1)
    is_ambiguous = _exchangeable(scores, partner)
    fits = np.any(scores[is_ambiguous] > _LEAST, axis=0).tolist()
    left = [column for column in range(columns) if column not in partner and not fits[column]]
    return Pairing(partner=tuple(partner.tolist()), is_ambiguous=tuple(is_ambiguous.tolist()), left=tuple(left))


def _exchangeable(scores: Scores, partner: Indices) -> NDArray[np.bool_]:
    """Return the requesters that could have another partner at a total loss of less than `_MARGIN`.

    Partners are exchanged in cycles: one requester takes the next one's responses, and so on. The last one takes what
    the first one gave up, or unused responses, or none. The edges of the graph are the losses of these steps, its last
    node stands for unused responses, and the cycle of least loss is the shortest path back.
    """
    from scipy.sparse.csgraph import floyd_warshall  # noqa: PLC0415

    rows = len(scores)
    has = partner >= 0
    free = np.setdiff1d(np.arange(scores.shape[1]), partner)
    own = np.where(has, scores[np.arange(rows), np.maximum(partner, 0)], _LEAST)
    best_free = scores[:, free].max(axis=1, initial=-np.inf)
    loss = np.zeros((rows + 1, rows + 1))
    loss[:rows, :rows] = np.where(has, own[:, None] - scores[:, np.maximum(partner, 0)], np.inf)
    loss[:rows, rows] = own - np.where(has, np.maximum(best_free, _LEAST), best_free)
    # The library treats a weight close to 0 as a missing edge.
    far = floyd_warshall(np.where(np.abs(loss) < _TINY, _TINY, loss), directed=True)
    circle = far + far.T
    np.fill_diagonal(circle, np.inf)
    ambiguous: NDArray[np.bool_] = circle[:rows].min(axis=1) < _MARGIN
    return ambiguous
