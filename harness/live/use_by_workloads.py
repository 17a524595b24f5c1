"""What the workloads of this process use at a moment, for the exposure of faults."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

from faultbed.inject.evidence.exposure import default_gpu
from faultbed.inject.evidence.workload_use import WorkloadUse
from faultbed.testbed.errors import LabError
from faultbed.testbed.lab import Lab
from faultbed.testbed.model.topology import Topology
from faultbed.traffic.engine.run_results import Connection
from faultbed.traffic.engine.running_traffic import Running
from faultbed.traffic.engine.task_specs import TaskPlan
from faultbed.traffic.probes.ecmp_entropy import data_and_ack_paths

__all__ = ["use_of"]


def use_of(lab: Lab, workloads: Iterable[Running[Any]]) -> WorkloadUse | None:
    """Return what workloads use now; None: there is none.

    A workload that is over uses nothing, and neither does a rank that has finished its work.
    """
    started = list(workloads)
    if not started:
        return None
    running = [workload for workload in started if not workload.is_over]
    at_work = [task for workload in running for task in _at_work(workload)]
    connections = [connection for workload in running for connection in _carrying(workload)]
    by_pair: dict[str, set[tuple[str, ...]]] = {}
    without: list[Connection] = []
    why: str | None = None
    # One workload after the other, because their connections have the same indexes.
    for workload in running:
        carrying = _carrying(workload)
        try:
            by_index = data_and_ack_paths(lab, carrying)
        except LabError as error:
            by_index, why = {}, f"a switch did not say by which port it forwards: {error}"
        for connection in carrying:
            both = by_index.get(connection.index, ((), ()))
            for pair, path in zip(
                ((connection.src, connection.dst), (connection.dst, connection.src)), both, strict=True
            ):
                if path:
                    by_pair.setdefault(">".join(pair), set()).add(path)
            if not all(both):
                without.append(connection)
    rnics = {task.endpoint.name for task in at_work} | {end for one in connections for end in (one.src, one.dst)}
    is_sprayed = lab.scheme is not None and lab.scheme.scheme.is_per_packet
    if without and not is_sprayed:
        why = why or f"the path from {without[0].src} to {without[0].dst} was not read"
    paths = tuple(sorted({path for of_pair in by_pair.values() for path in of_pair}))
    return WorkloadUse(
        at_ns=time.monotonic_ns(),
        rnics=tuple(sorted(rnics)),
        gpus=tuple(sorted({_gpu(task, lab.topology) for task in at_work})),
        hosts=tuple(sorted({host for task in at_work for host in _storage_hosts(task.spec, lab.topology)})),
        paths=paths,
        by_pair={pair: tuple(sorted(paths.index(path) for path in of_it)) for pair, of_it in sorted(by_pair.items())},
        sprayed=tuple(sorted({(one.src, one.dst) for one in without})) if is_sprayed else (),
        unknown_paths=why,
    )


def _at_work(workload: Running[Any]) -> list[TaskPlan]:
    """Return the tasks that have not finished. A task that only serves others works as long as one of them does."""
    done = set(workload.done)
    return [task for task in workload.plan.tasks if task.name not in done and (task.stops_after or "") not in done]


def _carrying(workload: Running[Any]) -> list[Connection]:
    """Return the connections whose sender has not finished."""
    sender = {connection.index: connection.src for connection in workload.plan.connections}
    return [one for one in workload.connections if sender.get(one.index) not in workload.done]


def _gpu(task: TaskPlan, topology: Topology) -> str:
    """Return the GPU of a task: the one that it computes on, or that of the inventory."""
    gpu: Mapping[str, Any] = task.spec.get("gpu") or {}
    host = topology.host_by_name.get(task.endpoint.host)
    by_place = {one.pcie: one.name for one in host.gpus if one.pcie} if host is not None else {}
    name = PurePath(gpu["socket"]).stem if "socket" in gpu else by_place.get(gpu.get("pcie", ""))
    return f"{task.endpoint.host}:{name}" if name else default_gpu(task.endpoint.name, topology)


def _storage_hosts(spec: Mapping[str, Any], topology: Topology) -> Iterator[str]:
    """Yield the host of a task's storage, which its client knows by the address."""
    address = (spec.get("storage") or {}).get("address")
    yield from (host.name for host in topology.hosts if address is not None and host.front_end_ip == address)
