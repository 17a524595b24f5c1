"""Faults of storage: it answers slowly, or not at all. Front end and TCP only; no RDMA goes there."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from inject.aim.processes import limited, stopped
from inject.aim.shot import Request, Shot
from inject.node.limit import STORAGE_CGROUP

__all__ = ["BY_KIND", "SERVER"]

# What serves a job's storage on a host, by an argument of its command line.
SERVER = "traffic.node.storage"


def _slow(asked: Request) -> Shot:
    return limited(asked, SERVER, STORAGE_CGROUP, asked.params["percent"])


def _stall(asked: Request) -> Shot:
    return stopped(asked, SERVER)


BY_KIND: Mapping[str, Callable[[Request], Shot]] = {"storage.slow": _slow, "storage.stall": _stall}
