"""Start the workload of an experiment."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from faultbed.harness.experiment.experiment_file import Experiment
from faultbed.harness.run.workload_kinds import kind_of
from faultbed.testbed.errors import LabError
from faultbed.testbed.lab import Lab
from faultbed.traffic.engine.engine_client import MODULE
from faultbed.traffic.engine.running_traffic import OnEvent, Running
from faultbed.traffic.probes.ecmp_entropy import data_and_ack_paths

__all__ = ["engines_started_ahead", "paths_of", "patience_s", "start"]


def engines_started_ahead(experiment: Experiment, lab: Lab) -> AbstractContextManager[None]:
    """Start the engines of the workload in the background, while faults are prepared, for `start` during the block."""
    work = experiment.workload
    return lab.started_ahead((name.partition(":")[0] for name in kind_of(work).endpoints(work)), MODULE)


def start(experiment: Experiment, lab: Lab, also: OnEvent = lambda _event: None) -> Running[Any]:
    """Start the workload.

    Each of its events is a heartbeat of the lab, and is passed to `also`, which is called on the workload's own thread.

    Raises:
        UsageError: the lab cannot carry it.
        LabError: it could not be started; nothing is left running.
    """
    work = experiment.workload

    def beat(event: dict[str, Any]) -> None:
        lab.heartbeat()
        also(event)

    return kind_of(work).start(lab, work, experiment.source, beat)


def patience_s(experiment: Experiment, running: Running[Any]) -> float:
    """Return the seconds after which the workload counts as stuck.

    A timed workload gets a minute beyond its duration, a trace as long as its operations and pauses need, and any other
    workload ten minutes. A job with restarts gets, in addition, the longest time that all its restarts may take.
    """
    return kind_of(experiment.workload).patience_s(experiment.workload, running)


def paths_of(lab: Lab, running: Running[Any]) -> dict[int, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return the paths of each connection's data and ACKs, by index; empty if a switch did not answer."""
    with contextlib.suppress(LabError):
        return data_and_ack_paths(lab, running.connections)
    return {}
