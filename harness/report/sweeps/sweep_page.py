"""The page of a sweep: one HTML file that works offline, from `sweep.json` alone."""

from __future__ import annotations

from pathlib import Path

from faultbed.harness.experiment.metrics import lookup
from faultbed.harness.record.run_files import whole
from faultbed.harness.record.sweep_file import SweepFile
from faultbed.harness.report import page
from faultbed.harness.report.sweeps import sweep_text
from faultbed.harness.report.sweeps.sweep_chart import sweep_chart

__all__ = ["render", "render_html"]


def render(sweep: SweepFile, folder: Path) -> Path:
    """Write `sweep.html` into the folder of the sweep, and return it."""
    with whole(folder / "sweep.html") as temporary:
        temporary.write_text(render_html(sweep), encoding="utf-8")
    return folder / "sweep.html"


def render_html(sweep: SweepFile) -> str:
    """Return the page as text."""
    metrics = {name: lookup(name, [name.partition(".")[2]]) for name in sweep.metrics}
    return (
        page.environment()
        .get_template("sweep.html.j2")
        .render(
            sweep=sweep,
            chart=page.markup(sweep_chart(sweep)),
            sentence=sweep_text.sentence(sweep),
            cell=sweep_text.cell,
            state=sweep_text.state,
            meanings={name: metric.meaning for name, metric in metrics.items() if metric is not None},
        )
    )
