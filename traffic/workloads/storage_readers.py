"""Hosts that read a job's storage during the job, like other users of it (`traffic/node/front_end/storage_reader.py`).

A reader that fails does not end the job; its result has the reason (`failure`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from faultbed.testbed.errors import FaultbedError, UsageError
from faultbed.testbed.model.selectors import select, select_one
from faultbed.testbed.model.topology import Topology
from faultbed.traffic.engine.engine_client import GONE, Engines, TrafficLab
from faultbed.traffic.engine.run_results import Window
from faultbed.traffic.workloads.storage_service import Storage, StorageServer

__all__ = ["ReaderResult", "StorageReaders", "reader_hosts", "start"]

MODULE = "faultbed.traffic.node.front_end.storage_reader"
END_TIMEOUT_S = 10.0
"""How long the reads that were planned during the job may take after its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderResult:
    """What one host read: (planned, begin, end) of each read that was planned during the job, in controller ns.

    `failure` is why reads are missing; None: none is.
    """

    host: str
    reads: tuple[tuple[int, int, int], ...] = ()
    failure: str | None = None


class StorageReaders:
    """The running readers of a job, possibly none. `close` stops them and may be called twice."""

    def __init__(self, engines: Engines, hosts: tuple[str, ...], request: Mapping[str, Any]) -> None:
        self._engines, self._hosts, self._request = engines, hosts, request

    def begin(self) -> None:
        """Begin to read."""
        self._send(self._request)

    def _send(self, request: Mapping[str, Any]) -> None:
        for host in self._hosts:
            with contextlib.suppress(FaultbedError):  # `results` reports a reader that is gone
                self._engines.send(host, request)

    def results(self, window: Window) -> tuple[ReaderResult, ...]:
        """End the reading, and return the reads that were planned within a window."""
        self._send({"do": "end"})
        pending = set(self._hosts)
        replies: dict[str, Mapping[str, Any]] = {}
        deadline_ns = time.monotonic_ns() + int(END_TIMEOUT_S * 1e9)
        while pending and (event := self._engines.next(deadline_ns)) is not None:
            if event.name in ("reads", GONE):
                replies.setdefault(event.host, event.message)
                pending.discard(event.host)
        self._engines.widen_clocks()
        return tuple(self._result(host, replies.get(host), window) for host in self._hosts)

    def _result(self, host: str, reply: Mapping[str, Any] | None, window: Window) -> ReaderResult:
        if reply is None:
            return ReaderResult(host=host, failure=f"its reads were not over {END_TIMEOUT_S:g} s after the job")
        if reply["event"] == GONE:
            reason = f": {reply['error']}" if reply.get("error") else ""
            return ReaderResult(host=host, failure=f"its reader is gone{reason}")
        offset_ns = self._engines.offsets[host].offset_ns
        reads = ((planned + offset_ns, begin + offset_ns, end + offset_ns) for planned, begin, end in reply["rows"])
        during = tuple(read for read in reads if window.start_ns <= read[0] <= window.end_ns)
        return ReaderResult(host=host, reads=during, failure=reply["error"])

    @property
    def clock_error_ns(self) -> dict[str, int]:
        """Clock error of each reader's host, in ns."""
        return {host: offset.error_ns for host, offset in self._engines.offsets.items()}

    def close(self) -> None:
        """Stop the readers."""
        self._engines.close()


def reader_hosts(topology: Topology, storage: Storage, rank_hosts: Collection[str]) -> tuple[str, ...]:
    """Return the hosts of the readers, with selectors resolved.

    Raises:
        UsageError: the lab has no such host, the host has a part in the job, or it is named twice.
    """
    hosts: list[str] = []
    for host in (name for text in storage.readers for name in select(topology, text)):
        if host not in topology.host_by_name:
            raise UsageError(f'no host "{host}" to read on; choose one of {", ".join(topology.host_by_name)}')
        if host in rank_hosts:
            raise UsageError(f"{host} cannot be a reader: it has a rank; name a host without a part in the job")
        if host == select_one(topology, storage.host):
            raise UsageError(f"{host} cannot be a reader: it serves the storage; name a host without a part in the job")
        if host in hosts:
            raise UsageError(f"{host} is named twice; a host has one reader")
        hosts.append(host)
    return tuple(hosts)


def start(lab: TrafficLab, storage: Storage, server: StorageServer, rank_hosts: Collection[str]) -> StorageReaders:
    """Start the readers of a job's storage. They read nothing before `begin`.

    Raises:
        UsageError: as `reader_hosts`.
        LabError: a reader does not start; none is left running.
    """
    hosts = reader_hosts(lab.topology, storage, rank_hosts)
    return StorageReaders(
        Engines.start(lab, hosts, module=MODULE),
        hosts,
        {
            "do": "read",
            "address": server.address,
            "port": server.port,
            "size_bytes": storage.ingest_bytes,
            "every_ns": storage.read_every_ns,
        },
    )
