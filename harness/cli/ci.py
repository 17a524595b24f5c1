"""The command for CI: summary."""

from __future__ import annotations

from pathlib import Path

import click

from harness.cli.context import Session, pass_session
from harness.report import step_summary

__all__ = ["COMMANDS"]


@click.command()
@click.option("--title", default="faultbed", show_default=True, help="The headline.")
@click.option(
    "--junit", "junit", multiple=True, type=click.Path(dir_okay=False, path_type=Path), help="A JUnit file; repeatable."
)
@click.option("--runs", type=click.Path(file_okay=False, path_type=Path), help="A folder of run directories.")
@click.option("--step", "steps", multiple=True, metavar="NAME=OUTCOME", help="How a step of the job ended; repeatable.")
@click.option(
    "--preflight", type=click.Path(dir_okay=False, path_type=Path), help="What `faultbed preflight --out` wrote."
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
    to: Path | None,
) -> None:
    """Write a page of Markdown about JUnit files and runs: failures first, then flakes and quarantine.

    What did not run is said to be no pass, and the page is written also when a job ended before its tests: then it
    names the step (--step) and what preflight found. Ends with 0 whatever it tells: the job has its own exit code.
    """
    verdicts, unfinished = step_summary.read_verdicts(runs) if runs else ([], [])
    page = step_summary.markdown(
        title,
        step_summary.read_junit(junit),
        verdicts,
        unfinished,
        steps=[step_summary.parse_step(text) for text in steps],
        missing=[str(path) for path in junit if not path.exists()],
        preflight=step_summary.read_preflight(preflight) if preflight else [],
    )
    if to is None:
        session.out.print(page, end="", soft_wrap=True)
        return
    to.parent.mkdir(parents=True, exist_ok=True)
    with to.open("a", encoding="utf-8") as file:
        file.write(page)


COMMANDS = (summary,)
