"""From measurements to one value for each metric, each with its origin in words. Pure.

A value that cannot be had (no twin, too short a baseline, a fault that never fired) is None with the reason,
never 0 and never left out: the judge makes INCONCLUSIVE of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from harness import intervals, kernel_log, timeline
from harness.ettr import Ettr, ettr
from harness.measurements import FaultRun, Measurements, RankSeries, Serving, counter_deltas
from harness.phases import NAMES, Phase, phases
from harness.quantities import format_bytes, format_duration
from harness.routing import Routing, routing
from harness.slow_ranks import slow_ranks
from harness.statistics import Interval
from testbed import counters

__all__ = ["Observation", "Observed", "Slowdown", "observe", "slowdowns"]

Value = float | int | str

_STRAGGLER_RATIO = 1.25
"""A rank stands out when its compute phase grew by this factor, and by this factor more than the median rank's did."""
_ENOUGH_ITERATIONS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A metric's value in its unit, or None, and its origin. `censored`: the truth is at least it.

    `interval` is where the value would lie were the run repeated; None: a count, a name, or too little data.
    """

    value: Value | None
    detail: str
    censored: bool = False
    interval: Interval | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """Growth of a rank's median compute phase while a fault acted, against its own fault-free start."""

    host: str
    fault_id: str
    before_ns: float
    during_ns: float

    @property
    def ratio(self) -> float:
        """During over before."""
        return self.during_ns / self.before_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """All that the judge and the report know about a run beyond its raw data."""

    metrics: Mapping[str, Observation]
    goodput: timeline.Goodput | None
    per_rank: Mapping[int, timeline.Goodput]
    baseline: timeline.Baseline | None
    impacts: Mapping[str, timeline.Impact]
    phases: Mapping[str, tuple[Phase, ...]]
    job_time: timeline.JobTime | None
    slowdowns: tuple[Slowdown, ...]
    routing: Mapping[str, Routing]
    training: Ettr | None = None


def observe(run: Measurements) -> Observed:
    """Compute every metric of one run."""
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
        base = timeline.baseline(whole, first_fault_ns=first_ns, window_ns=window_ns)
    impacts = {} if whole is None or base is None else _impacts(whole, base, fired)
    by_phase = phases(run, impacts)
    by_routing = routing(run.changes, fired)
    job_time = None if run.twin is None else timeline.job_time_ratio(run.series, run.twin)
    slow = slowdowns(run, fired, first_ns)
    training = ettr(run, base, impacts.values(), first_fault_ns=first_ns)
    metrics = {
        **_plain(run),
        **_rates(run, whole),
        **_recoveries(run, base, impacts),
        **_phases(run, base, by_phase),
        **_dips(base, impacts),
        "jct_ratio": _jct(run, job_time),
        "ettr": _ettr(training),
        "straggler": _straggler(slow),
        **_routing(run, by_routing),
        **_slow_rank(run, fired),
        **_counters(run),
        **_packets(run),
    }
    found = intervals.find(run, whole, base, impacts)
    return Observed(
        metrics={name: replace(one, interval=found.get(name)) for name, one in metrics.items()},
        goodput=whole,
        per_rank=per_rank,
        baseline=base,
        impacts=impacts,
        phases=by_phase,
        job_time=job_time,
        slowdowns=slow,
        routing=by_routing,
        training=training,
    )


def _fired_windows(faults: Sequence[FaultRun]) -> dict[str, tuple[int, int]]:
    """Fault id to (first firing, removal) for those that fired; by time of firing."""
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
    """When the fault-free start ends: the first arming or firing, for an armed fault may act unseen."""
    armed = [fault.receipt.armed.get("at_ns") for fault in run.faults if fault.receipt is not None]
    times = [*(start for start, _ in fired.values()), *(at_ns for at_ns in armed if isinstance(at_ns, int))]
    return min(times, default=run.end_ns)


def _impacts(
    whole: timeline.Goodput, base: timeline.Baseline, fired: Mapping[str, tuple[int, int]]
) -> dict[str, timeline.Impact]:
    found = {}
    for fault_id, (first, cleared) in fired.items():
        later = [other for other, _ in fired.values() if other > first]
        one = timeline.impact(whole, base, fired_ns=first, cleared_ns=cleared, until_ns=min(later, default=None))
        if one is not None:
            found[fault_id] = one
    return found


def _plain(run: Measurements) -> dict[str, Observation]:
    iterations = timeline.finished_iterations(run.series)
    wrong = sum(step.wrong for rank in run.series for step in rank.iterations)
    checked = any(rank.iterations for rank in run.series)
    return {
        "wrong_elements": Observation(
            value=wrong if checked else None,
            detail=f"every element of {iterations} iterations on {len(run.series)} ranks compared"
            if checked
            else "no iteration finished, so no result was checked",
        ),
        "iterations": Observation(value=iterations, detail=f"finished by all {len(run.series)} ranks"),
        "kernel.errors": _kernel(run),
        "ingest.wait": _longest([step.ingest_ns for rank in run.series for step in rank.iterations], "data"),
        "checkpoint.wait": _longest(
            [step.checkpoint_ns for rank in run.series for step in rank.iterations], "checkpoints"
        ),
        **_serving(run.serving),
        "qp_errors": Observation(value=run.qp_errors, detail="completions with an error status, by the engine"),
        "rebuilds": Observation(value=run.rebuilds, detail="queue pairs connected anew, by the engine"),
    }


def _kernel(run: Measurements) -> Observation:
    found = kernel_log.errors(run.kernel)
    first = f"; the first: {found[0].node}: {found[0].text}" if found else ""
    return Observation(value=len(found), detail=f"in the logs of {len(run.watched)} machines while they ran{first}")


def _longest(waits_ns: Sequence[int], what: str) -> Observation:
    if not any(waits_ns):
        return Observation(value=None, detail=f"no rank waited for {what}: the job has no such storage")
    return Observation(value=max(waits_ns) / 1e9, detail=f"longest of {len(waits_ns)} iterations of all ranks")


def _serving(serving: Serving | None) -> dict[str, Observation]:
    if serving is None:
        nothing = Observation(value=None, detail="not an inference job")
        return dict.fromkeys(("ttft.p50", "ttft.p99", "tpot.p50", "tpot.p99", "slo_attainment"), nothing)
    tokens = [time_ns for one in serving.tpot_ns for time_ns in one]
    found = {}
    for name, times, what in (("ttft", serving.ttft_ns, "requests"), ("tpot", tokens, "tokens after the first")):
        for share in (50, 99):
            value = float(np.percentile(times, share)) / 1e9 if times else None
            found[f"{name}.p{share}"] = Observation(value=value, detail=f"of {len(times)} {what}")
    kept = serving.slo_attainment
    said = "no SLO was given" if kept is None else f"{len(serving.ttft_ns)} requests were over, of those asked for"
    found["slo_attainment"] = Observation(value=kept, detail=said)
    return found


def _rates(run: Measurements, whole: timeline.Goodput | None) -> dict[str, Observation]:
    seconds = (run.end_ns - run.t0_ns) / 1e9
    silent = whole is None or seconds <= 0
    return {
        "goodput.mean": Observation(
            value=None if whole is None or silent else float(whole.bytes.sum()) * 8 / seconds / 1e9,
            detail="no samples" if silent else f"all samples of {len(run.series)} ranks over {seconds:.1f} s",
        ),
        "busbw.mean": Observation(
            value=run.summary.busbw_gbps,
            detail="not a collective, or no iteration finished"
            if run.summary.busbw_gbps is None
            else f"algbw {run.summary.algbw_gbps:.4g} Gb/s, mean over all iterations",
        ),
    }


def _why_no_impact(base: timeline.Baseline | None) -> str:
    if base is None:
        return "no baseline: the fault-free start is too short or silent"
    return "it never fired, or the run ended too soon after it"


def _recoveries(
    run: Measurements, base: timeline.Baseline | None, impacts: Mapping[str, timeline.Impact]
) -> dict[str, Observation]:
    found: dict[str, Observation] = {}
    for fault in run.faults:
        one = impacts.get(fault.plan.id)
        for prefix in ("recovery", "after_clear"):
            found[f"{prefix}.{fault.plan.id}"] = (
                Observation(value=None, detail=f"{fault.plan.id}: {_why_no_impact(base)}")
                if one is None
                else _recovery(fault.plan.id, one, prefix)
            )
    for prefix in ("recovery", "after_clear"):
        each = [found[f"{prefix}.{fault.plan.id}"] for fault in run.faults]
        found[f"{prefix}.total"] = _worst(each)
    return found


def _recovery(fault_id: str, one: timeline.Impact, prefix: str) -> Observation:
    value_ns = one.recovery_ns if prefix == "recovery" else one.after_clear_ns
    if one.censored:
        detail = f"{fault_id}: not back by the end of its data; at least {format_duration(value_ns)}"
    elif one.recovery_ns == 0:
        detail = f"{fault_id}: goodput never left its noise floor"
    else:
        detail = (
            f"{fault_id}: goodput back {format_duration(one.recovery_ns)} after it fired, "
            f"{format_bytes(one.lost_bytes)} not carried"
        )
    return Observation(value=value_ns / 1e9, detail=detail, censored=one.censored)


def _worst(each: Sequence[Observation]) -> Observation:
    if not each:
        return Observation(value=None, detail="no fault in this run")
    missing = [one for one in each if one.value is None]
    if missing:
        return missing[0]
    worst = max(each, key=lambda one: float(one.value or 0))
    censored = any(one.censored for one in each)
    return Observation(value=worst.value, detail=worst.detail, censored=censored)


def _phases(
    run: Measurements, base: timeline.Baseline | None, by_phase: Mapping[str, tuple[Phase, ...]]
) -> dict[str, Observation]:
    """The worst fault in each phase; None when nothing shows it for any."""
    found = {}
    for name in NAMES:
        each = [
            (one.length_ns, fault_id, one.detail)
            for fault_id, steps in by_phase.items()
            for one in steps
            if one.name == name
        ]
        if each:
            length_ns, fault_id, detail = max(each)
            found[f"recovery.{name}"] = Observation(value=length_ns / 1e9, detail=f"{fault_id}: {detail}")
            continue
        why = "nothing shows it: no going back at a captured port" if by_phase else _why_no_impact(base)
        found[f"recovery.{name}"] = Observation(value=None, detail=why if run.faults else "no fault in this run")
    return found


def _dips(base: timeline.Baseline | None, impacts: Mapping[str, timeline.Impact]) -> dict[str, Observation]:
    if not impacts:
        missing = Observation(value=None, detail=_why_no_impact(base))
        return {"goodput_min_ratio": missing, "dip": missing}
    fault_id, one = min(impacts.items(), key=lambda item: item[1].min_ratio)
    detail = f"under {fault_id}, against the mean of the fault-free start"
    return {
        "goodput_min_ratio": Observation(value=one.min_ratio, detail=detail),
        "dip": Observation(value=1 - one.min_ratio, detail=detail),
    }


def _jct(run: Measurements, job_time: timeline.JobTime | None) -> Observation:
    if job_time is None:
        reason = "this run has no fault-free twin" if run.twin is None else "no iteration that both runs finished"
        return Observation(value=None, detail=reason)
    return Observation(
        value=job_time.ratio,
        detail=f"{format_duration(job_time.run_ns)} for {job_time.iterations} iterations, "
        f"twin {format_duration(job_time.twin_ns)}",
    )


def _ettr(training: Ettr | None) -> Observation:
    if training is None:
        return Observation(value=None, detail="not a job with iterations, or too few of them before the first fault")
    return Observation(
        value=training.ratio,
        detail=f"{training.iterations} iterations of {format_duration(training.healthy_ns)} in "
        f"{format_duration(training.wall_ns)}",
    )


def slowdowns(run: Measurements, fired: Mapping[str, tuple[int, int]], first_ns: int) -> tuple[Slowdown, ...]:
    """Growth of each rank's compute phase under each fault: medians over iterations begun within it."""
    hosts = {rank.rank: rank.host for rank in run.ranks}
    found = []
    for series in run.series:
        before = _median_compute(series, run.t0_ns, first_ns)
        for fault_id, (start, end) in fired.items():
            during = _median_compute(series, start, end)
            if before and during:
                found.append(
                    Slowdown(
                        host=hosts.get(series.rank, f"rank {series.rank}"),
                        fault_id=fault_id,
                        before_ns=before,
                        during_ns=during,
                    )
                )
    return tuple(found)


def _median_compute(series: RankSeries, start_ns: int, end_ns: int) -> float | None:
    inside = [step.compute_ns for step in series.iterations if start_ns <= step.start_ns < end_ns]
    return float(np.median(inside)) if len(inside) >= _ENOUGH_ITERATIONS else None


def _straggler(slow: Sequence[Slowdown]) -> Observation:
    if not slow:
        return Observation(value=None, detail="too few iterations with a compute phase before or under the faults")
    best: tuple[float, Slowdown] | None = None
    for fault_id in dict.fromkeys(one.fault_id for one in slow):
        group = [one for one in slow if one.fault_id == fault_id]
        middle = float(np.median([one.ratio for one in group]))
        top = max(group, key=lambda one: one.ratio)
        # Where all got faster, the one that did so least has not slowed anybody down.
        stands_out = min(top.ratio, top.ratio / middle)
        if best is None or stands_out > best[0]:
            best = (stands_out, top)
    if best is None or best[0] < _STRAGGLER_RATIO:
        return Observation(value="none", detail="no rank's compute phase stands out from the others'")
    top = best[1]
    return Observation(
        value=top.host,
        detail=f"median compute phase {format_duration(top.before_ns)} before, "
        f"{format_duration(top.during_ns)} under {top.fault_id}",
    )


def _routing(run: Measurements, by_routing: Mapping[str, Routing]) -> dict[str, Observation]:
    """The worst fault in each; None where routing changed for none of them."""
    found = {}
    told: dict[str, Callable[[Routing], int | None]] = {
        "detected": lambda one: one.detected_ns,
        "next-hop": lambda one: one.stage_ns("next hop"),
        "withdrawn": lambda one: one.stage_ns("withdrawn"),
        "converged": lambda one: one.converged_ns,
        "restored": lambda one: one.restored_ns,
    }
    for name, of in told.items():
        each = [
            (value, fault_id, one.detected_by) for fault_id, one in by_routing.items() if (value := of(one)) is not None
        ]
        why = "routing did not change for any fault" if run.watched else "the lab was not watched"
        found[f"routing.{name}"] = Observation(value=None, detail=why)
        if each:
            value, fault_id, by = max(each)
            found[f"routing.{name}"] = Observation(value=value / 1e9, detail=f"{fault_id}: first {by}")
    return found


def _slow_rank(run: Measurements, fired: Mapping[str, tuple[int, int]]) -> dict[str, Observation]:
    """What the online detector said; it knows nothing of faults, only the count of iterations does."""
    found = slow_ranks(run)
    first_ns = min((start for start, _ in fired.values()), default=None)
    worst = max(found.slow, key=lambda one: one.slowdown, default=None)
    if worst is None:
        missing = Observation(value=None, detail=found.words)
        return {
            "slow_rank": missing if found.smallest is None else Observation(value="none", detail=found.words),
            "slow_rank.iterations": missing,
        }
    count = None if first_ns is None else found.iterations_since(first_ns, worst)
    why = f"{worst.host} was found slow before any fault fired" if count is None else found.words
    return {
        "slow_rank": Observation(value=worst.host, detail=found.words),
        "slow_rank.iterations": Observation(value=count, detail=why),
    }


def _packets(run: Measurements) -> dict[str, Observation]:
    found = run.packets
    if found is None:
        nothing = Observation(value=None, detail="this run captured no packets")
        return {"capture.missed": nothing, "capture.broken_rules": nothing}
    whole = f"{found.frames:,} frames captured"
    return {
        "capture.missed": Observation(value=found.missed, detail=whole),
        # What is not in the capture could look like a packet that its sender left out.
        "capture.broken_rules": Observation(value=None, detail=f"{found.missed} frames are missing from the capture")
        if found.missed
        else Observation(value=found.broken, detail=f"{whole}; packets.json names each"),
    }


def _counters(run: Measurements) -> dict[str, Observation]:
    deltas = counter_deltas(run)

    def growth(counter: str) -> Observation:
        names = counter, counters.MLX5[counter]
        found: dict[str, Any] = {
            f"{node}:{name}": delta
            for node, values in deltas.items()
            for name, delta in values.items()
            if re.split(r"[./:]", name)[-1] in names
        }
        if not found:
            return Observation(value=None, detail=f"no RNIC gave its {' or '.join(names)} before and after the run")
        moved = [f"{name} +{delta}" for name, delta in found.items() if delta]
        return Observation(value=sum(found.values()), detail=", ".join(moved) or "moved nowhere")

    return {"nak_episodes": growth("out_of_seq_request"), "go_back_n": growth("rcvd_seq_err")}
