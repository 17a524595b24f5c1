"""Charts of a run as inline SVG (matplotlib): goodput over time, and iterations by rank.

Each chart is drawn twice, wide for a screen and narrow for a phone, because text that is scaled with its
picture is either huge or unreadable. matplotlib writes fixed colours; those named in `_INKS` are stand-ins
which are exchanged for the page's CSS variables afterwards, so that the charts follow the page into dark
mode. Text stays text, in the page's font. Nothing random and no date goes in: the same run gives the same
bytes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from harness import timeline
from harness.measurements import Measurements, RankSeries
from harness.observe import Observed
from harness.quantities import format_duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

__all__ = ["Band", "Chart", "goodput_chart", "iteration_cut_ms", "iterations_chart"]

_INKS = {
    "#010101": "var(--ink)",
    "#020202": "var(--muted)",
    "#030303": "var(--line)",
    "#040404": "var(--goodput)",
    "#050505": "var(--goodput-soft)",
    "#060606": "var(--compute)",
    "#070707": "var(--comm)",
    "#080808": "var(--wait)",
    "#090909": "var(--storage)",
}
_INK, _MUTED, _LINE, _GOODPUT, _SOFT, _COMPUTE, _COMM, _WAIT, _STORAGE = _INKS
_PARTS = (
    ("ingest_ns", _STORAGE),
    ("compute_ns", _COMPUTE),
    ("wait_ns", _WAIT),
    ("comm_ns", _COMM),
    ("checkpoint_ns", _STORAGE),
)
"""Of an iteration, in order."""
_CUT = 2.6
_MAX_ROWS = 16
"""Ranks drawn in one chart; beyond, rows are too thin to read, and the data is in samples.parquet."""

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "faultbed",
    "text.parse_math": False,
    "font.size": 9.5,
    "axes.edgecolor": _LINE,
    "axes.labelcolor": _MUTED,
    "axes.linewidth": 0.8,
    "text.color": _INK,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "path.simplify": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A fault's window to shade: seconds since the workload's start, number in the report, `#rrggbb`."""

    start_s: float
    end_s: float
    number: int
    colour: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart in its two widths, as SVG elements without a prologue."""

    wide: str
    narrow: str


@mpl.rc_context(_STYLE)
def goodput_chart(run: Measurements, observed: Observed, bands: Sequence[Band]) -> Chart | None:
    """Total goodput (bins and rolling mean, healthy level), and a row for each rank. None without samples."""
    if observed.goodput is None or not len(observed.goodput.bytes):
        return None
    rows = list(observed.per_rank.items())[:_MAX_ROWS]
    names = {rank.rank: f"{rank.host}:{rank.rnic}" for rank in run.ranks}

    def draw(width: float, *, narrow: bool) -> str:
        total_height, row_height = (2.1, 0.36) if narrow else (2.5, 0.42)
        figure = Figure(figsize=(width, total_height + row_height * len(rows) + 0.5))
        grid = figure.add_gridspec(
            1 + len(rows), 1, height_ratios=[total_height, *[row_height] * len(rows)], hspace=0.28
        )
        top = figure.add_subplot(grid[0])
        _total_axes(top, observed, bands)
        scale = max((float(_rolled(one, observed).max(initial=0)) for _, one in rows), default=0) or 1.0
        below = [figure.add_subplot(grid[1 + index], sharex=top) for index in range(len(rows))]
        for axes, (rank, one) in zip(below, rows, strict=True):
            times = (np.arange(len(one.bytes)) + 0.5) * one.step_ns / 1e9
            axes.fill_between(times, _rolled(one, observed), color=_SOFT, linewidth=0)
            axes.plot(times, _rolled(one, observed), color=_GOODPUT, linewidth=0.9)
            _row(axes, names.get(rank, f"rank {rank}"), scale * 1.1, bands)
        _time_axis([top, *below], run)
        return _svg(figure, f"goodput-{'narrow' if narrow else 'wide'}", narrow=narrow, top_in=0.06)

    return Chart(wide=draw(9.6, narrow=False), narrow=draw(3.7, narrow=True))


@mpl.rc_context(_STYLE)
def iterations_chart(run: Measurements, bands: Sequence[Band]) -> Chart | None:
    """Each iteration's length by rank: computing, waiting, communicating. None without iterations."""
    rows = [series for series in run.series if series.iterations][:_MAX_ROWS]
    if not rows:
        return None
    names = {rank.rank: f"{rank.host}:{rank.rnic}" for rank in run.ranks}
    top_ms = iteration_cut_ms(run.series)

    def draw(width: float, *, narrow: bool) -> str:
        figure = Figure(figsize=(width, (0.66 if narrow else 0.78) * len(rows) + 0.6))
        axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False, gridspec_kw={"hspace": 0.3})[:, 0]
        for one, series in zip(axes, rows, strict=True):
            _stack(one, series, run.t0_ns, top_ms)
            _row(one, names.get(series.rank, f"rank {series.rank}"), top_ms * 1.04, bands)
            one.set_yticks([top_ms], [format_duration(top_ms * 1e6)])
        _time_axis(list(axes), run)
        return _svg(figure, f"iterations-{'narrow' if narrow else 'wide'}", narrow=narrow, top_in=0.24)

    return Chart(wide=draw(9.6, narrow=False), narrow=draw(3.7, narrow=True))


def _rolled(one: timeline.Goodput, observed: Observed) -> NDArray[np.float64]:
    """Centred rolling mean in Mb/s, over the window that the judge used; shorter at both ends."""
    window_ns = observed.baseline.window_ns if observed.baseline else timeline.ROLLING_NS
    width = max(1, window_ns // one.step_ns)
    counts = np.convolve(np.ones(len(one.bytes)), np.ones(width), mode="same")[: len(one.bytes)]
    means = np.convolve(one.bytes, np.ones(width), mode="same")[: len(one.bytes)] / counts
    rate: NDArray[np.float64] = means * 8 / 1e6 / (one.step_ns / 1e9)
    return rate


def _total_axes(axes: Axes, observed: Observed, bands: Sequence[Band]) -> None:
    whole = observed.goodput
    if whole is None:
        return
    times = np.arange(len(whole.bytes)) * whole.step_ns / 1e9
    raw = whole.bytes_per_s * 8 / 1e6
    rolled = _rolled(whole, observed)
    axes.fill_between(times, raw, step="post", color=_SOFT, linewidth=0)
    axes.plot(times + whole.step_ns / 2e9, rolled, color=_GOODPUT, linewidth=1.8)
    top = float(raw.max(initial=0)) * 1.18 or 1.0
    axes.set_ylim(0, top)
    axes.set_ylabel("Mb/s, all ranks")
    axes.yaxis.grid(visible=True, color=_LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    if observed.baseline is not None:
        healthy = observed.baseline.healthy * 8 / 1e6
        axes.axhline(healthy, color=_INK, linewidth=1.0, linestyle=(0, (4, 3)))
    _shade(axes, bands)
    for band in bands:
        axes.text(
            (band.start_s + band.end_s) / 2,
            top * 0.985,
            str(band.number),
            ha="center",
            va="top",
            fontweight="bold",
            color=_INK,
        )
    _bare(axes)


def iteration_cut_ms(ranks: Sequence[RankSeries]) -> float:
    """Where the bars of the iterations chart are cut: one stalled iteration must not flatten all others."""
    lengths = [(step.end_ns - step.start_ns) / 1e6 for one in ranks for step in one.iterations]
    return float(min(max(lengths), _CUT * np.median(lengths))) if lengths else 0.0


def _stack(axes: Axes, series: RankSeries, t0_ns: int, top_ms: float) -> None:
    steps = sorted(series.iterations, key=lambda step: step.start_ns)
    edges = np.array([(step.start_ns - t0_ns) / 1e9 for step in steps] + [(steps[-1].end_ns - t0_ns) / 1e9])
    lower = np.zeros(len(steps))
    for field, colour in _PARTS:
        upper = lower + np.array([getattr(step, field) for step in steps]) / 1e6
        axes.stairs(upper, edges, baseline=lower, fill=True, color=colour, linewidth=0)
        lower = upper
    cut = [index for index, length in enumerate(lower) if length > top_ms * 1.001]
    middle = (edges[:-1] + edges[1:]) / 2
    axes.plot(middle[cut], [top_ms * 0.9] * len(cut), "^", color=_INK, markersize=4, linewidth=0)


def _row(axes: Axes, name: str, top: float, bands: Sequence[Band]) -> None:
    axes.set_ylim(0, top)
    axes.set_yticks([])
    axes.set_title(name, loc="left", fontsize=8.5, color=_INK, pad=2)
    _shade(axes, bands)
    _bare(axes)


def _shade(axes: Axes, bands: Sequence[Band]) -> None:
    for band in bands:
        axes.axvspan(band.start_s, band.end_s, color=band.colour, alpha=0.22, linewidth=0, zorder=0)
        axes.axvline(band.start_s, color=band.colour, linewidth=1.2, zorder=1)


def _bare(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.patch.set_visible(False)


def _time_axis(stack: Sequence[Axes], run: Measurements) -> None:
    stack[-1].set_xlim(0, (run.end_ns - run.t0_ns) / 1e9)
    for axes in stack[:-1]:
        axes.tick_params(axis="x", labelbottom=False, length=0)
    stack[-1].set_xlabel("seconds since the workload's start")


def _svg(figure: Figure, prefix: str, *, narrow: bool, top_in: float) -> str:
    """The figure as an SVG element: page colours and font, ids unique in the page, no fixed size."""
    width, height = figure.get_size_inches()
    left = 0.56 / width if narrow else 0.64 / width
    figure.subplots_adjust(left=left, right=1 - 0.08 / width, top=1 - top_in / height, bottom=0.5 / height)
    figure.patch.set_visible(False)
    FigureCanvasSVG(figure)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg )[^>]*?(viewBox="[^"]*")[^>]*>', r'\1\2 class="chart" aria-hidden="true">', text, count=1)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r"url\(#", f"url(#{prefix}-", text)
    text = re.sub(r'xlink:href="#', f'href="#{prefix}-', text)
    text = re.sub(r"font-family: [^;\"]*", "font-family: inherit", text)
    text = re.sub(r"(\d\.\d\d)\d+", r"\1", text)
    return _exchange(text, _INKS)


def _exchange(text: str, colours: Mapping[str, str]) -> str:
    for stand_in, variable in colours.items():
        text = text.replace(stand_in, variable)
    return text
