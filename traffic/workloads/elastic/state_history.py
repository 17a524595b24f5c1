"""The history of a job's state: consecutive parts of its iterations, each computed on one placement. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from faultbed.traffic.schedules import Program
from faultbed.traffic.workloads.elastic.machine import JobState

__all__ = ["StateHistory"]


@dataclass(frozen=True, slots=True)
class StateHistory:
    """Parts of a job's history, oldest first: (placement, iterations finished when the part began).

    A placement is named by its generation (`faultbed.traffic.workloads.elastic.machine.JobState`).
    """

    parts: tuple[tuple[int, int], ...] = ((0, 0),)

    def resumed(self, placement: int, *, stored_by: int, iterations: int) -> StateHistory:
        """Return the history of a job that continues on `placement` from a checkpoint.

        Placement `stored_by` stored the checkpoint after `iterations`; 0: there is none, and the job begins from an
        empty state. A store that ends late may publish the checkpoint of an earlier placement. Parts of placements
        after `stored_by` did not contribute to it.
        """
        kept = tuple(part for part in self.parts if part[0] <= stored_by and part[1] < iterations)
        return StateHistory((*kept, (placement, iterations)))

    def of_rank(
        self, rank: int, job: JobState, programs: Mapping[int, Sequence[Program]], *, warmup: int
    ) -> list[dict[str, Any]]:
        """Return the parts of a rank's expected state, as `expected` of `traffic/node/ranks/rank_state.py`.

        `programs` are those of all ranks, by placement.
        """
        ends = [*(begin for _, begin in self.parts[1:]), job.total]
        parts = []
        for (placement, begin), end in zip(self.parts, ends, strict=True):
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
