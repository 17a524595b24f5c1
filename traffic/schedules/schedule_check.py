"""Proof that a schedule does what its collective requires, without any network.

Every block of every rank's input becomes a random number modulo 2^64, and moves add or copy these numbers. A correct
result contains each input exactly once (or one input, unreduced). Any other result differs from the expected number,
except with a chance of about 2^-60. That is exact enough for a proof and fast enough for thousands of ranks; counting
every contribution would need ranks^3 counters. `contributions` does count, to explain a small schedule that is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from faultbed.traffic.schedules import ALL, Moves, Schedule, expanded, input_blocks, results

__all__ = ["contributions", "faults"]

Numbers = npt.NDArray[Any]
EXPLAINED_RANKS = 32
MOST_SENTENCES = 10


def _by_step(all_moves: Moves) -> list[Moves]:
    starts = np.flatnonzero(np.diff(all_moves["step"], prepend=-2))
    return np.split(all_moves, starts[1:]) if len(all_moves) else []


def _run(all_moves: Moves, inputs: Numbers, work: Numbers) -> None:
    """Execute all moves on arrays of shape (ranks, chunks, ...). `work` becomes the result."""
    for rows in _by_step(all_moves):
        _step(rows, inputs, work)


def _step(rows: Moves, inputs: Numbers, work: Numbers) -> None:
    row, place = _spread(rows["span"])
    src, dst, reduce, from_input = (rows[name][row] for name in ("src", "dst", "reduce", "from_input"))
    source, target = rows["source"][row] + place, rows["target"][row] + place
    if from_input.all():
        data = inputs[src, source]
    else:
        data = work[src, source]
        if from_input.any():
            data[from_input] = inputs[src[from_input], source[from_input]]
    if not reduce.any():
        work[dst, target] = data
        return
    work[dst[~reduce], target[~reduce]] = data[~reduce]
    np.add.at(work, (dst[reduce], target[reduce]), data[reduce])


def _spread(spans: Numbers) -> tuple[Numbers, Numbers]:
    """Return, for every block of every row, the row's index and the block's position in the row."""
    row = np.repeat(np.arange(len(spans)), spans)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(spans) - spans, spans)


def _inputs_like(schedule: Schedule, full: Numbers) -> Numbers:
    """Return the inputs with only the blocks that ranks hold; all others are other numbers, to detect their use."""
    other = np.random.default_rng(2).integers(0, 2**64, full.shape, dtype=np.uint64)
    for rank in range(schedule.ranks):
        first, span = input_blocks(schedule, rank)
        other[rank, first : first + span] = full[rank, first : first + span]
    return other


def faults(schedule: Schedule) -> list[str]:
    """Return the errors of a schedule, one sentence each; empty if it is correct. Similar errors are abbreviated."""
    all_moves = expanded(schedule)
    return [*_malformed(schedule, all_moves), *_wrong_results(schedule, all_moves)]


def _wrong_results(schedule: Schedule, all_moves: Moves) -> list[str]:
    random = np.random.default_rng(1)
    shape = (schedule.ranks, schedule.chunks)
    full = random.integers(0, 2**64, shape, dtype=np.uint64)
    work = random.integers(0, 2**64, shape, dtype=np.uint64)
    _run(all_moves, _inputs_like(schedule, full), work)
    total = full.sum(axis=0, dtype=np.uint64)
    wrong_blocks: list[tuple[int, int, int]] = []
    for rank in range(schedule.ranks):
        rows = results(schedule, rank)
        row, place = _spread(rows[:, 1])
        first, _, source, block = rows[row].T
        expected = np.where(source == ALL, total[block + place], full[source, block + place])
        wrong = np.flatnonzero(work[rank, first + place] != expected)
        wrong_blocks += zip(repeat(rank), (first + place)[wrong].tolist(), source[wrong].tolist(), strict=False)
    return list(_explained(schedule, wrong_blocks)) if wrong_blocks else []


def _explained(schedule: Schedule, wrong_blocks: list[tuple[int, int, int]]) -> Iterator[str]:
    counts = contributions(schedule) if schedule.ranks <= EXPLAINED_RANKS else None
    for rank, block, source in wrong_blocks[:MOST_SENTENCES]:
        expected = "the reduction over all ranks" if source == ALL else f"what rank {source} has for it"
        actual = ""
        if counts is not None:
            parts = ", ".join(
                f"{n} times the input of rank {other}" for other, n in enumerate(counts[rank, block]) if n
            )
            actual = f"; it has {parts or 'no input'}"
        yield f"rank {rank} does not end with {expected} in block {block}{actual}"
    if len(wrong_blocks) > MOST_SENTENCES:
        yield f"{len(wrong_blocks) - MOST_SENTENCES} more blocks are wrong"


def contributions(schedule: Schedule) -> npt.NDArray[np.int64]:
    """Count how often each rank's input went into a block: counts of shape (rank, block, contributing rank)."""
    ranks, chunks = schedule.ranks, schedule.chunks
    inputs = np.zeros((ranks, chunks, ranks), dtype=np.int64)
    inputs[np.arange(ranks), :, np.arange(ranks)] = 1
    work = np.zeros_like(inputs)
    _run(expanded(schedule), inputs, work)
    return work


def _malformed(schedule: Schedule, all_moves: Moves) -> Iterator[str]:
    moving = all_moves[all_moves["step"] >= 0]
    for name, size in (("src", schedule.ranks), ("dst", schedule.ranks)):
        for row in all_moves[(all_moves[name] < 0) | (all_moves[name] >= size)][:1]:
            yield f"step {row['step']}: there is no rank {row[name]}"
    for row in moving[moving["src"] == moving["dst"]][:1]:
        yield f"step {row['step']}: rank {row['src']} sends to itself"
    for row in all_moves[(all_moves["step"] < 0) & (all_moves["src"] != all_moves["dst"])][:1]:
        yield f"rank {row['src']} sends to rank {row['dst']} in the local step"
    yield from _written_twice(schedule, all_moves)


def _written_twice(schedule: Schedule, all_moves: Moves) -> Iterator[str]:
    """Report blocks that are copied to and written a second time in one step: the order of the writes is undefined."""
    for some in _by_step(all_moves):
        if some["reduce"].all():
            continue
        row, place = _spread(some["span"])
        key = some["dst"][row].astype(np.int64) * schedule.chunks + some["target"][row] + place
        if _repeats(key, schedule.ranks * schedule.chunks):
            _, first, times = np.unique(key, return_index=True, return_counts=True)
            copied = np.isin(key, key[~some["reduce"][row]])
            for at in first[(times > 1) & copied[first]][:1]:
                move = some[row[at]]
                yield f"step {move['step']} writes a block of rank {move['dst']} twice"


def _repeats(keys: Numbers, below: int) -> bool:
    """Return whether any key occurs twice: by counting if there are many keys, by sorting if there are few."""
    if len(keys) * 8 > below:
        return bool(np.bincount(keys, minlength=below).max() > 1)
    ordered = np.sort(keys)
    return bool((ordered[1:] == ordered[:-1]).any())
