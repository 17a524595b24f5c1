"""The section `[bystander]` of an experiment: a flow beside the workload that no fault should affect.

Its goodput under each fault, compared with its goodput before the first one, shows whether faults stay within their
blast radius (`faultbed.harness.parts.bystander.isolation`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from faultbed.harness.experiment.declare.field_types import Choice, Count, Rate, Selector, Size
from faultbed.harness.experiment.declare.section import Section, Table
from faultbed.harness.experiment.rank_fields import QueuePair, same_fields
from faultbed.traffic.engine.task_specs import QpParams
from faultbed.traffic.flows.flow_spec import ATOMIC_BYTES, MAX_QPS, VERBS, FlowSpec, check

__all__ = ["Bystander"]

_LONGEST_S = 24 * 3600.0
"""Longer than any run. A run stops its bystander at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bystander(Section):
    """A flow beside the workload. `src` and `dst` may be selectors."""

    src: Annotated[str, Selector("RNIC that sends.")]
    dst: Annotated[str, Selector("RNIC at the other end.")]
    flow: Annotated[str, Choice("The verb.", among=VERBS)] = "write"
    size_bytes: Annotated[int, Size("Message size; an atomic has 8 bytes.", key="size", above=0)] = 65536
    qps: Annotated[int, Count("Queue pairs.", least=1, most=MAX_QPS)] = 1
    depth: Annotated[int, Count("Messages outstanding on each queue pair; 0 chooses by size.", least=0, most=4096)] = 4
    rate_bps: Annotated[float, Rate("Payload rate; 0b/s: no limit.", key="rate", least=0)] = 0.0
    qp: Annotated[QpParams, Table("Parameters of the queue pairs.", section=QueuePair)] = field(
        default_factory=QpParams
    )

    def decoded(self, source: str) -> FlowSpec:  # noqa: ARG002
        """Return the flow as traffic takes it.

        Raises:
            UsageError: its values contradict each other.
        """
        spec = FlowSpec(
            **same_fields(FlowSpec, self),
            verb=self.flow,
            message_bytes=ATOMIC_BYTES if self.flow == "atomic" else self.size_bytes,
            duration_s=_LONGEST_S,
        )
        check(spec)
        return spec
