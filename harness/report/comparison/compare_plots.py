"""The chart of a comparison: goodput of both runs on one axis, aligned at the first firing of a fault."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from faultbed.harness.report.comparison.compared_runs import Side, origin_ns
from faultbed.harness.report.plots import fault_bands
from faultbed.harness.report.plots.charts import GOODPUT, INK, LINE, OTHER, STYLE, Band, Chart, bare, both_widths, svg
from faultbed.harness.report.plots.goodput_plot import healthy_line, rolled
from faultbed.harness.report.plots.thinning import extremes, spans

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["aligned", "goodput_chart"]

_LANE_HEIGHT_IN = 0.22
_COLOURS = (GOODPUT, OTHER)


def aligned(side_a: Side, side_b: Side) -> bool:
    """Return whether a fault fired in both runs, so that the first firings are aligned; otherwise the starts are."""
    return origin_ns(side_a) is not None and origin_ns(side_b) is not None


@mpl.rc_context(STYLE)
def goodput_chart(side_a: Side, side_b: Side) -> Chart | None:
    """Draw the rolling goodput of all ranks of A and B, with a row for each run's faults.

    Return None if a run has no samples of goodput.
    """
    if any(side.observed.goodput is None or not len(side.observed.goodput.bytes) for side in (side_a, side_b)):
        return None
    origins = [_origin_s(side, at_fault=aligned(side_a, side_b)) for side in (side_a, side_b)]
    bands = [_bands(side, origin) for side, origin in zip((side_a, side_b), origins, strict=True)]
    ends = [
        ((side.run.workload.t0_ns / 1e9) - origin, (side.run.workload.end_ns / 1e9) - origin)
        for side, origin in zip((side_a, side_b), origins, strict=True)
    ]

    def draw(width: float, *, narrow: bool) -> str:
        height = 2.2 if narrow else 2.8
        lanes = [(letter, lane_bands) for letter, lane_bands in zip("AB", bands, strict=True) if lane_bands]
        figure = Figure(figsize=(width, height + _LANE_HEIGHT_IN * len(lanes) + 0.5))
        heights = [height, *[_LANE_HEIGHT_IN] * len(lanes)]
        rows = figure.subplots(
            len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights, "hspace": 0.12}
        )[:, 0]
        _lines(rows[0], (side_a, side_b), origins, narrow=narrow)
        for axes, (letter, lane_bands) in zip(rows[1:], lanes, strict=True):
            _lane(axes, letter, lane_bands)
        if aligned(side_a, side_b):
            for axes in rows:
                axes.axvline(0, color=INK, linewidth=0.8, zorder=1)
        rows[-1].set_xlim(min(start for start, _ in ends), max(end for _, end in ends))
        for axes in rows[:-1]:
            axes.tick_params(axis="x", labelbottom=False, length=0)
        since = "the first fault fired" if aligned(side_a, side_b) else "the workload's start"
        rows[-1].set_xlabel(f"seconds since {since}, in each run")
        return svg(figure, f"compare-{'narrow' if narrow else 'wide'}", narrow=narrow, top_in=0.1)

    return both_widths(draw)


def _origin_s(side: Side, *, at_fault: bool) -> float:
    fired = origin_ns(side) if at_fault else None
    return (side.run.workload.t0_ns if fired is None else fired) / 1e9


def _bands(side: Side, origin_s: float) -> list[Band]:
    """Return the windows of a run's faults in seconds since its origin."""
    shift = side.run.workload.t0_ns / 1e9 - origin_s
    bands = [fault_bands.band(side.run, fault, index) for index, fault in enumerate(side.run.injected.faults)]
    return [
        Band(
            start_s=fault_band.start_s + shift,
            end_s=fault_band.end_s + shift,
            number=fault_band.number,
            colour=fault_band.colour,
        )
        for fault_band in bands
        if fault_band is not None
    ]


def _lines(axes: Axes, sides: Sequence[Side], origins: Sequence[float], *, narrow: bool) -> None:
    top, stroke = 0.0, 0.9 if narrow else 1.8
    for side, origin, colour in zip(sides, origins, _COLOURS, strict=True):
        whole = side.observed.goodput
        if whole is None:
            continue
        rates = rolled(whole, side.observed)
        times = (whole.t0_ns + (np.arange(len(rates)) + 0.5) * whole.step_ns) / 1e9 - origin
        # Colour and stroke both differ, so that either one is sufficient.
        drawn = extremes(rates, spans(narrow=narrow))
        axes.plot(
            times[drawn],
            rates[drawn],
            color=colour,
            linewidth=stroke,
            linestyle="-" if side.letter == "A" else (0, (5, 1.4)),
        )
        healthy = healthy_line(whole, side.observed)
        if healthy is not None:
            drawn = extremes(healthy, spans(narrow=narrow))
            axes.plot(times[drawn], healthy[drawn], color=colour, linewidth=0.9, linestyle=(0, (1, 2)))
        top = max(top, float(rates.max(initial=0)))
    axes.set_ylim(0, top * 1.12 or 1.0)
    axes.set_ylabel("Mb/s, all ranks")
    axes.yaxis.grid(visible=True, color=LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    bare(axes)
    axes.spines["bottom"].set_visible(False)


def _lane(axes: Axes, letter: str, bands: Sequence[Band]) -> None:
    """Draw a run's faults as numbered bars."""
    for band in bands:
        axes.axvspan(band.start_s, band.end_s, ymin=0.12, ymax=0.88, color=band.colour, alpha=0.45, linewidth=0)
        axes.text(
            (band.start_s + band.end_s) / 2,
            0.5,
            str(band.number),
            ha="center",
            va="center",
            fontsize=8.5,
            fontweight="bold",
            color=INK,
        )
    axes.set_ylim(0, 1)
    axes.set_yticks([0.5], [letter])
    bare(axes)
    if letter == "A":
        axes.spines["bottom"].set_visible(False)
