"""A fault's effect on goodput and on the job's time. Pure.

**Goodput** is payload bytes per second, summed over ranks, on a grid of `step_ns` bins (100 ms).

**Rolling goodput** at bin i is the mean over the *next* W of time, W = 1 s, or two iterations of the workload if that
is longer. A collective sends in bursts, and a window that holds one burst now and two later would show dips that do not
exist. A forward window contains no part of the outage once traffic is back.

**Baseline** is the run's own fault-free start: from the end of the warm-up (1 s) to the first arming of a fault,
without the bins in which the harness itself read counters or looked something up on the lab. Its *mean* is the mean of
its bins; its *noise floor* is the 5th percentile of its rolling goodput. Both come from this run, because two runs on
shared cores differ by more than a fault may cost.

**Recovery** of a fault: a bin is *healthy* if its rolling goodput is at least 95 % of the noise floor. Recovered is the
first moment after the dip from which rolling goodput stays healthy for a hold of 1 s; then, within that window, the
first bin that itself carries traffic at the healthy rate (a forward window may be healthy although its first bins are
still silent). The clock starts when the fault first fired. A dip may begin up to one hold after the fault was cleared;
a later one does not belong to this fault. If goodput never left the floor, recovery is 0. A silence that is short
against the rolling window is no dip (`Baseline.hidden_ns`), so that the interval of such a 0 extends to its length.

On a soft lab whose job computes, steadied goodput (`faultbed.harness.analysis.pace`) is compared with the floor: a
slower machine under the lab is not the fault's effect. W then counts the machine's own time. Otherwise a window of two
iterations would hold only one and a half, and each compute phase would be a dip.

Recovery is known only if the data show goodput healthy for a hold after the fault was cleared *and* after goodput came
back. If the data end or the next fault begins earlier, the result is *censored*: the true time is at least the number
given. The judge fails a bound that even this lower bound exceeds, and reports INCONCLUSIVE otherwise. The same holds if
no dip was seen yet: it may have been about to come.

A fault-free start whose noise floor is below half of its mean shows no dips, so every recovery is censored.

A fault is charged only for its own dip. A dip that begins while an earlier fault still acts (until a hold after its
removal), or before goodput recovered from it, may be the earlier fault's. The later fault's recovery is then censored
at 0, and `Impact.reason` names both.

Flows do not wait for each other as ranks do: one of many that stands still is no dip. The recovery of a run of flows
therefore lasts until each of their RNICs carries data again (`faultbed.harness.analysis.effects.flow_silences`).

The resolution of all times is one bin, plus the clock error of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.record.evidence.workload_evidence import Iteration, RankSeries, Sample

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "HOLD_NS",
    "MIN_BASELINE_NS",
    "ROLLING_NS",
    "STEADY_SHARE",
    "Baseline",
    "Goodput",
    "Impact",
    "JobTime",
    "SlowDown",
    "Window",
    "baseline",
    "finished_iterations",
    "first_start_ns",
    "goodput",
    "impact",
    "impacts",
    "iterations_done",
    "job_start_ns",
    "job_time_ratio",
    "lowest_share",
    "paired",
    "rolling",
    "rolling_window_ns",
    "steadiness",
    "total",
    "while_acting",
]

WARMUP_NS = 1_000_000_000
ROLLING_NS = 1_000_000_000
HOLD_NS = 1_000_000_000
MIN_BASELINE_NS = 4_000_000_000
"""Fault-free time that a run needs before its first fault: the warm-up and 3 s of baseline."""
FLOOR_PERCENTILE = 5.0
HEALTHY_SHARE = 0.95
STEADY_SHARE = 0.5
"""Minimum ratio of noise floor to mean of the fault-free start. Below it, half of goodput could be missing without any
window below the floor, so recoveries are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Bytes per bin; bin i covers [t0_ns + i * step_ns, t0_ns + (i + 1) * step_ns).

    `pace` is set for steadied goodput: the divisor of the bytes of each bin (the machine's time over wall time).
    """

    t0_ns: int
    step_ns: int
    bytes: NDArray[np.float64]
    pace: NDArray[np.float64] | None = None

    @property
    def end_ns(self) -> int:
        """End of the last bin."""
        return self.t0_ns + len(self.bytes) * self.step_ns

    def bin_of(self, t_ns: int) -> int:
        """Return the bin that contains `t_ns`, clamped to the series."""
        return min(max((t_ns - self.t0_ns) // self.step_ns, 0), len(self.bytes))

    def time_of(self, index: int) -> int:
        """Return when bin `index` begins."""
        return self.t0_ns + index * self.step_ns

    @property
    def bytes_per_s(self) -> NDArray[np.float64]:
        """Rate of each bin."""
        return self.bytes / (self.step_ns / 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The fault-free start: bytes/s. `window_ns` is the rolling window that `floor` was measured with."""

    start_ns: int
    end_ns: int
    mean: float
    floor: float
    window_ns: int

    @property
    def healthy(self) -> float:
        """Rolling goodput (bytes/s) at and above which the job counts as healthy."""
        return HEALTHY_SHARE * self.floor

    @property
    def hidden_ns(self) -> int:
        """Longest silence in steady goodput that keeps every rolling window healthy, so that it is no dip."""
        return max(0, round(self.window_ns * (1 - self.healthy / self.mean)))

    @property
    def is_steady(self) -> bool:
        """Whether fault-free goodput varies so little that a dip below its floor is evidence."""
        return self.floor >= STEADY_SHARE * self.mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The time in which a fault may act, in controller ns.

    `start_ns` is its arming, or its earliest possible firing. `fired_ns` is its first observed firing (None: never).
    `cleared_ns` is its removal, or the end of the run if that was not confirmed.
    """

    start_ns: int
    fired_ns: int | None
    cleared_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowDown:
    """All ranks became slower with a fault, by the fault or by the machine under a soft lab: which one is not proven.

    `reason` says what was seen. If it was the fault, then `min_ratio` is the lowest rolling goodput over the baseline's
    mean (None: unknown), and `recovery_ns` and `after_clear_ns` are as in `Impact` (None: goodput did not recover).
    """

    reason: str
    min_ratio: float | None = None
    recovery_ns: int | None = None
    after_clear_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Impact:
    """Effect of one fault on goodput. Times in controller ns; `recovered_ns` is None if censored.

    `recovery_ns` counts from the first firing, `after_clear_ns` from the removal (0 if recovered before it). With
    `censored` they are lower bounds, and `reason` says why. `min_ratio` is the lowest rolling goodput over the
    baseline's mean. `lost_bytes` is what the baseline's mean would have carried until recovery, minus what was carried.
    `dip_ns` is the start of the first window below the floor; None without one. `acted_until_ns` is the end of the dip,
    whichever fault caused it, or the end of the data that show it; `is_back` is False in the latter case.
    All numbers assume that `slow_down`, if there is one, was the machine's.
    """

    fired_ns: int
    cleared_ns: int
    recovered_ns: int | None
    recovery_ns: int
    after_clear_ns: int
    censored: bool
    min_ratio: float
    lost_bytes: float
    reason: str = ""
    dip_ns: int | None = None
    acted_until_ns: int = 0
    is_back: bool = True
    slow_down: SlowDown | None = None

    @property
    def end_ns(self) -> int:
        """Last moment at which the fault is known to have affected goodput."""
        slowed_ns = self.slow_down.recovery_ns if self.slow_down is not None else None
        return max(self.cleared_ns, self.fired_ns + max(self.recovery_ns, slowed_ns or 0), self.acted_until_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTime:
    """Time to finish the first `iterations` iterations, in this run (where they end at `end_ns`) and in its twin."""

    iterations: int
    run_ns: int
    twin_ns: int
    end_ns: int

    @property
    def ratio(self) -> float:
        """Ratio of the run to its twin."""
        return self.run_ns / self.twin_ns


def goodput(
    samples: Sequence[Sample], *, start_ns: int, end_ns: int, sample_ns: int, step_ns: int = 100_000_000
) -> Goodput:
    """Place one rank's samples on the grid. A sample's bytes are spread evenly over its `sample_ns`: no byte is lost.

    Samples may come in any order; a missing one counts as silence.
    """
    bins = max(0, -(-(end_ns - start_ns) // step_ns))
    grid = [0.0] * bins
    for sample in samples:
        first, last = sample.t_ns - start_ns, sample.t_ns - start_ns + sample_ns
        for index in range(max(0, first // step_ns), min(bins, -(-last // step_ns))):
            overlap = min(last, (index + 1) * step_ns) - max(first, index * step_ns)
            grid[index] += sample.bytes * overlap / sample_ns
    return Goodput(t0_ns=start_ns, step_ns=step_ns, bytes=np.array(grid, dtype=np.float64))


def total(series: Sequence[Goodput]) -> Goodput:
    """Return the sum of series on one grid.

    Raises:
        ValueError: no series, or different grids.
    """
    if not series or len({(goodput.t0_ns, goodput.step_ns, len(goodput.bytes)) for goodput in series}) != 1:
        raise ValueError("series on one and the same grid are needed")
    first = series[0]
    return Goodput(
        t0_ns=first.t0_ns, step_ns=first.step_ns, bytes=np.sum([goodput.bytes for goodput in series], axis=0)
    )


def rolling_window_ns(ranks: Iterable[RankSeries], step_ns: int, *, until_ns: int | None = None) -> int:
    """Return the rolling window for a workload: 1 s, or two median iterations, rounded up to whole bins.

    Only iterations that begin before `until_ns` (the first fault) count.
    """
    lengths = [
        step.end_ns - step.start_ns
        for rank in ranks
        for step in rank.iterations
        if until_ns is None or step.start_ns < until_ns
    ]
    length_ns = max(ROLLING_NS, int(2 * np.median(lengths)) if lengths else 0)
    return -(-length_ns // step_ns) * step_ns


def rolling(series: Goodput, window_ns: int) -> NDArray[np.float64]:
    """Return the mean rate (bytes/s) over the window that begins at each bin, for whole windows only.

    For steadied goodput, windows are of the machine's time, and each bin is weighted by its pace.
    """
    width = window_ns // series.step_ns
    if width < 1 or len(series.bytes) < width:
        return np.zeros(0, dtype=np.float64)
    if series.pace is not None:
        return _rolling_by_pace(series, series.pace, width) / (window_ns / 1e9)
    summed = np.concatenate(([0.0], np.cumsum(series.bytes)))
    # Differences of a long cumulative sum can be slightly below 0 if all bins are 0.
    means: NDArray[np.float64] = np.maximum(summed[width:] - summed[:-width], 0.0) / (window_ns / 1e9)
    return means


def _rolling_by_pace(series: Goodput, pace: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    machine = np.concatenate(([0.0], np.cumsum(pace)))
    carried = np.concatenate(([0.0], np.cumsum(series.bytes * pace)))
    # A sum of shares may miss the end by a rounding error.
    whole = int(np.searchsorted(machine, machine[-1] - width + 1e-6, side="right"))
    until = np.interp(machine[:whole] + width, machine, carried)
    means: NDArray[np.float64] = np.maximum(until - carried[:whole], 0.0)
    return means


def baseline(
    series: Goodput, *, first_fault_ns: int, window_ns: int, reads: Iterable[tuple[int, int]] = ()
) -> Baseline | None:
    """Return the run's own fault-free start, without the harness's own `reads` (begin, end) of the lab.

    None if the rest is silent, or shorter than 3 s or two rolling windows.
    """
    first, last = series.bin_of(series.t0_ns + WARMUP_NS), series.bin_of(first_fault_ns)
    parts = _without(series, first, last, reads)
    if (known := _floor_and_mean(parts, window_ns)) is None or known[0] <= 0:
        return None
    floor, mean = known
    return Baseline(
        start_ns=series.time_of(first), end_ns=series.time_of(last), mean=mean, floor=floor, window_ns=window_ns
    )


def steadiness(
    series: Goodput, *, until_ns: int, window_ns: int, reads: Iterable[tuple[int, int]] = ()
) -> float | None:
    """Return noise floor over mean of the start of a run, 0 to 1; None if it is too short yet."""
    first, last = series.bin_of(series.t0_ns + WARMUP_NS), series.bin_of(until_ns)
    known = _floor_and_mean(_without(series, first, last, reads), window_ns)
    return None if known is None else known[0] / known[1] if known[1] > 0 else 0.0


def lowest_share(series: Goodput, *, until_ns: int, window_ns: int) -> float | None:
    """Return the lowest rolling goodput over the mean, after the warm-up; None if it is too short or silent."""
    first, last = series.bin_of(series.t0_ns + WARMUP_NS), series.bin_of(until_ns)
    part = Goodput(t0_ns=series.time_of(first), step_ns=series.step_ns, bytes=series.bytes[first:last])
    if last <= first or part.end_ns - part.t0_ns < max(2 * window_ns, MIN_BASELINE_NS - WARMUP_NS):
        return None
    mean = float(part.bytes_per_s.mean())
    return float(rolling(part, window_ns).min()) / mean if mean > 0 else None


def _floor_and_mean(parts: Sequence[Goodput], window_ns: int) -> tuple[float, float] | None:
    if sum(part.end_ns - part.t0_ns for part in parts) < max(2 * window_ns, MIN_BASELINE_NS - WARMUP_NS):
        return None
    means = np.concatenate([rolling(part, window_ns) for part in parts])
    if not len(means):
        return None
    mean = float(np.concatenate([part.bytes_per_s for part in parts]).mean())
    return float(np.percentile(means, FLOOR_PERCENTILE)), mean


def _without(series: Goodput, first: int, last: int, reads: Iterable[tuple[int, int]]) -> list[Goodput]:
    """Return the stretches of bins [first, last) outside all reads."""
    quiet = np.zeros(len(series.bytes) + 1, dtype=np.bool_)
    quiet[first:last] = True
    for begin_ns, end_ns in reads:
        if end_ns > series.t0_ns:
            quiet[series.bin_of(begin_ns) : series.bin_of(end_ns) + 1] = False
    edges = np.flatnonzero(np.diff(quiet.astype(np.int8), prepend=0))
    return [
        Goodput(t0_ns=series.time_of(int(start)), step_ns=series.step_ns, bytes=series.bytes[start:end])
        for start, end in edges.reshape(-1, 2)
    ]


def impacts(series: Goodput, base: Baseline, windows: Mapping[str, Window]) -> dict[str, Impact]:
    """Return the effect of each fault that fired on `series`, unless too little data follows its firing."""
    by_fault: dict[str, Impact] = {}
    for fault_id, window in sorted(windows.items(), key=lambda item: item[1].start_ns):
        if window.fired_ns is None:
            continue
        later = [(other.start_ns, name) for name, other in windows.items() if other.start_ns > window.start_ns]
        until_ns, following = min(later, default=(None, ""))
        measured = impact(
            series,
            base,
            fired_ns=window.fired_ns,
            cleared_ns=window.cleared_ns,
            until_ns=until_ns,
            until=f"{following} began" if following else "the data end",
        )
        if measured is not None:
            earlier = [
                name
                for name, other in windows.items()
                if name != fault_id
                and other.start_ns <= window.start_ns
                and measured.dip_ns is not None
                and (measured.dip_ns <= other.cleared_ns + HOLD_NS or _was_not_back(other, by_fault.get(name)))
            ]
            by_fault[fault_id] = _unattributable(measured, earlier) if earlier else measured
    return by_fault


def _was_not_back(window: Window, impact: Impact | None) -> bool:
    """Return whether goodput was still low because of a fault, or unknown, when the next fault began."""
    return window.fired_ns is not None if impact is None else not impact.is_back


def _unattributable(impact: Impact, earlier: Sequence[str]) -> Impact:
    """Return the impact of a fault whose dip may be that of `earlier` faults, so that its own is unknown."""
    names = " and ".join(sorted(earlier))
    return replace(
        impact,
        recovered_ns=None,
        recovery_ns=0,
        after_clear_ns=0,
        censored=True,
        reason=f"the faults overlap: the dip may be that of {names}, so its own share of the dip is unknown",
    )


def impact(
    series: Goodput,
    base: Baseline,
    *,
    fired_ns: int,
    cleared_ns: int,
    until_ns: int | None = None,
    until: str = "the data end",
) -> Impact | None:
    """Return the effect of one fault on `series`; `until_ns` is the start of the next fault (None: end of the data)."""
    end = series.bin_of(series.end_ns if until_ns is None else until_ns)
    pace = None if series.pace is None else series.pace[:end]
    known = Goodput(t0_ns=series.t0_ns, step_ns=series.step_ns, bytes=series.bytes[:end], pace=pace)
    means = rolling(known, base.window_ns)
    first = series.bin_of(fired_ns)
    if first >= len(means):
        return None
    last_dip, hold_bins = series.bin_of(cleared_ns + HOLD_NS), HOLD_NS // series.step_ns
    dip, back = _find_dip(means >= base.healthy, first, last_dip, hold_bins)
    # bin_of stops at the end of the series. Compare times, so that a removal near the end does not count as confirmed.
    sure_ns = max(cleared_ns + HOLD_NS, fired_ns if back is None else series.time_of(back) + HOLD_NS)
    is_back = back is None or back < len(means)
    is_confirmed = is_back and series.time_of(len(means)) > sure_ns
    censored = not is_confirmed or not base.is_steady
    if back is not None and is_back:
        back = _first_healthy_bin(known, base, back)
    back_ns = fired_ns if back is None else max(fired_ns, series.time_of(back))
    carried = float(series.bytes[first : series.bin_of(back_ns)].sum())
    expected = base.mean * (series.bin_of(back_ns) - first) * series.step_ns / 1e9
    known_ns = series.time_of(end)
    recovery_state = "not back" if not is_back else "no dip yet" if dip is None else "back, but not yet for long enough"
    if not is_confirmed:
        reason = _why_censored(recovery_state, until, known_ns - fired_ns, known_ns - cleared_ns)
    else:
        reason = "" if base.is_steady else _why_unsteady(base)
    return Impact(
        fired_ns=fired_ns,
        cleared_ns=cleared_ns,
        recovered_ns=None if censored else back_ns,
        recovery_ns=back_ns - fired_ns,
        after_clear_ns=max(0, back_ns - cleared_ns),
        censored=censored,
        min_ratio=float(means[first : max(last_dip, first) + 1].min()) / base.mean,
        lost_bytes=max(0.0, expected - carried),
        reason=reason,
        dip_ns=None if dip is None else series.time_of(dip),
        acted_until_ns=back_ns,
        is_back=is_back,
    )


def _first_healthy_bin(series: Goodput, base: Baseline, begin: int) -> int:
    """Return the first bin at the healthy level in the rolling window that begins at `begin`; `begin` if there is none.

    The rolling mean is healthy as soon as its window is, although the first bins of the window may be low.
    """
    window = series.bytes_per_s[begin : begin + base.window_ns // series.step_ns]
    healthy = np.flatnonzero(window >= base.healthy)
    return begin + (int(healthy[0]) if len(healthy) else 0)


def while_acting(series: Goodput, impact: Impact) -> NDArray[np.float64]:
    """Return the rate (bytes/s) of each bin from a fault's firing to its removal; at least one bin."""
    first = min(series.bin_of(impact.fired_ns), len(series.bytes) - 1)
    return series.bytes_per_s[first : max(series.bin_of(impact.cleared_ns), first + 1)]


def _why_unsteady(base: Baseline) -> str:
    return (
        f"the fault-free start is too unsteady: its own rolling goodput falls to {base.floor / base.mean:.2f} of "
        f"its mean (at least {STEADY_SHARE:g} is needed)"
    )


def _why_censored(recovery_state: str, until: str, after_fired_ns: int, after_cleared_ns: int) -> str:
    elapsed = (
        f"{after_cleared_ns / 1e9:.1f} s after it was cleared"
        if after_cleared_ns > 0
        else f"{after_fired_ns / 1e9:.1f} s after it fired, before it was cleared"
    )
    return f"{recovery_state} when {until} {elapsed}"


def _find_dip(healthy: NDArray[np.bool_], first: int, last_dip: int, hold_bins: int) -> tuple[int | None, int | None]:
    """Return the bins of the first dip and of its end; the end is `len(healthy)` if it has none.

    A relapse within the hold, or before `last_dip`, is the same outage.
    """
    bad = np.flatnonzero(~healthy)
    bad = bad[bad >= first]
    if not len(bad) or bad[0] > last_dip:
        return None, None
    end = int(bad[0])
    for index in bad[1:]:
        if index > max(end + hold_bins, last_dip):
            break
        end = int(index)
    return int(bad[0]), end + 1


def finished_iterations(ranks: Sequence[RankSeries]) -> int:
    """Return the number of iterations that every rank finished."""
    return min((len(rank.iterations) for rank in ranks), default=0)


def iterations_done(ranks: Sequence[RankSeries]) -> int:
    """Return the number of iterations from the first to the last one that every rank has recorded.

    Iterations between them count even if a record is lost: an iteration begins only after the previous one is finished.
    """
    indices = [{step.index for step in rank.iterations} for rank in ranks]
    common = set.intersection(*indices) if indices else set()
    return max(common) - min(common) + 1 if common else 0


def first_start_ns(ranks: Sequence[RankSeries]) -> int | None:
    """Return when the first iteration of any rank began; None: there is none."""
    return min((step.start_ns for rank in ranks for step in rank.iterations), default=None)


def paired(
    run: Sequence[RankSeries], other: Sequence[RankSeries]
) -> tuple[tuple[RankSeries, ...], tuple[RankSeries, ...]]:
    """Return the series of two runs with the iterations that all ranks of both have.

    A killed engine loses the record of its last iteration. Without the pairing, the n-th iteration of one run would be
    compared with another iteration of the other run.
    """
    indices = [{step.index for step in rank.iterations} for rank in (*run, *other)]
    common = set.intersection(*indices) if indices else set()
    if all(of_rank == common for of_rank in indices):
        return tuple(run), tuple(other)

    def kept(ranks: Sequence[RankSeries]) -> tuple[RankSeries, ...]:
        return tuple(
            msgspec.structs.replace(rank, iterations=tuple(step for step in rank.iterations if step.index in common))
            for rank in ranks
        )

    return kept(run), kept(other)


def job_start_ns(run: RunEvidence) -> int | None:
    """Return when the job's time begins; None: with the first iteration of its series.

    A job with restarts begins with its workload: its series hold the last execution of each iteration only, so that
    the work before a restart from nothing is not in them.
    """
    return run.workload.t0_ns if run.workload.resilience is not None and run.workload.resilience.restarts else None


def _span_of_first(ranks: Sequence[RankSeries], count: int) -> tuple[int, int]:
    """Return when the first iteration of any rank began, and when the last rank ended the last one of `count`."""

    def ordered(rank: RankSeries) -> list[Iteration]:
        return sorted(rank.iterations, key=lambda step: step.index)

    return min(ordered(rank)[0].start_ns for rank in ranks), max(ordered(rank)[count - 1].end_ns for rank in ranks)


def job_time_ratio(
    run: Sequence[RankSeries], twin: Sequence[RankSeries], start_ns: int | None = None
) -> JobTime | None:
    """Return job times over the iterations that both runs finished; None if there are none.

    `start_ns` is the start of the run's job (`job_start_ns`).
    """
    twin_start_ns = first_start_ns(twin)
    run, twin = paired(run, twin)
    count = min(finished_iterations(run), finished_iterations(twin))
    if count == 0 or twin_start_ns is None:
        return None
    begin_ns, end_ns = _span_of_first(run, count)
    twin_begin_ns, twin_end_ns = twin_start_ns, _span_of_first(twin, count)[1]
    if twin_end_ns <= twin_begin_ns:
        return None
    run_ns = end_ns - (begin_ns if start_ns is None else start_ns)
    return JobTime(iterations=count, run_ns=run_ns, twin_ns=twin_end_ns - twin_begin_ns, end_ns=end_ns)
