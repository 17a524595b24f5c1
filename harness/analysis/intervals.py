"""Intervals of the metrics that are performance values, from the noise that the run itself shows. Pure.

Counts and names have no interval. Recovery times are in `faultbed.harness.analysis.resolutions`.
`faultbed.harness.confidence` has the method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from faultbed.harness import confidence
from faultbed.harness.analysis import timeline
from faultbed.harness.analysis.effects.fault_windows import acting_windows
from faultbed.harness.analysis.ettr import Ettr, work_share
from faultbed.harness.analysis.ranks.storage_reads import reads_of
from faultbed.harness.confidence import LEVEL, Interval
from faultbed.harness.ledger.statistics.contrasts import Member
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.record.evidence.workload_evidence import RankSeries, Serving
from faultbed.traffic.engine.latency_split import PARTS
from faultbed.traffic.workloads.service_level import kept_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "attainment_range",
    "bins_after",
    "contrasts_of",
    "disturbed",
    "ends_of",
    "hull",
    "intervals_of",
    "iteration_times",
    "mean_busbw_gbps",
    "operation_shares",
    "operation_times",
    "ratio_of_means",
    "ratio_to",
    "times_are_mixed",
]


def intervals_of(
    run: RunEvidence,
    whole: timeline.Goodput | None,
    impacts: Mapping[str, timeline.Impact],
    training: Ettr | None = None,
    *,
    level: float = LEVEL,
    is_rough: bool = False,
) -> dict[str, Interval]:
    """Return intervals of this `level` by metric, for those that have one in this run.

    `is_rough`: for decisions that tolerate the level of the machine (`confidence.noise_of_mean`).
    """
    intervals: dict[str, Interval | None] = {
        "jct_ratio": _jct(run, impacts, level, is_rough=is_rough),
        "busbw.mean": _busbw(run, level, is_rough=is_rough),
        **_shares(run.workload.series, level, is_rough=is_rough),
        "ingest.p99_ratio": reads_of(
            run.workload.series, run.workload.readers, clock_error_ns=run.workload.clock_error_ns
        ).interval(level),
        "ettr": None if training is None else training.interval(level),
        **({} if run.workload.serving is None else _serving(run, run.workload.serving, level, is_rough=is_rough)),
        **({} if times_are_mixed(run) else _latency(run.workload.latencies_ns, level, is_rough=is_rough)),
    }
    if whole is not None:
        bits = whole.bytes_per_s * 8 / 1e9
        intervals["goodput.mean"] = confidence.mean_interval(bits, of="bins of goodput", level=level, is_rough=is_rough)
    return {name: interval for name, interval in intervals.items() if interval is not None}


def iteration_times(ranks: Sequence[RankSeries], count: int, start_ns: int | None = None) -> NDArray[np.float64]:
    """Return how much each of the first `count` iterations added to the job's time (ns).

    Their sum is the job's time. `start_ns` is the start of the job (`timeline.job_start_ns`).
    """
    if count == 0:
        return np.zeros(0)
    ordered = [sorted(rank.iterations, key=lambda step: step.index)[:count] for rank in ranks]
    ends = np.array([[step.end_ns for step in rank] for rank in ordered]).max(axis=0)
    begin = min(rank[0].start_ns for rank in ordered) if start_ns is None else start_ns
    times: NDArray[np.float64] = np.diff(ends, prepend=begin).astype(np.float64)
    return times


def operation_times(ranks: Sequence[RankSeries]) -> NDArray[np.float64]:
    """Return the time of each collective (ns): the shortest over the ranks, because the last to enter never waits."""
    count = timeline.finished_iterations(ranks)
    ordered = [sorted(rank.iterations, key=lambda step: step.index)[:count] for rank in ranks]
    if not count:
        return np.zeros(0)
    times = np.array([[step.comm_ns + step.wait_ns for step in rank] for rank in ordered], dtype=np.float64)
    shortest: NDArray[np.float64] = times.min(axis=0)
    return shortest


def mean_busbw_gbps(run: RunEvidence) -> float | None:
    """Return the bus bandwidth (Gb/s, as nccl-tests define it) at the mean time of a collective; None without one.

    The run's summary has the bus bandwidth at the median time, which does not change if a fault stops a few
    collectives.
    """
    times = operation_times(run.workload.series)
    if run.workload.summary.busbw_gbps is None or not times.any():
        return run.workload.summary.busbw_gbps
    return run.workload.summary.busbw_gbps * float(np.median(times) / times.mean())


def operation_shares(ranks: Sequence[RankSeries]) -> NDArray[np.float64]:
    """Return the share of each part of `PARTS` in each collective, of shape (collectives, parts), on its last rank.

    The last rank to enter has no wait for other ranks to begin. Runs without a record of the parts have no rows.
    """
    count = timeline.finished_iterations(ranks)
    by_rank = [sorted(rank.iterations, key=lambda step: step.index)[:count] for rank in ranks]
    last_in = [min(steps, key=lambda step: step.comm_ns + step.wait_ns) for steps in zip(*by_rank, strict=True)]
    if not last_in or any(len(step.split_ns) != len(PARTS) or not sum(step.split_ns) for step in last_in):
        return np.zeros((0, len(PARTS)))
    parts = np.array([step.split_ns for step in last_in], dtype=np.float64)
    shares: NDArray[np.float64] = parts / parts.sum(axis=1, keepdims=True)
    return shares


def _shares(ranks: Sequence[RankSeries], level: float, *, is_rough: bool) -> dict[str, Interval | None]:
    columns = zip(PARTS, operation_shares(ranks).T, strict=True)
    return {
        f"split.{name}": confidence.mean_interval(column, of="collectives", level=level, is_rough=is_rough)
        for name, column in columns
    }


def _jct(run: RunEvidence, impacts: Mapping[str, timeline.Impact], level: float, *, is_rough: bool) -> Interval | None:
    if run.fault_free is None or work_share(run) != 1:
        return None
    series, twin = timeline.paired(run.workload.series, run.fault_free)
    count = min(timeline.finished_iterations(series), timeline.finished_iterations(twin))
    times = iteration_times(series, count, timeline.job_start_ns(run))
    if count == 0 or not (times > 0).all():
        return None
    touched = disturbed(run, impacts, times)
    twin_times = iteration_times(twin, count, timeline.first_start_ns(run.fault_free))
    # By how much the level of the machine differs between the two is the subject of the level tolerance.
    return confidence.total_ratio(times, twin_times, quiet=~touched, before=0, level=level, is_rough=is_rough)


def disturbed(
    run: RunEvidence, impacts: Mapping[str, timeline.Impact], times: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Return, for each of a run's first iterations, whether a fault affected it.

    `times` is what each of these iterations added to the job's time (ns, `iteration_times`).
    """
    starts = (step.start_ns for rank in run.workload.series for step in rank.iterations)
    begin = timeline.job_start_ns(run) or min(starts, default=0)
    ends = begin + np.cumsum(times)
    touched = np.zeros(len(times), dtype=np.bool_)
    for first_ns, last_ns in _disturbances(run, impacts):
        touched |= (ends > first_ns) & (ends - times < last_ns)
    return touched


def _disturbances(run: RunEvidence, impacts: Mapping[str, timeline.Impact]) -> list[tuple[int, int]]:
    """Return, for each fault, the time from its arming to goodput's return, or to the run's end if that is unknown."""
    spans = []
    for fault in run.injected.faults:
        if fault.receipt is None:
            continue
        armed, fired = fault.receipt.armed.at_ns, fault.receipt.fired.first_ns
        starts = [at for at in (armed, fired) if isinstance(at, int)]
        if starts:
            impact = impacts.get(fault.plan.id)
            back = run.workload.end_ns if impact is None else impact.end_ns
            spans.append((min(starts), back))
    return spans


def _busbw(run: RunEvidence, level: float, *, is_rough: bool) -> Interval | None:
    mean = mean_busbw_gbps(run)
    times = operation_times(run.workload.series)
    interval = confidence.mean_interval(times, of="collectives", level=level, is_rough=is_rough)
    if mean is None or interval is None or interval.low <= 0:
        return None
    middle = float(times.mean())
    return replace(interval, low=mean * middle / interval.high, high=mean * middle / interval.low)


def _serving(run: RunEvidence, serving: Serving, level: float, *, is_rough: bool) -> dict[str, Interval | None]:
    """Return the intervals of an inference job, from its requests in the order of time.

    The tokens of one request count as at most one independent value: a request is slow or it is not. A time to first
    token begins on one host and ends on another one, so that the errors of both clocks are in it.
    """
    error_s = 2 * run.workload.clock_error_ns / 1e9
    first_tokens = np.array(serving.ttft_ns, dtype=np.float64) / 1e9
    requests = [np.array(times_ns, dtype=np.float64) / 1e9 for times_ns in serving.tpot_ns if times_ns]
    request_means = np.array([times.mean() for times in requests])
    tokens = np.concatenate(requests) if requests else np.zeros(0)
    intervals: dict[str, Interval | None] = {}
    independent_counts = []
    for name, times, values in (("ttft", first_tokens, first_tokens), ("tpot", tokens, request_means)):
        independent = confidence.independent_of(values, is_rough=is_rough)
        if len(values):
            independent_counts.append(independent)
        if independent is None:
            continue
        for percent in (50, 99):
            interval = confidence.percentile_bounds(
                times, percent, independent=int(independent), least=0.0, level=level
            )
            intervals[f"{name}.p{percent}"] = _by_two_clocks(interval, error_s) if name == "ttft" else interval
    known = [count for count in independent_counts if count is not None]
    if serving.slo_attainment is not None and known and len(known) == len(independent_counts):
        ends, doubt = attainment_range(run, serving) or ((serving.slo_attainment, serving.slo_attainment), "")
        low, high = (
            confidence.share_interval(
                round(share * len(first_tokens)), len(first_tokens), level=level, independent=min(known)
            )
            for share in ends
        )
        method = f"{high.method}; {doubt}" if doubt else low.method
        intervals["slo_attainment"] = replace(low, high=high.high, method=method)
    return intervals


def _by_two_clocks(interval: Interval | None, error_s: float) -> Interval | None:
    if interval is None or not error_s:
        return interval
    method = f"{interval.method}; {error_s * 1e3:.3g} ms for the clocks of two hosts"
    return replace(interval, low=max(0.0, interval.low - error_s), high=interval.high + error_s, method=method)


def attainment_range(run: RunEvidence, serving: Serving) -> tuple[tuple[float, float], str] | None:
    """Return the lowest and highest SLO attainment possible within the clocks' errors, and why; None: it is exact.

    A time to first token begins on one host and ends on another one, so that the errors of both clocks are in it.
    """
    if serving.slo_attainment is None or not serving.ttft_ns:
        return None
    kept = kept_of(
        serving.ttft_ns,
        serving.tpot_ns,
        slo_ttft_ms=float(run.workload.planned.get("slo_ttft_ms") or 0.0),
        slo_tpot_ms=float(run.workload.planned.get("slo_tpot_ms") or 0.0),
        error_ns=2 * run.workload.clock_error_ns,
    )
    doubtful = kept.may_have_missed + kept.may_have_kept
    if not doubtful:
        return None
    requests = max(int(run.workload.planned.get("requests") or 0), len(serving.ttft_ns))
    low = max(0.0, serving.slo_attainment - kept.may_have_missed / requests)
    high = min(1.0, serving.slo_attainment + kept.may_have_kept / requests)
    return (low, high), f"{doubtful} requests are within the clocks' error of slo_ttft"


def times_are_mixed(run: RunEvidence) -> bool:
    """Return whether a run's latencies mix bulk messages and probes. Only old runs do: such a mix is rejected now."""
    return bool(run.workload.planned.get("latency") and run.workload.planned.get("probe"))


def _latency(flows: Sequence[Sequence[int]], level: float, *, is_rough: bool) -> dict[str, Interval | None]:
    """Return the intervals of percentiles of timed messages. Those of one flow, and of one queue, move together."""
    series = [np.array(times_ns, dtype=np.float64) / 1e9 for times_ns in flows]
    independent = confidence.independent_of_all(series, is_rough=is_rough)
    if independent is None:
        return {}
    return {
        f"latency.p{percent}": confidence.percentile_bounds(
            np.concatenate(series), percent, independent=int(independent), least=0.0, level=level
        )
        for percent in (50, 99)
    }


def contrasts_of(
    run: RunEvidence,
    whole: timeline.Goodput | None,
    base: timeline.Baseline | None,
    impacts: Mapping[str, timeline.Impact],
    *,
    level: float = LEVEL,
) -> dict[str, tuple[Member, ...]]:
    """Return, by metric, how each fault compares with the fault-free time before it and after it.

    The ranges are at the level of one of all faults, so that `level` holds for all of them together.
    """
    if whole is None or base is None or not impacts:
        return {}
    member_level = 1 - (1 - level) / len(impacts)
    before = whole.bytes_per_s[whole.bin_of(base.start_ns) : whole.bin_of(base.end_ns)]
    windows = acting_windows(run)
    means, lowest, later = [], [], []
    for fault_id, impact in impacts.items():
        after = bins_after(whole, windows, fault_id, impact.end_ns) if not impact.censored else before[:0]
        under = timeline.while_acting(whole, impact)
        value = float(under.mean()) / base.mean if len(under) else 0.0
        means.append(
            Member(
                name=fault_id,
                value=value,
                before=ends_of(ratio_of_means(under, before, value, member_level)),
                after=ends_of(ratio_to(under, after, member_level)),
            )
        )
        lowest.append(
            Member(
                name=fault_id,
                value=impact.min_ratio,
                before=_lowest(whole, base, impact, before, base.mean, member_level),
                after=_lowest(whole, base, impact, after, float(after.mean()) if len(after) else 0.0, member_level),
            )
        )
        # What is compared is the time after the fault, so that the time before it is the only control.
        since = ends_of(ratio_to(after, before, member_level))
        if len(after):
            later.append(Member(name=fault_id, value=float(after.mean()) / base.mean, before=since, after=since))
    return {
        "goodput_mean_ratio": tuple(means),
        "goodput_min_ratio": tuple(lowest),
        "dip": tuple(lowest),
        "goodput.after_ratio": tuple(later) if len(later) == len(impacts) else (),
    }


def bins_after(
    whole: timeline.Goodput, windows: Mapping[str, timeline.Window], fault_id: str, end_ns: int
) -> NDArray[np.float64]:
    """Return the rates (bytes/s) from the end of a fault's effect until the next fault, or until the run's end.

    Empty if another fault acts at the end of the effect. The last bin of a run is left out, because it may be cut.
    """
    others = [window for name, window in windows.items() if name != fault_id]
    if any(window.start_ns <= end_ns <= window.cleared_ns for window in others):
        return whole.bytes_per_s[:0]
    next_ns = min((window.start_ns for window in others if window.start_ns > end_ns), default=whole.end_ns)
    return whole.bytes_per_s[whole.bin_of(end_ns) + 1 : min(whole.bin_of(next_ns), len(whole.bytes) - 1)]


def hull(members: Sequence[Member], value: float, level: float) -> Interval | None:
    """Return the range of the worst of several contrasts, whose value is `value`, against both of its controls."""
    worst = next((member for member in members if member.value == value), None)
    if worst is None or worst.before is None or worst.after is None:
        return None
    low, high = min(worst.before[0], worst.after[0]), max(worst.before[1], worst.after[1])
    return Interval(low=low, high=high, level=level, method="against the fault-free time before and after the fault")


def ends_of(interval: Interval | None) -> tuple[float, float] | None:
    """Return both ends of an interval."""
    return None if interval is None else (interval.low, interval.high)


def _lowest(
    whole: timeline.Goodput,
    base: timeline.Baseline,
    impact: timeline.Impact,
    control: NDArray[np.float64],
    mean: float,
    level: float,
) -> tuple[float, float] | None:
    """Return the range of the lowest window under a fault over the mean of a control."""
    if mean <= 0:
        return None
    windows = (max(impact.end_ns, impact.cleared_ns + timeline.HOLD_NS) - impact.fired_ns) // whole.step_ns + 1
    width = base.window_ns // whole.step_ns
    value = impact.min_ratio * base.mean / mean
    return ends_of(confidence.lowest_window(value, control, width=width, windows=windows, level=level))


def ratio_to(under_fault: NDArray[np.float64], control: NDArray[np.float64], level: float) -> Interval | None:
    """Return the interval of the mean rate under a fault over that of a control."""
    mean = float(control.mean()) if len(control) else 0.0
    if mean <= 0 or not len(under_fault):
        return None
    return ratio_of_means(under_fault, control, float(under_fault.mean()) / mean, level)


def ratio_of_means(
    under_fault: NDArray[np.float64], control: NDArray[np.float64], ratio: float, level: float
) -> Interval | None:
    """Return the interval of the mean rate under a fault over that of a control, which is `ratio`."""
    denominator = confidence.mean_interval(control, of="fault-free bins", level=level)
    if denominator is not None and len(under_fault) and not under_fault.any() and denominator.low > 0:
        return Interval(low=0.0, high=0.0, method="nothing came under the fault", level=level)
    numerator = confidence.mean_interval(under_fault, of="bins under the fault", level=level)
    if numerator is None or denominator is None:
        return None
    mean = float(under_fault.mean())
    interval = confidence.ratio_interval(numerator, denominator, (mean, mean / ratio if ratio else 0.0))
    return None if interval is None else replace(interval, level=level)
