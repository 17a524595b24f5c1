"""Results of a workload of programs. Times are the controller's monotonic clock in ns."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from faultbed.traffic.engine.run_results import Connection, Iteration, Outcome, QpError, Rebuild, Sample

__all__ = ["OutputLine", "ProgramEnd", "ProgramsResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEnd:
    """One end of a process.

    Attributes:
        rank: of the process.
        role: of the process.
        rnic: its RNIC.
        attempt: 1, and one more after each restart.
        start_ns: when it was started.
        end_ns: when it had ended.
        code: exit code; a negative one is the signal that ended it.
        stopped: it was told to end: its time was over, or the programs that it served had ended.
        timed_out: it was told to end because it took longer than its timeout.
        left: processes that it had started and that outlived it. They were ended.
        removed: whether all its processes are known to be gone.
        cut_bytes: bytes of its output that were not kept.
    """

    rank: int
    role: str
    rnic: str
    attempt: int
    start_ns: int
    end_ns: int
    code: int
    stopped: bool = False
    timed_out: bool = False
    left: int = 0
    removed: bool = True
    cut_bytes: int = 0

    def describe(self) -> str:
        """Return how it ended, for people: `client on host1:rxe0 ended by itself with 1`."""
        name = f"{self.role} on {self.rnic}" + (f" (attempt {self.attempt})" if self.attempt > 1 else "")
        with_what = f"by {_signal_name(-self.code)}" if self.code < 0 else f"with {self.code}"
        if self.timed_out:
            return f"{name} did not end in time and was ended ({with_what})"
        return f"{name} was ended {with_what}" if self.stopped else f"{name} ended by itself {with_what}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLine:
    """A line that a process printed, on its standard output (`out`) or its standard error (`err`)."""

    time_ns: int
    attempt: int
    stream: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramsResult:
    """Result of a workload of programs; it has what the results of ranks have.

    Attributes:
        ranks: the RNIC of each process.
        samples: bytes by rank.
        iterations: iterations by rank.
        resolution_ns: length of the samples: the longest time between two reports of a program, or a bin.
        connections: the queue pairs of the programs as they were seen last.
        ends: every end of a process, in order.
        output: lines of each process that were kept, by its name.
    """

    outcome: Outcome
    where: str | None
    ranks: tuple[str, ...]
    samples: tuple[tuple[Sample, ...], ...]
    iterations: tuple[tuple[Iteration, ...], ...]
    resolution_ns: int
    connections: tuple[Connection, ...]
    ends: tuple[ProgramEnd, ...]
    output: Mapping[str, tuple[OutputLine, ...]]
    clock_error_ns: Mapping[str, int]
    qp_errors: tuple[QpError, ...] = ()
    rebuilds: tuple[Rebuild, ...] = ()

    def samples_of(self, rank: int) -> tuple[Sample, ...]:
        """Return the samples of one rank."""
        return self.samples[rank]
