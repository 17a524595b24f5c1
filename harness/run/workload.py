"""Start the workload of an experiment, or flows that measure the lab."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from faultbed.harness.experiment.experiment_file import Experiment
from faultbed.harness.run.workload_kinds import GRACE_S, kind_of
from faultbed.testbed.errors import LabError
from faultbed.testbed.lab import Lab
from faultbed.traffic.engine.engine_client import MODULE
from faultbed.traffic.engine.run_results import Window
from faultbed.traffic.engine.running_traffic import OnEvent, Running
from faultbed.traffic.flows import flow_run
from faultbed.traffic.flows.flow_run import FlowSpec, FlowsResult
from faultbed.traffic.probes.ecmp_entropy import data_and_ack_paths

__all__ = ["engines_started_ahead", "paths_of", "patience_s", "run_flows", "start"]


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


def run_flows(lab: Lab, specs: Sequence[FlowSpec]) -> tuple[FlowsResult, Window]:
    """Run flows of equal duration at once, and return their result and when they ran; their progress is a heartbeat.

    Raises:
        UsageError: the lab cannot carry them.
        LabError: they could not be started, were not over in time, or failed; nothing is left running.
    """
    with flow_run.start_all(lab, specs, on_event=lambda _event: lab.heartbeat()) as running:
        result = running.wait((specs[0].duration_s or 0) + GRACE_S)
    if result.outcome == "failed":
        more = f" and {len(specs) - 1} more" if len(specs) > 1 else ""
        raise LabError(f"{specs[0].src} to {specs[0].dst}{more}: {result.where}")
    return result, Window(start_ns=running.started_ns, end_ns=running.ended_ns)


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
