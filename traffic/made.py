"""What jobs that are made into a trace tell alike: inference and ranking (`traffic.replay.start_made`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from traffic.flight import Flight
from traffic.replay import SPARE_S, Execution
from traffic.results import Connection, Iteration, Outcome, QpError, Rebuild, Sample
from traffic.run import Running
from traffic.samples import samples_of

__all__ = ["MadeResult", "patience_s", "told"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeResult:
    """A job that is over. `iterations[r]` are those of rank r: one is a request, or a step of training.

    `clock_error_ns` is, by host, how wrong its times may be.
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

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)


def told(done: Execution) -> dict[str, Any]:
    """The fields of `MadeResult`."""
    ((_, running),) = done.runs
    return {
        "outcome": done.outcome,
        "where": done.where,
        "ranks": tuple(rank.name for rank in done.ranks),
        "iterations": done.iterations[0],
        "wrong_elements": done.wrong_elements,
        "flights": tuple(running.flights.values()),
        "samples": samples_of(running),
        "connections": running.connections,
        "qp_errors": running.qp_errors,
        "rebuilds": running.rebuilds,
        "clock_error_ns": running.clock_error_ns,
    }


def patience_s(running: Running[Any], rounds: int) -> float:
    """How long to wait for so many rounds of it."""
    each_s: float = max(task.spec["deadline_ms"] for task in running.plan.tasks) / 1000
    return SPARE_S + running.plan.stall_deadline_s + rounds * each_s
