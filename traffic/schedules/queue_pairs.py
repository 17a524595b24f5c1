"""Compute which queue pairs carry the messages of ranks, if a rank has several to each peer. Pure.

Ranks spread their segments by the same rules (`faultbed.traffic.node.ranks.segments`); nodes do not have this module.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from faultbed.traffic.schedules.program import Program, peers_of

__all__ = [
    "MAX_QPS_PER_PEER",
    "OUT_OF_ORDER",
    "SPREADS",
    "longest_message",
    "parts_for_equal_turns",
    "writes_by_queue_pair",
]

OUT_OF_ORDER = ("spray", "dqplb")
SPREADS = ("split", "round-robin", *OUT_OF_ORDER)
"""Distributions of the data for a peer over its queue pairs.

`split` cuts every message into equal parts, one for each queue pair. `round-robin` gives segments to the queue pairs in
turn. A segment is a whole message, except in two cases: the message is longer than a segment may be, or whole messages
would load the queue pairs unequally. With `split` and `round-robin`, each queue pair is a lane, on which segments
arrive in order.

With `OUT_OF_ORDER` all queue pairs are one lane, on which segments arrive in any order. `spray` gives them to the queue
pairs in turn, `dqplb` (dynamic queue pair load balancing) each to the one that has the fewest in flight.
"""

MAX_QPS_PER_PEER = 128
"""The maximum of NCCL, too (NCCL_IB_QPS_PER_CONNECTION)."""


def longest_message(programs: Sequence[Program]) -> int:
    """Return the elements of the longest message; 1 without messages."""
    return max((count for program in programs for _, _, _, count in program["sends"]), default=1)


def parts_for_equal_turns(programs: Sequence[Program], qps: int) -> int:
    """Return into how many parts to cut each message so that all `qps` queue pairs get the same number of parts."""
    messages = Counter((program["rank"], dst) for program in programs for _, dst, _, _ in program["sends"])
    return math.lcm(*(qps // math.gcd(qps, count) for count in messages.values()))


def writes_by_queue_pair(
    programs: Sequence[Program], qps: int, spread: str, segment_elements: int
) -> dict[tuple[int, int], list[list[int]]]:
    """Return the elements of each write, by (src, dst) and queue pair; pairs are in order of their first use.

    A pair whose messages have fewer elements, or segments, than there are queue pairs uses fewer of them. With
    `OUT_OF_ORDER` queue pairs are chosen while the job runs; here they take turns.
    """
    writes: dict[tuple[int, int], list[list[int]]] = {pair: [] for pair in peers_of(programs)}
    for program in programs:
        turns: Counter[int] = Counter()
        for _, dst, _, count in program["sends"]:
            writes_to_peer = writes[program["rank"], dst]
            shares = _equal_parts(count, min(qps, count)) if spread == "split" else [count]
            for number, share in enumerate(shares):
                for size in _segments(share, segment_elements):
                    qp = number if spread == "split" else turns[dst] % qps
                    turns[dst] += 1
                    while len(writes_to_peer) <= qp:
                        writes_to_peer.append([])
                    writes_to_peer[qp].append(size)
    return writes


def _equal_parts(count: int, parts: int) -> list[int]:
    return [count * (part + 1) // parts - count * part // parts for part in range(parts)]


def _segments(count: int, most: int) -> list[int]:
    whole, rest = divmod(count, most)
    return [most] * whole + [rest] * (rest > 0)
