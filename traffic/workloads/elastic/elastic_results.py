"""Results of a job that survives losses: its restarts in phases, and how its final state compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from faultbed.traffic.engine.run_results import Iteration
from faultbed.traffic.workloads.elastic.machine import Cause
from faultbed.traffic.workloads.job import JobResult

__all__ = ["ElasticResult", "RankState", "Restart", "iterations_by_rank"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """One restart of a job, in controller ns. Times of phases that a later loss cut short are None.

    `progress_ns` is when the last iteration before the loss was finished, `noticed_ns` when the loss was noticed. The
    phases then end at `diagnosed_ns`, `rescheduled_ns`, `initialised_ns` and `restored_ns`. At `caught_up_ns` all ranks
    had finished again what was finished before (None: the job ended before).

    `iterations` had been finished, and the restart continued after `restored_iterations`. `rejected` are (name, reason)
    of checkpoints that were passed over. `connections` is the number of QP pairs that were connected.
    """

    number: int
    reason: str
    cause: Cause
    hosts: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...] = ()
    connections: int = 0
    progress_ns: int
    noticed_ns: int
    diagnosed_ns: int | None = None
    rescheduled_ns: int | None = None
    initialised_ns: int | None = None
    restored_ns: int | None = None
    caught_up_ns: int | None = None
    iterations: int
    restored_iterations: int | None = None
    rejected: tuple[tuple[str, str], ...] = ()

    @property
    def lost_iterations(self) -> int | None:
        """Finished iterations that were repeated; None if nothing was restored."""
        return None if self.restored_iterations is None else max(0, self.iterations - self.restored_iterations)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """The state of one rank at the end, compared element by element with that of a job without interruptions."""

    rank: int
    iterations: int
    elements: int
    wrong: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticResult(JobResult):
    """Result of a job with restarts. `ranks` and `spec` are those of the last placement.

    `iterations[r]` holds the last execution of each iteration, and the same ones for every rank. Iterations, samples
    and checkpoints of a rank are those of the ranks whose state it continued, wherever they ran. `window` begins with
    the first placement, `groups` are those of the last one. `initialised_ns` is how long it took to start the storage
    server and the engines, and to connect the first placement. `longest_ingest_ns` and `longest_checkpoint_ns` are the
    longest waits for data and for a checkpoint in any execution of an iteration, repeated ones included.
    """

    restarts: tuple[Restart, ...]
    states: tuple[RankState, ...]
    repeated_iterations: int
    initialised_ns: int
    longest_ingest_ns: int
    longest_checkpoint_ns: int


def iterations_by_rank(
    executions: Sequence[Sequence[Sequence[Iteration]]], resumed: Sequence[int | None] = ()
) -> tuple[tuple[Iteration, ...], ...]:
    """Return the last execution of each iteration by rank, in order; `executions[r][g]` are those of a generation.

    When an engine is killed, the record of its last iteration may be lost although the state after it was stored. Such
    an iteration is left out for all ranks, so that the n-th entry of every rank is the same iteration.

    `resumed[g]` is the number of iterations after which generation g continued; None: it restored nothing. Iterations
    that an earlier generation had finished beyond that are lost, even if the job ends before it repeats them.
    """
    last = []
    for rank in executions:
        items: dict[int, Iteration] = {}
        for generation, of_generation in enumerate(rank):
            begin = resumed[generation] if generation < len(resumed) else None
            if begin is not None:
                items = {index: item for index, item in items.items() if index < begin}
            items |= {item.index: item for item in of_generation}
        last.append(items)
    common = sorted(set.intersection(*(set(items) for items in last))) if last else []
    return tuple(tuple(items[index] for index in common) for items in last)
