"""Results of a traffic run. Times are the controller's monotonic clock in ns, sizes are payload bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "Checkpoint",
    "Connection",
    "Endpoint",
    "Iteration",
    "Outcome",
    "QpError",
    "Rebuild",
    "Sample",
    "Standstill",
    "Window",
]

Outcome = Literal["completed", "recovered", "failed"]
"""`recovered`: completed, but at least one QP was rebuilt. A `failed` run also reports where it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An RNIC that takes part in traffic, named as in the lab's topology."""

    host: str
    rnic: str
    address: str

    @property
    def name(self) -> str:
        """Name of the RNIC, such as `host1:rxe0`."""
        return f"{self.host}:{self.rnic}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """One connection in its current state. `generation` counts its rebuilds; `transport` is rc, uc or ud.

    `src` sends data, `dst` receives it. `lqpn` and `sq_psn` belong to `src`. `rqpn` is the QP at `dst`, and `rq_psn` is
    the first PSN that `dst` sends. A data packet on the wire carries destination QP `rqpn` and a PSN from `sq_psn` on.
    `flow_label` is the flow label of the connection's address handles (0: none).
    """

    index: int
    src: str
    dst: str
    src_ip: str
    dst_ip: str
    lqpn: int
    rqpn: int
    sq_psn: int
    rq_psn: int
    generation: int
    flow_label: int = 0
    transport: str = "rc"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Bytes whose completion the task `task` saw on its RNIC `endpoint` in [start, start + duration).

    Several tasks may share an RNIC. `task` is empty in samples that were stored without it.
    """

    endpoint: str
    start_ns: int
    duration_ns: int
    size_bytes: int
    task: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One compute phase followed by one collective (in a job: by several collectives), on one rank.

    `start_ns` is the start of the compute phase, `end_ns` the end of the collective. The check of the result comes
    after `end_ns`. `wait_ns` is the part of `comm_ns` until the first data from another rank could be used. `phases_ns`
    are the end times of a job's collectives, relative to the end of the compute phase. `paused_ns` are the lengths of
    the pauses in the program (`faultbed.traffic.node.ranks.gate`). `split_ns` divides `comm_ns` without the pauses
    into the parts of `faultbed.traffic.engine.latency_split`; it is empty if the engine did not report it.

    With storage, the wait for data (`ingest_ns`) comes before the compute phase, and the wait for a checkpoint
    (`checkpoint_ns`) after the collective. Both lie between `start_ns` and `end_ns`. The data were read within
    `read_ns`, from `read_from_ns` after the start on (negative: before it, as data are read an iteration ahead).
    """

    index: int
    start_ns: int
    end_ns: int
    compute_ns: int
    comm_ns: int
    wait_ns: int
    wrong_elements: int
    phases_ns: tuple[int, ...] = ()
    paused_ns: tuple[int, ...] = ()
    ingest_ns: int = 0
    checkpoint_ns: int = 0
    read_from_ns: int = 0
    read_ns: int = 0
    split_ns: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A stored checkpoint of one rank, written from `start_ns` to `end_ns`. The rank was blocked for `waited_ns`."""

    rank: int
    iteration: int
    start_ns: int
    end_ns: int
    waited_ns: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """An interval (controller ns) in which a host's engine did not run: it was stopped or got no CPU time."""

    host: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QpError:
    """A completion with an error, or an expired deadline, on `endpoint`'s QP `qpn` towards `peer`."""

    time_ns: int
    connection: int
    endpoint: str
    peer: str
    qpn: int
    status: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuild:
    """One episode, from the first error of a connection until data flowed again.

    `attempts` counts the QP pairs that were created. `rebuilt_ns` is when the last pair was connected. `recovered_ns`
    is when its first data completed. Either is None if the run ended before. `redone_segments` and `redone_bytes` count
    the data of a collective that was sent again because the peer had not received it.
    """

    connection: int
    src: str
    dst: str
    error_ns: int
    rebuilt_ns: int | None
    recovered_ns: int | None
    attempts: int
    reason: str
    redone_segments: int = 0
    redone_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """An interval in controller monotonic ns."""

    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        """Length of the interval."""
        return self.end_ns - self.start_ns
