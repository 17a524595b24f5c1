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

from harness.analysis.observations import Observation
from harness.analysis.phases import Phase
from harness.quantities import format_duration
from harness.record.measurements import Measurements, RankSeries, ResilienceRun
from traffic.workloads.elastic.elastic_results import Restart

__all__ = ["PHASES", "describe", "phases_of_restarts", "restart_metrics", "times_by_phase", "why_state_unknown"]

PHASES = ("detect", "diagnose", "reschedule", "initialise", "restore", "catch_up")
_DETAILS = {
    "detect": "the loss of a rank was noticed",
    "diagnose": "the lost hosts were known",
    "reschedule": "the other ranks were stopped, and all ranks had a place",
    "initialise": "all ranks had engines, memory and connections",
    "restore": "all ranks had the state of a checkpoint",
    "catch_up": "all iterations finished before the loss were finished again",
}


def phases_of_restarts(
    run: ResilienceRun, fired: Mapping[str, tuple[int, int]], series: Sequence[RankSeries] = ()
) -> tuple[tuple[Restart, tuple[Phase, ...]], ...]:
    """Return each restart with its phases. `fired` maps fault ids to (first firing, removal) in controller ns.

    `series` shows how long an iteration takes: a fault that fires when the job has stood still for longer is not its
    loss.
    The phases end with the last one that the restart completed.
    """
    restarts = []
    before_ns = 0
    for restart in run.restarts:
        firings = [start for start, _ in fired.values() if before_ns < start <= restart.noticed_ns]
        boundaries = [
            _loss_ns(restart, firings, before_ns, _longest_before(series, restart.progress_ns)),
            restart.noticed_ns,
            restart.diagnosed_ns,
            restart.rescheduled_ns,
            restart.initialised_ns,
            restart.restored_ns,
            restart.caught_up_ns,
        ]
        phases = []
        for name, start, end in zip(PHASES, boundaries, boundaries[1:], strict=False):
            if start is None or end is None:
                break
            phases.append(Phase(name=name, start_ns=start, end_ns=end, detail=_DETAILS[name]))
        restarts.append((restart, tuple(phases)))
        before_ns = restart.noticed_ns
    return tuple(restarts)


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


def restart_metrics(run: Measurements, fired: Mapping[str, tuple[int, int]]) -> dict[str, Observation]:
    """Return the metrics of restarts, lost iterations and the final state; without values if the job cannot restart."""
    names = [f"restart.{name}" for name in (*PHASES, "total")]
    resilience = run.resilience
    if resilience is None:
        missing = Observation(value=None, detail="the workload is not a job with [workload.resilience]")
        return dict.fromkeys((*names, "lost_iterations", "state_errors", "initialise.time"), missing)
    return {
        **_phase_times(phases_of_restarts(resilience, fired, run.series), run.end_ns),
        "lost_iterations": _lost_iterations(resilience),
        "state_errors": _state_errors(run),
        "initialise.time": Observation(
            value=resilience.initialised_ns / 1e9,
            detail=f"{len(run.ranks)} ranks with {resilience.connections} queue pairs at the end",
        ),
    }


def times_by_phase(restarts: Sequence[tuple[Restart, tuple[Phase, ...]]]) -> dict[str, list[tuple[int, str]]]:
    """Return (duration in ns, description of the restart) by phase; `total` has the durations of whole outages."""
    durations_by_phase: dict[str, list[tuple[int, str]]] = {}
    outage_ns: int | None = None
    for restart, phases in restarts:
        label = f"restart {restart.number} ({_cause_and_hosts(restart)})"
        for phase in phases:
            durations_by_phase.setdefault(phase.name, []).append((phase.length_ns, label))
        outage_ns = phases[0].start_ns if outage_ns is None else outage_ns
        if restart.caught_up_ns is not None:
            durations_by_phase.setdefault("total", []).append((restart.caught_up_ns - outage_ns, label))
            outage_ns = None
    return durations_by_phase


def _interrupted(restarts: Sequence[tuple[Restart, tuple[Phase, ...]]]) -> dict[str, list[tuple[int, str]]]:
    """Return (ns until another loss interrupted it, description of the restart) of each interrupted phase, by phase.

    A phase that timed out also ends this way, so an interrupted phase may be the longest one.
    """
    lasted_by_phase: dict[str, list[tuple[int, str]]] = {}
    for (restart, phases), (then, _) in itertools.pairwise(restarts):
        if phases and len(phases) < len(PHASES):
            label = f"restart {restart.number} ({_cause_and_hosts(restart)}), until another loss interrupted it"
            lasted_ns = max(0, then.noticed_ns - phases[-1].end_ns)
            lasted_by_phase.setdefault(PHASES[len(phases)], []).append((lasted_ns, label))
    return lasted_by_phase


def _phase_times(restarts: Sequence[tuple[Restart, tuple[Phase, ...]]], end_ns: int) -> dict[str, Observation]:
    """Return the longest time of each phase over all restarts, in seconds, with the restart that took it."""
    durations_by_phase = times_by_phase(restarts)
    # If the run ended during an outage, this is a lower bound of its length.
    open_ns = _open_outage_ns(restarts, end_ns)
    if open_ns is not None:
        durations_by_phase.setdefault("total", []).append((open_ns, f"restart {restarts[-1][0].number}: not caught up"))
    interrupted = _interrupted(restarts)
    missing_reason = "the job was not restarted" if not restarts else "no restart reached this phase"
    metrics = {}
    for name in (*PHASES, "total"):
        slowest = max(durations_by_phase.get(name, ()), default=None)
        cut = max(interrupted.get(name, ()), default=None)
        if cut is not None and (slowest is None or cut[0] > slowest[0]):
            metrics[f"restart.{name}"] = Observation(value=cut[0] / 1e9, detail=cut[1], censored=True)
            continue
        metrics[f"restart.{name}"] = (
            Observation(value=None, detail=missing_reason)
            if slowest is None
            else Observation(
                value=slowest[0] / 1e9, detail=slowest[1], censored=name == "total" and open_ns is not None
            )
        )
    return metrics


def _open_outage_ns(restarts: Sequence[tuple[Restart, tuple[Phase, ...]]], end_ns: int) -> int | None:
    """Return how long the last outage had lasted when the run ended; None: the job had caught up."""
    since_ns = None
    for restart, phases in restarts:
        since_ns = phases[0].start_ns if since_ns is None else since_ns
        since_ns = None if restart.caught_up_ns is not None else since_ns
    return None if since_ns is None else max(0, end_ns - since_ns)


def _cause_and_hosts(restart: Restart) -> str:
    """Return the cause of a restart, with the lost hosts if there are any."""
    return f"{restart.cause}: {', '.join(restart.hosts)}" if restart.hosts else restart.cause


def _lost_iterations(run: ResilienceRun) -> Observation:
    """Return the finished iterations that all restarts together had to repeat.

    If a restart restored no state, the next restart's count includes its losses. Without a next restart, the value is a
    lower bound.
    """
    restarts = run.restarts
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
    detail = "; ".join(ends) or "the job was not restarted"
    return Observation(
        value=lost,
        detail=f"{detail}; {run.repeated_iterations} executions were repeated on all ranks",
        censored=is_open,
    )


def _state_errors(run: Measurements) -> Observation:
    """Return the wrong elements of the final state; no value if none is wrong but part of it is unknown."""
    states = run.resilience.states if run.resilience is not None else ()
    wrong = sum(state.wrong for state in states)
    unknown = why_state_unknown(run)
    if unknown and not wrong:
        return Observation(value=None, detail=unknown)
    elements = sum(state.elements for state in states)
    detail = f"{elements} elements on {len(states)} ranks after {min(state.iterations for state in states)} iterations"
    return Observation(value=wrong, detail=f"{detail} compared")


def why_state_unknown(run: Measurements) -> str:
    """Return why some rank's state after all iterations is unknown; empty if all states are known."""
    states = run.resilience.states if run.resilience is not None else ()
    reported = {state.rank for state in states}
    if missing := [rank_series.rank for rank_series in run.series if rank_series.rank not in reported]:
        return f"no state from rank {', '.join(map(str, missing))}"
    if not sum(state.elements for state in states):
        return "no element of a final state was compared"
    planned = run.workload.get("iterations")
    if early := [state for state in states if isinstance(planned, int) and state.iterations != planned]:
        return f"rank {early[0].rank} reported its state after {early[0].iterations} of {planned} iterations"
    return ""


def describe(restart: Restart, phases: Sequence[Phase]) -> str:
    """Describe a restart in one line: lost hosts, reason, moved ranks, length of each phase, repeated iterations."""
    moved = [f"{old} -> {new}" for old, new in zip(restart.before, restart.after, strict=False) if old != new]
    if len(restart.after) not in (0, len(restart.before)):
        moved = [f"{len(restart.before)} ranks -> {len(restart.after)} ranks"]
    times = ", ".join(f"{phase.name} {format_duration(phase.length_ns)}" for phase in phases)
    lost = restart.lost_iterations
    words = [
        f"lost {_cause_and_hosts(restart)}",
        f"reason: {restart.reason}",
        *moved,
        times,
        *(
            []
            if lost is None
            else [f"{lost} iterations repeated, resumed after {restart.restored_iterations} iterations"]
        ),
        *(f"checkpoint {name} rejected: {reason}" for name, reason in restart.rejected),
    ]
    return "; ".join(words)
