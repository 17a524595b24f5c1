"""Which placements a job's state stems from: segments of its iterations, each executed on one placement. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from traffic.schedules import Program
from traffic.workloads.elastic.machine import JobState

__all__ = ["StateHistory"]


@dataclass(frozen=True, slots=True)
class StateHistory:
    """Segments of a job's state, oldest first: (placement, iterations finished when the segment began).

    A placement is named by its generation (`traffic.workloads.elastic.machine.JobState`).
    """

    segments: tuple[tuple[int, int], ...] = ((0, 0),)

    def resumed(self, placement: int, *, stored_by: int, iterations: int) -> StateHistory:
        """Return the history after `placement` has restored the checkpoint of `stored_by` after so many `iterations`.

        Segments of later placements than `stored_by` did not contribute to that checkpoint: a store that ends late may
        publish the checkpoint of an earlier placement. Without iterations the job begins from an empty state.
        """
        kept = tuple(one for one in self.segments if one[0] <= stored_by and one[1] < iterations)
        return StateHistory((*kept, (placement, iterations)))

    def of_rank(
        self, rank: int, job: JobState, programs: Mapping[int, Sequence[Program]], *, warmup: int
    ) -> list[dict[str, Any]]:
        """Return the parts of a rank's expected state, in the format of `traffic.node.ranks.rank_state.expected`.

        `programs` are those of all ranks, by placement.
        """
        ends = [*(begin for _, begin in self.segments[1:]), job.total]
        parts = []
        for (placement, begin), end in zip(self.segments, ends, strict=True):
            program = programs[placement][job.ancestor(rank, placement)]
            parts.append(
                {
                    "ranks": program["ranks"],
                    "results": program["results"],
                    "groups": program["groups"],
                    "first": warmup + begin,
                    "iterations": end - begin,
                }
            )
        return parts
