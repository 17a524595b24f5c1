"""Storage of a job: a host serves data and stores checkpoints over the front end, by TCP (`traffic/node/storage.py`).

The server exits when its channel closes, also because the controller is gone. It then removes the job's checkpoints.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from faultbed.testbed.errors import LabError, UsageError
from faultbed.testbed.model.selectors import select_one
from faultbed.testbed.remote.remote_node import Channel
from faultbed.traffic.engine import traffic_metrics
from faultbed.traffic.engine.engine_client import START_TIMEOUT_S, TrafficLab
from faultbed.traffic.engine.run_results import Checkpoint, Iteration

__all__ = [
    "FOLDER",
    "LEAST_KEPT",
    "MODES",
    "MODULE",
    "CheckpointSet",
    "Storage",
    "StorageServer",
    "StorageTimes",
    "check",
    "newest_timeout_s",
    "serve",
    "times_of",
]

MODULE = "faultbed.traffic.node.storage"
FOLDER = "/var/tmp/faultbed-checkpoints"  # noqa: S108  # on the storage host; each job has its own folder in it
LEAST_KEPT = 2
"""Minimum number of complete sets to keep: the previous set must stay complete while the next one is written."""
PING_TIMEOUT_S = 15.0
"""Timeout of a ping; an emulated host may stall for seconds."""
NEWEST_TIMEOUT_S = 30.0
VERIFIED_BYTES_PER_S = 5_000_000
"""Lowest rate at which an emulated host reads and verifies checkpoints."""
MODES = ("sync", "staggered", "async")
LEAST_READ_EVERY_NS = 10_000_000
"""Minimum interval between the reads of a reader. With a shorter one, it would measure its own delays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Storage on `host`: each rank prefetches `ingest_bytes` per iteration and stores `checkpoint_bytes` periodically.

    A checkpoint is due every `every` iterations, in one of `MODES` (`faultbed.traffic.node.ranks.feed`). The newest
    `keep` complete sets are kept; a set is complete when all ranks have stored theirs. A size of 0 disables that part.

    Each of the hosts `readers` reads `ingest_bytes` beside the job, every `read_every_ns`, as another user of the
    storage does (`faultbed.traffic.workloads.storage_readers`).
    """

    host: str
    ingest_bytes: int = 0
    checkpoint_bytes: int = 0
    every: int = 10
    mode: str = "sync"
    keep: int = 3
    readers: tuple[str, ...] = ()
    read_every_ns: int = 250_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSet:
    """The newest complete and intact set of checkpoints: all `ranks` of a `generation`, after `iterations` iterations.

    All three are None if there is no such set. `rejected` has (name, reason) of each newer checkpoint that is not used.
    """

    iterations: int | None
    generation: int | None
    ranks: int | None
    rejected: tuple[tuple[str, str], ...]


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
        raise UsageError(f'no checkpoint mode "{storage.mode}"; choose one of {", ".join(MODES)}')
    if min(storage.ingest_bytes, storage.checkpoint_bytes) < 0 or storage.every < 1:
        raise UsageError(
            "sizes of data and checkpoints must be at least 0, and a checkpoint interval at least 1 iteration"
        )
    if storage.keep < LEAST_KEPT:
        raise UsageError(f"at least {LEAST_KEPT} complete sets of checkpoints must be kept, got {storage.keep}")
    if not storage.ingest_bytes and not storage.checkpoint_bytes:
        raise UsageError(f"storage on {storage.host} is not used; give a size for ingest or for checkpoints")
    if storage.readers and not storage.ingest_bytes:
        raise UsageError(f"the readers {', '.join(storage.readers)} have nothing to read; give a size for ingest")
    if storage.read_every_ns < LEAST_READ_EVERY_NS:
        least_ms, every_ms = LEAST_READ_EVERY_NS / 1e6, storage.read_every_ns / 1e6
        raise UsageError(f"a reader reads at most once every {least_ms:g} ms, got {every_ms:g} ms")


def newest_timeout_s(storage: Storage, ranks: int) -> float:
    """Return a timeout for finding the newest intact set. In the worst case the server reads every checkpoint.

    A rank that is ahead may have stored one checkpoint more than `keep`.
    """
    return NEWEST_TIMEOUT_S + (storage.keep + 1) * ranks * storage.checkpoint_bytes / VERIFIED_BYTES_PER_S


class StorageServer:
    """A running storage server. `close` stops it and may be called twice."""

    def __init__(self, channel: Channel, address: str, port: int) -> None:
        self._channel = channel
        self._requests = 0
        self.address, self.port = address, port

    def close(self) -> None:
        """Stop the server."""
        self._channel.close()

    def client_spec(self, storage: Storage, ranks: int, *, generation: int = 0) -> dict[str, Any]:
        """Return the configuration of a rank's storage client. `generation` counts the placements of the job."""
        return {
            **asdict(storage),
            "address": self.address,
            "port": self.port,
            "ranks": ranks,
            "generation": generation,
        }

    def ping(self, *, timeout_s: float = PING_TIMEOUT_S) -> None:
        """Check that the server answers. This reads no checkpoint.

        Raises:
            LabError: the server is gone.
            CommandFailed: it did not answer in time.
        """
        self._request("ping", timeout_s)

    def newest(
        self, ranks_of: Mapping[int, int] | None = None, *, timeout_s: float = NEWEST_TIMEOUT_S
    ) -> CheckpointSet:
        """Verify the stored checkpoints and return the newest complete set. `newest_timeout_s` is enough time for that.

        `ranks_of` is the number of ranks of each generation of the job: no other set is returned. None: any may be.

        Raises:
            LabError: the server is gone.
            CommandFailed: it did not answer in time.
        """
        ranks = {} if ranks_of is None else {"ranks": list(ranks_of.items())}
        reply = self._request("newest", timeout_s, **ranks)
        return CheckpointSet(
            iterations=reply["iterations"],
            generation=reply["generation"],
            ranks=reply["ranks"],
            rejected=tuple((name, reason) for name, reason in reply["rejected"]),
        )

    def _request(self, do: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
        """Send a request and return its reply. Late replies to earlier requests are discarded."""
        self._requests += 1
        self._channel.send({"do": do, "seq": self._requests, **fields})
        deadline = time.monotonic() + timeout_s
        while True:
            reply = self._channel.receive(timeout_s=max(0.0, deadline - time.monotonic()))
            if reply is None:
                raise LabError(f"storage on {self.address} is gone: its checkpoints cannot be restored")
            if reply.get("seq") == self._requests:
                return reply


def serve(lab: TrafficLab, host: str, *, keep: int = 3, folder: str = FOLDER) -> StorageServer:
    """Start the storage server on a host. Checkpoints of this job get a folder of their own in `folder`.

    Raises:
        UsageError: there is no such host.
        LabError: the server does not start.
    """
    host = select_one(lab.topology, host)
    server = lab.topology.host_by_name.get(host)
    if server is None:
        raise UsageError(
            f'storage on "{host}": there is no such host; choose one of {", ".join(lab.topology.host_by_name)}'
        )
    address = server.front_end_ip
    channel = lab.open_module(host, MODULE, address, "--keep", f"{folder}/job-{secrets.token_hex(4)}", str(keep))
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
