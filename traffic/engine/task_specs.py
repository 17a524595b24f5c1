"""Plan of a traffic run as data: tasks on engines, the connections between them, and QP parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.lab_kind import LabKind, traits_of
from faultbed.testbed.suggestions import hint
from faultbed.traffic.engine.run_results import Endpoint

__all__ = [
    "PATIENT_TIMEOUT",
    "ConnectionSpec",
    "Plan",
    "QpParams",
    "TaskPlan",
    "check_entropy",
    "check_qp",
    "refuse_local",
    "shared_flow_label",
]

MAX_ENTROPY = 4096

PATIENT_TIMEOUT = 17
"""QP timeout for measurements without faults: the sender waits 0.5 s for an ACK. The default of 67 ms detects faults
early, but it is too short for many concurrent QPs on emulated machines: their load alone causes retransmissions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QpParams:
    """Parameters of a reliable connection, all explicit.

    `timeout` is the local ACK timeout, 4.096 us x 2^timeout (14: 67 ms). A packet is sent `retry_cnt` + 1 times before
    the QP fails. A receiver that is not ready requests a wait of `min_rnr_timer` (12: 0.64 ms); the sender waits up to
    `rnr_retry` times. rxe treats 7 as "retry forever" for both `retry_cnt` and `rnr_retry`.
    """

    timeout: int = 14
    retry_cnt: int = 6
    rnr_retry: int = 6
    min_rnr_timer: int = 12
    mtu: int = 4096
    traffic_class: int = 0
    flow_label: int = 0

    @classmethod
    def of(cls, values: Mapping[str, int]) -> QpParams:
        """Return the default parameters with some of them replaced.

        Raises:
            UsageError: there is no such parameter.
        """
        for name in values:
            if name not in cls.__slots__:
                raise UsageError(f'no QP parameter "{name}"; {hint(name, cls.__slots__)}')
        return cls(**values)

    def to_dict(self) -> dict[str, int]:
        """Return the parameters as plain data."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """A task of one engine, as requested from the engine."""

    name: str
    kind: str
    endpoint: Endpoint
    spec: Mapping[str, Any]
    active: bool
    """Whether the task is started explicitly and ends with a `done` event."""
    stops_after: str | None = None
    """Name of the task after whose end this one is stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSpec:
    """A connection to establish. `src` and `dst` are the names of the tasks at its ends; data goes from `src` to `dst`.

    `flow_label` is the flow label of its address handles; 0 selects the flow label of the task's QPs. What a connection
    with `has_substitutes` carries can go over the other connections between the same two tasks.
    """

    index: int
    src: str
    dst: str
    flow_label: int = 0
    has_substitutes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Tasks to run, and the connections between them."""

    what: str
    tasks: tuple[TaskPlan, ...]
    connections: tuple[ConnectionSpec, ...]
    peer_deadline_s: float
    stall_deadline_s: float
    one_by_one: bool = False
    """Start each active task only when the previous one is done, so that they do not disturb each other."""


def check_qp(qp: QpParams) -> None:
    """Reject QP parameters that are out of range or have a surprising meaning.

    Raises:
        UsageError: a value is out of range, or means "retry forever" where that hides a dead peer.
    """
    if not 1 <= qp.timeout <= 31:  # noqa: PLR2004  # 5 bits; 0 means no timeout
        raise UsageError(f"QP timeout must be 1 to 31 (4.096 us x 2^timeout), got {qp.timeout}")
    if not 0 <= qp.retry_cnt <= 6:  # noqa: PLR2004
        reason = "rxe treats 7 as 'retry forever', which hides a dead peer"
        raise UsageError(f"retry_cnt must be 0 to 6, got {qp.retry_cnt}: {reason}")
    if not 0 <= qp.rnr_retry <= 7:  # noqa: PLR2004  # 7 hides no dead peer: a peer that sends RNR NAKs is alive
        raise UsageError(f"rnr_retry must be 0 to 6, or 7 to retry forever, got {qp.rnr_retry}")
    if qp.mtu not in (1024, 2048, 4096):
        raise UsageError(f"path MTU must be 1024, 2048 or 4096, got {qp.mtu}")
    if not 0 <= qp.min_rnr_timer <= 31:  # noqa: PLR2004
        raise UsageError(f"min_rnr_timer must be 0 to 31, got {qp.min_rnr_timer}")


def check_entropy(entropy: int) -> None:
    """Reject a number of UDP source ports that QPs cannot share.

    Raises:
        UsageError: it is out of range.
    """
    if not 0 <= entropy <= MAX_ENTROPY:
        raise UsageError(
            f"QPs can share 1 to {MAX_ENTROPY} source ports (0: each QP has its own), got entropy {entropy}"
        )


def shared_flow_label(qp: QpParams, entropy: int, number: int) -> int:
    """Return the flow label of connection `number` of those that share `entropy` labels in turn; 0: each has its own.

    QPs with the same label between the same two addresses have the same UDP source port.
    """
    return (qp.flow_label or 1) + number % entropy if entropy else 0


def refuse_local(lab_kind: LabKind, purpose: str, pairs: Iterable[tuple[Endpoint, Endpoint]]) -> None:
    """Reject a connection inside one host of a soft lab: Linux delivers it through lo, where rxe does not listen.

    Args:
        lab_kind: the kind of lab.
        purpose: what the connections are for, such as `all-reduce (ring) over 4 ranks`.
        pairs: both ends of each connection.

    Raises:
        UsageError: a pair is inside one host; the message names both RNICs.
    """
    for src, dst in pairs:
        if traits_of(lab_kind).is_emulated and src.host == dst.host:
            raise UsageError(
                f"{purpose}: {src.name} -> {dst.name} is inside one host, and soft RoCE cannot reach its own host over "
                "the fabric; name an RNIC of another host, or order the ranks so that neighbours are on different hosts"
            )
