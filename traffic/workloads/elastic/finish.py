"""Build the result of a job with restarts from what its engines reported on all placements."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from faultbed.traffic.engine.samples import checkpoints_of, iterations_of, samples_in
from faultbed.traffic.workloads import job
from faultbed.traffic.workloads.elastic.elastic_results import ElasticResult, RankState, iterations_by_rank
from faultbed.traffic.workloads.ranks import task_name
from faultbed.traffic.workloads.ranks_result import common_results

if TYPE_CHECKING:
    from faultbed.traffic.workloads.elastic.driver import ElasticRunning

__all__ = ["result_of"]


def result_of(running: ElasticRunning) -> ElasticResult:
    """Build the result.

    A rank's iterations, samples and checkpoints are collected over all placements along its lineage: the ranks whose
    state it continued.
    """
    state = running.job
    ranks = tuple(task.endpoint for task in running.plan.tasks)
    generations = range(state.generation + 1)
    lineages = [
        [task_name(state.ancestor(rank, generation)) for generation in generations] for rank in range(len(ranks))
    ]
    by_generation = [
        [iterations_of(running, lineage[generation], generation=generation) for generation in generations]
        for lineage in lineages
    ]
    placed = [restart for restart in running.restarts if restart.rescheduled_ns is not None]
    per_rank = iterations_by_rank(by_generation, (None, *(restart.restored_iterations for restart in placed)))
    samples = [
        sample
        for rank, (place, lineage) in enumerate(zip(ranks, lineages, strict=True))
        for event in running.events
        if event.name == "sample" and lineage[event.message["generation_of_job"]] == event.message["task"]
        for sample in samples_in(event.message, task_name(rank), place.name)
    ]
    stored = tuple(
        checkpoint
        for rank, lineage in enumerate(lineages)
        for generation in generations
        for checkpoint in checkpoints_of(running, lineage[generation], rank, generation=generation)
    )
    executed = [event.message for event in running.events if event.name == "iteration"]
    unique_iterations = sum(len(iterations) for iterations in iterations_by_rank(by_generation))
    executed_iterations = sum(
        any(lineage[message["generation_of_job"]] == message["task"] for lineage in lineages) for message in executed
    )
    common = common_results(running, ranks) | {
        "iterations": per_rank,
        "samples": tuple(sorted(samples, key=lambda sample: (sample.start_ns, sample.endpoint))),
        "wrong_elements": running.warmup_wrong + sum(message["wrong"] for message in executed),
    }
    fields = job.result_fields(running, running.spec, running.algorithms, ranks, per_rank, stored)
    fields["window"] = replace(fields["window"], start_ns=running.started_ns)
    return ElasticResult(
        **common,
        **fields,
        restarts=tuple(running.restarts),
        states=tuple(
            RankState(
                rank=rank,
                iterations=rank_state["iterations"],
                elements=rank_state["elements"],
                wrong=rank_state["wrong"],
                sha256=rank_state["sha256"],
            )
            for rank, rank_state in sorted(running.states.items())
        ),
        repeated_iterations=executed_iterations - unique_iterations,
        initialised_ns=running.initialised_ns,
        longest_ingest_ns=max((message.get("ingest_ns", 0) for message in executed), default=0),
        longest_checkpoint_ns=max((message.get("checkpoint_ns", 0) for message in executed), default=0),
    )
