"""The traffic matrix of a collective: bytes from each rank to each other rank, summed over its steps."""

from __future__ import annotations

from faultbed.traffic.schedules.schedule import Schedule, expanded

__all__ = ["pair_bytes"]


def pair_bytes(schedule: Schedule, size_bytes: float) -> dict[tuple[int, int], float]:
    """Return the bytes that each rank sends to each other rank in a collective of `size_bytes`, by (src, dst).

    All blocks are assumed to be equally long. Pairs that exchange nothing are left out.
    """
    block = size_bytes / schedule.chunks
    sent: dict[tuple[int, int], float] = {}
    for move in expanded(schedule):
        pair = int(move["src"]), int(move["dst"])
        if pair[0] != pair[1]:
            sent[pair] = sent.get(pair, 0.0) + block * int(move["span"])
    return sent
