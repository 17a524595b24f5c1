"""Start the workload of an experiment: a collective, flows, a trace, or a job that trains, serves or ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from harness.experiment.experiment_file import Experiment
from harness.experiment.flow_words import between
from harness.experiment.replayed import Replay, spec_of, trace_of
from harness.experiment.workload_file import OF_SPEC, Collective, Flow, Job, Workload, duration_ns
from testbed.errors import LabError
from testbed.lab import Lab
from traffic.engine.run_results import Window
from traffic.engine.running_traffic import OnEvent, Running
from traffic.flows import flow_run
from traffic.flows.flow_run import FlowSpec, FlowsResult
from traffic.probes.ecmp_entropy import data_and_ack_paths
from traffic.workloads import collective, inference, job, ranking, replay
from traffic.workloads.collective import CollectiveSpec
from traffic.workloads.elastic import driver as elastic
from traffic.workloads.inference import InferenceSpec
from traffic.workloads.job import JobSpec
from traffic.workloads.ranking import RankingSpec

__all__ = ["collective_spec", "job_spec", "paths_of", "patience_s", "rank_names", "run_flows", "start"]

GRACE_S = 60.0
"""How much longer than planned a workload may take before it is ended."""


def start(experiment: Experiment, lab: Lab, also: OnEvent = lambda _event: None) -> Running[Any]:
    """Start the workload.

    Each of its events is a heartbeat of the lab, and is passed to `also`, which is called on the workload's own thread.

    Raises:
        UsageError: the lab cannot carry it.
        LabError: it could not be started; nothing is left running.
    """
    work = experiment.workload

    def beat(event: dict[str, Any]) -> None:
        lab.heartbeat()
        also(event)

    if isinstance(work, InferenceSpec):
        return inference.start(lab, work, on_event=beat)
    if isinstance(work, RankingSpec):
        return ranking.start(lab, work, on_event=beat)
    if isinstance(work, Replay):
        return replay.start(lab, spec_of(work), trace_of(work, experiment.source, len(work.ranks)), on_event=beat)
    if isinstance(work, Flow):
        return flow_run.start_all(lab, _flows(work), on_event=beat)
    if isinstance(work, Job):
        return _start_job(work, lab, beat)
    return collective.start(lab, collective_spec(work), on_event=beat)


def run_flows(lab: Lab, specs: Sequence[FlowSpec]) -> tuple[FlowsResult, Window]:
    """Run flows of equal duration at once, and return their result and when they ran; their progress is a heartbeat.

    Raises:
        UsageError: the lab cannot carry them.
        LabError: they could not be started, were not over in time, or failed; nothing is left running.
    """
    with flow_run.start_all(lab, specs, on_event=lambda _event: lab.heartbeat()) as running:
        result = running.wait((specs[0].duration_s or 0) + GRACE_S)
    if result.outcome == "failed":
        more = f" and {len(specs) - 1} more" if len(specs) > 1 else ""
        raise LabError(f"{specs[0].src} to {specs[0].dst}{more}: {result.where}")
    return result, Window(start_ns=running.started_ns, end_ns=running.ended_ns)


def _start_job(work: Job, lab: Lab, on_event: OnEvent) -> Running[Any]:
    if work.resilience is None:
        return job.start(lab, job_spec(work), on_event=on_event)
    return elastic.start(lab, job_spec(work), work.resilience, on_event=on_event)


def _flows(work: Flow) -> list[FlowSpec]:
    one = FlowSpec(
        src="",
        dst="",
        message_bytes=work.size_bytes,
        verb=work.flow,
        duration_s=work.duration_ns / 1e9,
        **{name: getattr(work, name) for name in OF_SPEC},
    )
    return [spec for pair in work.pairs for spec in between(one, *pair, probe=work.probe)]


def job_spec(work: Job) -> JobSpec:
    """The traffic's words for it."""
    return JobSpec(
        grid=work.grid,
        phases=work.phases,
        dtype=work.dtype,
        redop=work.op,
        ranks=work.ranks,
        ranks_per_rnic=work.ranks_per_rnic,
        iterations=work.iterations,
        warmup=work.warmup,
        compute_units=work.compute_units,
        storage=work.storage,
        **_queue_pairs_of(work),
    )


def collective_spec(work: Collective) -> CollectiveSpec:
    """The traffic's words for it."""
    return CollectiveSpec(
        collective=work.collective,
        algorithm=work.algorithm,
        dtype=work.dtype,
        redop=work.op,
        root=work.root,
        skew=work.skew,
        in_place=work.in_place,
        ranks=work.ranks,
        ranks_per_rnic=work.ranks_per_rnic,
        size_bytes=work.size_bytes,
        iterations=work.iterations,
        duration_s=None if work.duration_ns is None else work.duration_ns / 1e9,
        compute_units=work.compute_units,
        warmup=work.warmup,
        **_queue_pairs_of(work),
    )


def _queue_pairs_of(work: Collective | Job) -> dict[str, Any]:
    """The words about queue pairs, as the traffic has them."""
    return {name: getattr(work, name) for name in ("qps_per_peer", "spread", "entropy", "qp")}


def rank_names(work: Workload) -> tuple[str, ...]:
    """Return the RNIC of each rank of a fitted workload; none of flows."""
    if isinstance(work, Flow):
        return ()
    return work.ranks * (work.ranks_per_rnic if isinstance(work, Collective | Job) else 1)


def patience_s(experiment: Experiment, running: Running[Any]) -> float:
    """Return the seconds after which the workload counts as stuck.

    A timed workload gets a minute beyond its duration, a trace as long as its operations and pauses need, and a
    workload that goes by iterations ten minutes.
    """
    work = experiment.workload
    if isinstance(work, Replay):
        return replay.timeout_s(running, work.warmup + work.repeat)
    length_ns = duration_ns(work)
    return 10 * GRACE_S if length_ns is None else length_ns / 1e9 + GRACE_S


def paths_of(lab: Lab, running: Running[Any]) -> dict[int, tuple[tuple[str, ...], tuple[str, ...]]]:
    """The paths of each connection's data and ACKs, by index; empty when a switch could not tell."""
    with contextlib.suppress(LabError):
        return data_and_ack_paths(lab, running.connections)
    return {}
