"""Options that write traffic to files, as a table or as a trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from faultbed.harness.cli.context import Session
from faultbed.harness.cli.options import rows_file
from faultbed.harness.cli.options.rows_file import Rows
from faultbed.testbed.errors import UsageError
from faultbed.traffic import traces
from faultbed.traffic.traces import Trace

__all__ = ["check_record", "out_option", "record_options", "write_record", "write_rows"]


def out_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option `--out` for a table of results. Its path is checked before anything runs."""

    def checked(_context: click.Context, _option: click.Parameter, path: Path | None) -> Path | None:
        if path is not None:
            rows_file.check(path)
        return path

    return click.option(
        "--out",
        type=click.Path(dir_okay=False, path_type=Path),
        callback=checked,
        metavar="FILE",
        help="Write iterations (of flows: bins of 100 ms) as a table: FILE.csv or FILE.parquet.",
    )(command)


def write_rows(session: Session, rows: Rows, path: Path | None) -> None:
    """Write the table to the file of `--out`, if there is one, and report that."""
    if path is not None:
        rows_file.write(rows, path)
        session.err.print(f"{len(rows)} rows in {path}", soft_wrap=True)


def record_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that record a run as a trace."""
    folder = click.option(
        "--record",
        type=click.Path(path_type=Path),
        metavar="FOLDER",
        help="Write the run as a trace, one file per rank.",
    )
    form = click.option(
        "--record-format",
        default="param",
        show_default=True,
        type=click.Choice(traces.FORMATS),
        help="Format of that trace: PARAM comms trace, or Chakra execution trace.",
    )
    return folder(form(command))


def check_record(folder: Path | None) -> None:
    """Refuse a folder that cannot be written to, before anything runs.

    Raises:
        UsageError: it is there and not empty.
    """
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--record {folder}: is there and not an empty folder; name another one")


def write_record(session: Session, trace: Trace, folder: Path, form: str) -> None:
    """Write a trace that was recorded, and say so."""
    paths = traces.save(trace, folder, form=form)
    session.err.print(f"recorded {len(trace.operations)} operations in {len(paths)} files in {folder}", soft_wrap=True)
