"""Exposure of a fault: whether it acted on something that the workload used. Pure.

A link or a switch is used by the queue pairs whose data or ACKs cross it, as the switches' kernels route them. A host,
an RNIC or a GPU is used by the ranks on it, and a host by the job whose storage it has. A spare is not used until a
rank moves to it.
"""

from __future__ import annotations

from faultbed.harness.record.evidence.fault_evidence import FaultRun
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.record.evidence.workload_evidence import Paths
from faultbed.inject.mechanisms import late_target
from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.selectors import candidates, choose, is_chosen_later
from faultbed.testbed.model.topology import Target, Topology

__all__ = ["why_not_exposed"]


def why_not_exposed(run: RunEvidence, fault: FaultRun) -> tuple[str, ...]:
    """Return why it is not shown that a fault acted where its plan says; empty if it is.

    A fault with `exposed = "none"` must act on nothing that the workload used. An unknown path counts against either.
    """
    if is_chosen_later(fault.plan.target) and (wrong := _why_not_chosen(run, fault)):
        return (wrong,)
    try:
        target = run.lab.topology.resolve(fault.target)
    except UsageError as error:
        return (f"it is unknown whether the workload used {fault.target}: {error}",)
    used = _is_used(run, target, fault.paths)
    if used is None:
        return (f"it is unknown whether the workload used {target.text}: the path of a queue pair was not read",)
    if fault.plan.exposed == "none":
        return (f'the workload used {target.text}, although the experiment says exposed = "none"',) if used else ()
    if used:
        return ()
    unused = f"the workload did not use {target.text}: no rank was there and no queue pair crossed it"
    return (f'{unused}; choose a target that it uses, or write exposed = "none" for a fault that must touch nothing',)


def _why_not_chosen(run: RunEvidence, fault: FaultRun) -> str | None:
    """Return why it is not shown that a fault acted on the target that its selector meant then; None if it is.

    The choice is made again, from the paths that were recorded when the fault was armed.
    """
    selector, paths = fault.plan.target, (fault.paths or {}).values()
    if fault.target == selector:
        return f"it is unknown what it should have acted on: no target was chosen for {selector}"
    try:
        names = candidates(run.lab.topology, selector)
        used = late_target.crossed(run.lab.topology, names, (path for of_pair in paths for path in of_pair))
        meant = choose(selector, used, seed=fault.plan.seed)
    except UsageError as error:
        return f"it is unknown whether the workload used {fault.target}: {error}"
    return None if meant == fault.target else f"it acted on {fault.target}, and {selector} was {meant} then"


def _is_used(run: RunEvidence, target: Target, paths: Paths | None) -> bool | None:
    """Return whether the workload used a target; None: some path is unknown, and no known one crosses it.

    `paths` are those of the moment when the fault was armed; None: those at the start of the workload count.
    """
    rnics = _rnics(run)
    if target.kind == "host":
        return target.node in {name.partition(":")[0] for name in rnics} | _storage_hosts(run)
    if target.gpu is not None:
        return f"{target.node}:{target.gpu.name}" in {_gpu(name, run) for name in rnics}
    if target.link is not None and target.link.rnic is not None:
        return f"{target.link.b.node}:{target.link.rnic}" in rnics
    found = [
        _crosses(path, (connection.src, connection.dst), target, run)
        for connection in run.workload.connections
        for path in ((connection.path, connection.ack_path) if paths is None else _at(paths, connection.index))
    ]
    if True in found:
        return True
    return None if None in found or not found else False


def _at(paths: Paths, index: int | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return paths.get(index, ((), ())) if index is not None else ((), ())


def _rnics(run: RunEvidence) -> set[str]:
    """Return the RNICs of all ranks: those at the start, and those to which ranks moved after a loss."""
    at_start = run.workload.planned.get("ranks") or ()
    return {f"{rank.host}:{rank.rnic}" for rank in run.workload.ranks} | {
        name for name in at_start if isinstance(name, str)
    }


def _gpu(rnic: str, run: RunEvidence) -> str:
    """Return the GPU of the rank at an RNIC: the one that the inventory assigns to it, or that of the workload."""
    host, _, name = rnic.partition(":")
    rnics = run.lab.topology.host_by_name[host].rnics if host in run.lab.topology.host_by_name else ()
    assigned = next((item.gpu for item in rnics if item.name == name), None)
    return f"{host}:{assigned or run.workload.planned.get('gpu') or 'gpu0'}"


def _storage_hosts(run: RunEvidence) -> set[str]:
    storage = run.workload.planned.get("storage") or {}
    return {host for host in (storage.get("host"),) if host}


def _crosses(path: tuple[str, ...], ends: tuple[str, str], target: Target, run: RunEvidence) -> bool | None:
    """Return whether packets of a path cross a link or a switch; None: unknown.

    Sprayed packets have no path of their own. They take every uplink of the rack switches at both ends in turn.
    """
    if not path:
        is_sprayed = run.routing is not None and run.routing.scheme == "spray"
        racks = {_rack_switch(end, run.lab.topology) for end in ends}
        is_near = target.link is not None and bool(racks & {target.link.a.node, target.link.b.node})
        return True if is_sprayed and is_near and len(racks) > 1 else None
    return target.node in path if target.link is None else run.lab.topology.crosses(path, target.link)


def _rack_switch(rnic: str, topology: Topology) -> str:
    host, _, name = rnic.partition(":")
    return topology.rnic_link(host, name).a.node
