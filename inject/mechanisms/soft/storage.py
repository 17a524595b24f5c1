"""Faults of storage: it answers slowly, not at all, or others too. Front end and TCP only; no RDMA goes there."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from inject.mechanisms.mechanism import Request, Shot, Step, Witness, held, on_host, rnic_counters
from inject.mechanisms.soft.processes import limited, stopped
from inject.node.machine.limit import STORAGE_CGROUP

__all__ = ["BY_KIND", "SERVER"]

# What serves a job's storage on a host, by an argument of its command line.
SERVER = "traffic.node.storage"


def _slow(asked: Request) -> Shot:
    return limited(asked, SERVER, STORAGE_CGROUP, asked.params["percent"])


def _stall(asked: Request) -> Shot:
    return stopped(asked, SERVER)


def _burst(asked: Request) -> Shot:
    host, writers, size_mib = asked.target.node, asked.params["writers"], asked.params["size"]
    args = {
        "argument": SERVER,
        "writers": writers,
        "size_bytes": size_mib << 20,
        "period_s": asked.params["period"],
    }
    return Shot(
        place=on_host(asked),
        request=held(asked, "burst", args, claims=f"{host}/{SERVER}/burst"),
        steps=(
            Step(
                do=f"# {writers} writers, {size_mib} MiB each to {SERVER}, together every {asked.params['period']:g} s",
                undo="kill %1   # they also end with the holder",
            ),
        ),
        must_move=(Witness(any_of=(f"{host}/tcp.PassiveOpens",), at_least=writers),),
        must_not_move=rnic_counters(asked.topology, "send_err"),
        shows={"what": SERVER},
        of_workload=True,
    )


BY_KIND: Mapping[str, Callable[[Request], Shot]] = {
    "storage.slow": _slow,
    "storage.stall": _stall,
    "storage.burst": _burst,
}
