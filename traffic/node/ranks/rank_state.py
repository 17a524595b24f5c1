"""State of a rank that depends on every iteration so far, so that a restart from a wrong place cannot go unnoticed.

There is one 32-bit word for each element of the program's results. After every iteration, modulo 2^32,

    state = state * FACTOR + bits of the result

A job's real state, such as its weights, depends on its history in the same way. A restart that restores nothing, an old
checkpoint, or that of another rank therefore ends in another state, and so does an iteration that is skipped or run
twice. All results are known in closed form (`faultbed.traffic.node.ranks.pattern`), hence so is the state (`expected`).
"""

from __future__ import annotations

import hashlib

import numpy as np

from faultbed.traffic.node.ranks import pattern

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from typing import Any

    import numpy.typing as npt

    Array = npt.NDArray[Any]

__all__ = ["FACTOR", "State", "expected"]

FACTOR = 0x01000193
"""The 32-bit FNV prime. It is odd, so no information about earlier iterations is lost."""


class State:
    """The state of one rank. `results` are those of its program."""

    def __init__(self, results: list[list[int]]) -> None:
        self._regions = [(offset, count) for offset, count, _, _ in results]
        self.words = np.zeros(sum(count for _, count in self._regions), dtype=np.uint32)

    def advance(self, array: Array) -> None:
        """Add the results of an iteration, from the rank's whole array."""
        self.words *= np.uint32(FACTOR)
        at = 0
        for offset, count in self._regions:
            self.words[at : at + count] += array[offset : offset + count].view(f"u{array.itemsize}")
            at += count

    def restore(self, data: bytes) -> None:
        """Replace the state by that of a checkpoint, which may be followed by filler.

        Raises:
            ValueError: the checkpoint is smaller than the state.
        """
        if len(data) < self.words.nbytes:
            raise ValueError(f"a checkpoint of {len(data)} bytes cannot hold a state of {self.words.nbytes} bytes")
        self.words[:] = np.frombuffer(data, dtype=np.uint32, count=len(self.words))

    def digest(self) -> str:
        """Return the SHA-256 of the state. Equal digests mean that every element is equal."""
        return hashlib.sha256(self.words.tobytes()).hexdigest()

    def count_wrong(self, history: list[dict[str, Any]], dtype: str, redop: str) -> int:
        """Count the elements that differ from the closed form (`expected`)."""
        return int(np.count_nonzero(self.words != expected(history, dtype, redop)))


def expected(history: list[dict[str, Any]], dtype: str, redop: str) -> Array:
    """Return the state after some iterations, in closed form.

    `history` holds parts in order: `iterations` of them from number `first` on, in a job of `ranks` ranks, with the
    `results` and `groups` of the rank's program. There is more than one part if the number of ranks changed.
    """
    state = np.zeros(sum(count for _, count, _, _ in history[0]["results"]), dtype=np.uint32)
    for part in history:
        data = pattern.Pattern(part["ranks"], dtype, redop)
        periods = {source: _period(data, part, source) for source in {source for _, _, source, _ in part["results"]}}
        state *= np.uint32(pow(FACTOR, part["iterations"], 1 << 32))
        at = 0
        for _, count, source, index in part["results"]:
            added = np.zeros(count, dtype=np.uint32)
            pattern.fill(added, periods[source], index)
            state[at : at + count] += added
            at += count
    return state


def _period(data: pattern.Pattern, part: dict[str, Any], source: int) -> Array:
    """Return one period of what a part's iterations add to the state, for the results of one source."""
    total = np.zeros(pattern.PERIOD, dtype=np.uint32)
    for iteration in range(part["first"], part["first"] + part["iterations"]):
        period = data.reduced(part["groups"][-1 - source], iteration) if source < 0 else data.period(source, iteration)
        total = total * np.uint32(FACTOR) + period.view(f"u{period.itemsize}").astype(np.uint32)
    return total
