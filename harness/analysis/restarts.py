"""Restarts of a job in phases, what they cost, and what its final state shows. Pure.

    detect      first firing of the fault -> the loss of a rank was noticed
    diagnose    noticed -> lost hosts known
    reschedule  known -> remaining ranks stopped, all ranks placed
    initialise  placed -> engines, memory and connections
    restore     connected -> state of the newest good checkpoint on all ranks
    catch_up    restored -> what was finished before is finished again

A restart that a further loss cut short has no more phases; the restart after it begins where the loss was noticed.
Without a fault, `detect` begins when the last iteration was finished, which is at most an iteration too early.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.analysis.observations import Observation
from harness.analysis.phases import Phase
from harness.quantities import format_duration
from harness.record.measurements import Measurements, ResilienceRun
from traffic.workloads.elastic.elastic_results import Restart

__all__ = ["PHASES", "describe", "phases_of_restarts", "restart_metrics"]

PHASES = ("detect", "diagnose", "reschedule", "initialise", "restore", "catch_up")
_DETAILS = {
    "detect": "the loss of a rank was noticed",
    "diagnose": "the lost hosts were known",
    "reschedule": "the other ranks were stopped, and all ranks had a place",
    "initialise": "all ranks had engines, memory and connections",
    "restore": "all ranks had the state of a checkpoint",
    "catch_up": "what was finished before was finished again",
}


def phases_of_restarts(
    run: ResilienceRun, fired: Mapping[str, tuple[int, int]]
) -> tuple[tuple[Restart, tuple[Phase, ...]], ...]:
    """Return the phases of each restart. `fired` are (first firing, removal) of the faults that fired, by id."""
    restarts = []
    before_ns = 0
    for restart in run.restarts:
        firings = [start for start, _ in fired.values() if before_ns < start <= restart.noticed_ns]
        marks = [
            max(firings) if firings else max(before_ns, restart.progress_ns),
            restart.noticed_ns,
            restart.diagnosed_ns,
            restart.rescheduled_ns,
            restart.initialised_ns,
            restart.restored_ns,
            restart.caught_up_ns,
        ]
        phases = []
        for name, start, end in zip(PHASES, marks, marks[1:], strict=False):
            if start is None or end is None:
                break
            phases.append(Phase(name=name, start_ns=start, end_ns=end, detail=_DETAILS[name]))
        restarts.append((restart, tuple(phases)))
        before_ns = restart.noticed_ns
    return tuple(restarts)


def restart_metrics(run: Measurements, fired: Mapping[str, tuple[int, int]]) -> dict[str, Observation]:
    """Return the metrics of restarts, lost iterations and the final state."""
    names = [f"restart.{name}" for name in (*PHASES, "total")]
    resilience = run.resilience
    if resilience is None:
        missing = Observation(value=None, detail="the workload is not a job with [workload.resilience]")
        return dict.fromkeys((*names, "lost_iterations", "state_errors", "initialise.time"), missing)
    return {
        **_times(phases_of_restarts(resilience, fired)),
        "lost_iterations": _lost(resilience),
        "state_errors": _state(resilience),
        "initialise.time": Observation(
            value=resilience.initialised_ns / 1e9,
            detail=f"{len(run.ranks)} ranks with {resilience.connections} queue pairs at the end",
        ),
    }


def _times(restarts: Sequence[tuple[Restart, tuple[Phase, ...]]]) -> dict[str, Observation]:
    found: dict[str, list[tuple[int, str]]] = {}
    for restart, phases in restarts:
        who = f"restart {restart.number} ({_what(restart)})"
        for phase in phases:
            found.setdefault(phase.name, []).append((phase.length_ns, who))
        if restart.caught_up_ns is not None:
            found.setdefault("total", []).append((restart.caught_up_ns - phases[0].start_ns, who))
    why = "the job was not restarted" if not restarts else "no restart came so far"
    metrics = {}
    for name in (*PHASES, "total"):
        slowest = max(found.get(name, ()), default=None)
        metrics[f"restart.{name}"] = (
            Observation(value=None, detail=why)
            if slowest is None
            else Observation(value=slowest[0] / 1e9, detail=slowest[1])
        )
    return metrics


def _what(restart: Restart) -> str:
    return f"{restart.cause}: {', '.join(restart.hosts)}" if restart.hosts else restart.cause


def _lost(run: ResilienceRun) -> Observation:
    unknown = [one.number for one in run.restarts if one.lost_iterations is None]
    lost = sum(one.lost_iterations or 0 for one in run.restarts)
    each = ", ".join(
        f"restart {one.number} from {one.iterations} back to {one.restored_iterations}"
        for one in run.restarts
        if one.lost_iterations is not None
    )
    detail = each or "the job was not restarted"
    if unknown:
        detail = f"{detail}; restart {unknown[0]} restored nothing because of a further loss"
    return Observation(value=lost, detail=f"{detail}; {run.repeated_iterations} executions were repeated on all ranks")


def _state(run: ResilienceRun) -> Observation:
    if not run.states:
        return Observation(value=None, detail="the job did not end, so its state was not compared")
    wrong = sum(one.wrong for one in run.states)
    elements = sum(one.elements for one in run.states)
    after = {one.iterations for one in run.states}
    detail = f"{elements} elements on {len(run.states)} ranks after {min(after)} iterations compared"
    return Observation(value=wrong, detail=detail)


def describe(restart: Restart, phases: Sequence[Phase]) -> str:
    """Return a restart in words: what was lost, where the ranks went, and how long each phase took."""
    moved = [f"{old} -> {new}" for old, new in zip(restart.before, restart.after, strict=False) if old != new]
    if len(restart.after) not in (0, len(restart.before)):
        moved = [f"{len(restart.before)} ranks -> {len(restart.after)} ranks"]
    times = ", ".join(f"{phase.name} {format_duration(phase.length_ns)}" for phase in phases)
    lost = restart.lost_iterations
    words = [
        f"{_what(restart)} lost: {restart.reason}",
        *moved,
        times,
        *([] if lost is None else [f"{lost} iterations repeated, from {restart.restored_iterations}"]),
        *(f"{name}: {reason}" for name, reason in restart.rejected),
    ]
    return "; ".join(words)
