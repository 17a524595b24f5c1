"""Fields that several workloads declare: those of all workloads on ranks, and the parameters of queue pairs."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from faultbed.harness.experiment.declare.field_types import Choice, Count, Selector, Several
from faultbed.harness.experiment.declare.section import Section, Table
from faultbed.traffic.engine.task_specs import MAX_ENTROPY, QpParams, check_qp
from faultbed.traffic.schedules import MAX_QPS_PER_PEER, SPREADS
from faultbed.traffic.workloads.ranks import WARMUP

__all__ = ["Entropy", "OnRanks", "QueuePair", "same_fields"]

Entropy = Annotated[
    int,
    Count(
        "Number of UDP source ports that all queue pairs share (low entropy); 0: each has its own.",
        least=0,
        most=MAX_ENTROPY,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePair(Section):
    """Parameters of the queue pairs. The section is `[workload.qp]`, or `[bystander.qp]`."""

    timeout: Annotated[int, Count("Local ACK timeout: 4.096 us x 2^timeout (14: 67 ms).", least=1, most=31)] = 14
    retry_cnt: Annotated[
        int,
        Count(
            "Retransmissions of a packet before the queue pair fails.",
            least=0,
            most=6,
            because="rxe treats 7 as 'retry forever', which hides a dead peer",
        ),
    ] = 6
    rnr_retry: Annotated[
        int, Count("Retries to a receiver that is not ready before the queue pair fails; 7: forever.", least=0, most=7)
    ] = 6
    min_rnr_timer: Annotated[
        int, Count("Wait that a receiver requests if it is not ready (12: 0.64 ms).", least=0, most=31)
    ] = 12
    mtu: Annotated[int, Count("Path MTU in bytes.", among=(1024, 2048, 4096))] = 4096
    traffic_class: Annotated[int, Count("Traffic class of the packets: DSCP x 4.", least=0, most=255)] = 0
    flow_label: Annotated[
        int, Count("Flow label, which selects the UDP source port of rc and uc; 0: by queue pair.", least=0)
    ] = 0

    def decoded(self, source: str) -> QpParams:  # noqa: ARG002
        """Return the parameters.

        Raises:
            UsageError: a value is out of range or has a surprising meaning.
        """
        params = QpParams(**same_fields(QpParams, self))
        check_qp(params)
        return params


@dataclass(frozen=True, slots=True, kw_only=True)
class OnRanks(Section):
    """The fields of every workload on ranks."""

    ranks: Annotated[
        tuple[str, ...],
        Several(
            "RNICs in rank order; empty: the first RNIC of each host.",
            of=Selector("RNIC of a rank."),
            options=("--rank",),
        ),
    ] = ()
    warmup: Annotated[int, Count("Iterations before the measured ones.", least=0)] = WARMUP
    qps_per_peer: Annotated[
        int, Count("Queue pairs from a rank to each rank that it sends to.", least=1, most=MAX_QPS_PER_PEER)
    ] = 1
    spread: Annotated[
        str,
        Choice(
            "Distribution of messages over these queue pairs. split: equal parts of each message; round-robin and "
            "spray: segments in turn, which arrive in order or in any order; dqplb: each segment takes the queue pair "
            "with the fewest in flight.",
            among=SPREADS,
        ),
    ] = SPREADS[0]
    entropy: Entropy = 0
    qp: Annotated[QpParams, Table("Parameters of the queue pairs.", section=QueuePair)] = field(
        default_factory=QpParams
    )


def same_fields(spec: type, section: Any) -> dict[str, Any]:
    """Return the values of the fields that a section and a dataclass have in common, by name."""
    names = {one.name for one in fields(spec)} & {one.name for one in fields(section)}
    return {name: getattr(section, name) for name in names}
