"""Summary of a workload for the report of a failed test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from testbed.errors import FaultbedError
from traffic.engine.running_traffic import Running

__all__ = ["summary_of"]

_LONGEST = 3


def summary_of(running: Running[Any]) -> str:
    """Return the outcome, the longest iterations by rank and part, lost queue pairs, and where running ranks are."""
    return "\n".join(_lines(running))


def _lines(running: Running[Any]) -> Iterator[str]:
    state = running.outcome if running.is_over else "not over"
    yield f"{running.plan.what}: {state}{f', {running.failure}' if running.failure else ''}"
    start_ns = running.started_ns
    by_index: dict[int, list[Any]] = {}
    for event in list(running.events):
        if event.name == "iteration":
            by_index.setdefault(event.message["index"], []).append(event)
    if by_index:
        yield f"{len(by_index)} iterations; the longest:"
    lengths = {
        index: max(event.message["end_ns"] for event in events) - min(event.message["start_ns"] for event in events)
        for index, events in by_index.items()
    }
    for index in sorted(lengths, key=lambda index: -lengths[index])[:_LONGEST]:
        events = by_index[index]
        at_s = (min(event.message["start_ns"] for event in events) - start_ns) / 1e9
        yield f"  {index}, at {at_s:.1f} s, {lengths[index] / 1e9:.2f} s: {'; '.join(_rank(event) for event in events)}"
    for error in running.qp_errors:
        at_s = (error.time_ns - start_ns) / 1e9
        yield f"  QP lost at {at_s:.1f} s: {error.endpoint} to {error.peer}, {error.status}"
    for rebuild in running.rebuilds:
        yield f"  QP rebuilt: {rebuild.src} to {rebuild.dst}, {rebuild.attempts} attempts, after {rebuild.reason}"
    if not running.is_over:
        try:
            flights = running.dump()
        except FaultbedError as error:
            yield f"  the ranks do not report where they are: {error}"
            return
        for flight in flights.values():
            yield f"  rank {flight.rank} on {flight.endpoint}: {flight.standing}"


def _rank(event: Any) -> str:
    parts = {name: event.message.get(f"{name}_ns", 0) / 1e9 for name in ("ingest", "compute", "wait", "comm")}
    times = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items() if seconds >= 0.005)  # noqa: PLR2004
    return f"{event.message['task']} {times or 'no time'} s"
