"""Check an experiment against a lab: whether its names exist there, and whether its bounds make sense.

Two different answers: `needs.unmet` says that this lab is too small (as a test the experiment is skipped, with that
reason); `fit` says that the file is wrong for it (the run is refused, with the path inside the file).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from faultbed.harness.analysis.links import link_metrics
from faultbed.harness.analysis.timeline import MIN_BASELINE_NS
from faultbed.harness.experiment.declare.lab_names import LabNames
from faultbed.harness.experiment.experiment_file import Expectation, Experiment, Fault
from faultbed.harness.experiment.metrics import LINK_PREFIXES, needs_baseline
from faultbed.harness.experiment.workload_file import Workload, duration_ns
from faultbed.harness.parts.registry import PARTS
from faultbed.harness.run.workload_kinds import kind_of
from faultbed.inject.kinds.catalogue import CATALOGUE
from faultbed.inject.mechanisms.planned_fault import PlannedFault
from faultbed.testbed.errors import ConfigError, UsageError
from faultbed.testbed.model.lab_kind import LabKind, traits_of
from faultbed.testbed.model.path_selector import ends_in, text_of
from faultbed.testbed.model.selectors import candidates, is_chosen_later, is_selector, select_one
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.suggestions import hint
from faultbed.traffic.engine.engine_client import FabricModel

__all__ = ["fit", "hosts_of", "refuse_absent"]

_NO_HOST = "none"
"""Value of a metric that names a host, if no host stands out."""


def fit(experiment: Experiment, topology: Topology, lab_kind: LabKind) -> Experiment:
    """Check every name and bound of `experiment` against a lab, resolve selectors, and fill in the default ranks.

    Raises:
        ConfigError: an unknown target, rank or host, a fault that outlasts the workload or leaves no fault-free start
            to compare with, or a bound in Gb/s on a soft lab.
        Unsupported: a routing scheme that the lab's switches cannot do.
    """
    names = LabNames(source=experiment.source, text=experiment.text, lab=FabricModel(kind=lab_kind, topology=topology))
    workload = kind_of(experiment.workload).fit(names, experiment.workload)
    faults = _fit_faults(experiment, names, kind_of(workload).roles(workload))
    expectations = _fit_expectations(experiment, names)
    _fit_stops(experiment, names)
    endpoints = kind_of(workload).endpoints(workload)
    bound = experiment
    for part in PARTS:
        bound = part.bind(names, bound, endpoints)
    return replace(bound, workload=workload, faults=faults, expectations=expectations)


def hosts_of(workload: Workload) -> tuple[str, ...]:
    """Return the hosts whose RNICs a fitted workload uses, or may use after a restart."""
    return tuple(dict.fromkeys(name.partition(":")[0] for name in kind_of(workload).endpoints(workload)))


def refuse_absent(experiment: Experiment, faults: Sequence[PlannedFault], places: Mapping[str, str]) -> None:
    """Reject a fault of a rank or of the storage on a host where the fitted workload has none.

    `places` maps the name of each fault to its path in the file, such as `faults[0]`.

    Raises:
        ConfigError: such a fault could not be armed.
    """
    workload = experiment.workload
    for fault in faults:
        if not fault.mechanism.of_workload:
            continue
        if not fault.kind.startswith("storage."):
            hosts, missing = hosts_of(workload), "no rank"
        else:
            host = kind_of(workload).storage_host(workload)
            hosts, missing = (host,) if host else (), "no storage ([workload.storage])"
        if fault.target.node not in hosts:
            placement = f"; choose one of {', '.join(hosts)}" if hosts else ""
            problem = f"{fault.kind} on {fault.target.text}: the workload has {missing} there{placement}"
            raise ConfigError(f"{experiment.at(places[fault.spec.id])}: {problem}")


def _fit_faults(experiment: Experiment, names: LabNames, roles: Mapping[str, str]) -> tuple[Fault, ...]:
    """Return the faults with the names of their targets. The seed chooses one if a selector matches several."""
    faults = []
    end_ns = duration_ns(experiment.workload)
    for index, fault in enumerate(experiment.faults):
        path = f"faults[{index}]"
        targets: list[str] = []
        for choice, text in enumerate(fault.targets):
            place = f"{path}.target" if len(fault.targets) == 1 else f"{path}.target[{choice}]"
            if is_chosen_later(text):
                with names.at(place):
                    chosen_later = _with_rnics(text, roles, names.topology)
                    candidates(names.topology, chosen_later)
                targets.append(chosen_later)
                continue
            for target in names.select(place, text):
                with names.at(place):
                    names.topology.resolve(target)
                targets.append(target)
        kind = CATALOGUE.get(fault.kind)  # the plan of the fault refuses an unknown one
        rnics = {param.name for param in kind.params if param.type == "rnic"} if kind is not None else set()
        parameters = {
            name: names.select_one(f"{path}.set.{name}", value)
            if name in rnics and isinstance(value, str) and is_selector(value)
            else value
            for name, value in fault.parameters.items()
        }
        faults.append(replace(fault, targets=tuple(targets), parameters=parameters))
        last_ns = fault.at[-1] + fault.duration_ns
        if end_ns is not None and last_ns > end_ns:
            raise names.error(
                path,
                f"may last until {last_ns / 1e9:g} s, but the workload ends at {end_ns / 1e9:g} s; "
                "begin the fault earlier or run longer",
            )
    return tuple(faults)


def _with_rnics(text: str, roles: Mapping[str, str], topology: Topology) -> str:
    """Return a selector that is chosen later with the RNICs of roles: `path[client>server]` names two of them.

    Raises:
        UsageError: an end of a path is neither a role nor something on the lab.
    """
    ends = ends_in(text)
    if ends is None:
        return text
    for end in ends:
        if end not in roles and not is_selector(end) and ":" not in end:
            known = hint(end, tuple(roles)) if roles else "its workload has none; name RNICs, such as host1:rxe0"
            raise UsageError(f'"{text}": no role "{end}"; {known}')
    src, dst = (select_one(topology, roles.get(end, end)) for end in ends)
    return text_of((src, dst))


def _fit_expectations(experiment: Experiment, names: LabNames) -> tuple[Expectation, ...]:
    """Return the expectations with host names in place of selectors. The lab must have each host."""
    _check_expectations(experiment, names)
    fitted = []
    for index, expectation in enumerate(experiment.expectations):
        expected, path = expectation.equals, f"expect[{index}].equals"
        if isinstance(expected, str) and is_selector(expected):
            expected = names.select_one(path, expected)
        known = (*names.topology.host_by_name, _NO_HOST)
        if expectation.metric.unit == "host" and expected not in known:
            raise names.error(path, f'no host "{expected}" in this lab; {hint(str(expected), known)}')
        fitted.append(replace(expectation, equals=expected))
    return tuple(fitted)


def _check_expectations(experiment: Experiment, names: LabNames) -> None:
    first_ns = min((fault.at[0] for fault in experiment.faults), default=None)
    for index, expectation in enumerate(experiment.expectations):
        path = f"expect[{index}].metric"
        metric = expectation.metric
        if traits_of(names.lab.kind).is_emulated and metric.unit == "Gb/s":
            raise names.error(
                path,
                f"{metric.name} is in Gb/s, and a soft lab's bounds are ratios within one run; "
                "bound jct_ratio or goodput_min_ratio",
            )
        known = link_metrics.names(names.topology)
        if metric.name.startswith(tuple(LINK_PREFIXES)) and metric.name not in known:
            raise names.error(path, f'this lab has no metric "{metric.name}"; {hint(metric.name, known)}')
        if not needs_baseline(metric.name):
            continue
        if first_ns is None:
            raise names.error(
                path,
                f"{metric.name} is about faults, and this experiment has none; bound goodput.lowest (of any run), or "
                "add [[faults]]",
            )
        _refuse_short_start(names, path, metric.name, first_ns)


def _fit_stops(experiment: Experiment, names: LabNames) -> None:
    first_ns = min((fault.at[0] for fault in experiment.faults), default=0)
    last_ns = max((fault.at[-1] + fault.duration_ns for fault in experiment.faults), default=0)
    work = experiment.workload
    computes = kind_of(work).computes(work)
    for index, condition in enumerate(experiment.stops):
        # Goodput is compared with that before the first fault.
        begin_ns = first_ns if condition.metric.name == "goodput_ratio" else 0
        if condition.for_ns > last_ns - begin_ns:
            problem = (
                f"{condition.metric.name} would have to hold for {condition.for_ns / 1e9:g} s, but it is evaluated for "
                f"{(last_ns - begin_ns) / 1e9:g} s, until the last fault is over: it could never stop the run"
            )
            raise names.error(f"stop[{index}].for", problem)
        if condition.metric.name == "slow_ranks" and not computes:
            problem = "slow_ranks compares compute phases, and this workload has none (compute_units)"
            raise names.error(f"stop[{index}].metric", problem)
        if condition.metric.name == "goodput_ratio":
            _refuse_short_start(names, f"stop[{index}].metric", "goodput_ratio", first_ns)


def _refuse_short_start(names: LabNames, path: str, metric: str, first_ns: int) -> None:
    if first_ns < MIN_BASELINE_NS:
        raise names.error(
            path,
            f"{metric} compares with the run's own fault-free start, which needs {MIN_BASELINE_NS / 1e9:g} s; "
            f"the first fault may come at {first_ns / 1e9:g} s",
        )
