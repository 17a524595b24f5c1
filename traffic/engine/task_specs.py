"""What a run is made of, as data: tasks on engines, the connections between them, and QP parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from testbed.errors import UsageError
from testbed.suggestions import hint
from traffic.engine.run_results import Endpoint

__all__ = ["PATIENT_TIMEOUT", "Cable", "Plan", "QpParams", "TaskPlan", "check_qp", "refuse_local"]

PATIENT_TIMEOUT = 17
"""Of queue pairs that are measured without faults: an ACK is waited for 0.5 s. With 67 ms, by which faults are noticed
early, many queue pairs that send at once on emulated machines are sent again, and lost, by their own load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QpParams:
    """Parameters of a reliable connection, all explicit.

    `timeout` is the local ACK timeout of 4.096 us x 2^timeout (14: 67 ms); a packet is sent `retry_cnt` + 1 times
    before the QP dies. `min_rnr_timer` 12 is 0.64 ms: what a receiver that is not ready asks to
    wait for, as often as `rnr_retry` says. rxe takes `retry_cnt` 7 and `rnr_retry` 7 as for ever.
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
        """The parameters with some of them changed.

        Raises:
            UsageError: there is no such parameter.
        """
        for name in values:
            if name not in cls.__slots__:
                raise UsageError(f'no QP parameter "{name}"; {hint(name, cls.__slots__)}')
        return cls(**values)

    def to_dict(self) -> dict[str, int]:
        """Plain data."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """A task of one engine, as the engine is told to make it."""

    name: str
    kind: str
    endpoint: Endpoint
    spec: Mapping[str, Any]
    active: bool
    """Whether it is started, and ends with `done`."""
    stops_after: str | None = None
    """The task after which it is told to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cable:
    """A connection to make: number and the names of the tasks at its ends; data goes from `src` to `dst`.

    `flow_label` is that of its address handles; 0: that of its task's QPs.
    """

    index: int
    src: str
    dst: str
    flow_label: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run: tasks, and the connections between them."""

    what: str
    tasks: tuple[TaskPlan, ...]
    cables: tuple[Cable, ...]
    peer_deadline_s: float
    stall_deadline_s: float
    one_by_one: bool = False
    """Whether each active task is started when the one before is done, so that none disturbs another."""


def check_qp(qp: QpParams) -> None:
    """Refuse connection parameters that mean something else than they say.

    Raises:
        UsageError: out of range, or for ever.
    """
    if not 1 <= qp.timeout <= 31:  # noqa: PLR2004  # 5 bits; 0 is for ever
        raise UsageError(f"QP timeout must be 1 to 31 (4.096 us x 2^timeout), got {qp.timeout}")
    if not 0 <= qp.retry_cnt <= 6:  # noqa: PLR2004
        said = "rxe takes 7 as for ever, which hides a dead peer"
        raise UsageError(f"retry_cnt must be 0 to 6, got {qp.retry_cnt}: {said}")
    if not 0 <= qp.rnr_retry <= 7:  # noqa: PLR2004  # 7 hides no dead peer: who says "not ready" is there
        raise UsageError(f"rnr_retry must be 0 to 6, or 7 for ever, got {qp.rnr_retry}")
    if qp.mtu not in (1024, 2048, 4096):
        raise UsageError(f"path MTU must be 1024, 2048 or 4096, got {qp.mtu}")
    if not 0 <= qp.min_rnr_timer <= 31:  # noqa: PLR2004
        raise UsageError(f"min_rnr_timer must be 0 to 31, got {qp.min_rnr_timer}")


def refuse_local(lab_kind: str, what: str, pairs: Iterable[tuple[Endpoint, Endpoint]]) -> None:
    """Refuse a connection inside one host of a soft lab: Linux delivers it through lo, where no rxe listens.

    Args:
        lab_kind: `soft` or `rack`.
        what: what the connections are for, such as `all-reduce (ring) over 4 ranks`.
        pairs: both ends of each connection.

    Raises:
        UsageError: the sentence names both RNICs.
    """
    for src, dst in pairs:
        if lab_kind == "soft" and src.host == dst.host:
            raise UsageError(
                f"{what}: {src.name} -> {dst.name} is inside one host, and soft RoCE cannot talk to itself over "
                "the fabric; name an RNIC of another host, or order the ranks so that neighbours are on different hosts"
            )
