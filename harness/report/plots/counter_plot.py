"""The chart of `harness/report/plots/counter_timeline.py`: a thin row per counter and per node with events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.report.plots.charts import (
    FAIL,
    GOODPUT,
    INK,
    MUTED,
    SOFT,
    STYLE,
    Band,
    Chart,
    both_widths,
    named_row,
    svg,
    time_axis,
)
from faultbed.harness.report.plots.counter_timeline import MOST, EventKind, EventMark, Series, Step, thinned

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["MOST_NODES", "counters_chart"]

MOST_NODES = 8
"""Maximum number of rows of events; the list below the chart has all nodes."""
_FEW = 4
_MOST_STEPS, _MOST_TICKS, _MOST_MARKS = 300, 60, 300
"""Maximum numbers of steps, ticks and marks in a row. A screen cannot show more, and they would bloat the page."""

_SIGNS: dict[EventKind, tuple[str, str]] = {
    "down": ("v", FAIL),
    "up": ("^", GOODPUT),
    "link": ("D", MUTED),
    "routes": ("|", INK),
    "gone": ("x", FAIL),
    "kernel": (".", MUTED),
}
"""Shape and colour both differ, so that either one is sufficient."""
_LETTER_IN, _BESIDE_IN = 0.058, 0.08
"""Width of a letter of a mark's label, and the distance from a mark to its label."""


@mpl.rc_context(STYLE)
def counters_chart(
    run: RunEvidence, series: Sequence[Series], marks: Sequence[EventMark], bands: Sequence[Band]
) -> Chart | None:
    """Draw the growth of the first `MOST` series, and marks for events. None if there is neither."""
    shown = sorted(series[:MOST], key=lambda drawn: (drawn.words, drawn.place))
    rows_of_marks = _rows(marks)
    if not shown and not rows_of_marks:
        return None

    def draw(width: float, *, narrow: bool) -> str:
        heights = [0.5] * len(shown) + [0.46] * len(rows_of_marks)
        figure = Figure(figsize=(width, sum(heights) + 0.75))
        rows = figure.subplots(
            len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights, "hspace": 0.95}
        )[:, 0]
        seconds = (run.workload.end_ns - run.workload.t0_ns) / 1e9
        for axes, drawn in zip(rows, shown, strict=False):
            steps = thinned(drawn.steps, seconds / _MOST_STEPS)
            peak = max(step.per_s for step in steps)
            _steps(axes, steps)
            named_row(axes, drawn.label if not narrow else f"{drawn.place} {drawn.words}", peak * 1.1, bands)
            axes.set_yticks([peak], [f"{peak:.3g}/s"])
        for axes, (name, events) in zip(rows[len(shown) :], rows_of_marks.items(), strict=True):
            named_row(axes, name, 1.0, bands)
            _marks(axes, events[:_MOST_MARKS], seconds, inches=width - 0.72, narrow=narrow)
        time_axis(list(rows), run)
        return svg(figure, f"counters-{'narrow' if narrow else 'wide'}", narrow=narrow, top_in=0.24)

    return both_widths(draw)


def _rows(marks: Sequence[EventMark]) -> dict[str, list[EventMark]]:
    """Group events by row: each node with changes of links or routes, then all other nodes' kernel logs together."""
    names = sorted({mark.node for mark in marks if mark.kind != "kernel"})
    rows = {name: [mark for mark in marks if mark.node == name] for name in names[:MOST_NODES]}
    logs = [mark for mark in marks if mark.kind == "kernel" and mark.node not in rows]
    machines = sorted({mark.node for mark in logs})
    if logs:
        rows[f"kernel logs of {', '.join(machines) if len(machines) <= _FEW else f'{len(machines)} machines'}"] = logs
    return rows


def _steps(axes: Axes, steps: Sequence[Step]) -> None:
    edges = np.array([step.start_s for step in steps] + [steps[-1].end_s])
    heights = [step.per_s for step in steps]
    axes.stairs(heights, edges, fill=True, color=SOFT, linewidth=0)
    axes.stairs(heights, edges, color=GOODPUT, linewidth=1.0)
    if len(edges) <= _MOST_TICKS:
        # When the counter was read: nothing is known between two ticks.
        axes.plot(edges, np.zeros(len(edges)), "|", color=MUTED, markersize=5, markeredgewidth=0.8, clip_on=False)


def _marks(axes: Axes, marks: Sequence[EventMark], seconds: float, *, inches: float, narrow: bool) -> None:
    """Draw the marks of one node, labelled beside them if there is room, else above, else only in the list."""
    per_inch = seconds / inches
    beside_free_s = above_free_s = 0.0
    for index, mark in enumerate(marks):
        shape, colour = _SIGNS[mark.kind]
        size = 7 if shape == "|" else 4.5
        axes.plot([mark.start_s], [0.3], shape, color=colour, markersize=size, linewidth=0, clip_on=False)
        begin_s = mark.start_s + _BESIDE_IN * per_inch
        end_s = begin_s + len(mark.words) * _LETTER_IN * per_inch
        if mark.kind == "kernel" or narrow or end_s > seconds:
            continue
        next_s = next((later.start_s for later in marks[index + 1 :] if later.start_s > begin_s), seconds)
        if mark.start_s >= beside_free_s and end_s <= next_s:
            axes.text(begin_s, 0.3, mark.words, fontsize=7.5, color=INK, va="center", ha="left")
            beside_free_s = end_s
        elif mark.start_s >= above_free_s:
            axes.text(mark.start_s, 0.86, mark.words, fontsize=7.5, color=INK, va="center", ha="left")
            above_free_s = end_s
