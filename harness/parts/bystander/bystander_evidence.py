"""What a bystander's flow carried: `evidence/<pass>/bystander.json`."""

from __future__ import annotations

import msgspec

from faultbed.harness.record.evidence.workload_evidence import Sample, refuse_samples
from faultbed.harness.record.workload_series import summed
from faultbed.traffic.engine.samples import BIN_NS
from faultbed.traffic.flows.flow_run import FlowsResult

__all__ = ["BystanderEvidence", "bystander_of"]


class BystanderEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """The flow beside the workload.

    `qp_errors` are the controller times (ns) at which its queue pairs failed. `failure` says where the flow failed;
    None: it did not. Samples that overlap in time are refused: their bytes would count twice.
    """

    src: str
    dst: str
    samples: tuple[Sample, ...]
    qp_errors: tuple[int, ...] = ()
    failure: str | None = None

    def __post_init__(self) -> None:
        refuse_samples("bystander", self.samples, BIN_NS)


def bystander_of(result: FlowsResult) -> BystanderEvidence:
    """Return the samples and the failures of the bystander."""
    (flow,) = result.flows
    return BystanderEvidence(
        src=flow.spec.src,
        dst=flow.spec.dst,
        samples=summed(flow.samples),
        qp_errors=tuple(error.time_ns for error in flow.qp_errors),
        failure=None if result.outcome != "failed" else result.where or "an unknown place",
    )
