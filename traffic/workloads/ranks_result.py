"""Results common to all workloads on ranks: collectives, and training, inference and ranking jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from faultbed.traffic.engine.flight_recorder import Flight
from faultbed.traffic.engine.run_results import Connection, Endpoint, Iteration, Outcome, QpError, Rebuild, Sample
from faultbed.traffic.engine.running_traffic import Running
from faultbed.traffic.engine.samples import iterations_of, samples_of
from faultbed.traffic.workloads.ranks import task_name

__all__ = ["RanksResult", "common_results"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksResult:
    """Result of a run. `iterations[r]` are those of rank r, `flights` the flight recorders of a failed run.

    `wrong_elements` is the sum over all ranks and iterations, with those of the warm-up. `clock_error_ns` is the clock
    error of each host.
    """

    outcome: Outcome
    where: str | None
    ranks: tuple[str, ...]
    iterations: tuple[tuple[Iteration, ...], ...]
    wrong_elements: int
    flights: tuple[Flight, ...]
    samples: tuple[Sample, ...]
    connections: tuple[Connection, ...]
    qp_errors: tuple[QpError, ...]
    rebuilds: tuple[Rebuild, ...]
    clock_error_ns: Mapping[str, int]

    def samples_of(self, rank: int) -> tuple[Sample, ...]:
        """Return the samples of what arrived at a rank. A sample stored without a task belongs to its RNIC's rank."""
        name, task = self.ranks[rank], task_name(rank)
        return tuple(
            sample for sample in self.samples if (sample.task == task if sample.task else sample.endpoint == name)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, ready for JSON."""
        return asdict(self)


def common_results(running: Running[Any], ranks: Sequence[Endpoint]) -> dict[str, Any]:
    """Return the fields of `RanksResult` for a run that is over."""
    per_rank = tuple(iterations_of(running, task_name(rank)) for rank in range(len(ranks)))
    return {
        "outcome": running.outcome,
        "where": running.failure,
        "ranks": tuple(rank.name for rank in ranks),
        "iterations": per_rank,
        "wrong_elements": running.warmup_wrong + sum(item.wrong_elements for rank in per_rank for item in rank),
        "flights": tuple(running.flights.values()),
        "samples": samples_of(running),
        "connections": running.connections,
        "qp_errors": running.qp_errors,
        "rebuilds": running.rebuilds,
        "clock_error_ns": running.clock_error_ns,
    }
