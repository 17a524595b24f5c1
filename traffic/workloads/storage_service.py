"""Storage of a job: a host serves data and stores checkpoints over the front end, by TCP (`traffic.node.storage`).

The server lives as long as its channel, so it also ends when the controller is gone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from testbed.errors import LabError, UsageError
from testbed.model.selectors import select_one
from testbed.remote.remote_node import Channel
from traffic.engine import traffic_metrics
from traffic.engine.engine_client import START_TIMEOUT_S, TrafficLab
from traffic.engine.run_results import Checkpoint, Iteration

__all__ = ["MODES", "MODULE", "Storage", "StorageServer", "StorageTimes", "check", "serve", "times_of"]

MODULE = "traffic.node.storage"
MODES = ("sync", "staggered", "async")


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Storage on `host`: each rank prefetches `ingest_bytes` per iteration and stores `checkpoint_bytes` periodically.

    A checkpoint is due every `every` iterations, in one of `MODES` (`traffic.node.ranks.feed`). A size of 0 disables
    that part.
    """

    host: str
    ingest_bytes: int = 0
    checkpoint_bytes: int = 0
    every: int = 10
    mode: str = "sync"


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageTimes:
    """Storage times of a job over all ranks: waits for data, waits for checkpoints, and times to store them."""

    ingest_wait_p50_ns: float
    ingest_wait_p99_ns: float
    checkpoints: int
    checkpoint_wait_p50_ns: float
    checkpoint_wait_max_ns: float
    stored_p50_ns: float
    stored_max_ns: float


def check(storage: Storage) -> None:
    """Reject a spec that is invalid on every lab.

    Raises:
        UsageError: a value is invalid; the message names it.
    """
    if storage.mode not in MODES:
        raise UsageError(f'no checkpoint mode "{storage.mode}"; there is {", ".join(MODES)}')
    if min(storage.ingest_bytes, storage.checkpoint_bytes) < 0 or storage.every < 1:
        raise UsageError(
            "sizes of data and checkpoints must be at least 0, and a checkpoint interval at least 1 iteration"
        )
    if not storage.ingest_bytes and not storage.checkpoint_bytes:
        raise UsageError(f"storage on {storage.host} is not used; give a size for ingest or for checkpoints")


class StorageServer:
    """A running storage server. `close` stops it and may be called twice."""

    def __init__(self, channel: Channel, address: str, port: int) -> None:
        self._channel = channel
        self.address, self.port = address, port

    def close(self) -> None:
        """Stop the server."""
        self._channel.close()

    def client_spec(self, storage: Storage, ranks: int) -> dict[str, Any]:
        """Return the configuration of a rank's storage client."""
        return {**asdict(storage), "address": self.address, "port": self.port, "ranks": ranks}


def serve(lab: TrafficLab, host: str) -> StorageServer:
    """Start the storage server on a host.

    Raises:
        UsageError: there is no such host.
        LabError: the server does not start.
    """
    host = select_one(lab.topology, host)
    server = lab.topology.host_by_name.get(host)
    if server is None:
        raise UsageError(f'storage on "{host}": there is no such host; there is {", ".join(lab.topology.host_by_name)}')
    address = server.front_end_address.split("/")[0]
    lab.ensure_code(host)
    channel = lab.node(host).open([*lab.python(MODULE), address])
    with contextlib.ExitStack() as undo:
        undo.callback(channel.close)
        reply = channel.receive(timeout_s=START_TIMEOUT_S)
        if reply is None:
            raise LabError(f"{host}: storage on {address} ended at once")
        undo.pop_all()
    return StorageServer(channel, address, reply["port"])


def times_of(iterations: Sequence[Sequence[Iteration]], checkpoints: Sequence[Checkpoint]) -> StorageTimes:
    """Summarise the storage waits of all ranks' iterations, and all checkpoints."""
    waits = [item.ingest_ns for rank in iterations for item in rank] or [0]
    blocked = [item.waited_ns for item in checkpoints] or [0]
    stored = [item.end_ns - item.start_ns for item in checkpoints] or [0]
    return StorageTimes(
        ingest_wait_p50_ns=traffic_metrics.percentile(waits, 50),
        ingest_wait_p99_ns=traffic_metrics.percentile(waits, 99),
        checkpoints=len(checkpoints),
        checkpoint_wait_p50_ns=traffic_metrics.percentile(blocked, 50),
        checkpoint_wait_max_ns=max(blocked),
        stored_p50_ns=traffic_metrics.percentile(stored, 50),
        stored_max_ns=max(stored),
    )
