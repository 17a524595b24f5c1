"""The charts of goodput over time, and of iterations by rank (`charts` has their common parts)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from faultbed.harness.analysis import timeline
from faultbed.harness.analysis.observe import Observed
from faultbed.harness.quantities import format_duration
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.record.evidence.workload_evidence import RankSeries
from faultbed.harness.report.plots.charts import (
    COMM,
    COMPUTE,
    GOODPUT,
    INK,
    LINE,
    SOFT,
    STORAGE,
    STYLE,
    WAIT,
    Band,
    Chart,
    bare,
    both_widths,
    named_row,
    shade,
    svg,
    time_axis,
)
from faultbed.harness.report.plots.thinning import extremes, longest, spans

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

__all__ = ["goodput_chart", "iteration_cut_ms", "iterations_chart", "rolled"]

_PARTS = (
    ("ingest_ns", STORAGE),
    ("compute_ns", COMPUTE),
    ("wait_ns", WAIT),
    ("comm_ns", COMM),
    ("checkpoint_ns", STORAGE),
)
"""Parts of an iteration, in order."""
_CUT = 2.6
"""Number of median iterations at which a bar of the iterations chart is cut."""
_MAX_ROWS = 16
"""Maximum number of ranks in one chart: more rows are too thin to read, and samples.parquet has the data."""


@mpl.rc_context(STYLE)
def goodput_chart(run: RunEvidence, observed: Observed, bands: Sequence[Band]) -> Chart | None:
    """Draw total goodput (bins, rolling mean, healthy level), and a row for each rank and each other flow.

    None without samples.
    """
    if observed.goodput is None or not len(observed.goodput.bytes):
        return None
    names = {rank.rank: f"{rank.host}:{rank.rnic}" for rank in run.workload.ranks}
    ranks = list(observed.per_rank.items())[:_MAX_ROWS]
    highest = max((float(rolled(rank_goodput, observed).max(initial=0)) for _, rank_goodput in ranks), default=0) or 1.0
    rows = [(names.get(rank, f"rank {rank}"), rank_goodput, highest) for rank, rank_goodput in ranks]
    for name, beside in observed.beside.items():
        if beside is not None:  # the bystander has its own scale, because it is often paced
            rows.append((name, beside, float(rolled(beside, observed).max(initial=0)) or 1.0))

    def draw(width: float, *, narrow: bool) -> str:
        total_height, row_height = (2.1, 0.36) if narrow else (2.5, 0.42)
        figure = Figure(figsize=(width, total_height + row_height * len(rows) + 0.5))
        grid = figure.add_gridspec(
            1 + len(rows), 1, height_ratios=[total_height, *[row_height] * len(rows)], hspace=0.28
        )
        top = figure.add_subplot(grid[0])
        _total_axes(top, observed, bands, spans(narrow=narrow))
        below = [figure.add_subplot(grid[1 + index], sharex=top) for index in range(len(rows))]
        for axes, (name, row_goodput, scale) in zip(below, rows, strict=True):
            rates = rolled(row_goodput, observed)
            drawn = extremes(rates, spans(narrow=narrow))
            times = (drawn + 0.5) * row_goodput.step_ns / 1e9
            axes.fill_between(times, rates[drawn], color=SOFT, linewidth=0)
            axes.plot(times, rates[drawn], color=GOODPUT, linewidth=0.9)
            named_row(axes, name, scale * 1.1, bands)
        time_axis([top, *below], run)
        return svg(figure, f"goodput-{'narrow' if narrow else 'wide'}", narrow=narrow, top_in=0.06)

    return both_widths(draw)


@mpl.rc_context(STYLE)
def iterations_chart(run: RunEvidence, bands: Sequence[Band]) -> Chart | None:
    """Draw each iteration's length by rank: compute, wait, communication. None without iterations."""
    rows = [series for series in run.workload.series if series.iterations][:_MAX_ROWS]
    if not rows:
        return None
    names = {rank.rank: f"{rank.host}:{rank.rnic}" for rank in run.workload.ranks}
    top_ms = iteration_cut_ms(run.workload.series)

    def draw(width: float, *, narrow: bool) -> str:
        figure = Figure(figsize=(width, (0.66 if narrow else 0.78) * len(rows) + 0.6))
        axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False, gridspec_kw={"hspace": 0.3})[:, 0]
        for rank_axes, series in zip(axes, rows, strict=True):
            _stack(rank_axes, series, run, top_ms, spans(narrow=narrow))
            named_row(rank_axes, names.get(series.rank, f"rank {series.rank}"), top_ms * 1.04, bands)
            rank_axes.set_yticks([top_ms], [format_duration(top_ms * 1e6)])
        time_axis(list(axes), run)
        return svg(figure, f"iterations-{'narrow' if narrow else 'wide'}", narrow=narrow, top_in=0.24)

    return both_widths(draw)


def rolled(goodput: timeline.Goodput, observed: Observed) -> NDArray[np.float64]:
    """Return the centred rolling mean in Mb/s over the judge's window (machine time); shorter at both ends."""
    window_ns = observed.baseline.window_ns if observed.baseline else timeline.ROLLING_NS
    width = max(1, window_ns // goodput.step_ns)
    edges = np.arange(len(goodput.bytes) + 1, dtype=np.float64)
    machine = np.concatenate(([0.0], np.cumsum(paces(goodput, observed))))
    middle = (machine[:-1] + machine[1:]) / 2
    since, until = (np.interp(middle + half, machine, edges) for half in (-width / 2, width / 2))
    carried = np.concatenate(([0.0], np.cumsum(goodput.bytes)))
    means = (np.interp(until, edges, carried) - np.interp(since, edges, carried)) / (until - since)
    rate: NDArray[np.float64] = means * 8 / 1e6 / (goodput.step_ns / 1e9)
    return rate


def paces(goodput: timeline.Goodput, observed: Observed) -> NDArray[np.float64]:
    """Return the machine's pace in each bin; 1 if it is unknown or not needed."""
    return np.ones(len(goodput.bytes)) if observed.pace is None else observed.pace


def healthy_line(goodput: timeline.Goodput, observed: Observed) -> NDArray[np.float64] | None:
    """Return healthy goodput in Mb/s in each bin, which follows the machine's pace; None without a baseline."""
    if observed.baseline is None:
        return None
    line: NDArray[np.float64] = observed.baseline.healthy * 8 / 1e6 * paces(goodput, observed)
    return line


def _total_axes(axes: Axes, observed: Observed, bands: Sequence[Band], most: int) -> None:
    whole = observed.goodput
    if whole is None:
        return
    step_s = whole.step_ns / 1e9
    raw = whole.bytes_per_s * 8 / 1e6
    means = rolled(whole, observed)
    drawn = extremes(raw, most)
    axes.fill_between(drawn * step_s, raw[drawn], step="post", color=SOFT, linewidth=0)
    drawn = extremes(means, most)
    axes.plot((drawn + 0.5) * step_s, means[drawn], color=GOODPUT, linewidth=1.8)
    top = float(raw.max(initial=0)) * 1.18 or 1.0
    axes.set_ylim(0, top)
    axes.set_ylabel("Mb/s, all ranks")
    axes.yaxis.grid(visible=True, color=LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    healthy = healthy_line(whole, observed)
    if healthy is not None:
        drawn = extremes(healthy, most)
        axes.plot((drawn + 0.5) * step_s, healthy[drawn], color=INK, linewidth=1.0, linestyle=(0, (4, 3)))
    shade(axes, bands)
    for band in bands:
        axes.text(
            (band.start_s + band.end_s) / 2,
            top * 0.985,
            str(band.number),
            ha="center",
            va="top",
            fontweight="bold",
            color=INK,
        )
    bare(axes)


def iteration_cut_ms(ranks: Sequence[RankSeries]) -> float:
    """Return where bars of the iterations chart are cut, so that one stalled iteration does not flatten all others."""
    lengths = [(step.end_ns - step.start_ns) / 1e6 for rank in ranks for step in rank.iterations]
    return float(min(max(lengths), _CUT * np.median(lengths))) if lengths else 0.0


def _stack(axes: Axes, series: RankSeries, run: RunEvidence, top_ms: float, most: int) -> None:
    steps = sorted(series.iterations, key=lambda step: step.start_ns)
    starts = np.array([(step.start_ns - run.workload.t0_ns) / 1e9 for step in steps])
    lengths = np.array([sum(getattr(step, field) for field, _ in _PARTS) / 1e6 for step in steps])
    drawn = longest(starts, lengths, (run.workload.end_ns - run.workload.t0_ns) / 1e9 / most)
    edges = np.append(starts[drawn], (steps[-1].end_ns - run.workload.t0_ns) / 1e9)
    lower = np.zeros(len(drawn))
    for field, colour in _PARTS:
        part = np.array([getattr(steps[index], field) for index in drawn]) / 1e6
        if part.any():
            axes.stairs(lower + part, edges, baseline=lower, fill=True, color=colour, linewidth=0)
            lower += part
    middle = (edges[:-1] + edges[1:]) / 2
    cut = lower > top_ms * 1.001
    axes.plot(middle[cut], np.full(cut.sum(), top_ms * 0.9), "^", color=INK, markersize=4, linewidth=0)
