"""Metrics of a placed routing scheme: how soon its controller placed flows again, and how well. Pure.

te.rebalanced     from a fault's first firing until the last placement before its removal was on the switches
te.moved          keys that placements moved to another uplink
te.bound_ratio    bytes of the fullest link over the cut bound, of the worst placement (modelled)
"""

from __future__ import annotations

from collections.abc import Mapping

from faultbed.harness.analysis.effects.fault_windows import fired_windows
from faultbed.harness.analysis.observations import Observation
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.verdict import FlowPlacements

__all__ = ["placement_metrics"]

_NAMES = ("te.rebalanced", "te.moved", "te.bound_ratio")


def placement_metrics(run: RunEvidence) -> dict[str, Observation]:
    """Return the metrics of the controller that placed flows; None without one, or if its cycles are not all known."""
    placements = None if run.routing is None else run.routing.placements
    if placements is None:
        nothing = Observation(value=None, detail="no controller placed flows: the routing scheme is not te")
        return dict.fromkeys(_NAMES, nothing)
    if placements.errors:
        count, last = len(placements.errors), placements.errors[-1]
        lost = Observation(value=None, detail=f"{count} cycles of the controller failed, the last one with: {last}")
        return dict.fromkeys(_NAMES, lost)
    moved = sum(placement.moved for placement in placements.placements)
    ratios = [placement.bound_ratio for placement in placements.placements if placement.bound_ratio is not None]
    detail = f"{len(placements.placements)} placements in {placements.cycles} cycles"
    ids = [fault.plan.id for fault in run.injected.faults]
    return {
        "te.rebalanced": _rebalanced(placements, fired_windows(run.injected.faults), ids),
        "te.moved": Observation(value=moved, detail=detail),
        "te.bound_ratio": Observation(value=max(ratios, default=None), detail=f"{detail}, by their demands"),
    }


def _rebalanced(placements: FlowPlacements, fired: Mapping[str, tuple[int, int]], fault_ids: list[str]) -> Observation:
    """Return the worst fault's time. A placement counts for the fault that fired last before it began."""
    times: dict[str, float] = {}
    for fault_id, (fired_ns, cleared_ns) in fired.items():
        until_ns = min([cleared_ns, *(later for later, _ in fired.values() if later > fired_ns)])
        done = [one.done_ns for one in placements.placements if fired_ns <= one.at_ns < until_ns]
        if done:
            times[fault_id] = (max(done) - fired_ns) / 1e9
    unseen = {name: "no placement changed a rule while it was on" for name in fault_ids if name not in times}
    if not times:
        return Observation(value=None, detail="no placement changed a rule under a fault", unseen=unseen)
    worst = max(times, key=lambda name: times[name])
    missing = f"; none under {', '.join(unseen)}" if unseen else ""
    return Observation(value=times[worst], detail=f"{worst}: read back from the switches{missing}", unseen=unseen)
