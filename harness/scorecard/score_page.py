"""`scorecard.json` and `scorecard.html`: the table of a scorecard for programs and for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from faultbed.harness.json_text import json_text
from faultbed.harness.record.run_files import whole
from faultbed.harness.record.rundir import RunDir
from faultbed.harness.report import page
from faultbed.harness.run.sweeps.sweep_points import Point
from faultbed.harness.scorecard.program_file import Program
from faultbed.harness.scorecard.score_table import ScoreFile, deciding, row_of

__all__ = ["COLUMNS", "scored", "sentence", "write"]

COLUMNS = {"recovery.total": "recovery [s]", "after_clear.total": "after it [s]", "goodput.after_ratio": "rate after"}
"""Metrics of the table, and the heads of their columns."""


def scored(
    lab: str,
    programs: Sequence[Program],
    points: Sequence[Point],
    runs: Mapping[int, Sequence[RunDir]],
    folder: Path,
) -> ScoreFile:
    """Return the scorecard of the runs that are finished, by the number of their point."""
    rows = tuple(row_of(point, runs.get(point.number, ()), folder) for point in points)
    return ScoreFile(
        faultbed=metadata.version("faultbed"),
        lab=lab,
        rows=rows,
        about={program.name: program.about for program in programs},
        decides=deciding(rows),
    )


def sentence(score: ScoreFile) -> str:
    """Return how many runs survived, failed and are unknown."""
    survived, failed, unknown = (
        sum(row.count(outcome) for row in score.rows) for outcome in ("survived", "failed", "unknown")
    )
    return f"{survived} runs survived, {failed} failed, {unknown} unknown, of {survived + failed + unknown}."


def write(score: ScoreFile, folder: Path) -> Path:
    """Write both files into a folder, and return the page.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with whole(folder / "scorecard.json") as temporary:
        temporary.write_bytes(json_text(score))
    template = page.environment().get_template("scorecard.html.j2")
    with whole(folder / "scorecard.html") as temporary:
        temporary.write_text(template.render(score=score, metrics=COLUMNS, sentence=sentence(score)), encoding="utf-8")
    return folder / "scorecard.html"
