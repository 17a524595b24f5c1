"""The interval of each metric that is a performance: which noise it has, and where in a run that noise shows. Pure.

Counts and names have none: they are what they are; of times of recovery see `harness.analysis.resolutions`.
`harness.statistics` has the rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from harness import statistics
from harness.analysis import timeline
from harness.record.measurements import Measurements, RankSeries, Serving
from harness.statistics import Interval

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.analysis.ettr import Ettr

__all__ = ["disturbed", "find", "iteration_times", "operation_times"]


def find(
    run: Measurements,
    whole: timeline.Goodput | None,
    base: timeline.Baseline | None,
    impacts: Mapping[str, timeline.Impact],
    training: Ettr | None = None,
) -> dict[str, Interval]:
    """Intervals by metric, for those that have one in this run."""
    found: dict[str, Interval | None] = {
        "jct_ratio": _jct(run, impacts),
        "busbw.mean": _busbw(run),
        "ettr": None if training is None else training.interval,
        **({} if run.serving is None else _serving(run.serving)),
    }
    if whole is not None:
        bits = whole.bytes_per_s * 8 / 1e9
        found["goodput.mean"] = statistics.mean_interval(bits, of="bins of goodput")
        if base is not None and impacts:
            found |= _dips(whole, base, impacts)
    return {name: interval for name, interval in found.items() if interval is not None}


def iteration_times(ranks: Sequence[RankSeries], count: int) -> NDArray[np.float64]:
    """What each of the first `count` iterations added to the job's time (ns); they add up to it."""
    if count == 0:
        return np.zeros(0)
    ordered = [sorted(rank.iterations, key=lambda step: step.index)[:count] for rank in ranks]
    ends = np.array([[step.end_ns for step in rank] for rank in ordered]).max(axis=0)
    times: NDArray[np.float64] = np.diff(ends, prepend=min(rank[0].start_ns for rank in ordered)).astype(np.float64)
    return times


def operation_times(ranks: Sequence[RankSeries]) -> NDArray[np.float64]:
    """Time of each collective (ns): the shortest over the ranks, for the last to come waits for nobody."""
    count = timeline.finished_iterations(ranks)
    ordered = [sorted(rank.iterations, key=lambda step: step.index)[:count] for rank in ranks]
    if not count:
        return np.zeros(0)
    times = np.array([[step.comm_ns + step.wait_ns for step in rank] for rank in ordered], dtype=np.float64)
    shortest: NDArray[np.float64] = times.min(axis=0)
    return shortest


def _jct(run: Measurements, impacts: Mapping[str, timeline.Impact]) -> Interval | None:
    if run.twin is None:
        return None
    count = min(timeline.finished_iterations(run.series), timeline.finished_iterations(run.twin))
    times = iteration_times(run.series, count)
    if count == 0 or not (times > 0).all():
        return None
    touched = disturbed(run, impacts, times)
    before = int(np.argmax(touched)) if touched.any() else count
    return statistics.total_ratio(times, iteration_times(run.twin, count), quiet=~touched, before=before)


def disturbed(
    run: Measurements, impacts: Mapping[str, timeline.Impact], times: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Which of a run's first iterations, of these times, a fault touched."""
    begin = min((step.start_ns for rank in run.series for step in rank.iterations), default=0)
    ends = begin + np.cumsum(times)
    touched = np.zeros(len(times), dtype=np.bool_)
    for first_ns, last_ns in _disturbances(run, impacts):
        touched |= (ends > first_ns) & (ends - times < last_ns)
    return touched


def _disturbances(run: Measurements, impacts: Mapping[str, timeline.Impact]) -> list[tuple[int, int]]:
    """From each fault's arming (it may act unseen) to goodput's return; the whole rest where that is not known."""
    found = []
    for fault in run.faults:
        if fault.receipt is None:
            continue
        armed, fired = fault.receipt.armed.get("at_ns"), fault.receipt.fired.first_ns
        starts = [at for at in (armed, fired) if isinstance(at, int)]
        if starts:
            impact = impacts.get(fault.plan.id)
            back = run.end_ns if impact is None else impact.end_ns
            found.append((min(starts), back))
    return found


def _busbw(run: Measurements) -> Interval | None:
    mean = run.summary.busbw_gbps
    times = operation_times(run.series)
    interval = statistics.mean_interval(times, of="collectives")
    if mean is None or interval is None or interval.low <= 0:
        return None
    middle = float(times.mean())
    return Interval(low=mean * middle / interval.high, high=mean * middle / interval.low, method=interval.method)


def _serving(serving: Serving) -> dict[str, Interval | None]:
    """Requests are taken for independent of each other; the tokens of one request are not: it is slow or it is not."""
    asked, tokens = len(serving.ttft_ns), [time_ns for one in serving.tpot_ns for time_ns in one]
    found: dict[str, Interval | None] = {}
    for name, times_ns in (("ttft", serving.ttft_ns), ("tpot", tokens)):
        times = np.array(times_ns, dtype=np.float64) / 1e9
        for percent in (50, 99):
            alone = min(asked, len(times))
            interval = statistics.percentile_bounds(times, percent, independent=alone, least=0.0)
            found[f"{name}.p{percent}"] = interval
    if serving.slo_attainment is not None and asked:
        found["slo_attainment"] = statistics.share_interval(round(serving.slo_attainment * asked), asked)
    return found


def _dips(
    whole: timeline.Goodput, base: timeline.Baseline, impacts: Mapping[str, timeline.Impact]
) -> dict[str, Interval | None]:
    bins = whole.bytes[whole.bin_of(base.start_ns) : whole.bin_of(base.end_ns)]
    value = min(one.min_ratio for one in impacts.values())
    interval = statistics.window_ratio(value, bins, width=base.window_ns // whole.step_ns)
    if interval is None:
        return {}
    dip = Interval(low=1 - interval.high, high=1 - interval.low, method=interval.method)
    return {"goodput_min_ratio": interval, "dip": dip}
