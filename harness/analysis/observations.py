"""Metrics of a run, each with its origin in words. Pure.

A value that cannot be determined (no twin, too short a baseline, a fault that never fired) is None with the reason. It
is never 0 and never left out, so that the judge reports INCONCLUSIVE.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from faultbed.harness.analysis import timeline
from faultbed.harness.analysis.effects.fault_windows import acting_windows
from faultbed.harness.analysis.ettr import Ettr, work_share
from faultbed.harness.analysis.intervals import (
    attainment_range,
    bins_after,
    mean_busbw_gbps,
    operation_shares,
    times_are_mixed,
)
from faultbed.harness.analysis.phases import ENDING, NAMES, Phase
from faultbed.harness.analysis.ranks.slow_ranks import slow_ranks
from faultbed.harness.analysis.ranks.storage_reads import reads_of
from faultbed.harness.analysis.ranks.straggler import LEVEL, slowdowns, slowest
from faultbed.harness.analysis.routing import TIMES, Routing
from faultbed.harness.confidence import Interval
from faultbed.harness.ledger.statistics.contrasts import Member
from faultbed.harness.quantities import format_bytes, format_duration
from faultbed.harness.record import kernel_log
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.record.evidence.telemetry_evidence import counter_deltas
from faultbed.harness.record.evidence.workload_evidence import RankSeries, Serving
from faultbed.testbed.observe import counters, machine_load
from faultbed.testbed.observe.telemetry import CHANGES_LOST
from faultbed.traffic.engine.latency_split import PARTS

__all__ = [
    "Observation",
    "after_ratio",
    "dips",
    "faster_than_twin",
    "goodput_mean_ratio",
    "jct_ratio",
    "plain",
    "rates",
    "recoveries",
    "recovery_phases",
    "rnic_counters",
    "routing_stages",
    "slow_rank",
    "straggler",
    "training_ratio",
]

Value = float | int | str

_SLOW = 0.9
"""If the machine under a soft lab ran below this pace, a recovery says that it was measured against the pace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A metric's value in its unit, or None, and its origin. `censored`: the true value is at least this one.

    `interval` is where the run's own noise, or its resolution, leaves the value; None for a count, a name, or too
    little data. `sampling` is the same for a decision that tolerates the level of the machine; it needs less data.
    `between` are the lowest and highest values that errors of measurement leave open in this run; None: only `value`.
    `members` are the contrasts of all faults, of which `value` is the worst. `unseen` says of each fault that has no
    value why: `value` is then the worst of the others.
    """

    value: Value | None
    detail: str
    censored: bool = False
    interval: Interval | None = None
    sampling: Interval | None = None
    between: tuple[float, float] | None = None
    members: tuple[Member, ...] = ()
    unseen: Mapping[str, str] = field(default_factory=dict)


def plain(run: RunEvidence) -> dict[str, Observation]:
    """Return counts that need no baseline, waits for storage, and service level metrics of an inference job."""
    iterations, reads = (
        timeline.finished_iterations(run.workload.series),
        reads_of(run.workload.series, run.workload.readers),
    )
    wrong = sum(step.wrong for rank in run.workload.series for step in rank.iterations)
    ingest_ns = checkpoint_ns = 0
    if run.workload.resilience is not None:  # a series holds the last execution of each iteration
        wrong = max(wrong, run.workload.resilience.wrong_elements)
        ingest_ns, checkpoint_ns = (
            run.workload.resilience.longest_ingest_ns,
            run.workload.resilience.longest_checkpoint_ns,
        )
    return {
        "wrong_elements": _wrong_elements(run, wrong, iterations),
        "iterations": Observation(
            value=_finished(run, iterations), detail=f"finished by all {len(run.workload.series)} ranks"
        ),
        "kernel.errors": _kernel(run),
        "ingest.wait": _longest(
            [step.ingest_ns for rank in run.workload.series for step in rank.iterations], ingest_ns, "data"
        ),
        "ingest.p99_ratio": Observation(value=reads.p99_ratio, detail=reads.describe()),
        "checkpoint.wait": _checkpoint_wait(run, checkpoint_ns),
        **_latency(run),
        **_operation_split(run.workload.series),
        **_serving(run, run.workload.serving),
        "qp_errors": Observation(
            value=run.workload.qp_errors, detail="completions with an error status, by the engine"
        ),
        "rebuilds": Observation(
            value=run.workload.rebuilds, detail="queue pairs connected again, as the engine reports"
        ),
    }


def _finished(run: RunEvidence, recorded: int) -> int:
    """Return how many iterations all ranks finished: a lost host may have finished one more than it recorded."""
    if run.workload.resilience is None or not recorded:
        return recorded
    last = min(max(step.index for step in rank.iterations) for rank in run.workload.series)
    states = {state.rank: state.iterations for state in run.workload.resilience.states}
    ended = min(states.values()) if states.keys() >= {rank.rank for rank in run.workload.series} else 0
    return max(recorded, last + 1, ended)


def _wrong_elements(run: RunEvidence, wrong: int, iterations: int) -> Observation:
    """Return the wrong elements on all ranks; a lower bound if a rank has no verified iteration."""
    if not any(rank.iterations for rank in run.workload.series):
        return Observation(value=None, detail="no iteration finished, so no result was checked")
    checked = {rank.rank for rank in run.workload.series if rank.iterations}
    missing = sorted({rank.rank for rank in run.workload.ranks} - checked)
    detail = f"every element of {iterations} iterations on {len(run.workload.series)} ranks compared"
    if missing:
        detail = (
            f"compared on {len(checked)} of {len(run.workload.ranks)} ranks: nothing was checked on rank {missing[0]}"
        )
    return Observation(value=wrong, detail=detail, censored=bool(missing))


def _kernel(run: RunEvidence) -> Observation:
    errors = kernel_log.errors(run.telemetry.kernel, run.telemetry.ignored)
    if not run.telemetry.watched and not errors:
        return Observation(value=None, detail="no machine's log was followed")
    first = f"; the first: {errors[0].node}: {errors[0].text}" if errors else ""
    followed = [machine for machine in run.telemetry.watched if machine.no_log is None]
    lost = [
        f"{machine.name}: its log was not followed: {machine.no_log}"
        for machine in run.telemetry.watched
        if machine.no_log is not None
    ]
    lost += [f"{machine.name} from some time on: {machine.lost}" for machine in followed if machine.lost]
    unknown = f"; nothing is known of {lost[0]}" if lost else ""
    hidden = len(kernel_log.errors(run.telemetry.kernel)) - len(errors)
    ignored = f"; {hidden} ignored by faultbed_ignored_messages" if hidden else ""
    return Observation(
        value=len(errors),
        detail=f"in the logs of {len(followed)} machines while they ran{first}{ignored}{unknown}",
        censored=bool(lost) or not run.telemetry.watched,
    )


def _longest(waits_ns: Sequence[int], of_any_ns: int, storage_use: str) -> Observation:
    """Return the longest wait. `of_any_ns` is the longest over all executions, also those that a restart repeated."""
    longest_ns = max(waits_ns, default=0)
    if not longest_ns and not of_any_ns:
        return Observation(value=None, detail=f"no rank waited for {storage_use}: the job has no such storage")
    detail = f"longest of {len(waits_ns)} iterations of all ranks"
    if of_any_ns > longest_ns:
        detail = "in an iteration that a restart repeated: the longest of all executions on all ranks"
    return Observation(value=max(longest_ns, of_any_ns) / 1e9, detail=detail)


def _checkpoint_wait(run: RunEvidence, of_any_ns: int) -> Observation:
    """Return the longest wait for a checkpoint: in an iteration, or at the end of the job for its last checkpoint.

    A rank that stores in the background (`async`) waits at the end. If the job failed, its last iteration is unknown.
    """
    waits_ns = [step.checkpoint_ns for rank in run.workload.series for step in rank.iterations]
    longest = _longest(waits_ns, of_any_ns, "checkpoints")
    ends = [
        max(end_ns for _, end_ns in rank.stored_ns) - rank.iterations[-1].end_ns
        for rank in run.workload.series
        if rank.stored_ns and rank.iterations
    ]
    last_ns = 0 if run.workload.failure is not None else max(ends, default=0)
    if last_ns <= max([*waits_ns, of_any_ns], default=0):
        return longest
    return Observation(
        value=last_ns / 1e9,
        detail="at the end of the job: after its last iteration, until the last checkpoint was stored",
    )


def _latency(run: RunEvidence) -> dict[str, Observation]:
    flows = run.workload.latencies_ns
    times = [time_ns for times_ns in flows for time_ns in times_ns]
    if not times:
        nothing = Observation(value=None, detail="no flow timed its messages (latency, or probe)")
        return {"latency.p50": nothing, "latency.p99": nothing}
    if times_are_mixed(run):
        mixed = "the times of the flows' messages and of their probes were recorded together; percentiles mean nothing"
        return dict.fromkeys(("latency.p50", "latency.p99"), Observation(value=None, detail=mixed))
    detail = f"of {len(times)} timed messages of {len(flows)} flows"
    return {
        f"latency.p{share}": Observation(value=float(np.percentile(times, share)) / 1e9, detail=detail)
        for share in (50, 99)
    }


def _operation_split(ranks: Sequence[RankSeries]) -> dict[str, Observation]:
    shares = operation_shares(ranks)
    if not len(shares):
        nothing = Observation(value=None, detail="no collective finished on all ranks with a record of its parts")
        return {f"split.{name}": nothing for name in PARTS}
    detail = f"mean of {len(shares)} collectives, each on the rank that entered last"
    return {
        f"split.{name}": Observation(value=float(share), detail=detail)
        for name, share in zip(PARTS, shares.mean(axis=0), strict=True)
    }


def _serving(run: RunEvidence, serving: Serving | None) -> dict[str, Observation]:
    if serving is None:
        nothing = Observation(value=None, detail="not an inference job")
        return dict.fromkeys(("ttft.p50", "ttft.p99", "tpot.p50", "tpot.p99", "slo_attainment"), nothing)
    tokens = [time_ns for times_ns in serving.tpot_ns for time_ns in times_ns]
    metrics = {}
    for name, times, unit in (("ttft", serving.ttft_ns, "requests"), ("tpot", tokens, "tokens after the first")):
        for share in (50, 99):
            value = float(np.percentile(times, share)) / 1e9 if times else None
            # A time to first token begins on one host and ends on another one: the errors of both clocks are in it.
            error_s = 2 * run.workload.clock_error_ns / 1e9 if name == "ttft" else 0.0
            metrics[f"{name}.p{share}"] = Observation(
                value=value,
                detail=f"of {len(times)} {unit}",
                between=None if value is None or not error_s else (max(0.0, value - error_s), value + error_s),
            )
    kept = serving.slo_attainment
    detail = "no SLO was given" if kept is None else f"{len(serving.ttft_ns)} requests finished, of those requested"
    between, doubt = attainment_range(run, serving) or (None, "")
    detail = f"{detail}; {doubt}" if doubt else detail
    metrics["slo_attainment"] = Observation(value=kept, detail=detail, between=between)
    return metrics


def rates(run: RunEvidence, whole: timeline.Goodput | None) -> dict[str, Observation]:
    """Return goodput over all samples, and bus bandwidth."""
    seconds = (run.workload.end_ns - run.workload.t0_ns) / 1e9
    silent = whole is None or seconds <= 0
    return {
        "goodput.mean": Observation(
            value=None if whole is None or silent else float(whole.bytes.sum()) * 8 / seconds / 1e9,
            detail="no samples" if silent else f"all samples of {len(run.workload.series)} ranks over {seconds:.1f} s",
        ),
        "goodput.lowest": _lowest_goodput(run, whole),
        "busbw.mean": Observation(
            value=mean_busbw_gbps(run),
            detail="not a collective, or no iteration finished"
            if run.workload.summary.busbw_gbps is None or run.workload.summary.algbw_gbps is None
            else f"at the mean time of all iterations; at the median {run.workload.summary.busbw_gbps:.4g} Gb/s, algbw "
            f"{run.workload.summary.algbw_gbps:.4g} Gb/s",
        ),
    }


def _lowest_goodput(run: RunEvidence, whole: timeline.Goodput | None) -> Observation:
    """Return the lowest rolling goodput of a run over its mean, until the first rank ends."""
    work = run.workload
    ends = [max(sample.t_ns for sample in series.samples) + work.sample_ns for series in work.series if series.samples]
    if whole is None or len(ends) < len(work.series):
        return Observation(value=None, detail="no samples of at least one rank")
    window_ns = timeline.rolling_window_ns(work.series, whole.step_ns)
    lowest = timeline.lowest_share(whole, until_ns=min(ends), window_ns=window_ns)
    detail = f"windows of {window_ns / 1e9:g} s"
    if lowest is None:
        detail = f"no goodput, or less than 3 s or two {detail} between the warm-up and the end of the first rank"
    return Observation(value=lowest, detail=detail)


def _why_no_impact(base: timeline.Baseline | None) -> str:
    if base is None:
        return (
            "no baseline: without the harness's own reads the fault-free start is silent, or shorter than 3 s or two "
            "rolling windows; begin the first fault later"
        )
    return "it never fired, or the run ended or the next fault began too soon after it"


def recoveries(
    run: RunEvidence,
    base: timeline.Baseline | None,
    impacts: Mapping[str, timeline.Impact],
    slowest: Mapping[str, float],
) -> dict[str, Observation]:
    """Return how long goodput took to recover, by fault and for the worst one.

    `slowest` is the machine's lowest pace during each recovery.
    """
    metrics: dict[str, Observation] = {}
    for fault in run.injected.faults:
        impact = impacts.get(fault.plan.id)
        for prefix in ("recovery", "after_clear"):
            metrics[f"{prefix}.{fault.plan.id}"] = (
                Observation(value=None, detail=f"{fault.plan.id}: {_why_no_impact(base)}")
                if impact is None
                else _recovery(fault.plan.id, impact, prefix, slowest.get(fault.plan.id, 1.0))
            )
    for prefix in ("recovery", "after_clear"):
        observations = [metrics[f"{prefix}.{fault.plan.id}"] for fault in run.injected.faults]
        metrics[f"{prefix}.total"] = _worst(observations)
    return metrics


def _recovery(fault_id: str, impact: timeline.Impact, prefix: str, slowest: float) -> Observation:
    value_ns = impact.recovery_ns if prefix == "recovery" else impact.after_clear_ns
    if impact.censored:
        detail = f"{fault_id}: at least {format_duration(value_ns)}: {impact.reason}"
    elif (slow_down := impact.slow_down) is not None:
        slowed_ns = slow_down.recovery_ns if prefix == "recovery" else slow_down.after_clear_ns
        longest = "longer" if slowed_ns is None else format_duration(slowed_ns)
        detail = f"{fault_id}: {format_duration(value_ns)} to {longest}: {slow_down.reason}"
    elif impact.recovery_ns == 0:
        detail = f"{fault_id}: goodput never left its noise floor"
    else:
        detail = (
            f"{fault_id}: goodput back {format_duration(impact.recovery_ns)} after it fired, "
            f"{format_bytes(impact.lost_bytes)} not carried"
        )
    if slowest < _SLOW and impact.recovery_ns and impact.slow_down is None and not impact.reason:
        detail += f"; measured against the machine's pace, which fell to {slowest:.2f} of that before the faults"
    return Observation(value=value_ns / 1e9, detail=detail, censored=impact.censored)


def _worst(observations: Sequence[Observation]) -> Observation:
    if not observations:
        return Observation(value=None, detail="no fault in this run")
    missing = [observation for observation in observations if observation.value is None]
    if missing:
        return missing[0]
    worst = max(observations, key=lambda observation: float(observation.value or 0))
    censored = [observation for observation in observations if observation.censored]
    detail = worst.detail if worst.censored or not censored else f"{worst.detail}; {censored[0].detail}"
    return Observation(value=worst.value, detail=detail, censored=bool(censored))


def recovery_phases(
    run: RunEvidence, base: timeline.Baseline | None, by_phase: Mapping[str, tuple[Phase, ...]]
) -> dict[str, Observation]:
    """Return the worst fault in each phase; None if no data shows the phase, or it did not end for some fault."""
    metrics = {}
    for name in NAMES:
        endless = [fault_id for fault_id, steps in by_phase.items() if name not in {phase.name for phase in steps}]
        if name in ENDING and endless:
            detail = f"{endless[0]}: the phase had no end in this run"
            metrics[f"recovery.{name}"] = Observation(value=None, detail=detail)
            continue
        unknown = [fault.plan.id for fault in run.injected.faults if fault.plan.id not in by_phase]
        if by_phase and unknown:
            metrics[f"recovery.{name}"] = Observation(value=None, detail=f"{unknown[0]}: {_why_no_impact(base)}")
            continue
        lengths = [
            (phase.length_ns, fault_id, phase.detail)
            for fault_id, steps in by_phase.items()
            for phase in steps
            if phase.name == name
        ]
        if lengths:
            length_ns, fault_id, detail = max(lengths)
            unseen = dict.fromkeys(endless, "no end noticed it, as far as the run shows")
            metrics[f"recovery.{name}"] = Observation(
                value=length_ns / 1e9, detail=f"{fault_id}: {detail}{_not_seen(unseen)}", unseen=unseen
            )
            continue
        why = "unknown: no go-back at a captured port" if by_phase else _why_no_impact(base)
        metrics[f"recovery.{name}"] = Observation(
            value=None, detail=why if run.injected.faults else "no fault in this run"
        )
    return metrics


def dips(
    run: RunEvidence, base: timeline.Baseline | None, impacts: Mapping[str, timeline.Impact]
) -> dict[str, Observation]:
    """Return how deep goodput fell under the worst fault; None unless it is known for each fault."""
    without = [fault.plan.id for fault in run.injected.faults if fault.plan.id not in impacts]
    if impacts and without:
        missing = Observation(value=None, detail=f"{without[0]}: {_why_no_impact(base)}")
        return {"goodput_min_ratio": missing, "dip": missing}
    if not impacts:
        missing = Observation(value=None, detail=_why_no_impact(base))
        return {"goodput_min_ratio": missing, "dip": missing}
    for fault_id, impact in impacts.items():
        if (slow_down := impact.slow_down) is not None:
            least = "0.00" if slow_down.min_ratio is None else f"{slow_down.min_ratio:.2f}"
            detail = f"under {fault_id} between {least} and {impact.min_ratio:.2f}: {slow_down.reason}"
            unknown = Observation(value=None, detail=detail)
            return {"goodput_min_ratio": unknown, "dip": unknown}
    fault_id, impact = min(impacts.items(), key=lambda item: item[1].min_ratio)
    detail = f"under {fault_id}, against the mean of the fault-free start"
    return {
        "goodput_min_ratio": Observation(value=impact.min_ratio, detail=detail),
        "dip": Observation(value=1 - impact.min_ratio, detail=detail),
    }


def goodput_mean_ratio(
    run: RunEvidence,
    whole: timeline.Goodput | None,
    base: timeline.Baseline | None,
    impacts: Mapping[str, timeline.Impact],
) -> Observation:
    """Return the mean goodput while the worst fault acted, relative to the fault-free start."""
    missing = [fault.plan.id for fault in run.injected.faults if fault.plan.id not in impacts]
    if whole is None or base is None or not impacts or missing:
        fault_prefix = f"{missing[0]}: " if missing else ""
        return Observation(value=None, detail=f"{fault_prefix}{_why_no_impact(base)}")
    for fault_id, impact in impacts.items():
        if impact.slow_down is not None:
            return Observation(value=None, detail=f"under {fault_id}: {impact.slow_down.reason}")
    ratios = {
        fault_id: float(timeline.while_acting(whole, impact).mean()) / base.mean for fault_id, impact in impacts.items()
    }
    worst = min(ratios, key=lambda fault_id: ratios[fault_id])
    seconds = (impacts[worst].cleared_ns - impacts[worst].fired_ns) / 1e9
    detail = f"under {worst} for {seconds:.1f} s, against the mean of the fault-free start"
    return Observation(value=ratios[worst], detail=detail)


def after_ratio(
    run: RunEvidence,
    whole: timeline.Goodput | None,
    base: timeline.Baseline | None,
    impacts: Mapping[str, timeline.Impact],
) -> Observation:
    """Return the mean goodput after the effects of a fault were over, relative to the fault-free start; the lowest.

    It lasts until the next fault, or the run's end. A fault whose recovery was not seen has no time after it.
    """
    missing = [fault.plan.id for fault in run.injected.faults if fault.plan.id not in impacts]
    if whole is None or base is None or not impacts or missing:
        return Observation(value=None, detail=f"{f'{missing[0]}: ' if missing else ''}{_why_no_impact(base)}")
    windows, ratios = acting_windows(run), dict[str, float]()
    for fault_id, impact in impacts.items():
        if impact.censored or impact.slow_down is not None:
            why = impact.slow_down.reason if impact.slow_down is not None else impact.reason
            return Observation(value=None, detail=f"{fault_id}: {why}")
        after = bins_after(whole, windows, fault_id, impact.end_ns)
        if not len(after):
            return Observation(value=None, detail=f"{fault_id}: nothing was measured after its effects were over")
        ratios[fault_id] = float(after.mean()) / base.mean
    worst = min(ratios, key=lambda fault_id: ratios[fault_id])
    return Observation(value=ratios[worst], detail=f"after {worst}, against the mean of the fault-free start")


def jct_ratio(run: RunEvidence, job_time: timeline.JobTime | None, fired: Mapping[str, tuple[int, int]]) -> Observation:
    """Return the job completion time relative to the fault-free twin; None unless it includes every fault.

    `fired` maps fault ids to (first firing, removal) in controller ns.
    """
    if job_time is None:
        reason = "this run has no fault-free twin" if run.fault_free is None else "no iteration that both runs finished"
        return Observation(value=None, detail=reason)
    if (share := work_share(run)) != 1:
        detail = f"the job went on with fewer ranks: its iterations are {share:.0%} of the work of the twin's"
        return Observation(value=None, detail=detail)
    # The twin may have finished fewer iterations than the run, and a fault may have come after those.
    is_whole = job_time.iterations == timeline.finished_iterations(run.workload.series)
    for fault_id, (first_ns, cleared_ns) in fired.items():
        if job_time.end_ns < (first_ns if is_whole else cleared_ns):
            detail = f"both runs finished {job_time.iterations} iterations, which ended before {fault_id} was over"
            return Observation(value=None, detail=detail)
    detail = (
        f"{format_duration(job_time.run_ns)} for {job_time.iterations} iterations, "
        f"twin {format_duration(job_time.twin_ns)}"
    )
    if load := machine_load.differences(run.workload.load, run.twin.load if run.twin is not None else None):
        detail += f"; {load}"
    return Observation(value=job_time.ratio, detail=detail)


def faster_than_twin(metric: str, observation: Observation) -> str | None:
    """Return why a `jct_ratio` significantly below 1 decides nothing; None for any other value or metric."""
    interval = observation.interval
    if metric != "jct_ratio" or interval is None or interval.high >= 1:
        return None
    return (
        "the machine was disturbed: the run was faster than its fault-free twin by more than its interval, which no "
        "fault does; run it again on a quiet machine"
    )


def training_ratio(training: Ettr | None) -> Observation:
    """Return the effective training time ratio."""
    if training is None:
        return Observation(value=None, detail="not a job with iterations, or too few of them before the first fault")
    detail = (
        f"{training.iterations} iterations of {format_duration(training.healthy_ns)} in "
        f"{format_duration(training.wall_ns)}"
    )
    if training.work_share != 1:
        detail += f", of {training.work_share:.0%} of the work, because the job went on with fewer ranks"
    if (formula := training.formula) is not None:
        detail += (
            f"; published formula {formula}: {formula.interruptions} interruptions of "
            f"{format_duration(formula.recovery_ns)}, a checkpoint every {format_duration(formula.interval_ns)} that "
            f"costs {formula.checkpoint_share:.1%}"
        )
    return Observation(value=training.ratio, detail=detail)


def straggler(run: RunEvidence, fired: Mapping[str, tuple[int, int]]) -> Observation:
    """Return the host of the rank that a fault slowed most, relative to the other ranks in the same iterations."""
    slow = slowdowns(run.workload.series, fired)
    if not slow:
        return Observation(value=None, detail="too few iterations with a compute phase before or under the faults")
    top, is_sure = slowest(slow)
    if top is None and (unknown := sorted(set(fired) - {slowdown.fault_id for slowdown in slow})):
        return Observation(value=None, detail=f"too few iterations with a compute phase under {unknown[0]}")
    if top is None:
        return Observation(value="none", detail="no rank's compute phase stands out from the others'")
    host = next((rank.host for rank in run.workload.ranks if rank.rank == top.rank), f"rank {top.rank}")
    words = (
        f"median compute phase {format_duration(top.before_ns)} without a fault (n = {top.iterations[0]}), "
        f"{format_duration(top.during_ns)} under {top.fault_id} (n = {top.iterations[1]}): {top.ratio:.2f} times as "
        "long against the other ranks'"
    )
    if not is_sure:
        by_chance = min(1.0, top.chance * len(slow))
        return Observation(
            value=None,
            detail=f"{host}'s {words}; chance alone causes that in {by_chance:.2g} of all runs (not below {LEVEL:g}); "
            "use a longer fault or shorter iterations",
        )
    return Observation(value=host, detail=f"{words} (by chance: {top.chance:.1g})")


def routing_stages(run: RunEvidence, by_routing: Mapping[str, Routing]) -> dict[str, Observation]:
    """Return the worst fault in each routing stage; None if routing changed for no fault."""
    left = [
        f"{fault_id}: {', '.join(stages.left[:2])} changed and were not restored ({len(stages.left)} routes in all)"
        for fault_id, stages in by_routing.items()
        if stages.left
    ]
    # A watched machine that is not a host runs switches.
    lost = [
        machine
        for machine in run.telemetry.watched
        if machine.lost and machine.name not in run.lab.topology.host_by_name
    ]
    overflown = next((change for change in run.telemetry.changes if change.subject == CHANGES_LOST), None)
    metrics = {}
    for name, of in TIMES.items():
        times = [
            (value, fault_id, stages.detected_by)
            for fault_id, stages in by_routing.items()
            if (value := of(stages)) is not None
        ]
        why = "routing did not change for any fault" if run.telemetry.watched else "the lab was not watched"
        if lost:
            why = f"{lost[0].name} sent no more data from some time on: {lost[0].lost}"
        if overflown is not None:
            why = f"changes on {overflown.node} were lost: more came than were read ({overflown.text})"
        metrics[f"routing.{name}"] = Observation(value=None, detail=why)
        if overflown is not None:
            continue
        if name == "restored" and left:
            metrics["routing.restored"] = Observation(value=None, detail=left[0])
        elif times and not lost:
            value, fault_id, by = max(times)
            reached = {of_fault for of_fault, stages in by_routing.items() if of(stages) is not None}
            still = [fault.plan.id for fault in run.injected.faults if fault.plan.id not in reached]
            unseen = dict.fromkeys(still, "no such change of a link or a route was seen under it")
            metrics[f"routing.{name}"] = Observation(
                value=value / 1e9, detail=f"{fault_id}: first {by}{_not_seen(unseen)}", unseen=unseen
            )
    return metrics


def _not_seen(unseen: Mapping[str, str]) -> str:
    return f"; not seen under {', '.join(unseen)}" if unseen else ""


def slow_rank(run: RunEvidence, fired: Mapping[str, tuple[int, int]]) -> dict[str, Observation]:
    """Return the online detector's result.

    The detector does not know the faults; only the iteration count uses them.
    """
    ranks = slow_ranks(run)
    first_ns = min((start for start, _ in fired.values()), default=None)
    worst = max(ranks.slow, key=lambda rank: rank.slowdown, default=None)
    if worst is None:
        missing = Observation(value=None, detail=ranks.words)
        return {
            "slow_rank": missing if ranks.smallest is None else Observation(value="none", detail=ranks.words),
            "slow_rank.iterations": missing,
        }
    count = None if first_ns is None else ranks.iterations_since(first_ns, worst)
    why = f"{worst.host} was found slow before any fault fired" if count is None else ranks.words
    return {
        "slow_rank": Observation(value=worst.host, detail=ranks.words),
        "slow_rank.iterations": Observation(value=count, detail=why),
    }


def rnic_counters(run: RunEvidence) -> dict[str, Observation]:
    """Return the number of NAK episodes and of go-backs, as the RNICs' own counters show them."""
    deltas = counter_deltas(run.telemetry)

    def growth(counter: str) -> Observation:
        names = counter, counters.MLX5[counter]
        deltas_by_counter: dict[str, Any] = {
            f"{node}:{name}": delta
            for node, values in deltas.items()
            for name, delta in values.items()
            if re.split(r"[./:]", name)[-1] in names
        }
        if not deltas_by_counter:
            return Observation(value=None, detail=f"no RNIC reported {' or '.join(names)} before and after the run")
        moved = [f"{name} +{delta}" for name, delta in deltas_by_counter.items() if delta]
        detail = ", ".join(moved) or "moved nowhere"
        # Counts from before a reset or a boot, or of an RNIC that was removed, are unknown.
        partly = [
            f"{node}:{name}"
            for node, values in run.telemetry.counters_before.items()
            for name in values
            if re.split(r"[./:]", name)[-1] in names
            and (
                name not in run.telemetry.counters_after.get(node, {})
                or counters.why_reset(run.telemetry.counters_before, run.telemetry.counters_after, f"{node}/{name}")
            )
        ]
        read = {name.partition(":")[0] + ":" + re.split(r"[./:]", name)[1] for name in deltas_by_counter}
        unread = [f"{rank.host}:{rank.rnic}" for rank in run.workload.ranks if f"{rank.host}:{rank.rnic}" not in read]
        if unread:
            detail = f"{detail}; {unread[0]} gave no such counter before and after the run"
            partly += unread
        elif partly:
            detail = f"{detail}; {partly[0]} was reset during the run, or could not be read after it"
        return Observation(value=sum(deltas_by_counter.values()), detail=detail, censored=bool(partly))

    return {"nak_episodes": growth("out_of_seq_request"), "go_back_n": growth("rcvd_seq_err")}
