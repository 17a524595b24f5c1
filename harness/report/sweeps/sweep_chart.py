"""The chart of a sweep: a row for each metric, its value over the last parameter, with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure

from faultbed.harness.record.sweep_file import SweepFile, SweptPoint, SweptValue
from faultbed.harness.report.plots.charts import (
    COMM,
    COMPUTE,
    GOODPUT,
    LINE,
    MUTED,
    OTHER,
    STORAGE,
    STYLE,
    Chart,
    bare,
    both_widths,
    svg,
)
from faultbed.harness.report.sweeps.sweep_text import is_shown, state
from faultbed.testbed.units import parse_duration_ns, parse_size_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["COLOURS", "MARKERS", "axis_values", "sweep_chart"]

COLOURS = (GOODPUT, OTHER, COMPUTE, STORAGE, COMM, MUTED)
MARKERS = "os^DvPX"
"""Markers of lines. There is one more than there are colours, so that 42 lines have different pairs of both."""
_LETTER_IN, _HANDLE_IN, _LEGEND_LINE_IN, _TITLE_IN = 0.065, 0.6, 0.2, 0.25
"""Sizes in inches: a letter of the legend, the mark before its text, a line of the legend, the title of a row."""
_WIDE = 20.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""
_MARGIN = 0.06
_ROOM = 1.12
_NARROW_TICKS = 5


def axis_values(texts: Sequence[str]) -> tuple[list[float], bool]:
    """Return the positions of values on an axis, and whether the axis is logarithmic.

    Numbers, sizes and times have the position of their value. Other values are placed one after the other, from 0 on.
    """
    readers: tuple[Callable[[str], float], ...] = (float, parse_size_bytes, parse_duration_ns)
    for read in readers:
        try:
            values = [float(read(text)) for text in texts]
        except ValueError:
            continue
        if all(math.isfinite(value) for value in values):
            return values, min(values) > 0 and max(values) / min(values) >= _WIDE
    return [float(index) for index in range(len(texts))], False


@mpl.rc_context(STYLE)
def sweep_chart(sweep: SweepFile) -> Chart | None:
    """Draw every metric over the last parameter, a line for each combination of the others.

    An interval is a bar, a prediction is dashed; a hollow mark has no interval. A point that shows nothing is a `?` on
    the axis. None: no point has a number.
    """
    rows = [metric for metric in sweep.metrics if any(_number(point, metric) for point in sweep.points)]
    if not rows:
        return None
    last = sweep.over[-1]
    places, is_log = axis_values(last.values)
    at = dict(zip(last.values, places, strict=True))

    def draw(width: float, *, narrow: bool) -> str:
        lines = _lines(sweep)
        height = (1.9 if narrow else 2.4) * len(rows)
        columns = max(1, int((width - 1) / (_LETTER_IN * max(len(words) for words, _ in lines) + _HANDLE_IN)))
        legend_in = 0.0 if len(lines) == 1 else _LEGEND_LINE_IN * (1 + math.ceil(len(lines) / columns))
        figure = Figure(figsize=(width, height + legend_in + _TITLE_IN + 0.5))
        stack = figure.subplots(len(rows), 1, sharex=True, squeeze=False, gridspec_kw={"hspace": 0.3})[:, 0]
        for axes, metric in zip(stack, rows, strict=True):
            _row(axes, metric, lines, at)
            if is_log:
                axes.set_xscale("log")
            label_step = 2 if narrow and len(places) > _NARROW_TICKS else 1
            axes.set_xticks(places[::label_step], last.values[::label_step], fontsize=8 if narrow else None)
            axes.minorticks_off()
        stack[-1].set_xlabel(last.path)
        if len(lines) > 1:
            figure.legend(
                *stack[0].get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(0, 1), ncols=columns,
                title=", ".join(over.path for over in sweep.over[:-1]), alignment="left", frameon=False, fontsize=8,
                title_fontsize=8,
            )  # fmt: skip
        return svg(figure, f"sweep-{'narrow' if narrow else 'wide'}", narrow=narrow, top_in=0.1 + legend_in + _TITLE_IN)

    return both_widths(draw)


def _lines(sweep: SweepFile) -> list[tuple[str, list[SweptPoint]]]:
    """Return the points by the values of all parameters but the last, with these values as text."""
    last = sweep.over[-1].path
    lines: dict[str, list[SweptPoint]] = {}
    for point in sweep.points:
        words = ", ".join(value for path, value in point.parameters.items() if path != last)
        lines.setdefault(words, []).append(point)
    return list(lines.items())


def _row(axes: Axes, metric: str, lines: Sequence[tuple[str, Sequence[SweptPoint]]], at: dict[str, float]) -> None:
    for index, (words, points) in enumerate(lines):
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        positions = [at[list(point.parameters.values())[-1]] for point in points]
        shown = [(x, value) for x, point in zip(positions, points, strict=True) if (value := _number(point, metric))]
        # A height that is NaN breaks the line, so that it does not bridge a point without a value.
        heights = [_height(_number(point, metric)) for point in points]
        axes.plot(positions, heights, color=colour, linewidth=1.2)
        axes.plot([], [], color=colour, linewidth=1.2, marker=marker, markersize=5, label=words)
        for x, value in shown:
            y = _height(value)
            fill = colour if value.low is not None else "none"
            axes.plot([x], [y], marker=marker, color=colour, markerfacecolor=fill, markersize=5, linestyle="none")
            if value.low is not None and value.high is not None:
                axes.plot([x, x], [value.low, value.high], color=colour, linewidth=2.4, alpha=0.5)
            elif value.low is not None:
                axes.plot([x, x], [value.low, y], color=colour, linewidth=2.4, alpha=0.5)
            if value.censored or (value.low is not None and value.high is None):
                axes.annotate("↑", (x, y), (0, 4), textcoords="offset points", color=colour, ha="center", gid="or more")
        modelled = [(x, value.predicted) for x, value in shown if value.predicted is not None]
        if modelled:
            axes.plot(*zip(*modelled, strict=True), color=colour, linewidth=1, linestyle=(0, (4, 2)))
        for x, point in zip(positions, points, strict=True):
            if not is_shown(point):
                axes.text(
                    x, _MARGIN, "?" if point.verdict else "·", color=MUTED, ha="center", fontweight="bold",
                    transform=axes.get_xaxis_transform(), gid=state(point),
                )  # fmt: skip
    unit = next((value.unit for _, points in lines for point in points if (value := _number(point, metric))), "")
    axes.set_title(
        metric if unit in ("ratio", "count", "") else f"{metric}, {unit}", loc="left", fontsize=9, color=MUTED
    )
    axes.yaxis.set_major_formatter(lambda height, _position: f"{height:g}")  # no factor above the axis
    # A very wide interval would flatten all others, so it may extend beyond the top.
    tops = [top for _, points in lines for point in points if (value := _number(point, metric)) for top in _tops(value)]
    axes.set_ylim(0, _ROOM * max(tops) if max(tops) > 0 else 1.0)
    axes.yaxis.grid(visible=True, color=LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    bare(axes)


def _number(point: SweptPoint, metric: str) -> SweptValue | None:
    """Return a metric at a point, if it is a number and the point shows something."""
    value = next((candidate for candidate in point.values if candidate.metric == metric), None)
    if value is None or not is_shown(point) or isinstance(value.value, str | None):
        return None
    return value


def _tops(value: SweptValue) -> Iterator[float]:
    """Return the heights that must be in the picture: value, prediction, and an interval of less than its own size."""
    yield _height(value)
    if value.predicted is not None:
        yield value.predicted
    if value.high is not None and value.high < 2 * _height(value):
        yield value.high


def _height(value: SweptValue | None) -> float:
    return math.nan if value is None or isinstance(value.value, str | None) else float(value.value)
