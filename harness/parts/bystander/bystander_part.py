"""The part `bystander`: it runs the flow beside the workload of every pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from faultbed.harness.analysis.timeline import Goodput
from faultbed.harness.experiment.experiment_file import Experiment
from faultbed.harness.ledger.sealed import Sealed
from faultbed.harness.parts.bystander.bystander_evidence import BystanderEvidence, bystander_of
from faultbed.harness.parts.bystander.fit_bystander import fit_bystander, refuse_faults_on_bystander
from faultbed.harness.parts.bystander.isolation import bystander_goodput, isolation
from faultbed.harness.parts.part import Part, Sending
from faultbed.harness.parts.passes import Active, Pass
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.traffic.engine.running_traffic import Running
from faultbed.traffic.flows import flow_run
from faultbed.traffic.flows.flow_run import FlowsResult
from faultbed.traffic.flows.flow_spec import FlowSpec

__all__ = ["PART"]

_END_S = 30.0
"""How long a bystander may take to complete what is in flight when it is stopped."""


class _Flow(Active):
    """The flow beside the workload.

    Its events do not renew the reservation of the lab. Otherwise a workload that hangs would keep the lab reserved for
    as long as its bystander runs.
    """

    def __init__(self, run: Pass, spec: FlowSpec) -> None:
        self._run, self._spec = run, spec
        self._running: Running[FlowsResult] | None = None
        self._result: FlowsResult | None = None

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        self._run.progress(f"bystander from {self._spec.src} to {self._spec.dst}")
        with flow_run.start_all(self._run.setting.lab, [self._spec]) as self._running:
            yield

    def end(self) -> None:
        if self._running is not None:
            self._running.stop()
            self._result = self._running.wait(_END_S)

    def sealed(self) -> BystanderEvidence | None:
        return None if self._result is None else bystander_of(self._result)


def _active(run: Pass) -> Active | None:
    flow = run.setting.experiment.bystander
    return None if flow is None else _Flow(run, flow)


def _sends(experiment: Experiment) -> Sending | None:
    flow = experiment.bystander
    return None if flow is None else Sending(sources=(flow.src,), sinks=(flow.dst,), paced_bps=flow.rate_bps)


def _beside(run: RunEvidence, sealed: Sealed) -> Iterator[tuple[str, Goodput | None]]:
    flow = sealed.of(BystanderEvidence)
    if flow is not None:
        yield f"bystander {flow.src} to {flow.dst}", bystander_goodput(run, flow)


def _says(experiment: Experiment) -> Iterator[str]:
    if flow := experiment.bystander:
        yield f"bystander: {flow.verb} from {flow.src} to {flow.dst}, beside the workload"


PART = Part(
    name="bystander",
    evidence=BystanderEvidence,
    bind=fit_bystander,
    refuse_faults=refuse_faults_on_bystander,
    says=_says,
    sends=_sends,
    active=_active,
    metrics=isolation,
    beside=_beside,
)
