"""Convert a schedule to programs: the work of each rank in offsets and counts of elements, as plain JSON data.

The memory of a rank is one array: its input, then its work buffer. With `in_place` there is no separate input: the test
pattern is written directly to the work buffer, and nothing is copied there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from faultbed.testbed.errors import UsageError
from faultbed.traffic.schedules.algorithms import Shape, build
from faultbed.traffic.schedules.meaning import input_blocks, results
from faultbed.traffic.schedules.schedule import Schedule, expanded

__all__ = [
    "Layout",
    "Program",
    "block_bounds",
    "in_sequence",
    "peers_of",
    "programs",
    "skewed_counts",
    "with_own_pattern",
    "with_world_ranks",
]

PATTERN_SHIFT = 1009
"""Offset between the test patterns of consecutive programs, so that data of one never matches data of another."""

Ints = npt.NDArray[np.int64]
Program = dict[str, Any]


def block_bounds(elements: int, chunks: int) -> Ints:
    """Return the block boundaries: `chunks` + 1 offsets.

    The first `elements % chunks` blocks are one element longer.
    """
    index = np.arange(chunks + 1)
    return index * (elements // chunks) + np.minimum(index, elements % chunks)


def skewed_counts(elements: int, ranks: int, skew: float) -> Ints:
    """Return how many elements rank i sends to rank j in an all-to-allv of `elements` per rank.

    The array has the shape (ranks, ranks); entry [i, j] is what i sends to j. The share of rank j is proportional to
    1 / (j + 1)^skew (Zipf): a `skew` of 0 is even, 1 makes rank 0 hot. Each entry is at least 1.

    Raises:
        UsageError: fewer elements than ranks.
    """
    if elements < ranks:
        raise UsageError(f"an all-to-allv over {ranks} ranks needs at least one element for each, got {elements}")
    weight = (1.0 + np.arange(ranks)) ** -skew
    ends = np.floor(np.cumsum(weight) / weight.sum() * (elements - ranks) + 0.5).astype(np.int64)
    row = np.diff(ends, prepend=0) + 1
    return np.broadcast_to(row, (ranks, ranks)).copy()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Lengths of the blocks: `elements` cut evenly, or given by `counts` (see `skewed_counts`)."""

    elements: int
    counts: Ints | None = None

    def input_bounds(self, schedule: Schedule, rank: int) -> Ints:
        """Return the offsets of the blocks of a rank's input, as if it held all of them."""
        if self.counts is None:
            return block_bounds(self.elements, schedule.chunks)
        return np.concatenate(([0], np.cumsum(self.counts[rank])))

    def work_bounds(self, schedule: Schedule, rank: int) -> Ints:
        """Return the offsets of the blocks of a rank's work buffer."""
        if self.counts is None:
            return block_bounds(self.elements, schedule.chunks)
        return np.concatenate(([0], np.cumsum(self.counts[:, rank])))


def peers_of(programs_of_ranks: Sequence[Program]) -> tuple[tuple[int, int], ...]:
    """Return every (src, dst) pair that moves data, in order of first use: the connections an executor needs."""
    uses = sorted((step, program["rank"], dst) for program in programs_of_ranks for step, dst, _, _ in program["sends"])
    return tuple(dict.fromkeys((src, dst) for _, src, dst in uses))


def programs(
    schedule: Schedule, layout: Layout, *, in_place: bool = False, closing_barrier: bool = False
) -> list[Program]:
    """Return the program of each rank. All offsets and counts are in elements of the rank's array.

    A program has these lists:

    * `fills`, `[offset, count, index, kept]`: write `count` elements of the rank's test pattern, from element `index`.
      `kept` is 1 if they are an input that the collective must not change.
    * `copies`, `[to, from, count]`: copies within the array.
    * `sends`, `[step, dst, offset, count]`, and `recvs`, `[step, src, offset, count, op]`: messages in step order, none
      of them empty.
    * `fences`: steps that a rank enters only when all its earlier work is done.
    * `results`, `[offset, count, source, index]`: expected contents, which are the pattern of rank `source` from
      element `index`. A source below 0 is a reduction over the ranks of `groups[-1 - source]`.

    With `closing_barrier` no rank finishes before all ranks have done their work.

    Raises:
        UsageError: the algorithm sends from its input and cannot run in place, or the size cannot be divided.
    """
    if schedule.collective == "all-to-all" and layout.elements % schedule.ranks:
        raise UsageError(
            f"an all-to-all of {layout.elements} elements cannot be divided among {schedule.ranks} ranks; "
            f"use {-(-layout.elements // schedule.ranks) * schedule.ranks} elements, or all-to-allv"
        )
    moves = expanded(schedule)
    local, moving = moves[moves["step"] < 0], moves[moves["step"] >= 0]
    if in_place and moving["from_input"].any():
        raise UsageError(f"{schedule.collective} by {schedule.algorithm} cannot run in place: it sends from its input")
    bounds = [
        (_input_bounds(schedule, layout, rank, in_place=in_place), layout.work_bounds(schedule, rank))
        for rank in range(schedule.ranks)
    ]
    by_rank = [_without_moves(schedule, layout, rank, in_place=in_place) for rank in range(schedule.ranks)]
    for row in local.tolist():
        _add_local(by_rank[row[1]], row, layout.input_bounds(schedule, row[1]), *bounds[row[1]], in_place=in_place)
    for step, src, dst, source, target, span, reduce, from_input in moving.tolist():
        offset, count = _extent(bounds[src][0 if from_input else 1], source, span)
        if count:
            shift = 0 if from_input else by_rank[src]["input"]
            by_rank[src]["sends"].append([step, dst, int(offset + shift), int(count)])
            offset_at_dst = int(bounds[dst][1][target]) + by_rank[dst]["input"]
            by_rank[dst]["recvs"].append([step, src, offset_at_dst, int(count), "reduce" if reduce else "copy"])
    if closing_barrier:
        tokens = build("barrier", "recursive-doubling", Shape(ranks=schedule.ranks))
        ends = programs(tokens, Layout(elements=schedule.ranks), in_place=True)
        by_rank = [
            in_sequence(before, with_own_pattern(end, 1), steps=schedule.steps)
            for before, end in zip(by_rank, ends, strict=True)
        ]
    return by_rank


def _input_bounds(schedule: Schedule, layout: Layout, rank: int, *, in_place: bool) -> Ints:
    """Return the offsets of the input blocks in the rank's array. Those of blocks that it does not hold are invalid."""
    bounds = layout.input_bounds(schedule, rank)
    return bounds if in_place else bounds - bounds[input_blocks(schedule, rank)[0]]


def _extent(bounds: Ints, first: int, span: int) -> tuple[int, int]:
    return int(bounds[first]), int(bounds[first + span] - bounds[first])


def _without_moves(schedule: Schedule, layout: Layout, rank: int, *, in_place: bool) -> Program:
    """Return a rank's program without copies and messages: its sizes, its input and its expected results."""
    own = layout.input_bounds(schedule, rank)
    index, count = _extent(own, *input_blocks(schedule, rank))
    size = 0 if in_place else count
    work = layout.work_bounds(schedule, rank)
    return {
        "rank": rank,
        "ranks": schedule.ranks,
        "input": size,
        "elements": size + int(work[-1]),
        "groups": [list(range(schedule.ranks))],
        "fills": [[0, count, index, 1]] if size else [],
        "copies": [],
        "sends": [],
        "recvs": [],
        "fences": [],
        "results": list(_results(schedule, layout, rank, work, size)),
    }


def _results(schedule: Schedule, layout: Layout, rank: int, work: Ints, shift: int) -> Iterator[list[int]]:
    for first, span, source, block in results(schedule, rank).tolist():
        offset, count = _extent(work, first, span)
        index = int(layout.input_bounds(schedule, max(source, 0))[block])
        if count:
            yield [offset + shift, count, source, index]


def _add_local(program: Program, row: Any, all_inputs: Ints, inputs: Ints, work: Ints, *, in_place: bool) -> None:
    _, _, _, source, target, span, _, _ = row
    offset, count = _extent(inputs, source, span)
    offset_in_array = int(work[target]) + program["input"]
    if not count:
        return
    if in_place:
        program["fills"].append([offset_in_array, count, int(all_inputs[source]), 0])
    else:
        program["copies"].append([offset_in_array, offset, count])


def in_sequence(first: Program, second: Program, *, steps: int) -> Program:
    """Join two programs of a rank: `second` begins at step `steps`, when all work of `first` is done."""
    shift, groups = first["elements"], len(first["groups"])
    return {
        **first,
        "elements": shift + second["elements"],
        "groups": first["groups"] + second["groups"],
        "fills": first["fills"]
        + [[offset + shift, count, index, kept] for offset, count, index, kept in second["fills"]],
        "copies": first["copies"]
        + [[target + shift, source + shift, count] for target, source, count in second["copies"]],
        "sends": first["sends"]
        + [[step + steps, dst, offset + shift, count] for step, dst, offset, count in second["sends"]],
        "recvs": first["recvs"]
        + [[step + steps, src, offset + shift, count, op] for step, src, offset, count, op in second["recvs"]],
        "fences": [*first["fences"], steps, *(step + steps for step in second["fences"])],
        "results": first["results"]
        + [
            [offset + shift, count, source if source >= 0 else source - groups, index]
            for offset, count, source, index in second["results"]
        ],
    }


def with_own_pattern(program: Program, number: int) -> Program:
    """Return the program with its input from another part of the test pattern, chosen by `number`.

    Programs with different numbers have different data. All ranks of a program must use the same number.
    """
    pattern_offset = PATTERN_SHIFT * number
    return {
        **program,
        "fills": [[offset, count, index + pattern_offset, kept] for offset, count, index, kept in program["fills"]],
        "results": [
            [offset, count, source, index + pattern_offset] for offset, count, source, index in program["results"]
        ],
    }


def with_world_ranks(program: Program, members: Sequence[int], ranks: int) -> Program:
    """Return a group's program with rank numbers of a world of `ranks` ranks: rank i of the group is `members[i]`."""
    return {
        **program,
        "rank": members[program["rank"]],
        "ranks": ranks,
        "groups": [[members[rank] for rank in group] for group in program["groups"]],
        "sends": [[step, members[dst], offset, count] for step, dst, offset, count in program["sends"]],
        "recvs": [[step, members[src], offset, count, op] for step, src, offset, count, op in program["recvs"]],
        "results": [
            [offset, count, source if source < 0 else members[source], index]
            for offset, count, source, index in program["results"]
        ],
    }
