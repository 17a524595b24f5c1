"""What runs beside the workload of an experiment and of its fault-free twin: capture, probes and bystander."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from faultbed.harness.experiment.experiment_file import Experiment
from faultbed.testbed.lab import Lab
from faultbed.testbed.observe import packet_capture
from faultbed.testbed.observe.packet_capture import Capturing
from faultbed.testbed.observe.telemetry import Change
from faultbed.traffic.engine.running_traffic import Running
from faultbed.traffic.flows import flow_run
from faultbed.traffic.flows.flow_run import FlowsResult
from faultbed.traffic.probes import prober
from faultbed.traffic.probes.prober import Probing

__all__ = ["bystander", "capturing", "forward_changes", "probing", "stop_bystander"]

_END_S = 30.0
"""How long a bystander may take to complete what is in flight when it is stopped."""


def capturing(
    experiment: Experiment, lab: Lab, progress: Callable[[str], None] = lambda _text: None
) -> AbstractContextManager[Capturing | None]:
    """Capture the experiment's ports while the block lasts; None: it captures none.

    Raises:
        UsageError: there is no such port, or its switch does not forward in its kernel.
        LabError: a machine could not capture.
    """
    if not experiment.capture:
        return contextlib.nullcontext()
    progress(f"capturing at {', '.join(experiment.capture)}")
    return packet_capture.start(lab, experiment.capture)


def probing(
    experiment: Experiment, lab: Lab, progress: Callable[[str], None] = lambda _text: None
) -> AbstractContextManager[Probing | None]:
    """Probe the paths between racks while the block lasts; None: the experiment has no `[probe]`.

    Events of probes do not renew the reservation of the lab. Otherwise a workload that hangs would keep the lab
    reserved for as long as its probes run.

    Raises:
        UsageError: the lab has no two hosts to probe between.
        LabError: the probes could not be started.
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

    Like events of probes (`probing`), its events do not renew the reservation of the lab.

    Raises:
        LabError: the flow could not be started.
    """
    flow = experiment.bystander
    if flow is None:
        yield None
        return
    progress(f"bystander from {flow.src} to {flow.dst}")
    with flow_run.start_all(lab, [flow]) as running:
        yield running


def stop_bystander(running: Running[FlowsResult]) -> FlowsResult:
    """Stop the bystander's flow and return its result. If the flow failed, the result says where.

    Raises:
        LabError: the flow did not end in time.
    """
    running.stop()
    return running.wait(_END_S)


def forward_changes(on_change: Callable[[Change], None], probing: Probing | None) -> Callable[[Change], None]:
    """Return a callback that forwards each change, and has the probes look up their paths again.

    A line of a kernel's log (`subject` is `kernel`) changes no path.
    """

    def forward(change: Change) -> None:
        on_change(change)
        if probing is not None and change.subject != "kernel":
            probing.report_change()

    return forward
