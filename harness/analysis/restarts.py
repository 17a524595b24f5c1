"""Phases of a job's restarts, iterations that were lost, and errors in the final state. Pure.

    detect      first firing of the fault  -> loss noticed
    diagnose    loss noticed               -> lost hosts known
    reschedule  lost hosts known           -> remaining ranks stopped, every rank has an RNIC
    initialise  every rank has an RNIC     -> engines started, queue pairs connected
    restore     queue pairs connected      -> all ranks have the state of the newest intact checkpoint
    catch_up    state restored             -> every iteration finished before the loss finished again

If another loss interrupts a restart, its current phase lasted at least until then, and it has no later phases. The next
restart's `detect` begins when the interrupted restart's loss was noticed, or when a later fault fired. The next
restart's total includes the interrupted restart.

With several faults, `detect` begins at the first one that fired after the last iteration that all ranks finished,
unless the job stood still before that. Without a fault it begins at the end of that iteration, which is at most one
iteration before the loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from faultbed.harness.analysis.observations import Observation
from faultbed.harness.analysis.phases import Phase
from faultbed.harness.quantities import format_duration
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.record.evidence.workload_evidence import RankSeries, ResilienceRun
from faultbed.traffic.workloads.elastic.elastic_results import Restart

__all__ = ["PHASES", "Length", "TimedRestart", "lengths", "restart_metrics", "timed_restarts", "why_state_unknown"]

PHASES = ("detect", "diagnose", "reschedule", "initialise", "restore", "catch_up")
_DETAILS = {
    "detect": "the loss of a rank was noticed",
    "diagnose": "the lost hosts were known",
    "reschedule": "the other ranks were stopped, and all ranks had a place",
    "initialise": "all ranks had engines, memory and connections",
    "restore": "all ranks had the state of a checkpoint",
    "catch_up": "all iterations finished before the loss were finished again",
}
_INTERRUPTED = "another loss interrupted it"
_UNFINISHED = "not over when the run ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRestart:
    """A restart with the phases that it completed, of which `detect` is always there.

    `interrupted` is the phase that another loss interrupted, until that loss was noticed; None: no phase was.
    `unfinished` is the phase in which the restart was when the run ended, until then; None: it was in none.
    """

    restart: Restart
    phases: tuple[Phase, ...]
    interrupted: Phase | None = None
    unfinished: Phase | None = None

    @property
    def title(self) -> str:
        """Number, cause and lost hosts."""
        return f"restart {self.restart.number} ({_cause_and_hosts(self.restart)})"

    @property
    def length_ns(self) -> int:
        """Time of all completed phases."""
        return self.phases[-1].end_ns - self.phases[0].start_ns

    def describe(self) -> str:
        """Describe it in one line: lost hosts, reason, moved ranks, length of each phase, repeated iterations."""
        restart = self.restart
        moved = [f"{old} -> {new}" for old, new in zip(restart.before, restart.after, strict=False) if old != new]
        if len(restart.after) not in (0, len(restart.before)):
            moved = [f"{len(restart.before)} ranks -> {len(restart.after)} ranks"]
        lost = restart.lost_iterations
        repeated = f"{lost} iterations repeated, resumed after {restart.restored_iterations} iterations"
        words = [
            f"lost {_cause_and_hosts(restart)}",
            f"reason: {restart.reason}",
            *moved,
            ", ".join([*(f"{phase.name} {format_duration(phase.length_ns)}" for phase in self.phases), *self._open()]),
            *([] if lost is None else [repeated]),
            *(f"checkpoint {name} rejected: {reason}" for name, reason in restart.rejected),
        ]
        return "; ".join(words)

    def _open(self) -> list[str]:
        """Describe the phase in which the restart was when the run ended; empty if it was in none."""
        phase = self.unfinished
        return [] if phase is None else [f"{phase.name} {_more_than(phase.length_ns)} ({phase.detail})"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """How long a phase or an outage took, and of which restart it is. `is_open`: it took at least that long.

    `is_unfinished`: it is open because the run ended meanwhile.
    """

    ns: int
    of: str
    is_open: bool = False
    is_unfinished: bool = False


def timed_restarts(
    run: ResilienceRun,
    fired: Mapping[str, tuple[int, int]],
    series: Sequence[RankSeries] = (),
    *,
    end_ns: int | None = None,
) -> tuple[TimedRestart, ...]:
    """Return the job's restarts with their phases. `fired` maps fault ids to (first firing, removal) in controller ns.

    `series` shows how long an iteration takes: if a fault fires after the job has stood still for longer than that, it
    did not cause the loss. `end_ns` is the end of the run; None: the last restart's unfinished phase is left out.
    """
    timed = []
    before_ns = 0
    for restart, later in itertools.zip_longest(run.restarts, run.restarts[1:]):
        firings = [start for start, _ in fired.values() if before_ns < start <= restart.noticed_ns]
        loss_ns = _loss_ns(restart, firings, before_ns, _longest_before(series, restart.progress_ns))
        phases = _completed_phases(restart, loss_ns)
        timed.append(
            TimedRestart(
                restart=restart,
                phases=phases,
                interrupted=None if later is None else _open_phase(phases, later.noticed_ns, _INTERRUPTED),
                unfinished=None if later is not None or end_ns is None else _open_phase(phases, end_ns, _UNFINISHED),
            )
        )
        before_ns = restart.noticed_ns
    return tuple(timed)


def _completed_phases(restart: Restart, loss_ns: int) -> tuple[Phase, ...]:
    boundaries = (
        loss_ns,
        restart.noticed_ns,
        restart.diagnosed_ns,
        restart.rescheduled_ns,
        restart.initialised_ns,
        restart.restored_ns,
        restart.caught_up_ns,
    )
    phases = []
    for name, start_ns, end_ns in zip(PHASES, boundaries, boundaries[1:], strict=False):
        if start_ns is None or end_ns is None:
            break
        phases.append(Phase(name=name, start_ns=start_ns, end_ns=end_ns, detail=_DETAILS[name]))
    return tuple(phases)


def _open_phase(completed: Sequence[Phase], end_ns: int, detail: str) -> Phase | None:
    """Return the phase after the completed ones, which lasted at least until `end_ns`; None: all are completed."""
    if len(completed) == len(PHASES):
        return None
    start_ns = completed[-1].end_ns
    return Phase(name=PHASES[len(completed)], start_ns=start_ns, end_ns=max(start_ns, end_ns), detail=detail)


def _loss_ns(restart: Restart, firings: Sequence[int], before_ns: int, iteration_ns: int) -> int:
    """Return when the loss began: at the first firing since the last progress, or at the last firing before it.

    The end of an iteration is recorded a while after it. If a fault fired within an iteration before that record, and
    none within an iteration after it, the job stood still because of the former.
    """
    if not firings:
        return max(before_ns, restart.progress_ns)
    after = min((start for start in firings if start >= restart.progress_ns), default=None)
    just_before = max((start for start in firings if 0 < restart.progress_ns - start <= iteration_ns), default=None)
    if just_before is not None and (after is None or after - restart.progress_ns > iteration_ns):
        return just_before
    return max(firings) if after is None else after


def _longest_before(series: Sequence[RankSeries], time_ns: int) -> int:
    """Return the longest iteration of any rank that ended before a time; 0: none did."""
    return max(
        (step.end_ns - step.start_ns for rank in series for step in rank.iterations if step.end_ns <= time_ns),
        default=0,
    )


def lengths(restarts: Sequence[TimedRestart], end_ns: int) -> dict[str, list[Length]]:
    """Return the lengths of the phases by name, and as `total` those of the outages, in a run that ended at `end_ns`.

    An outage lasts from a loss until the job has caught up, over all restarts that this takes.
    """
    found: dict[str, list[Length]] = {}
    outage_start_ns: int | None = None
    for timed in restarts:
        for phase in timed.phases:
            found.setdefault(phase.name, []).append(Length(ns=phase.length_ns, of=timed.title))
        if (cut := timed.interrupted) is not None:
            # A phase that timed out also ends this way, so it may be the longest one.
            at_least = Length(ns=cut.length_ns, of=f"{timed.title}, until another loss interrupted it", is_open=True)
            found.setdefault(cut.name, []).append(at_least)
        if (last := timed.unfinished) is not None:
            found.setdefault(last.name, []).append(_until_end(last.length_ns, timed.title))
        outage_start_ns = timed.phases[0].start_ns if outage_start_ns is None else outage_start_ns
        if timed.restart.caught_up_ns is not None:
            outage = Length(ns=timed.restart.caught_up_ns - outage_start_ns, of=timed.title)
            found.setdefault("total", []).append(outage)
            outage_start_ns = None
    if outage_start_ns is not None:
        of = f"restart {restarts[-1].restart.number}: not caught up"
        found.setdefault("total", []).append(_until_end(max(0, end_ns - outage_start_ns), of))
    return found


def _until_end(length_ns: int, of: str) -> Length:
    """Return a length that the end of the run cut short."""
    return Length(ns=length_ns, of=f"{_more_than(length_ns)}: {of}, {_UNFINISHED}", is_open=True, is_unfinished=True)


def _more_than(length_ns: int) -> str:
    return f"more than {format_duration(length_ns)}"


def restart_metrics(run: RunEvidence, fired: Mapping[str, tuple[int, int]]) -> dict[str, Observation]:
    """Return the metrics of restarts, lost iterations and the final state; without values if the job cannot restart."""
    names = [f"restart.{name}" for name in (*PHASES, "total")]
    resilience = run.workload.resilience
    if resilience is None:
        missing = Observation(value=None, detail="the workload is not a job with [workload.resilience]")
        return dict.fromkeys((*names, "lost_iterations", "state_errors", "initialise.time"), missing)
    found = lengths(
        timed_restarts(resilience, fired, run.workload.series, end_ns=run.workload.end_ns), run.workload.end_ns
    )
    without = "no restart reached this phase" if resilience.restarts else "the job was not restarted"
    return {
        **{name: _longest(found.get(name.removeprefix("restart."), ()), without) for name in names},
        "lost_iterations": _lost_iterations(resilience),
        "state_errors": _state_errors(run),
        "initialise.time": Observation(
            value=resilience.initialised_ns / 1e9,
            detail=f"{len(run.workload.ranks)} ranks with {resilience.connections} queue pairs at the end",
        ),
    }


def _longest(found: Sequence[Length], without: str) -> Observation:
    """Return the longest length in seconds; `without` says why there is none.

    It is a lower bound if the run ended during any of them, which might have become the longest.
    """
    longest = max(found, key=lambda length: (length.ns, not length.is_open, length.of), default=None)
    if longest is None:
        return Observation(value=None, detail=without)
    unfinished = [length.of for length in found if length.is_unfinished and length is not longest]
    return Observation(
        value=longest.ns / 1e9,
        detail="; ".join([longest.of, *unfinished]),
        censored=longest.is_open or bool(unfinished),
    )


def _cause_and_hosts(restart: Restart) -> str:
    """Return the cause of a restart, with the lost hosts if there are any."""
    return f"{restart.cause}: {', '.join(restart.hosts)}" if restart.hosts else restart.cause


def _lost_iterations(run: ResilienceRun) -> Observation:
    """Return the finished iterations that all restarts together had to repeat; no value without a restart.

    A loss that hit an idle spare restarts nothing, so that it says nothing about a restart.
    If a restart restored no state, the next restart's count includes its losses. Without a next restart, the value is a
    lower bound.
    """
    restarts = run.restarts
    if not restarts:
        return Observation(value=None, detail="the job was not restarted")
    lost = sum(restart.lost_iterations or 0 for restart in restarts)
    ends = [
        f"restart {restart.number} from {restart.iterations} back to {restart.restored_iterations}"
        for restart in restarts
        if restart.lost_iterations is not None
    ]
    unknown = [restart for restart in restarts if restart.lost_iterations is None]
    is_open = bool(unknown) and unknown[-1] is restarts[-1]
    for restart in unknown:
        reason = "" if restart is restarts[-1] else ", because another loss interrupted it"
        ends.append(f"restart {restart.number} restored nothing{reason}")
    return Observation(
        value=lost,
        detail=f"{'; '.join(ends)}; {run.repeated_iterations} executions were repeated on all ranks",
        censored=is_open,
    )


def _state_errors(run: RunEvidence) -> Observation:
    """Return the wrong elements of the final state; no value if none is wrong but part of it is unknown."""
    states = run.workload.resilience.states if run.workload.resilience is not None else ()
    wrong = sum(state.wrong for state in states)
    unknown = why_state_unknown(run)
    if unknown and not wrong:
        return Observation(value=None, detail=unknown)
    elements = sum(state.elements for state in states)
    detail = f"{elements} elements on {len(states)} ranks after {min(state.iterations for state in states)} iterations"
    return Observation(value=wrong, detail=f"{detail} compared")


def why_state_unknown(run: RunEvidence) -> str:
    """Return why some rank's state after all iterations is unknown; empty if all states are known."""
    states = run.workload.resilience.states if run.workload.resilience is not None else ()
    reported = {state.rank for state in states}
    if missing := [rank_series.rank for rank_series in run.workload.series if rank_series.rank not in reported]:
        return f"no state from rank {', '.join(map(str, missing))}"
    if not sum(state.elements for state in states):
        return "no element of a final state was compared"
    planned = run.workload.planned.get("iterations")
    if early := [state for state in states if isinstance(planned, int) and state.iterations != planned]:
        return f"rank {early[0].rank} reported its state after {early[0].iterations} of {planned} iterations"
    return ""
