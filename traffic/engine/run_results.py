"""What a traffic run leaves behind. Times are the controller's monotonic clock in ns, sizes are payload bytes."""

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
"""`recovered`: completed, but at least one QP had to be rebuilt on the way. `failed` comes with where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An RNIC that takes part in traffic, as the lab's topology names it."""

    host: str
    rnic: str
    address: str

    @property
    def name(self) -> str:
        """`host1:rxe0`."""
        return f"{self.host}:{self.rnic}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """One connection, as it is now: `generation` counts its rebuilds. `transport` is rc, uc or ud.

    `src` sends data, `dst` receives it. `lqpn` and `sq_psn` belong to `src`; `rqpn` is the QP at `dst`, and `rq_psn`
    the first PSN that `dst` sends with. A data packet on the wire carries destination QP `rqpn` and a PSN from
    `sq_psn` on. `flow_label` is that of a connection's address handles (0: none).
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
    """Bytes whose completion was seen in [start, start + duration), at `endpoint`."""

    endpoint: str
    start_ns: int
    duration_ns: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One compute phase and one collective, or a job's several, on one rank.

    `wait_ns` is the part of `comm_ns` before the first data of a neighbour could be used. `start_ns` is the beginning
    of the compute phase, `end_ns` the end of the collective; the check of the result comes after it and is not in it.
    `phases_ns` are when each collective of a job was over, counted from the end of the compute phase.
    `paused_ns` is how long each pause in the program was (`traffic.node.ranks.gate`). With storage, the wait for data
    (`ingest_ns`) comes before the compute phase and the wait for a checkpoint (`checkpoint_ns`) after the collective;
    both are between `start_ns` and `end_ns`.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One rank's state, stored: written from `start_ns` to `end_ns`; for `waited_ns` the rank did nothing else."""

    rank: int
    iteration: int
    start_ns: int
    end_ns: int
    waited_ns: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """While this time (controller ns) the engine of a host did not run at all: stopped, or robbed of its CPU."""

    host: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QpError:
    """A completion with an error, or a deadline that passed: on `endpoint`'s QP `qpn`, towards `peer`."""

    time_ns: int
    connection: int
    endpoint: str
    peer: str
    qpn: int
    status: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuild:
    """One episode from the first error of a connection until data flowed again.

    `attempts` counts the QP pairs that were made. `rebuilt_ns` is when the last pair was connected, `recovered_ns`
    when its first data completed; None: never, the run ended before. `redone_segments` of a collective, of
    `redone_bytes`, had been sent before the error and were sent again: all that the peer had not yet got.
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
    """A stretch of time in controller monotonic ns."""

    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        """Its length."""
        return self.end_ns - self.start_ns
