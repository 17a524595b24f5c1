"""What a run does with each kind of workload: one protocol, and its implementation for each.

A new kind of workload is a section of the experiment file (`faultbed.harness.experiment.workload_file`), a module of
`faultbed.traffic.workloads`, and a class here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Protocol, TypeVar

from faultbed.harness.experiment import replayed
from faultbed.harness.experiment.declare.lab_names import LabNames
from faultbed.harness.experiment.program.command_section import Command, command_spec, keep_files
from faultbed.harness.experiment.replayed import Replay, spec_of, trace_of
from faultbed.harness.experiment.workload_file import Collective, Flow, Job, Workload, duration_ns
from faultbed.harness.experiment.workload_specs import collective_spec, flow_specs, job_spec
from faultbed.harness.live.measured_flows import GRACE_S
from faultbed.harness.record import workload_series
from faultbed.testbed.lab import Lab
from faultbed.traffic.engine.engine_client import Fabric, endpoint
from faultbed.traffic.engine.run_results import Endpoint
from faultbed.traffic.engine.running_traffic import OnEvent, Running
from faultbed.traffic.engine.task_specs import refuse_local
from faultbed.traffic.flows import flow_run
from faultbed.traffic.flows.flow_run import FlowsResult
from faultbed.traffic.flows.matrix import pairs_in
from faultbed.traffic.programs import command_run
from faultbed.traffic.programs.program_results import ProgramsResult
from faultbed.traffic.schedules import cost, peers_of
from faultbed.traffic.workloads import collective, inference, job, ranking, replay, storage_readers
from faultbed.traffic.workloads.collective import CollectiveResult
from faultbed.traffic.workloads.elastic import driver as elastic
from faultbed.traffic.workloads.elastic.resilience import Resilience, check_on_lab
from faultbed.traffic.workloads.inference import InferenceResult, InferenceSpec
from faultbed.traffic.workloads.ranking import RankingSpec
from faultbed.traffic.workloads.replay_batches import whole
from faultbed.traffic.workloads.storage_service import Storage

__all__ = ["WorkloadKind", "kind_of"]

W_contra = TypeVar("W_contra", contravariant=True)


class WorkloadKind(Protocol[W_contra]):
    """What a run does with one kind of workload; `work` is a fitted one, `source` the path of its experiment file."""

    def fit(self, names: LabNames, work: Any) -> Any:
        """Return the workload of a file with names of the lab, its selectors resolved and its ranks filled in.

        Raises:
            ConfigError: a name does not exist, or the lab cannot carry the workload.
        """

    def start(self, lab: Lab, work: W_contra, source: str, on_event: OnEvent) -> Running[Any]:
        """Start the workload on a lab, without waiting for its end.

        Raises:
            UsageError: the lab cannot carry it.
            LabError: it could not be started; nothing is left running.
        """

    def patience_s(self, work: W_contra, running: Running[Any]) -> float:
        """Return the seconds after which the workload counts as stuck."""

    def rank_names(self, work: W_contra) -> tuple[str, ...]:
        """Return the RNIC of each rank, in rank order. Flows have no ranks."""

    def roles(self, work: W_contra) -> Mapping[str, str]:
        """Return the first RNIC of each role, as the ends of a path are named: `path[client>server]`."""

    def endpoints(self, work: W_contra) -> tuple[str, ...]:
        """Return the RNICs that the workload uses, or may use after a restart, each once."""

    def senders_and_receivers(self, work: W_contra) -> tuple[tuple[str, ...], tuple[str, ...], float]:
        """Return the RNICs that send, those that receive, and the rate of all flows together in bits/s.

        The rate is 0 if the workload is not paced.
        """

    def storage_host(self, work: W_contra) -> str | None:
        """Return the host of the workload's storage; None if it has no storage."""

    def computes(self, work: W_contra) -> bool:
        """Return whether the ranks have compute phases that can be compared."""

    def default_metric(self, *, has_faults: bool) -> str:
        """Return the metric that a sweep shows if the experiment has no `[[expect]]` and none was named."""

    def measured(self, work: W_contra, result: Any) -> dict[str, Any]:
        """Return the fields of `WorkloadEvidence` that only this kind of workload has."""

    def keep_inputs(self, work: W_contra, source: str, folder: Path) -> None:
        """Copy the files that the workload reads into the run directory."""


class _Ranks:
    """Base of the workloads of ranks. The defaults suit a workload without storage, compute phases or own inputs."""

    def fit(self, names: LabNames, work: Any) -> Any:
        topology = names.topology
        written = work.ranks or tuple(f"{host.name}:{host.rnics[0].name}" for host in topology.hosts if host.rnics)
        ranks: list[str] = []
        for index, text in enumerate(written):
            path = f"workload.ranks[{index}]"
            for rank in names.select(path, text):
                names.check_rnic(path, rank)
                ranks.append(rank)
        if repeated := sorted({rank for rank in ranks if ranks.count(rank) > 1}):
            problem = f"{repeated[0]} appears twice; name each RNIC once (ranks_per_rnic gives RNICs several ranks)"
            raise names.error("workload.ranks", problem)
        if len(ranks) < 2:  # noqa: PLR2004 - a ring needs two
            raise names.error("workload.ranks", f"a collective needs at least 2 ranks, not {len(ranks)}")
        return self._fit_ranked(names, replace(work, ranks=tuple(ranks)))

    def _fit_ranked(self, names: LabNames, work: Any) -> Any:
        """Check what the workload needs besides ranks that exist, and resolve its other names."""
        with names.at("workload"):
            self._check(names.lab, work)
        return work

    def _check(self, lab: Fabric, work: Any) -> None:
        return

    def patience_s(self, work: Any, running: Running[Any]) -> float:
        length_ns = duration_ns(work)
        return 10 * GRACE_S if length_ns is None else length_ns / 1e9 + GRACE_S

    def rank_names(self, work: Any) -> tuple[str, ...]:
        names: tuple[str, ...] = work.ranks * getattr(work, "ranks_per_rnic", 1)
        return names

    def roles(self, work: Any) -> Mapping[str, str]:
        return {}

    def endpoints(self, work: Any) -> tuple[str, ...]:
        return tuple(dict.fromkeys(work.ranks))

    def senders_and_receivers(self, work: Any) -> tuple[tuple[str, ...], tuple[str, ...], float]:
        return work.ranks, work.ranks, 0.0

    def storage_host(self, work: Any) -> str | None:
        return None

    def computes(self, work: Any) -> bool:
        return getattr(work, "compute_units", 0) > 0

    def default_metric(self, *, has_faults: bool) -> str:
        return "goodput.mean"

    def measured(self, work: Any, result: Any) -> dict[str, Any]:
        return {}

    def keep_inputs(self, work: Any, source: str, folder: Path) -> None:
        return


class _Collective(_Ranks):
    def start(self, lab: Lab, work: Collective, source: str, on_event: OnEvent) -> Running[Any]:
        return collective.start(lab, collective_spec(work), on_event=on_event)

    def default_metric(self, *, has_faults: bool) -> str:
        return "busbw.mean"

    def measured(self, work: Collective, result: CollectiveResult) -> dict[str, Any]:
        return {"summary": workload_series.summary_of(result)}

    def _check(self, lab: Fabric, work: Collective) -> None:
        places, schedule, programs = collective.fit(lab, collective_spec(work))
        _refuse_local(lab, f"{work.collective} ({schedule.algorithm}) over", places, programs)


class _Flows(_Ranks):
    def fit(self, names: LabNames, work: Flow) -> Flow:
        lab, topology = names.lab, names.topology
        with names.at("workload.qp"):
            flow_run.check_on(lab.kind, transport=work.transport, qp=work.qp, entropy=work.entropy)
        if work.pattern is not None:
            with names.at("workload.pattern"):
                return replace(work, pairs=pairs_in(topology, work.pattern))
        src, dst = names.select_one("workload.src", work.src), names.select_one("workload.dst", work.dst)
        names.check_rnic("workload.src", src)
        names.check_rnic("workload.dst", dst)
        if src == dst:
            raise names.error("workload.dst", f"the flow ends where it begins ({src})")
        with names.at("workload.dst"):
            refuse_local(lab.kind, f"flow {work.flow}", [(endpoint(topology, src), endpoint(topology, dst))])
        return replace(work, src=src, dst=dst, pairs=((src, dst),))

    def start(self, lab: Lab, work: Flow, source: str, on_event: OnEvent) -> Running[Any]:
        return flow_run.start_all(lab, flow_specs(work), on_event=on_event)

    def rank_names(self, work: Flow) -> tuple[str, ...]:
        return ()

    def roles(self, work: Flow) -> Mapping[str, str]:
        return {} if work.pattern is not None else {"src": work.src, "dst": work.dst}

    def endpoints(self, work: Flow) -> tuple[str, ...]:
        return tuple(dict.fromkeys(end for pair in work.pairs for end in pair))

    def senders_and_receivers(self, work: Flow) -> tuple[tuple[str, ...], tuple[str, ...], float]:
        sources, sinks = tuple(src for src, _ in work.pairs), tuple(dst for _, dst in work.pairs)
        return sources, sinks, work.rate_bps * len(work.pairs)

    def default_metric(self, *, has_faults: bool) -> str:
        return "goodput_mean_ratio" if has_faults else "goodput.mean"

    def measured(self, work: Flow, result: FlowsResult) -> dict[str, Any]:
        checked_bytes, wrong_bytes = workload_series.checked_of(result)
        return {
            "latencies_ns": workload_series.latencies_of(result),
            "checked_bytes": checked_bytes,
            "wrong_bytes": wrong_bytes,
            "silent_flows": workload_series.silent_of(result),
            "unchecked_flows": workload_series.unchecked_of(result),
        }


class _Job(_Ranks):
    def _fit_ranked(self, names: LabNames, work: Job) -> Job:
        if storage := work.storage:
            host = names.select_one("workload.storage.host", storage.host)
            work = replace(work, storage=replace(storage, host=host))
        ranks = len(self.rank_names(work))
        if ranks != (grid_ranks := prod(size for _, size in work.grid)):
            on = f"{len(work.ranks)} RNICs with {work.ranks_per_rnic} each"
            ranks_text = on if work.ranks_per_rnic > 1 else f"{ranks} RNICs"
            raise names.error("workload.grid", f"has {grid_ranks} ranks, but there are {ranks_text}")
        if work.storage:
            if work.storage.host not in names.topology.host_by_name:
                problem = f'no host "{work.storage.host}"; choose one of {", ".join(names.topology.host_by_name)}'
                raise names.error("workload.storage.host", problem)
            work = replace(work, storage=_fit_readers(names, work.storage, work.ranks))
        super()._fit_ranked(names, work)
        if work.resilience is None:
            return work
        return replace(work, resilience=_fit_resilience(names, work, work.resilience))

    def start(self, lab: Lab, work: Job, source: str, on_event: OnEvent) -> Running[Any]:
        if work.resilience is None:
            return job.start(lab, job_spec(work), on_event=on_event)
        return elastic.start(lab, job_spec(work), work.resilience, on_event=on_event)

    def patience_s(self, work: Job, running: Running[Any]) -> float:
        restarts_s = 0.0 if work.resilience is None else elastic.longest_restarts_s(work.resilience)
        return super().patience_s(work, running) + restarts_s

    def endpoints(self, work: Job) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*work.ranks, *(work.resilience.spares if work.resilience else ()))))

    def storage_host(self, work: Job) -> str | None:
        return work.storage.host if work.storage else None

    def measured(self, work: Job, result: Any) -> dict[str, Any]:
        if work.resilience is None:
            return {"readers": workload_series.readers_of(result)}
        return {"resilience": workload_series.resilience_of(result)}

    def _check(self, lab: Fabric, work: Job) -> None:
        places, programs, _ = job.fit(lab, job_spec(work))
        _refuse_local(lab, "job of", places, programs)


class _Inference(_Ranks):
    def start(self, lab: Lab, work: InferenceSpec, source: str, on_event: OnEvent) -> Running[Any]:
        return inference.start(lab, work, on_event=on_event)

    def _check(self, lab: Fabric, work: InferenceSpec) -> None:
        inference.check(work, len(work.ranks))

    def measured(self, work: InferenceSpec, result: InferenceResult) -> dict[str, Any]:
        return {"serving": workload_series.serving_of(result)}


class _Ranking(_Ranks):
    def start(self, lab: Lab, work: RankingSpec, source: str, on_event: OnEvent) -> Running[Any]:
        return ranking.start(lab, work, on_event=on_event)

    def _check(self, lab: Fabric, work: RankingSpec) -> None:
        ranking.check(work, len(work.ranks))


class _Replay(_Ranks):
    def _fit_ranked(self, names: LabNames, work: Replay) -> Replay:
        with names.at("workload.replay"):
            trace = trace_of(work, names.source, len(work.ranks))
            whole(trace, spec_of(work), cost.NETWORKS[names.lab.kind])
        return replace(work, ranks=work.ranks[: trace.ranks])

    def start(self, lab: Lab, work: Replay, source: str, on_event: OnEvent) -> Running[Any]:
        return replay.start(lab, spec_of(work), trace_of(work, source, len(work.ranks)), on_event=on_event)

    def patience_s(self, work: Replay, running: Running[Any]) -> float:
        return replay.timeout_s(running, work.warmup + work.repeat)

    def keep_inputs(self, work: Replay, source: str, folder: Path) -> None:
        replayed.keep(work, source, folder)


class _Programs(_Ranks):
    """Programs of other authors. Their processes are the ranks."""

    def fit(self, names: LabNames, work: Command) -> Command:
        roles: dict[str, tuple[str, ...]] = {}
        seen: dict[str, str] = {}
        for role, written in work.roles.items():
            path = f"workload.roles.{role}"
            roles[role] = tuple(rnic for text in written for rnic in names.select(path, text))
            for rnic in roles[role]:
                names.check_rnic(path, rnic)
                if rnic in seen:
                    problem = f"{rnic} is already an RNIC of {seen[rnic]}; name each RNIC once"
                    raise names.error(path, problem)
                seen[rnic] = role
        return replace(work, roles=roles)

    def start(self, lab: Lab, work: Command, source: str, on_event: OnEvent) -> Running[Any]:
        return command_run.start(lab, command_spec(work, source), on_event)

    def patience_s(self, work: Command, running: Running[Any]) -> float:
        return work.timeout_ns / 1e9 + GRACE_S

    def rank_names(self, work: Command) -> tuple[str, ...]:
        return ()  # the phases of their iterations are unknown, so that no rank can be called slow

    def roles(self, work: Command) -> Mapping[str, str]:
        return {role: rnics[0] for role, rnics in work.roles.items()}

    def endpoints(self, work: Command) -> tuple[str, ...]:
        return tuple(rnic for rnics in work.roles.values() for rnic in rnics)

    def senders_and_receivers(self, work: Command) -> tuple[tuple[str, ...], tuple[str, ...], float]:
        return self.endpoints(work), self.endpoints(work), 0.0

    def default_metric(self, *, has_faults: bool) -> str:
        return "goodput_mean_ratio" if has_faults else "goodput.mean"

    def measured(self, work: Command, result: ProgramsResult) -> dict[str, Any]:
        return {"programs": result.ends, "sample_ns": result.resolution_ns}

    def keep_inputs(self, work: Command, source: str, folder: Path) -> None:
        keep_files(work, source, folder)


_KINDS: Mapping[type, WorkloadKind[Any]] = {
    Collective: _Collective(),
    Flow: _Flows(),
    Job: _Job(),
    InferenceSpec: _Inference(),
    RankingSpec: _Ranking(),
    Replay: _Replay(),
    Command: _Programs(),
}


def kind_of(work: Workload) -> WorkloadKind[Any]:
    """Return the kind of a workload."""
    return _KINDS[type(work)]


def _refuse_local(lab: Fabric, title: str, places: Sequence[Endpoint], programs: Sequence[dict[str, Any]]) -> None:
    pairs = [(places[src], places[dst]) for src, dst in peers_of(programs)]
    refuse_local(lab.kind, f"{title} {len(places)} ranks", pairs)


def _fit_readers(names: LabNames, storage: Storage, ranks: Sequence[str]) -> Storage:
    """Return the storage of a job with the hosts of its readers resolved."""
    rank_hosts = {name.partition(":")[0] for name in ranks}
    readers: tuple[str, ...] = ()
    for index in range(len(storage.readers)):
        with names.at(f"workload.storage.readers[{index}]"):
            until_here = replace(storage, readers=storage.readers[: index + 1])
            readers = storage_readers.reader_hosts(names.topology, until_here, rank_hosts)
    return replace(storage, readers=readers)


def _fit_resilience(names: LabNames, work: Job, resilience: Resilience) -> Resilience:
    """Return the resilience of a job with its spares resolved, after a check that it could be restarted on this lab."""
    spares: list[str] = []
    hosts = {name.partition(":")[0] for name in work.ranks}
    for index, text in enumerate(resilience.spares):
        path = f"workload.resilience.spares[{index}]"
        for name in names.select(path, text):
            with names.at(path):
                spare = endpoint(names.topology, name)
            if spare.host in hosts:
                problem = (
                    f"{spare.name} cannot be a spare: the job has a rank on {spare.host}; name a host without a rank"
                )
                raise names.error(path, problem)
            spares.append(spare.name)
    resilience = replace(resilience, spares=tuple(dict.fromkeys(spares)))
    with names.at("workload.resilience"):
        check_on_lab(names.lab, job_spec(work), resilience)
    return resilience
