"""Resolve an experiment against a lab: ranks, fault targets and what to reserve. Nothing on the lab changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

import faultbed
from faultbed.harness.experiment import run_plan as plan_module
from faultbed.harness.experiment.experiment_file import FAULT_KEYS, Experiment
from faultbed.harness.experiment.needs import unmet
from faultbed.harness.experiment.run_plan import Plan
from faultbed.harness.ledger.sealed import Phase
from faultbed.harness.parts.part import Fitting, Sending, planned_by
from faultbed.harness.parts.registry import PARTS
from faultbed.harness.run.prepare.bind_to_lab import fit, hosts_of, refuse_absent
from faultbed.harness.run.workload_kinds import kind_of
from faultbed.harness.verdict import ExcludedHost
from faultbed.inject import fault_plan
from faultbed.inject.mechanisms.planned_fault import PlannedFault
from faultbed.inject.policy import blast_radius, safety
from faultbed.inject.policy.conflicts import touches
from faultbed.testbed.errors import Unsupported, UsageError
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.inventory.subset import without_hosts
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.testbed.model.topology import Topology

__all__ = ["ResolvedRun", "passes_before", "refusal", "resolve", "touched"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRun:
    """An experiment that is resolved against a lab: ranks and fault targets are chosen, and nothing is changed yet.

    `hosts` are the lab's hosts without those in `left_out`, which take no part in the run.
    """

    experiment: Experiment
    source: bytes
    plan: Plan
    faults: tuple[PlannedFault, ...]
    hosts: tuple[str, ...]
    left_out: tuple[ExcludedHost, ...] = ()


def resolve(
    experiment: Experiment,
    source: bytes,
    inventory: Inventory,
    *,
    seed: int | None = None,
    left_out: Sequence[ExcludedHost] = (),
) -> ResolvedRun:
    """Plan a run on the hosts that are not `left_out`. Nothing on the lab changes.

    Raises:
        ConfigError: the experiment does not fit the lab.
        UsageError: a fault that does not exist or does not fit its target.
        Unsupported: the lab is too small, or has no mechanism for a fault.
    """
    inventory = without_hosts(inventory, [exclusion.host for exclusion in left_out])
    if experiment.lab_kind not in (None, inventory.kind):
        labs = f"for a {experiment.lab_kind} lab, but {inventory.name} is a {inventory.kind} lab"
        raise Unsupported(f"{experiment.at('lab.kind')}: it is {labs}")
    lacking = unmet(experiment.needs, inventory.topology)
    if lacking:
        raise Unsupported(f"{experiment.at('lab.needs')}: {inventory.name} is not enough for it: {'; '.join(lacking)}")
    fitted = fit(experiment, inventory.topology, inventory.kind)
    planned = plan_module.plan(fitted, seed=seed, inventory_digest=inventory.digest, version=faultbed.__version__)
    planned = msgspec.structs.replace(planned, parts=_decided_by_parts(fitted, inventory) or msgspec.UNSET)
    faults = _planned(fitted, planned, inventory)
    if not traits_of(inventory.kind).has_snapshot:
        inventory = _of_the_run(fitted, faults, inventory)
        faults = _planned(fitted, planned, inventory)
    hosts = tuple(host.name for host in inventory.topology.hosts)
    return ResolvedRun(
        experiment=fitted, source=source, plan=planned, faults=faults, hosts=hosts, left_out=tuple(left_out)
    )


def passes_before(plan: Plan) -> dict[Phase, str]:
    """Return the passes that a run has before the measured one, each with its progress line."""
    before = planned_by(plan)
    return {phase: line for part in PARTS for phase, line in part.passes(before).items()}


def _decided_by_parts(fitted: Experiment, inventory: Inventory) -> dict[str, Any]:
    """Return what parts decide about an experiment on a lab, as it is read again from `plan.json`."""
    sources, sinks, paced_bps = kind_of(fitted.workload).senders_and_receivers(fitted.workload)
    beside = [sending for part in PARTS if (sending := part.sends(fitted)) is not None]
    workload = Sending(sources=tuple(sources), sinks=tuple(sinks), paced_bps=paced_bps)
    fitting = Fitting(experiment=fitted, inventory=inventory, sending=(workload, *beside))
    decided = {part.name: part.fit(fitting) for part in PARTS}
    return {name: msgspec.to_builtins(one) for name, one in decided.items() if one is not None}


def _of_the_run(experiment: Experiment, faults: Sequence[PlannedFault], inventory: Inventory) -> Inventory:
    """Return the lab restricted to the hosts that this run reserves.

    Another user may work on the other hosts. Their counters would be evidence of that user's faults, and a reboot
    there would end a run that does not use the host.
    """
    topology = inventory.topology
    names = set(_touched(experiment, faults, topology, tuple(topology.host_by_name)))
    ours = names | {link.b.node for link in topology.links if link.name in names}
    return without_hosts(inventory, [name for name in topology.host_by_name if name not in ours])


def _planned(experiment: Experiment, planned: Plan, inventory: Inventory) -> tuple[PlannedFault, ...]:
    """Return a plan's faults with their targets resolved. An error names the fault's place in the experiment file."""
    # A plan has its faults in the order of their times; a person looks for them in the order of the file.
    places = {fault.id: f"faults[{index}]" for index, fault in enumerate(experiment.faults)}
    names = [places[fault.id] for fault in planned.faults]
    try:
        faults = fault_plan.plan_all(planned.faults, inventory.topology, lab_kind=inventory.kind, names=names)
    except (UsageError, Unsupported) as error:
        path, _, sentence = str(error).partition(": ")
        if not path.startswith(tuple(names)):
            raise type(error)(f"{experiment.source}: {error}") from error
        raise type(error)(f"{experiment.at(_in_file(path))}: {sentence}") from error
    refuse_absent(experiment, faults, places)
    for part in PARTS:
        part.refuse_faults(experiment, faults, places, inventory.topology)
    return faults


def _in_file(path: str) -> str:
    """Return the path in the file of what the planner names: it leaves out `set` of a parameter's path."""
    fault, _, key = path.partition(".")
    return f"{fault}.set.{key}" if key and key not in FAULT_KEYS else path


def touched(resolved: ResolvedRun, topology: Topology) -> tuple[str, ...]:
    """Return the hosts of the workload and of parts, and the targets of the faults: what a run on a rack lab reserves.

    A run on a soft lab reserves the whole lab, because it restores the snapshot.
    """
    return _touched(resolved.experiment, resolved.faults, topology, resolved.hosts)


def _touched(
    experiment: Experiment, faults: Sequence[PlannedFault], topology: Topology, hosts: tuple[str, ...]
) -> tuple[str, ...]:
    beside = [sending for part in PARTS if (sending := part.sends(experiment)) is not None]
    return (
        *(host for part in PARTS for host in part.uses(experiment, hosts)),
        *(rnic.partition(":")[0] for sending in beside for rnic in (*sending.sources, *sending.sinks)),
        *hosts_of(experiment.workload),
        *(name for fault in faults for name in touches(fault, topology)),
    )


def refusal(resolved: ResolvedRun, inventory: Inventory) -> safety.Forbidden | None:
    """Return why the lab's policy forbids the faults of a run; None: it allows them."""
    try:
        for fault in resolved.faults:
            safety.check(fault, inventory)
        blast_radius.check(resolved.faults, inventory)
        safety.check_spacing(resolved.faults, inventory)
    except safety.Forbidden as reason:
        return reason
    return None
