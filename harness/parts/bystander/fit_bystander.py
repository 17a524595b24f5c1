"""Check that the bystander of an experiment is outside the workload and the faults, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from faultbed.harness.experiment.declare.lab_names import LabNames
from faultbed.harness.experiment.experiment_file import Experiment
from faultbed.inject.mechanisms.planned_fault import PlannedFault
from faultbed.inject.policy.conflicts import touches
from faultbed.testbed.errors import ConfigError
from faultbed.testbed.model.topology import Topology
from faultbed.traffic.engine.engine_client import endpoint
from faultbed.traffic.engine.task_specs import refuse_local
from faultbed.traffic.flows.flow_run import check_on

__all__ = ["fit_bystander", "refuse_faults_on_bystander"]


def fit_bystander(names: LabNames, experiment: Experiment, endpoints: Sequence[str]) -> Experiment:
    """Return the experiment with the RNICs of its bystander by name; `endpoints` are the RNICs of the workload.

    Raises:
        ConfigError: `src` or `dst` is no RNIC of the lab, or an RNIC that the workload uses.
    """
    flow = experiment.bystander
    if flow is None:
        return experiment
    ends = {end: names.select_one(f"bystander.{end}", getattr(flow, end)) for end in ("src", "dst")}
    for end, name in ends.items():
        names.check_rnic(f"bystander.{end}", name)
        if name in endpoints:
            free = [other for other in names.topology.rnic_names if other not in endpoints]
            remedy = f"choose one of {', '.join(free)}" if free else "give the workload fewer ranks"
            raise names.error(f"bystander.{end}", f"{name} is already used by the workload; {remedy}")
    if ends["src"] == ends["dst"]:
        raise names.error("bystander.dst", f"src and dst are the same RNIC ({ends['dst']}); choose two")
    with names.at("bystander.qp"):
        check_on(names.lab.kind, transport=flow.transport, qp=flow.qp, entropy=flow.entropy)
    with names.at("bystander.dst"):
        pair = (endpoint(names.topology, ends["src"]), endpoint(names.topology, ends["dst"]))
        refuse_local(names.lab.kind, f"flow {flow.verb}", [pair])
    return replace(experiment, bystander=replace(flow, src=ends["src"], dst=ends["dst"]))


def refuse_faults_on_bystander(
    experiment: Experiment, faults: Sequence[PlannedFault], places: Mapping[str, str], topology: Topology
) -> None:
    """Refuse a fault of a host, an RNIC or an access link of the bystander.

    `places` maps the name of each fault to its path in the file, such as `faults[0]`.

    Raises:
        ConfigError: a fault hits the bystander directly; its goodput would then say nothing of isolation.
    """
    flow = experiment.bystander
    if flow is None:
        return
    ends = [endpoint(topology, name) for name in (flow.src, flow.dst)]
    links = {topology.rnic_link(end.host, end.rnic).name for end in ends}
    used = links | {end.host for end in ends} | {end.name for end in ends}
    for fault in faults:
        targets = [option.target for option in fault.options]
        affected = set(touches(fault, topology)) | {target.link.name for target in targets if target.link}
        if shared := sorted(used & affected):
            problem = f"{fault.kind} on {fault.target.text} affects {shared[0]}, which the bystander uses; move one"
            raise ConfigError(f"{experiment.at(places[fault.spec.id])}: {problem}")
