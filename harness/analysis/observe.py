"""Everything about a run that is judged and reported: timeline, impacts, phases, routing and all metrics. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from harness.analysis import intervals, observations, resolutions, timeline
from harness.analysis.ettr import Ettr, ettr
from harness.analysis.links.link_metrics import link_metrics
from harness.analysis.observations import Observation
from harness.analysis.pace import doubt_slow_downs, pace, steadied
from harness.analysis.phases import Phase, phases
from harness.analysis.resolutions import Firing
from harness.analysis.restarts import phases_of_restarts, restart_metrics
from harness.analysis.routing import Routing, routing
from harness.confidence import LEVEL
from harness.record.measurements import FaultRun, Measurements
from traffic.workloads.elastic.elastic_results import Restart

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Observed", "observe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Everything that the judge and the report know about a run beyond its raw data.

    `firing` is the uncertainty of each fault's firing time. `pace` is the pace of the machine under a soft lab in each
    bin of `goodput`; None if it is unknown or not needed.
    """

    metrics: Mapping[str, Observation]
    goodput: timeline.Goodput | None
    per_rank: Mapping[int, timeline.Goodput]
    baseline: timeline.Baseline | None
    impacts: Mapping[str, timeline.Impact]
    phases: Mapping[str, tuple[Phase, ...]]
    job_time: timeline.JobTime | None
    routing: Mapping[str, Routing]
    firing: Mapping[str, Firing]
    training: Ettr | None = None
    restarts: tuple[tuple[Restart, tuple[Phase, ...]], ...] = ()
    pace: NDArray[np.float64] | None = None


def observe(run: Measurements, *, level: float = LEVEL) -> Observed:
    """Compute every metric of one run. Noisy metrics have intervals of this `level`."""
    per_rank = {
        series.rank: timeline.goodput(series.samples, start_ns=run.t0_ns, end_ns=run.end_ns, sample_ns=run.sample_ns)
        for series in run.series
    }
    whole = timeline.total(list(per_rank.values())) if per_rank else None
    fired = _fired_windows(run.faults)
    first_ns = _first_disturbance(run, fired)
    base = None
    if whole is not None:
        window_ns = timeline.rolling_window_ns(run.series, whole.step_ns, until_ns=first_ns)
        base = timeline.baseline(whole, first_fault_ns=first_ns, window_ns=window_ns, reads=run.reads)
    impacts: dict[str, timeline.Impact] = {}
    beyond_chance: dict[str, timeline.Impact] = {}
    of_machine = None
    if whole is not None and base is not None:
        of_machine = pace(run, whole, fired.values(), start_ns=base.start_ns, until_ns=base.end_ns)
        windows = _windows(run)
        impacts = timeline.impacts(steadied(whole, of_machine), base, windows)
        beyond = resolutions.beyond_chance(whole, base, impacts, level)
        beyond_chance = timeline.impacts(steadied(whole, of_machine), beyond, windows)
        if of_machine is not None:
            impacts = doubt_slow_downs(run, impacts, timeline.impacts(whole, base, windows), windows)
    firing = resolutions.firings(run.faults)
    early_ns = {fault_id: one.early_ns for fault_id, one in firing.items()}
    by_phase = phases(run, impacts, early_ns)
    by_routing = routing(run.changes, fired, early_ns)
    job_time = None if run.twin is None else timeline.job_time_ratio(run.series, run.twin, timeline.job_start_ns(run))
    training = ettr(run, base, impacts.values(), first_fault_ns=first_ns)
    metrics = {
        **observations.plain(run),
        **observations.rates(run, whole),
        **observations.recoveries(run, base, impacts, _slowest(whole, of_machine, impacts)),
        **observations.recovery_phases(run, base, by_phase),
        **observations.dips(run, base, impacts),
        "goodput_mean_ratio": observations.goodput_mean_ratio(run, whole, base, impacts),
        "jct_ratio": observations.jct_ratio(run, job_time),
        "ettr": observations.training_ratio(training),
        **restart_metrics(run, fired),
        "straggler": observations.straggler(run, fired),
        **observations.routing_stages(run, by_routing),
        **observations.slow_rank(run, fired),
        **observations.rnic_counters(run),
        **observations.captured_packets(run),
        **link_metrics(run),
    }
    interval_of = intervals.find(run, whole, base, impacts, training, level=level)
    if whole is not None:
        interval_of |= resolutions.find(run, whole.step_ns, impacts, by_phase, by_routing, firing, beyond_chance)
    return Observed(
        metrics={name: replace(one, interval=interval_of.get(name)) for name, one in metrics.items()},
        goodput=whole,
        per_rank=per_rank,
        baseline=base,
        impacts=impacts,
        phases=by_phase,
        job_time=job_time,
        routing=by_routing,
        firing=firing,
        training=training,
        restarts=phases_of_restarts(run.resilience, fired) if run.resilience is not None else (),
        pace=of_machine,
    )


def _slowest(
    whole: timeline.Goodput | None, of_machine: NDArray[np.float64] | None, impacts: Mapping[str, timeline.Impact]
) -> dict[str, float]:
    """Return, by fault id, the lowest pace of the machine from the firing until goodput was back."""
    if whole is None or of_machine is None:
        return {}
    return {
        fault_id: float(of_machine[whole.bin_of(one.fired_ns) : whole.bin_of(one.fired_ns + one.recovery_ns) + 1].min())
        for fault_id, one in impacts.items()
        if whole.bin_of(one.fired_ns) < len(of_machine)
    }


def _fired_windows(faults: Sequence[FaultRun]) -> dict[str, tuple[int, int]]:
    """Return, by fault id, (first firing, removal) of the faults that fired, by time of firing."""
    windows = {}
    for fault in faults:
        receipt = fault.receipt
        if receipt is None or receipt.fired.first_ns is None:
            continue
        first = receipt.fired.first_ns
        cleared = receipt.cleared.get("at_ns")
        end = cleared if isinstance(cleared, int) else first + fault.plan.duration_ns
        windows[fault.plan.id] = (first, max(first, end))
    return dict(sorted(windows.items(), key=lambda item: item[1]))


def _first_disturbance(run: Measurements, fired: Mapping[str, tuple[int, int]]) -> int:
    """Return when the fault-free start ends: at the first arming or firing, because an armed fault may act unseen."""
    armed = [fault.receipt.armed.get("at_ns") for fault in run.faults if fault.receipt is not None]
    times = [*(start for start, _ in fired.values()), *(at_ns for at_ns in armed if isinstance(at_ns, int))]
    return min(times, default=run.end_ns)


def _windows(run: Measurements) -> dict[str, timeline.Window]:
    """Return when each fault may have acted, by id: until the run's end if its removal was not confirmed."""
    windows = {}
    for fault in run.faults:
        receipt = fault.receipt
        if receipt is None:
            continue
        armed_ns, fired = receipt.armed.get("at_ns"), receipt.fired
        starts = [at for at in (armed_ns, fired.first_ns, *(fired.between_ns or ())) if isinstance(at, int)]
        if not starts:
            continue
        cleared_ns = receipt.cleared.get("at_ns")
        is_confirmed = receipt.cleared.get("ok") is True
        end_ns = cleared_ns if is_confirmed and isinstance(cleared_ns, int) else run.end_ns
        windows[fault.plan.id] = timeline.Window(
            start_ns=min(starts), fired_ns=fired.first_ns, cleared_ns=max(end_ns, fired.first_ns or min(starts))
        )
    return windows
