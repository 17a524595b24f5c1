"""Summary of a workload for the report of a failed test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from faultbed.testbed.errors import FaultbedError
from faultbed.traffic.engine.running_traffic import Running

__all__ = ["summary_of"]

_LONGEST = 3


def summary_of(running: Running[Any]) -> str:
    """Return the outcome, the longest iterations by rank and part, failed queue pairs, and where running ranks are."""
    return "\n".join(_lines(running))


def _lines(running: Running[Any]) -> Iterator[str]:
    state = running.outcome if running.is_over else "not over"
    yield f"{running.plan.what}: {state}{f', {running.failure}' if running.failure else ''}"
    start_ns = running.started_ns
    yield from _longest_iterations(running)
    for error in running.qp_errors:
        at_s = (error.time_ns - start_ns) / 1e9
        yield f"  QP failed at {at_s:.1f} s: {error.endpoint} to {error.peer}, {error.status}"
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


def _longest_iterations(running: Running[Any]) -> Iterator[str]:
    """Yield the number of iterations, and the longest ones with the times of each rank; nothing without any."""
    by_index: dict[int, list[Any]] = {}
    for event in list(running.events):
        if event.name == "iteration":
            by_index.setdefault(event.message["index"], []).append(event)
    spans = []
    for index, events in by_index.items():
        begin_ns = min(event.message["start_ns"] for event in events)
        length_ns = max(event.message["end_ns"] for event in events) - begin_ns
        spans.append((length_ns, begin_ns, index))
    if spans:
        yield f"{len(spans)} iterations; the longest:"
    for length_ns, begin_ns, index in sorted(spans, key=lambda span: -span[0])[:_LONGEST]:
        at_s = (begin_ns - running.started_ns) / 1e9
        ranks = "; ".join(_rank(event) for event in by_index[index])
        yield f"  {index}, at {at_s:.1f} s, {length_ns / 1e9:.2f} s: {ranks}"


def _rank(event: Any) -> str:
    parts = {name: event.message.get(f"{name}_ns", 0) / 1e9 for name in ("ingest", "compute", "wait", "comm")}
    times = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items() if seconds >= 0.005)  # noqa: PLR2004
    return f"{event.message['task']} {times or 'no time'} s"
