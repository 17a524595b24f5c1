"""Everything about a run that is judged and reported: timeline, impacts, phases, routing and all metrics. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from faultbed.harness.analysis import intervals, observations, resolutions, timeline
from faultbed.harness.analysis.effects.fault_windows import fired_windows, first_disturbance
from faultbed.harness.analysis.effects.goodput_effects import GoodputEffects, goodput_effects
from faultbed.harness.analysis.ettr import Ettr, ettr
from faultbed.harness.analysis.links.link_metrics import link_metrics
from faultbed.harness.analysis.observations import Observation
from faultbed.harness.analysis.phases import Phase, phases
from faultbed.harness.analysis.resolutions import Firing
from faultbed.harness.analysis.restarts import TimedRestart, lengths, restart_metrics, timed_restarts
from faultbed.harness.analysis.routing import Routing, routing
from faultbed.harness.confidence import LEVEL
from faultbed.harness.experiment.metrics import METRICS
from faultbed.harness.ledger.statistics.contrasts import Member
from faultbed.harness.record.evidence.run_evidence import RunEvidence

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Observed", "observe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Everything that the judge and the report know about a run beyond its raw data.

    `firing` is the uncertainty of each fault's firing time. `pace` is the pace of the machine under a soft lab in each
    bin of `goodput`; None if it is unknown or not needed. `beside` is the goodput of what sent beside the workload, by
    name; None of one without samples.
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
    restarts: tuple[TimedRestart, ...] = ()
    pace: NDArray[np.float64] | None = None
    beside: Mapping[str, timeline.Goodput | None] = field(default_factory=dict)


def observe(
    run: RunEvidence,
    *,
    level: float = LEVEL,
    goings_back: Sequence[tuple[int, int]] = (),
    beside: Mapping[str, timeline.Goodput | None] = MappingProxyType({}),
) -> Observed:
    """Compute every metric of the workload of one run. `faultbed.harness.judge.observed_of` adds those of the parts.

    Noisy metrics have intervals of this `level`. `goings_back` is when packets were seen to be sent again, each
    with the time of its cause. `beside` is the goodput of what shared the workload's links.
    """
    fired = fired_windows(run.injected.faults)
    first_ns = first_disturbance(run, fired)
    effects = goodput_effects(run, fired, first_fault_ns=first_ns, level=level)
    total, base, impacts = effects.total, effects.baseline, effects.impacts
    firing = resolutions.firings(run.injected.faults)
    early_ns = {fault_id: timing.early_ns for fault_id, timing in firing.items()}
    by_phase = phases(run, impacts, early_ns, goings_back=goings_back)
    by_routing = routing(run.telemetry.changes, fired, early_ns)
    job_time = (
        None
        if run.fault_free is None
        else timeline.job_time_ratio(run.workload.series, run.fault_free, timeline.job_start_ns(run))
    )
    training = ettr(run, base, impacts.values(), first_fault_ns=first_ns, settled_ns=_settled_ns(run, fired, impacts))
    metrics = _metrics(run, fired, effects, by_phase, by_routing, job_time, training, beside=beside)
    interval_of = intervals.intervals_of(run, total, impacts, training, level=level)
    rough = intervals.intervals_of(run, total, impacts, training, level=level, is_rough=True)
    members = intervals.contrasts_of(run, total, base, impacts, level=level)
    if total is not None:
        interval_of |= resolutions.resolutions_of(
            run,
            total.step_ns,
            impacts,
            by_phase,
            by_routing,
            firing,
            effects.beyond_chance,
            0 if base is None else base.hidden_ns,
        )
    restarts = (
        timed_restarts(run.workload.resilience, fired, run.workload.series, end_ns=run.workload.end_ns)
        if run.workload.resilience is not None
        else ()
    )
    interval_of |= resolutions.of_restarts(run, lengths(restarts, run.workload.end_ns), firing)
    return Observed(
        metrics={
            **{
                name: replace(observation, interval=interval_of.get(name), sampling=rough.get(name))
                for name, observation in metrics.items()
            },
            **{name: _contrast(name, metrics[name], of_metric, level) for name, of_metric in members.items()},
        },
        goodput=total,
        per_rank=effects.per_rank,
        baseline=base,
        impacts=impacts,
        phases=by_phase,
        job_time=job_time,
        routing=by_routing,
        firing=firing,
        training=training,
        restarts=restarts,
        pace=effects.pace,
        beside=beside,
    )


def _settled_ns(
    run: RunEvidence, fired: Mapping[str, tuple[int, int]], impacts: Mapping[str, timeline.Impact]
) -> int | None:
    """Return when the last fault and its known effects were over; None: that was not seen for some fault."""
    ends = []
    for fault in run.injected.faults:
        impact = impacts.get(fault.plan.id)
        cleared_ns = None if fault.receipt is None else fault.receipt.cleared.at_ns
        if impact is not None and impact.censored:
            return None
        known_ns = impact.end_ns if impact is not None else cleared_ns
        if not isinstance(known_ns, int) or fault.plan.id not in fired:
            return None
        ends.append(known_ns)
    return max(ends, default=run.workload.t0_ns)


def _contrast(name: str, observation: Observation, members: Sequence[Member], level: float) -> Observation:
    """Return an observation with the contrasts of all faults, and the range of the worst one."""
    value = observation.value
    if not isinstance(value, int | float):
        return observation
    is_lost = METRICS[name].is_share_lost
    worst = intervals.hull(members, 1 - value if is_lost else value, level)
    if worst is not None and is_lost:
        worst = replace(worst, low=1 - worst.high, high=1 - worst.low)
    return replace(observation, members=tuple(members), interval=worst)


def _metrics(
    run: RunEvidence,
    fired: Mapping[str, tuple[int, int]],
    effects: GoodputEffects,
    by_phase: Mapping[str, tuple[Phase, ...]],
    by_routing: Mapping[str, Routing],
    job_time: timeline.JobTime | None,
    training: Ettr | None,
    *,
    beside: Collection[str],
) -> dict[str, Observation]:
    """Return every metric by name, without intervals."""
    total, base, impacts = effects.total, effects.baseline, effects.impacts
    return {
        **observations.plain(run),
        **observations.rates(run, total),
        **observations.recoveries(run, base, impacts, effects.slowest_pace()),
        **observations.recovery_phases(run, base, by_phase),
        **observations.dips(run, base, impacts),
        "goodput_mean_ratio": observations.goodput_mean_ratio(run, total, base, impacts),
        "goodput.after_ratio": observations.after_ratio(run, total, base, impacts),
        "jct_ratio": observations.jct_ratio(run, job_time, fired),
        "ettr": observations.training_ratio(training),
        **restart_metrics(run, fired),
        "straggler": observations.straggler(run, fired),
        **observations.routing_stages(run, by_routing),
        **observations.slow_rank(run, fired),
        **observations.rnic_counters(run),
        **link_metrics(run, beside),
    }
