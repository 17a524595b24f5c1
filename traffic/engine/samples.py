"""Samples, iterations and checkpoints from the raw events of a run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from faultbed.traffic.engine.run_results import Checkpoint, Iteration, Sample
from faultbed.traffic.engine.running_traffic import Running

__all__ = ["BIN_NS", "checkpoints_of", "iterations_of", "samples_in", "samples_of"]

BIN_NS = 100_000_000
"""Length of a sample, as in `faultbed.traffic.node.series`."""


def samples_of(running: Running[Any], tasks: Collection[str] | None = None) -> tuple[Sample, ...]:
    """Return the samples of some tasks (default: all of the plan), sorted by time."""
    names = {task.name: task.endpoint.name for task in running.plan.tasks}
    samples = [
        sample
        for event in running.events
        if event.name == "sample" and event.message["task"] in (names if tasks is None else tasks)
        for sample in samples_in(event.message, event.message["task"], names[event.message["task"]])
    ]
    return tuple(sorted(samples, key=lambda sample: (sample.start_ns, sample.endpoint)))


def samples_in(message: Mapping[str, Any], task: str, endpoint: str) -> Iterator[Sample]:
    """Yield the samples in one message of an engine, under the names of a task and its RNIC."""
    for index, size in enumerate(message["sizes"]):
        start_ns = message["start_ns"] + index * BIN_NS
        yield Sample(endpoint=endpoint, start_ns=start_ns, duration_ns=BIN_NS, size_bytes=size, task=task)


def iterations_of(running: Running[Any], task: str, *, generation: int | None = None) -> tuple[Iteration, ...]:
    """Return the iterations of one rank, in order; of a job with restarts, those of one `generation`."""
    return tuple(
        Iteration(
            index=event.message["index"],
            start_ns=event.message["start_ns"],
            end_ns=event.message["end_ns"],
            compute_ns=event.message["compute_ns"],
            comm_ns=event.message["comm_ns"],
            wait_ns=event.message["wait_ns"],
            wrong_elements=event.message["wrong"],
            phases_ns=tuple(event.message.get("phases_ns", ())),
            paused_ns=tuple(event.message.get("paused_ns", ())),
            ingest_ns=event.message.get("ingest_ns", 0),
            checkpoint_ns=event.message.get("checkpoint_ns", 0),
            read_from_ns=event.message.get("read_from_ns", 0),
            read_ns=event.message.get("read_ns", 0),
            split_ns=tuple(event.message.get("split_ns", ())),
        )
        for event in running.events
        if event.name == "iteration"
        and event.message["task"] == task
        and (generation is None or event.message["generation_of_job"] == generation)
    )


def checkpoints_of(
    running: Running[Any], task: str, rank: int, *, generation: int | None = None
) -> tuple[Checkpoint, ...]:
    """Return the checkpoints that one rank has stored, in order; of a job with restarts, those of one `generation`."""
    return tuple(
        Checkpoint(
            rank=rank,
            iteration=event.message["iteration"],
            start_ns=event.message["start_ns"],
            end_ns=event.message["end_ns"],
            waited_ns=event.message["waited_ns"],
            size_bytes=event.message["size_bytes"],
        )
        for event in running.events
        if event.name == "stored"
        and event.message["task"] == task
        and (generation is None or event.message["generation_of_job"] == generation)
    )
