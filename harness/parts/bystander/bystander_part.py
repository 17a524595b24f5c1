"""The part `bystander`: it runs the flow beside the workload of every pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from faultbed.harness.analysis.timeline import Goodput
from faultbed.harness.ledger.sealed import Sealed
from faultbed.harness.parts.bystander.bystander_evidence import BystanderEvidence, bystander_of
from faultbed.harness.parts.bystander.isolation import bystander_goodput, isolation
from faultbed.harness.parts.part import Part
from faultbed.harness.parts.passes import Active, Ended, Pass
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.traffic.engine.running_traffic import Running
from faultbed.traffic.flows import flow_run
from faultbed.traffic.flows.flow_run import FlowsResult

__all__ = ["PART"]

_END_S = 30.0
"""How long a bystander may take to complete what is in flight when it is stopped."""


class _Flow(Active):
    def __init__(self, running: Running[FlowsResult]) -> None:
        self._running = running
        self._result: FlowsResult | None = None

    def end(self) -> None:
        self._running.stop()
        self._result = self._running.wait(_END_S)

    def sealed(self, _ended: Ended) -> BystanderEvidence | None:
        return None if self._result is None else bystander_of(self._result)


@contextlib.contextmanager
def _around(run: Pass) -> Iterator[Active | None]:
    """Run the bystander's flow while the block lasts.

    Its events do not renew the reservation of the lab. Otherwise a workload that hangs would keep the lab reserved for
    as long as its bystander runs.

    Raises:
        LabError: the flow could not be started.
    """
    flow = run.experiment.bystander
    if flow is None:
        yield None
        return
    run.progress(f"bystander from {flow.src} to {flow.dst}")
    with flow_run.start_all(run.lab, [flow]) as running:
        yield _Flow(running)


def _beside(run: RunEvidence, sealed: Sealed) -> Iterator[tuple[str, Goodput | None]]:
    flow = sealed.of(BystanderEvidence)
    if flow is not None:
        yield f"bystander {flow.src} to {flow.dst}", bystander_goodput(run, flow)


PART = Part(name="bystander", evidence=BystanderEvidence, around=_around, metrics=isolation, beside=_beside)
