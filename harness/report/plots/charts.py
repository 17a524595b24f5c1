"""Common parts of all charts: page colours, fault bands, time axis, and the conversion to inline SVG.

Each chart is drawn twice, wide for a screen and narrow for a phone, because scaled text becomes huge or unreadable.
matplotlib writes fixed colours; those in `_INKS` are placeholders that are replaced by the page's CSS variables, so
that charts follow the page into dark mode. Text stays text, in the page's font. The output contains nothing random and
no date: the same run gives the same bytes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_svg import FigureCanvasSVG

from faultbed.harness.record.evidence.run_evidence import RunEvidence

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COMM",
    "COMPUTE",
    "FAIL",
    "GOODPUT",
    "INK",
    "LINE",
    "MUTED",
    "OTHER",
    "SOFT",
    "STORAGE",
    "STYLE",
    "WAIT",
    "Band",
    "Chart",
    "bare",
    "both_widths",
    "named_row",
    "shade",
    "svg",
    "time_axis",
]

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
    "#0a0a0a": "var(--fail)",
    "#0b0b0b": "var(--other)",
}
INK, MUTED, LINE, GOODPUT, SOFT, COMPUTE, COMM, WAIT, STORAGE, FAIL, OTHER = _INKS

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "faultbed",
    "text.parse_math": False,
    "font.size": 9.5,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
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


def both_widths(draw: Callable[..., str]) -> Chart:
    """Build both widths of a chart with a function of the width in inches and of `narrow`."""
    return Chart(wide=draw(9.6, narrow=False), narrow=draw(3.7, narrow=True))


def named_row(axes: Axes, name: str, top: float, bands: Sequence[Band]) -> None:
    """Format a thin row of a chart: its name above it, the fault bands behind it."""
    axes.set_ylim(0, top)
    axes.set_yticks([])
    axes.set_title(name, loc="left", fontsize=8.5, color=INK, pad=2)
    shade(axes, bands)
    bare(axes)


def shade(axes: Axes, bands: Sequence[Band]) -> None:
    """Shade the windows of the faults."""
    for band in bands:
        axes.axvspan(band.start_s, band.end_s, color=band.colour, alpha=0.22, linewidth=0, zorder=0)
        axes.axvline(band.start_s, color=band.colour, linewidth=1.2, zorder=1)


def bare(axes: Axes) -> None:
    """Remove the frame except for the time axis."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.patch.set_visible(False)


def time_axis(stack: Sequence[Axes], run: RunEvidence) -> None:
    """Use one time axis for stacked rows: the whole run, labelled below the last row."""
    stack[-1].set_xlim(0, (run.workload.end_ns - run.workload.t0_ns) / 1e9)
    for axes in stack[:-1]:
        axes.tick_params(axis="x", labelbottom=False, length=0)
    stack[-1].set_xlabel("seconds since the workload's start")


def svg(figure: Figure, prefix: str, *, narrow: bool, top_in: float) -> str:
    """Return the figure as an SVG element: page colours and font, ids unique in the page, no fixed size."""
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
    # Coordinates need no more digits; the text between elements keeps its own.
    text = re.sub(r"<[^>]+>", lambda element: re.sub(r"(\d\.\d\d)\d+", r"\1", element[0]), text)
    return _exchange(text, _INKS)


def _exchange(text: str, colours: Mapping[str, str]) -> str:
    for stand_in, variable in colours.items():
        text = text.replace(stand_in, variable)
    return text
