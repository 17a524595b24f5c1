"""The command for CI: summary."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import click

from faultbed.harness.cli.context import Session, pass_session
from faultbed.harness.report import history, step_summary
from faultbed.testbed.errors import UsageError

__all__ = ["COMMANDS"]

_From = TypeVar("_From")
_Row = TypeVar("_Row")


@click.command()
@click.option("--title", default="faultbed", show_default=True, help="The headline.")
@click.option(
    "--junit", "junit", multiple=True, type=click.Path(dir_okay=False, path_type=Path), help="A JUnit file; repeatable."
)
@click.option("--runs", type=click.Path(file_okay=False, path_type=Path), help="A folder of run directories.")
@click.option("--step", "steps", multiple=True, metavar="NAME=OUTCOME", help="How a step of the job ended; repeatable.")
@click.option(
    "--preflight",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Output file of `faultbed preflight --out`.",
)
@click.option(
    "--history",
    "kept",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder with earlier runs and these, to list regressions.",
)
@click.option(
    "--to", type=click.Path(dir_okay=False, path_type=Path), help="Append to this file ($GITHUB_STEP_SUMMARY)."
)
@pass_session
def summary(
    session: Session,
    *,
    title: str,
    junit: tuple[Path, ...],
    runs: Path | None,
    steps: tuple[str, ...],
    preflight: Path | None,
    kept: Path | None,
    to: Path | None,
) -> None:
    """Write a page of Markdown about JUnit files and runs: failures first, then flakes and quarantine.

    Tests that did not run are never shown as passed. If a job ended before its tests, the page names the step (--step)
    and the findings of preflight. Truncated files are named. The exit code is always 0, because the job has its own.
    """
    verdicts, unfinished, broken = step_summary.read_verdicts(runs) if runs else ([], [], [])
    joint, unreadable = step_summary.read_joint(runs) if runs else ([], [])
    broken += unreadable
    cases = [case for path in junit for case in _or_none(step_summary.read_junit, (path,), broken)]
    preflight_result = _or_none(step_summary.read_preflight, preflight, broken) if preflight else []
    results = step_summary.JobResults(
        cases=cases,
        verdicts=verdicts,
        unfinished=unfinished,
        steps=[step_summary.parse_step(text) for text in steps],
        missing=[str(path) for path in junit if not path.exists()],
        preflight=preflight_result,
        broken=broken,
        joint=joint,
        worse=_or_none(partial(_worse, runs), kept, broken) if kept and kept.is_dir() else [],
    )
    page = step_summary.markdown(title, results)
    if to is None:
        session.out.print(page, end="", soft_wrap=True)
        return
    to.parent.mkdir(parents=True, exist_ok=True)
    with to.open("a", encoding="utf-8") as file:
        file.write(page)


def _or_none(read: Callable[[_From], list[_Row]], source: _From, broken: list[str]) -> list[_Row]:
    """Return what `read` returns. A file that cannot be read is named on the page, which is written nevertheless."""
    try:
        return read(source)
    except UsageError as error:
        broken.append(str(error))
        return []


def _worse(runs: Path | None, kept: Path) -> list[str]:
    """Return the regressions of these runs, or without `runs` those of all kept runs."""
    names = {path.name for path in runs.glob("*")} if runs else None
    regressions = history.regressions(history.read(history.update(kept)).past)
    return [
        f"{regression.run}: {regression.metric} {regression.words}"
        for regression in regressions
        if names is None or regression.run in names
    ]


COMMANDS = (summary,)
