"""The chart of probes by link (`faultbed.harness.analysis.probe_lines`): a thin row for each affected link."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from faultbed.harness.analysis.probe_lines import ProbedLink
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.report.plots.charts import COMM, FAIL, STYLE, Band, Chart, both_widths, named_row, svg, time_axis

__all__ = ["MOST", "probes_chart", "worst"]

_LEAST_TOP = 0.1
"""Minimum upper end of the axis, as a share of probes."""
MOST = 8
"""Maximum number of rows; the table below the chart has all links."""


def worst(lines: Sequence[ProbedLink]) -> tuple[ProbedLink, ...]:
    """Return the links to draw: those with the highest share of lost or slow probes in a window, by name."""
    affected = [line for line in lines if line.worst]
    return tuple(sorted(sorted(affected, key=lambda line: -line.worst)[:MOST], key=lambda line: line.link))


@mpl.rc_context(STYLE)
def probes_chart(run: RunEvidence, lines: Sequence[ProbedLink], bands: Sequence[Band]) -> Chart | None:
    """Draw the share of lost (filled) and slow (line) probes in each window. None if none was lost or slow."""
    shown = worst(lines)
    if not shown:
        return None
    top = max(_LEAST_TOP, *(line.worst for line in shown))

    def draw(width: float, *, narrow: bool) -> str:
        figure = Figure(figsize=(width, 0.5 * len(shown) + 0.75))
        rows = figure.subplots(len(shown), 1, sharex=True, squeeze=False, gridspec_kw={"hspace": 0.95})[:, 0]
        for axes, line in zip(rows, shown, strict=True):
            for window in line.windows:
                edges = (np.array([window.start_ns, window.end_ns]) - run.workload.t0_ns) / 1e9
                axes.stairs([window.lost / window.sent], edges, fill=True, color=FAIL, linewidth=0)
                if window.answered:
                    axes.plot(
                        edges, [window.slow / window.answered] * 2, color=COMM, linewidth=1.4, solid_capstyle="butt"
                    )
            named_row(axes, line.name, 1.05 * top, bands)
            axes.set_yticks([top], [f"{100 * top:.0f} %"])
        time_axis(list(rows), run)
        return svg(figure, f"probes-{'narrow' if narrow else 'wide'}", narrow=narrow, top_in=0.24)

    return both_widths(draw)
