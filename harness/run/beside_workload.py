"""What runs beside the workload of an experiment that asks for it: probes, and a bystander."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from harness.experiment.experiment_file import Experiment
from testbed.lab import Lab
from testbed.observe.telemetry import Change
from traffic.engine.running_traffic import Running
from traffic.flows import flow_run
from traffic.flows.flow_run import FlowsResult
from traffic.probes import prober
from traffic.probes.prober import Probing

__all__ = ["both", "bystander", "ended", "probing"]

_END_S = 30.0
"""How long a bystander may take to complete what is in flight when it is stopped."""


def probing(
    experiment: Experiment, lab: Lab, progress: Callable[[str], None] = lambda _text: None
) -> AbstractContextManager[Probing | None]:
    """Probes on every way through the lab while the block lasts; None: the experiment wants none.

    They are no progress of the run: a lab is not held for a workload that hangs because its probes go on.

    Raises:
        UsageError: the lab has no two hosts to probe between.
        LabError: they could not be started.
    """
    if experiment.probe is None:
        return contextlib.nullcontext()
    progress(f"probing {len(prober.pairs(lab.topology))} pairs of RNICs")
    return prober.start(lab, experiment.probe)


@contextlib.contextmanager
def bystander(
    experiment: Experiment, lab: Lab, progress: Callable[[str], None] = lambda _text: None
) -> Iterator[Running[FlowsResult] | None]:
    """Run the bystander's flow while the block lasts; None: the experiment has none.

    Like probes it is no progress of the run.

    Raises:
        LabError: it could not be started.
    """
    flow = experiment.bystander
    if flow is None:
        yield None
        return
    progress(f"bystander from {flow.src} to {flow.dst}")
    with flow_run.start_all(lab, [flow]) as running:
        yield running


def ended(running: Running[FlowsResult]) -> FlowsResult:
    """Stop a bystander, and return its result; what it is short of when it has failed is in there.

    Raises:
        LabError: it does not end.
    """
    running.stop()
    return running.wait(_END_S)


def both(first: Callable[[Change], None], probing: Probing | None) -> Callable[[Change], None]:
    """Tells of changes, and lets the probes look for new ways when those may have changed."""

    def told(change: Change) -> None:
        first(change)
        if probing is not None and change.subject != "kernel":
            probing.changed()

    return told
