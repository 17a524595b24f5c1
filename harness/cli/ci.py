"""The command for CI: summary."""

from __future__ import annotations

from pathlib import Path

import click

from harness import step_summary
from harness.cli.context import Session, pass_session

__all__ = ["COMMANDS"]


@click.command()
@click.option("--title", default="faultbed", show_default=True, help="The headline.")
@click.option(
    "--junit", "junit", multiple=True, type=click.Path(dir_okay=False, path_type=Path), help="A JUnit file; repeatable."
)
@click.option("--runs", type=click.Path(file_okay=False, path_type=Path), help="A folder of run directories.")
@click.option(
    "--to", type=click.Path(dir_okay=False, path_type=Path), help="Append to this file ($GITHUB_STEP_SUMMARY)."
)
@pass_session
def summary(session: Session, *, title: str, junit: tuple[Path, ...], runs: Path | None, to: Path | None) -> None:
    """Write a page of Markdown about JUnit files and runs: failures first, then flakes and quarantine.

    What did not run is said to be no pass. Ends with 0 whatever it tells: the tests have their own exit code.
    """
    verdicts, unfinished = step_summary.read_verdicts(runs) if runs else ([], [])
    page = step_summary.markdown(title, step_summary.read_junit(junit), verdicts, unfinished)
    if to is None:
        session.out.print(page, end="", markup=False, soft_wrap=True)
        return
    with to.open("a", encoding="utf-8") as file:
        file.write(page)


COMMANDS = (summary,)
