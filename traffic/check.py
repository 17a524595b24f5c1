"""Proof that a schedule does what its collective means, without any network.

`simulate` runs a schedule on real arrays; `contributions` counts, for every rank and chunk, how often each rank's input
went into the result. An all-reduce is right exactly when every count is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from traffic.schedule import Schedule, chunk_range

__all__ = ["contributions", "faults", "simulate"]


def simulate(schedule: Schedule, inputs: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    """Run the schedule with sum on one 1-d array a rank, all of one length; return every rank's buffer at the end."""
    buffers = [array.copy() for array in inputs]
    elements = len(buffers[0])
    for step in schedule.steps:
        moving = []
        for move in step:
            offset, count = chunk_range(elements, schedule.chunks, move.chunk)
            moving.append((move, offset, buffers[move.src][offset : offset + count].copy()))
        for move, offset, data in moving:
            target = buffers[move.dst][offset : offset + len(data)]
            if move.op == "reduce":
                target += data
            else:
                target[:] = data
    return buffers


def contributions(schedule: Schedule) -> npt.NDArray[np.int64]:
    """Counts of shape (rank, chunk, contributing rank) after the schedule has run."""
    ranks, chunks = schedule.ranks, schedule.chunks
    state = np.zeros((ranks, chunks, ranks), dtype=np.int64)
    state[np.arange(ranks), :, np.arange(ranks)] = 1
    for step in schedule.steps:
        before = [state[move.src, move.chunk].copy() for move in step]
        for move, data in zip(step, before, strict=True):
            if move.op == "reduce":
                state[move.dst, move.chunk] += data
            else:
                state[move.dst, move.chunk] = data
    return state


def faults(schedule: Schedule) -> list[str]:
    """What is wrong with an all-reduce schedule, a sentence each; empty when it is right."""
    found = []
    counts = contributions(schedule)
    for rank, chunk, source in np.argwhere(counts != 1):
        times = counts[rank, chunk, source]
        found.append(f"rank {rank} ends with rank {source}'s part of chunk {chunk} {times} times, not once")
    for number, step in enumerate(schedule.steps):
        targets = [(move.dst, move.chunk) for move in step]
        if len(targets) != len(set(targets)):
            found.append(f"step {number} writes one chunk of one rank twice")
        found += [f"step {number}: rank {m.src} sends to itself" for m in step if m.src == m.dst]
    return found
