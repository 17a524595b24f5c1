"""State machine of a job that survives losses. Pure: frozen data in, frozen data out, no I/O.

    running -> diagnose -> reschedule -> initialise -> restore -> catch_up -> running -> finished
                  ^------------ a loss in any phase ------------'                `-> failed

The driver (`faultbed.traffic.workloads.elastic.driver`) carries out the phase that the state names and reports the
outcome as an event. A loss in any phase leads back to `diagnose`. Every loss counts against `Policy.most_restarts`,
and every other event of a recovery leads to the next phase, so every job ends.

Iterations are counted, not numbered: `finished` iterations are complete on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

__all__ = [
    "ENDS",
    "MODES",
    "WITHOUT_SPARE",
    "Cause",
    "Diagnosed",
    "Ended",
    "Event",
    "Impossible",
    "Initialised",
    "JobState",
    "Lost",
    "Mode",
    "Phase",
    "Policy",
    "Progress",
    "Rescheduled",
    "Restored",
    "begin",
    "step",
]

Phase = Literal["running", "diagnose", "reschedule", "initialise", "restore", "catch_up", "finished", "failed"]
Mode = Literal["spare", "shrink", "same"]
Cause = Literal["process", "host", "gpu", "network", "storage", "rank"]
"""What was lost: the job's process on a host that still answers, a host, a rank's GPU, the network of a host, the
storage, or a rank's task."""

ENDS: tuple[Phase, ...] = ("finished", "failed")
MODES: tuple[Mode, ...] = ("spare", "shrink", "same")
WITHOUT_SPARE: tuple[Literal["shrink", "fail"], ...] = ("shrink", "fail")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a job restarts.

    `restart` is `spare` (a spare takes the place of each lost rank), `shrink` (the job continues with fewer ranks) or
    `same` (it waits until the host is back). `without_spare` says what `spare` does when no spare is left.
    """

    restart: Mode = "spare"
    without_spare: Literal["shrink", "fail"] = "fail"
    most_restarts: int = 8

    @property
    def may_shrink(self) -> bool:
        """Whether a restart may leave the job with fewer ranks."""
        return self.restart == "shrink" or (self.restart == "spare" and self.without_spare == "shrink")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """A job at one moment. `ranks` are RNICs in rank order, `spares` RNICs that are free.

    `generation` counts the placements of the job. `origins[g][r]` is the rank in generation g - 1 whose state rank r of
    generation g continues; generation 0 continues itself. `furthest` is the most iterations that were ever finished.
    `lost_iterations` counts the finished iterations that restarts had to repeat. `phase` is what is to be done now.
    """

    phase: Phase
    total: int
    grid: tuple[tuple[str, int], ...]
    ranks: tuple[str, ...]
    spares: tuple[str, ...] = ()
    generation: int = 0
    origins: tuple[tuple[int, ...], ...] = ()
    finished: int = 0
    furthest: int = 0
    restarts: int = 0
    lost_iterations: int = 0
    cause: Cause | None = None
    lost_hosts: tuple[str, ...] = ()
    reason: str | None = None

    @property
    def is_iterating(self) -> bool:
        """Whether the ranks execute iterations: the job is in no phase of a restart before `catch_up`, and not over."""
        return self.phase in ("running", "catch_up")

    def ancestor(self, rank: int, generation: int) -> int:
        """Return the rank of an earlier generation whose state a present rank continues."""
        for origins in reversed(self.origins[generation + 1 : self.generation + 1]):
            rank = origins[rank]
        return rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """All ranks have finished `finished` iterations."""

    finished: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The job cannot continue."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosed:
    """The cause of the loss and the lost hosts; no hosts: the job can restart where it was."""

    cause: Cause
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescheduled:
    """The new placement. `origins` are the former ranks whose state each rank continues."""

    grid: tuple[tuple[str, int], ...]
    ranks: tuple[str, ...]
    spares: tuple[str, ...]
    origins: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Impossible:
    """The job cannot be restarted as the experiment demands, or what it needs is gone."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Initialised:
    """All ranks have their memory and their connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """All ranks have restored the state after `iterations` iterations; 0: there was no checkpoint."""

    iterations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """All ranks are done."""


Event = Progress | Lost | Diagnosed | Rescheduled | Impossible | Initialised | Restored | Ended


def begin(
    *, total: int, grid: tuple[tuple[str, int], ...], ranks: tuple[str, ...], spares: tuple[str, ...]
) -> JobState:
    """Return the state of a job that has just begun."""
    return JobState(
        phase="running", total=total, grid=grid, ranks=ranks, spares=spares, origins=(tuple(range(len(ranks))),)
    )


def step(state: JobState, event: Event, policy: Policy) -> JobState:  # noqa: PLR0911  # one return for each event
    """Return the state after an event.

    Raises:
        ValueError: the event does not belong to the phase; a defect of the driver.
    """
    if state.phase in ENDS:
        raise ValueError(f"{event} after the job has {state.phase}")
    match event:
        case Lost():
            return _lost(state, event, policy)
        case Impossible():
            return replace(state, phase="failed", reason=event.reason)
        case Progress() if state.is_iterating:
            return _progress(state, event)
        case Ended() if state.is_iterating:
            return replace(state, phase="finished")
        case Diagnosed() if state.phase == "diagnose":
            lost = tuple(dict.fromkeys((*state.lost_hosts, *event.hosts)))
            spares = tuple(name for name in state.spares if host_of(name) not in lost)
            return replace(state, phase="reschedule", cause=event.cause, lost_hosts=lost, spares=spares)
        case Rescheduled() if state.phase == "reschedule":
            return replace(
                state,
                phase="initialise",
                grid=event.grid,
                ranks=event.ranks,
                spares=event.spares,
                origins=(*state.origins, event.origins),
                generation=state.generation + 1,
                lost_hosts=(),
            )
        case Initialised() if state.phase == "initialise":
            return replace(state, phase="restore")
        case Restored() if state.phase == "restore":
            repeated = state.finished - event.iterations
            return replace(
                state,
                phase="catch_up" if event.iterations < state.furthest else "running",
                finished=event.iterations,
                # A host that was lost may have stored more than it had reported.
                furthest=max(state.furthest, event.iterations),
                lost_iterations=state.lost_iterations + max(0, repeated),
                reason=None,
            )
        case _:
            raise ValueError(f"{event} in phase {state.phase}")


def host_of(rnic: str) -> str:
    """Return the host of an RNIC name such as `host1:rxe0`."""
    return rnic.partition(":")[0]


def _lost(state: JobState, event: Lost, policy: Policy) -> JobState:
    restarts = state.restarts + 1
    if restarts > policy.most_restarts:
        reason = f"{event.reason}; the job has been restarted {policy.most_restarts} times, which is its limit"
        return replace(state, phase="failed", reason=reason)
    return replace(state, phase="diagnose", restarts=restarts, reason=event.reason)


def _progress(state: JobState, event: Progress) -> JobState:
    """Record the iterations that all ranks have finished. A job has caught up once it has finished `furthest` again."""
    finished = max(state.finished, event.finished)
    phase = "running" if finished >= state.furthest else state.phase
    return replace(state, phase=phase, finished=finished, furthest=max(state.furthest, finished))
