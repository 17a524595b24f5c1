"""Collective schedules as frozen data: which rank sends which blocks to which rank, in which step, to reduce or copy.

One schedule has three readers: the executor on the nodes (which gets its `programs`), the checker
(`faultbed.traffic.schedules.schedule_check`) and the cost model (`faultbed.traffic.schedules.cost`). A schedule
contains ranks and blocks; `Layout` defines the lengths of the blocks.
"""

from __future__ import annotations

from faultbed.traffic.schedules.algorithms import ALGORITHMS, MIN_RANKS, Shape, algorithms_for, build
from faultbed.traffic.schedules.meaning import ALL, COLLECTIVES, REDUCING, ROOTED, input_blocks, results
from faultbed.traffic.schedules.program import (
    Layout,
    Program,
    block_bounds,
    in_sequence,
    peers_of,
    programs,
    skewed_counts,
    with_own_pattern,
    with_world_ranks,
)
from faultbed.traffic.schedules.queue_pairs import (
    MAX_QPS_PER_PEER,
    OUT_OF_ORDER,
    SPREADS,
    longest_message,
    parts_for_equal_turns,
    writes_by_queue_pair,
)
from faultbed.traffic.schedules.schedule import Moves, Schedule, expanded

__all__ = [
    "ALGORITHMS",
    "ALL",
    "COLLECTIVES",
    "MAX_QPS_PER_PEER",
    "MIN_RANKS",
    "OUT_OF_ORDER",
    "REDUCING",
    "ROOTED",
    "SPREADS",
    "Layout",
    "Moves",
    "Program",
    "Schedule",
    "Shape",
    "algorithms_for",
    "block_bounds",
    "build",
    "expanded",
    "in_sequence",
    "input_blocks",
    "longest_message",
    "parts_for_equal_turns",
    "peers_of",
    "programs",
    "results",
    "skewed_counts",
    "with_own_pattern",
    "with_world_ranks",
    "writes_by_queue_pair",
]
