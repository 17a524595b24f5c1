"""A rank's memory: input and work buffer in one array, their initial contents, and the expected result."""

from __future__ import annotations

import numpy as np

from faultbed.traffic.node.ranks import pattern
from faultbed.traffic.node.ranks.elements import STORED, average, reducer

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from typing import Any

__all__ = ["Memory"]


class Memory:
    """The array of a program (`faultbed.traffic.schedules.program`), for one element type and reduction."""

    def __init__(self, program: dict[str, Any], dtype: str, redop: str) -> None:
        self.program = program
        self.dtype = dtype
        self.redop = redop
        self.array = np.zeros(program["elements"], dtype=STORED[dtype])
        self.reduce = reducer(dtype, redop)
        self.pattern = pattern.Pattern(program["ranks"], dtype, redop)
        rank, groups = program["rank"], program["groups"]
        inputs: list[list[tuple[int, int, list[int], int]]] = [[], []]
        for offset, count, index, kept in program["fills"]:
            inputs[bool(kept)].append((offset, count, [rank], index))
        self.changed_inputs, self.kept_inputs = (pattern.Regions(self.pattern, regions) for regions in inputs)
        results = [
            (offset, count, groups[-1 - source] if source < 0 else [source], index)
            for offset, count, source, index in program["results"]
        ]
        self.results = pattern.Regions(self.pattern, results)

    def fill(self, iteration: int) -> None:
        """Write the input of an iteration."""
        self.changed_inputs.fill(self.array, iteration)
        self.kept_inputs.fill(self.array, iteration)

    def copy(self) -> None:
        """Copy the input to where the work begins (the program's local step)."""
        for target, source, count in self.program["copies"]:
            self.array[target : target + count] = self.array[source : source + count]

    def divide(self) -> None:
        """Turn sums into averages, if the reduction is an average."""
        if self.redop == "avg":
            for offset, count, source, _ in self.program["results"]:
                if source < 0:
                    members = self.program["groups"][-1 - source]
                    average(self.array[offset : offset + count], len(members), self.dtype)

    def count_wrong(self, iteration: int) -> int:
        """Count the wrong elements of the result, and those of the input that the collective must not change."""
        return self.results.count_wrong(self.array, iteration) + self.kept_inputs.count_wrong(self.array, iteration)
