"""Start the engine of a host that joins a job; retry while the host is booting."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from faultbed.testbed.errors import FaultbedError, LabError
from faultbed.traffic.engine.engine_client import Engines, TrafficLab
from faultbed.traffic.engine.gid import gid_index
from faultbed.traffic.engine.run_results import Endpoint
from faultbed.traffic.workloads.elastic.loss import PROBE_S

__all__ = ["RETRY_S", "start_engine"]

RETRY_S = 2.0
"""Pause between two attempts to start a host's engine, in seconds."""


def start_engine(
    lab: TrafficLab,
    engines: Engines,
    host: str,
    rnics: Iterable[Endpoint],
    *,
    patience_s: float,
    pause: Callable[[float], bool],
) -> None:
    """Start the engine of a host as soon as its RNICs have their addresses. After a boot they have none at first.

    Args:
        lab: the lab.
        engines: the engines of the job.
        host: the host.
        rnics: those of its RNICs that the job uses.
        patience_s: how long to try; at least one attempt is made.
        pause: waits for some seconds and returns whether to continue.

    Raises:
        LabError: the engine did not start in time.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            for rnic in rnics:
                gid_index(lab.node(host), rnic, timeout_s=PROBE_S)
            engines.add(lab, [host])
        except FaultbedError as error:
            engines.drop(host)
            lab.forget(host)  # only after a failure: faults on a healthy host use this connection, too
            if time.monotonic() > deadline or not pause(RETRY_S):
                raise LabError(f"{host}: the traffic engine did not start: {error}") from error
        else:
            return
