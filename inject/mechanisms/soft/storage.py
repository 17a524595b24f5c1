"""Faults of storage: slow, stalled, or loaded by another job. Front end and TCP only; no RDMA is involved."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from faultbed.inject.mechanisms.mechanism import (
    Mechanism,
    Request,
    Step,
    Witness,
    holder_request,
    on_host,
    rnic_counters,
)
from faultbed.inject.mechanisms.soft.processes import limited, stopped
from faultbed.inject.node.machine.limit import STORAGE_CGROUP

__all__ = ["BY_KIND", "SERVER"]

# The process that serves a job's storage on a host, by an argument of its command line.
SERVER = "faultbed.traffic.node.storage"


def _slow(request: Request) -> Mechanism:
    return limited(request, SERVER, STORAGE_CGROUP, request.spec.params["percent"])


def _stall(request: Request) -> Mechanism:
    return stopped(request, SERVER)


def _burst(request: Request) -> Mechanism:
    host, writers, size_mib = request.target.node, request.spec.params["writers"], request.spec.params["size"]
    args = {
        "argument": SERVER,
        "writers": writers,
        "size_bytes": size_mib << 20,
        "period_s": request.spec.params["period"],
    }
    return Mechanism(
        place=on_host(request),
        request=holder_request(request, "burst", args, claims=f"{host}/{SERVER}/burst"),
        steps=(
            Step(
                do=f"# {writers} writers, {size_mib} MiB each to {SERVER}, every {request.spec.params['period']:g} s",
                undo="kill %1   # they also end with the holder",
            ),
        ),
        must_move=(Witness(any_of=(f"{host}/tcp.PassiveOpens",), at_least=writers),),
        must_not_move=rnic_counters(request.topology, "send_err"),
        shows={"what": SERVER},
        of_workload=True,
    )


BY_KIND: Mapping[str, Callable[[Request], Mechanism]] = {
    "storage.slow": _slow,
    "storage.stall": _stall,
    "storage.burst": _burst,
}
