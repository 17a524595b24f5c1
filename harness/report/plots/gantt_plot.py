"""The chart of `faultbed.harness.report.plots.step_gantt`: a row of bars for each rank, with the stall framed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path

from faultbed.harness.report.plots.charts import (
    COMM,
    COMPUTE,
    FAIL,
    INK,
    MUTED,
    STORAGE,
    STYLE,
    WAIT,
    Band,
    Chart,
    bare,
    both_widths,
    shade,
    svg,
)
from faultbed.harness.report.plots.step_gantt import Bar, BarKind, Gantt, StallMark

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["gantt_chart"]

_COLOURS: dict[BarKind, str] = {
    "ingest": STORAGE,
    "compute": COMPUTE,
    "wait": WAIT,
    "comm": COMM,
    "checkpoint": STORAGE,
    "whole": MUTED,
    "open": FAIL,
}
_THICK = 0.5
_FAINT = 0.45
_LETTER_IN = 0.062


@mpl.rc_context(STYLE)
def gantt_chart(chart: Gantt, bands: Sequence[Band]) -> Chart:
    """Draw both widths of a chart; `bands` are those of all faults."""
    inside = [band for band in bands if band.end_s > chart.start_s and band.start_s < chart.end_s]

    def draw(width: float, *, narrow: bool) -> str:
        figure = Figure(figsize=(width, 0.46 * len(chart.rows) + 0.75))
        axes = figure.subplots()
        axes.set_xlim(chart.start_s, chart.end_s)
        axes.set_ylim(len(chart.rows) - 0.6, -0.75)
        shade(axes, inside)
        bare(axes)
        axes.set_yticks([])
        for index, row in enumerate(chart.rows):
            for kind, colour in _COLOURS.items():
                _bars(axes, [bar for bar in row.bars if bar.kind == kind], index, colour, is_open=kind == "open")
            axes.text(
                chart.start_s, index - _THICK / 2 - 0.06, row.name, fontsize=8.5, color=INK, ha="left", va="bottom"
            )
            if chart.stall.rank == row.rank:
                _frame(axes, chart, chart.stall, index, inches=width - 0.72)
        axes.set_xlabel("seconds since the workload's start")
        return svg(figure, f"gantt-{chart.fault}-{'narrow' if narrow else 'wide'}", narrow=narrow, top_in=0.04)

    return both_widths(draw)


def _bars(axes: Axes, bars: Sequence[Bar], row: int, colour: str, *, is_open: bool) -> None:
    """Draw all bars of one kind in one row as a single path, because a chart has hundreds."""
    if not bars:
        return
    low, high = row - _THICK / 2, row + _THICK / 2
    points, codes = [], []
    for bar in bars:
        points += [(bar.start_s, low), (bar.end_s, low), (bar.end_s, high), (bar.start_s, high), (bar.start_s, low)]
        codes += [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    path = Path(points, codes)  # not `add_patch`, which would compute limits from every segment
    if is_open:
        axes.add_artist(PathPatch(path, facecolor="none", edgecolor=colour, linewidth=1.2, linestyle=(0, (4, 3))))
    else:
        alpha = _FAINT if bars[0].kind == "whole" else 1.0
        axes.add_artist(PathPatch(path, facecolor=colour, edgecolor="none", linewidth=0, alpha=alpha))
    # Mark where an iteration begins: otherwise two bars look like one.
    axes.vlines([bar.start_s for bar in bars], low, high, color=MUTED, linewidth=0.3)


def _frame(axes: Axes, chart: Gantt, stall: StallMark, row: int, *, inches: float) -> None:
    low, width_s = row - _THICK / 2, stall.end_s - stall.start_s
    frame = Rectangle((stall.start_s, low), width_s, _THICK, facecolor="none", edgecolor=FAIL, linewidth=2.0, zorder=4)
    axes.add_patch(frame)
    per_inch = (chart.end_s - chart.start_s) / inches
    words = f"▼ {stall.short}"
    # Next to the row's name, and inside the chart.
    begin_s = min(max(stall.start_s, chart.start_s + 0.95 * per_inch), chart.end_s - len(words) * _LETTER_IN * per_inch)
    axes.text(begin_s, low - 0.06, words, fontsize=8, color=FAIL, ha="left", va="bottom", fontweight="bold")
