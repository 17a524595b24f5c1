"""Hold an experiment against a lab: do its names exist there, do its bounds make sense there.

Two different answers: `needs.unmet` says that this lab is too small (as a test the experiment is skipped, with that
reason); `fit` says that the file is wrong for it (the run is refused, with the path inside the file).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from harness.analysis.links.link_metrics import names
from harness.analysis.timeline import MIN_BASELINE_NS
from harness.experiment.experiment_file import Expectation, Experiment, Fault
from harness.experiment.metrics import LINK_PREFIXES
from harness.experiment.replayed import Replay, spec_of, trace_of
from harness.experiment.workload_file import Collective, Flow, Job, Workload, duration_ns
from harness.run.prepare.fit_routing import fit_routing
from harness.run.workload_kinds import job_spec, kind_of
from inject.fault_plan import PlannedFault
from testbed.errors import ConfigError, UsageError
from testbed.model.lab_kind import LabKind, traits_of
from testbed.model.selectors import is_selector, select, select_one
from testbed.model.topology import Topology
from testbed.observe.packet_capture import port_named
from testbed.suggestions import hint
from traffic.engine.engine_client import Fabric, FabricModel, endpoint
from traffic.engine.task_specs import refuse_local
from traffic.flows.flow_run import check_on
from traffic.flows.matrix import pairs_in
from traffic.schedules import cost
from traffic.workloads.elastic.resilience import check_on_lab
from traffic.workloads.inference import InferenceSpec
from traffic.workloads.ranking import RankingSpec
from traffic.workloads.replay_batches import whole

__all__ = ["fit", "hosts_of", "needs_baseline", "refuse_absent", "wants_twin"]

_NEEDS_BASELINE = ("recovery.", "after_clear.", "goodput_min_ratio", "goodput_mean_ratio", "dip", "straggler")
_Ranked = Collective | Job | InferenceSpec | RankingSpec


def fit(experiment: Experiment, topology: Topology, lab_kind: LabKind) -> Experiment:
    """Check every name and bound of `experiment` against a lab, resolve selectors, and fill in the default ranks.

    Raises:
        ConfigError: an unknown target, rank or host, a fault that outlasts the workload or leaves no fault-free start
            to compare with, or a bound in Gb/s on a soft lab.
        Unsupported: a routing scheme that the lab's switches cannot do.
    """
    workload = _fit_workload(experiment, topology, lab_kind)
    faults = _fit_faults(experiment, topology)
    expectations = _fit_expectations(experiment, topology, lab_kind)
    _fit_stops(experiment)
    fit_routing(experiment, topology, lab_kind, kind_of(workload).endpoints(workload))
    return replace(
        experiment,
        workload=workload,
        faults=faults,
        expectations=expectations,
        capture=_fit_capture(experiment, topology),
    )


def hosts_of(workload: Workload) -> tuple[str, ...]:
    """Hosts on which a fitted workload has its RNICs, or may have them after a restart."""
    return tuple(dict.fromkeys(name.partition(":")[0] for name in kind_of(workload).endpoints(workload)))


def needs_baseline(experiment: Experiment) -> bool:
    """Return whether an expectation compares with the run's own fault-free start."""
    return any(one.metric.name.startswith(_NEEDS_BASELINE) for one in experiment.expectations)


def wants_twin(experiment: Experiment) -> bool:
    """Return whether an expectation compares with a fault-free twin of the run."""
    return any(one.metric.name == "jct_ratio" for one in experiment.expectations)


def refuse_absent(experiment: Experiment, faults: Sequence[PlannedFault], places: Mapping[str, str]) -> None:
    """Refuse a fault of a program that the (fitted) workload will not have on its target; `places` are by its name.

    Raises:
        ConfigError: it could not be armed.
    """
    workload = experiment.workload
    for fault in faults:
        if not fault.of_workload:
            continue
        if not fault.kind.startswith("storage."):
            there, what = hosts_of(workload), "no rank"
        else:
            host = kind_of(workload).storage_host(workload)
            there, what = (host,) if host else (), "no storage ([workload.storage])"
        if fault.target.node not in there:
            where = f"; it has on {', '.join(there)}" if there else ""
            said = f"{fault.kind} on {fault.target.text}: the workload has {what} there{where}"
            raise _error(experiment, places[fault.spec.name], said)


def _error(experiment: Experiment, path: str, message: str) -> ConfigError:
    return ConfigError(f"{experiment.source}: {path}: {message}")


def _selected(experiment: Experiment, topology: Topology, path: str, text: str) -> tuple[str, ...]:
    """The names that a selector stands for in this lab; a name stands for itself."""
    try:
        return select(topology, text)
    except UsageError as error:
        raise _error(experiment, path, str(error)) from error


def _selected_one(experiment: Experiment, topology: Topology, path: str, text: str) -> str:
    try:
        return select_one(topology, text)
    except UsageError as error:
        raise _error(experiment, path, str(error)) from error


def _resolve_rnic(experiment: Experiment, topology: Topology, path: str, text: str) -> None:
    try:
        target = topology.resolve(text)
    except UsageError as error:
        raise _error(experiment, path, str(error)) from error
    if target.kind != "rnic":
        raise _error(experiment, path, f'"{text}" is a {target.kind}, not an RNIC; write one like host1:rxe0')


def _fit_workload(experiment: Experiment, topology: Topology, lab_kind: LabKind) -> Workload:
    workload = experiment.workload
    if isinstance(workload, Flow):
        return _fit_flow(experiment, topology, workload, lab_kind)
    written = workload.ranks or tuple(f"{host.name}:{host.rnics[0].name}" for host in topology.hosts if host.rnics)
    ranks: tuple[str, ...] = ()
    for index, text in enumerate(written):
        path = f"workload.ranks[{index}]"
        for rank in _selected(experiment, topology, path, text):
            _resolve_rnic(experiment, topology, path, rank)
            ranks += (rank,)
    repeated = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if repeated:
        said = f"{repeated[0]} is there twice; name each RNIC once (ranks_per_rnic gives RNICs several ranks)"
        raise _error(experiment, "workload.ranks", said)
    if len(ranks) < 2:  # noqa: PLR2004 - a ring needs two
        raise _error(experiment, "workload.ranks", f"a collective needs at least 2 ranks, not {len(ranks)}")
    if isinstance(workload, Replay):
        return _fit_replay(experiment, replace(workload, ranks=ranks), lab_kind)
    workload = replace(workload, ranks=ranks)
    if isinstance(workload, Job) and (storage := workload.storage):
        host = _selected_one(experiment, topology, "workload.storage.host", storage.host)
        workload = replace(workload, storage=replace(storage, host=host))
    lab = FabricModel(kind=lab_kind, topology=topology)
    _check_ranked(experiment, workload, lab)
    return _fit_resilience(experiment, workload, lab) if isinstance(workload, Job) else workload


def _fit_resilience(experiment: Experiment, workload: Job, lab: Fabric) -> Job:
    """Resolve the spares of a job, and check that it could be restarted on this lab."""
    resilience = workload.resilience
    if resilience is None:
        return workload
    spares: list[str] = []
    hosts = {name.partition(":")[0] for name in workload.ranks}
    for index, text in enumerate(resilience.spares):
        path = f"workload.resilience.spares[{index}]"
        for name in _selected(experiment, lab.topology, path, text):
            try:
                spare = endpoint(lab.topology, name)
            except UsageError as error:
                raise _error(experiment, path, str(error)) from error
            if spare.host in hosts:
                said = f"{spare.name} cannot be a spare: the job has a rank on {spare.host}; name a host without a rank"
                raise _error(experiment, path, said)
            spares.append(spare.name)
    resilience = replace(resilience, spares=tuple(dict.fromkeys(spares)))
    try:
        check_on_lab(lab, job_spec(workload), resilience)
    except UsageError as error:
        raise _error(experiment, "workload.resilience", str(error)) from error
    return replace(workload, resilience=resilience)


def _fit_replay(experiment: Experiment, work: Replay, lab_kind: LabKind) -> Replay:
    """With as many ranks as the trace has."""
    try:
        trace = trace_of(work, experiment.source, len(work.ranks))
        whole(trace, spec_of(work), cost.NETWORKS[lab_kind])
    except UsageError as error:
        raise _error(experiment, "workload.replay", str(error)) from error
    return replace(work, ranks=work.ranks[: trace.ranks])


def _fit_flow(experiment: Experiment, topology: Topology, flow: Flow, lab_kind: LabKind) -> Flow:
    try:
        check_on(lab_kind, transport=flow.transport, qp=flow.qp, entropy=flow.entropy)
    except UsageError as error:
        raise _error(experiment, "workload.qp", str(error)) from error
    if flow.pattern is not None:
        try:
            return replace(flow, pairs=pairs_in(topology, flow.pattern))
        except UsageError as error:
            raise _error(experiment, "workload.pattern", str(error)) from error
    src = _selected_one(experiment, topology, "workload.src", flow.src)
    dst = _selected_one(experiment, topology, "workload.dst", flow.dst)
    _resolve_rnic(experiment, topology, "workload.src", src)
    _resolve_rnic(experiment, topology, "workload.dst", dst)
    if src == dst:
        raise _error(experiment, "workload.dst", f"the flow ends where it begins ({src})")
    try:
        refuse_local(lab_kind, f"flow {flow.flow}", [(endpoint(topology, src), endpoint(topology, dst))])
    except UsageError as error:
        raise _error(experiment, "workload.dst", str(error)) from error
    return replace(flow, src=src, dst=dst, pairs=((src, dst),))


def _check_ranked(experiment: Experiment, workload: _Ranked, lab: Fabric) -> None:
    """Check what a workload of ranks needs besides ranks that exist."""
    ranks = len(kind_of(workload).rank_names(workload))
    if isinstance(workload, Job):
        if ranks != (wanted := prod(size for _, size in workload.grid)):
            on = f"{len(workload.ranks)} RNICs with {workload.ranks_per_rnic} each"
            where = on if workload.ranks_per_rnic > 1 else f"{ranks} RNICs"
            raise _error(experiment, "workload.grid", f"has {wanted} ranks, but there are {where}")
        if workload.storage and workload.storage.host not in lab.topology.host_by_name:
            said = f'no host "{workload.storage.host}"; there is {", ".join(lab.topology.host_by_name)}'
            raise _error(experiment, "workload.storage.host", said)
    try:
        kind_of(workload).check(lab, workload)
    except UsageError as error:
        raise _error(experiment, "workload", str(error)) from error


def _fit_capture(experiment: Experiment, topology: Topology) -> tuple[str, ...]:
    """Full names of the ports, each once."""
    names = []
    for index, text in enumerate(experiment.capture):
        path = f"capture.ports[{index}]"
        for port in _selected(experiment, topology, path, text):
            try:
                names.append(port_named(topology, port)[0])
            except UsageError as error:
                raise _error(experiment, path, str(error)) from error
    return tuple(dict.fromkeys(names))


def _fit_faults(experiment: Experiment, topology: Topology) -> tuple[Fault, ...]:
    """The faults with the names of their targets; a selector of several targets is a list the seed chooses from."""
    faults = []
    end_ns = duration_ns(experiment.workload)
    for index, fault in enumerate(experiment.faults):
        path = f"faults[{index}]"
        targets: list[str] = []
        for choice, text in enumerate(fault.targets):
            where = f"{path}.target" if len(fault.targets) == 1 else f"{path}.target[{choice}]"
            for target in _selected(experiment, topology, where, text):
                try:
                    topology.resolve(target)
                except UsageError as error:
                    raise _error(experiment, where, str(error)) from error
                targets.append(target)
        parameters = {
            name: _selected_one(experiment, topology, f"{path}.set.{name}", value)
            if isinstance(value, str) and is_selector(value)
            else value
            for name, value in fault.parameters.items()
        }
        faults.append(replace(fault, targets=tuple(targets), parameters=parameters))
        last_ns = fault.at_latest_ns + fault.duration_ns
        if end_ns is not None and last_ns > end_ns:
            raise _error(
                experiment,
                path,
                f"may last until {last_ns / 1e9:g} s, but the workload ends at {end_ns / 1e9:g} s; "
                "begin the fault earlier or run longer",
            )
    return tuple(faults)


def _fit_expectations(experiment: Experiment, topology: Topology, lab_kind: LabKind) -> tuple[Expectation, ...]:
    """The expectations, with the name of the host where one is expected by a selector."""
    _check_expectations(experiment, topology, lab_kind)
    fitted = []
    for index, expectation in enumerate(experiment.expectations):
        expected = expectation.equals
        if isinstance(expected, str) and is_selector(expected):
            expected = _selected_one(experiment, topology, f"expect[{index}].equals", expected)
        fitted.append(replace(expectation, equals=expected))
    return tuple(fitted)


def _check_expectations(experiment: Experiment, topology: Topology, lab_kind: LabKind) -> None:
    first_ns = min((fault.at_earliest_ns for fault in experiment.faults), default=None)
    for index, expectation in enumerate(experiment.expectations):
        path = f"expect[{index}].metric"
        metric = expectation.metric
        if traits_of(lab_kind).is_emulated and metric.unit == "Gb/s":
            raise _error(
                experiment,
                path,
                f"{metric.name} is in Gb/s, and a soft lab's bounds are ratios within one run; "
                "bound jct_ratio or goodput_min_ratio",
            )
        if metric.name.startswith(tuple(LINK_PREFIXES)) and metric.name not in (known := names(topology)):
            raise _error(experiment, path, f'this lab has no metric "{metric.name}"; {hint(metric.name, known)}')
        if not metric.name.startswith(_NEEDS_BASELINE):
            continue
        if first_ns is None:
            raise _error(experiment, path, f"{metric.name} is about faults, and this experiment has none")
        if first_ns < MIN_BASELINE_NS:
            raise _error(
                experiment,
                path,
                f"{metric.name} compares with the run's own fault-free start, which needs "
                f"{MIN_BASELINE_NS / 1e9:g} s; the first fault may come at {first_ns / 1e9:g} s",
            )


def _fit_stops(experiment: Experiment) -> None:
    first_ns = min((fault.at_earliest_ns for fault in experiment.faults), default=0)
    work = experiment.workload
    computes = kind_of(work).computes(work)
    for index, condition in enumerate(experiment.stops):
        if condition.metric.name == "slow_ranks" and not computes:
            said = "slow_ranks compares compute phases, and this workload has none (compute_units)"
            raise _error(experiment, f"stop[{index}].metric", said)
        if condition.metric.name == "goodput_ratio" and first_ns < MIN_BASELINE_NS:
            raise _error(
                experiment,
                f"stop[{index}].metric",
                f"goodput_ratio compares with the run's own fault-free start, which needs {MIN_BASELINE_NS / 1e9:g} s; "
                f"the first fault may come at {first_ns / 1e9:g} s",
            )
