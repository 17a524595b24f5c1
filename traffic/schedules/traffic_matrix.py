"""The traffic matrix of a collective: bytes from each rank to each other rank, summed over its steps."""

from __future__ import annotations

from faultbed.traffic.schedules.schedule import Schedule, expanded

__all__ = ["pair_bytes"]


def pair_bytes(schedule: Schedule, size_bytes: float) -> dict[tuple[int, int], float]:
    """Return the bytes that rank `src` sends to rank `dst`, by (src, dst), of a buffer of `size_bytes`.

    Blocks count as equally long. Pairs that exchange nothing are left out.
    """
    block = size_bytes / schedule.chunks
    sent: dict[tuple[int, int], float] = {}
    for move in expanded(schedule):
        pair = int(move["src"]), int(move["dst"])
        if pair[0] != pair[1]:
            sent[pair] = sent.get(pair, 0.0) + block * int(move["span"])
    return sent
