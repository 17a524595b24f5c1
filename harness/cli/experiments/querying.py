"""The command that answers an SQL statement from many runs: query."""

from __future__ import annotations

import contextlib
import csv
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import click
from rich.text import Text

from faultbed.harness.cli.context import Session, json_option, pass_session
from faultbed.harness.report.query.read_only_sql import Answer, Cell, ask, columns_read
from faultbed.harness.report.query.run_tables import ALL_COLUMNS, TABLES, load
from faultbed.testbed.errors import UsageError

__all__ = ["COMMANDS"]

_SHOWN = 10
"""Most reasons for runs that are left out that are shown to a person; --json has all of them."""


@click.command(
    epilog="Tables: " + "; ".join(f"{table} ({', '.join(columns)})" for table, columns in ALL_COLUMNS.items()) + "."
)
@click.argument("sql", metavar="SQL")
@click.argument("folders", nargs=-1, metavar="[DIR]...", type=click.Path(path_type=Path))
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV (RFC 4180), with the columns' names in the first line.")
@json_option
@pass_session
def query(session: Session, *, sql: str, folders: tuple[Path, ...], as_csv: bool, as_json: bool) -> None:
    """Answer one SQL SELECT from the verdicts of all runs below each DIR (default: runs).

    SQL is SQLite's, with the aggregates median(x) and quantile(x, q). The tables are read anew into memory; nothing is
    written, and a statement that would write is refused. Runs that are damaged, unfinished, mixed from two runs or
    copies of another one are left out, counted and named, and so are sweeps of such runs. Times are in UTC.
    """
    if as_csv and as_json:
        raise click.UsageError("--csv and --json are two formats; give one of them")
    reads = columns_read(TABLES, sql)
    tables = load(folders or (Path("runs"),), reads)
    with contextlib.closing(tables.connection) as connection:
        answer = ask(connection, sql, reads)
    if as_json:
        _show_json(session, answer, tables.runs, tables.left_out)
        return
    if as_csv:
        _show_csv(answer)
    else:
        session.table(answer.columns, [tuple(_text(cell) for cell in row) for row in answer.rows])
    _show_left_out(session, tables.runs, tables.left_out)


def _show_json(session: Session, answer: Answer, runs: int, left_out: Mapping[str, str]) -> None:
    repeated = [name for name, count in Counter(answer.columns).items() if count > 1]
    if repeated:
        raise UsageError(
            f'query: two columns are named "{repeated[0]}"; name them with AS, because JSON has one of a name'
        )
    rows = [dict(zip(answer.columns, map(_plain, row), strict=True)) for row in answer.rows]
    session.json({"rows": rows, "runs": runs, "left_out": left_out})


def _show_csv(answer: Answer) -> None:
    with contextlib.suppress(BrokenPipeError):  # its reader has ended; the command keeps its own exit code
        writer = csv.writer(sys.stdout)
        writer.writerow(answer.columns)
        writer.writerows(map(_plain, row) for row in answer.rows)


def _show_left_out(session: Session, runs: int, left_out: Mapping[str, str]) -> None:
    """Say on stderr which runs the answer does not count, so that stdout is the answer alone."""
    if not left_out:
        return
    count = Text.assemble((f"{len(left_out)} of {runs + len(left_out)} directories are left out:", "yellow"))
    session.err.print(count, soft_wrap=True)
    for path, why in list(left_out.items())[:_SHOWN]:
        session.err.print(why if why.startswith(path) else f"{path}: {why}", soft_wrap=True)
    if len(left_out) > _SHOWN:
        session.err.print(f"and {len(left_out) - _SHOWN} more; --json lists all of them")


def _plain(cell: Cell) -> int | float | str | None:
    return cell.hex() if isinstance(cell, bytes) else cell


def _text(cell: Cell) -> str:
    """Return a cell for a person. NULL is a dash, as an unknown value is everywhere else."""
    if cell is None:
        return "—"
    return f"{cell:.6g}" if isinstance(cell, float) else str(_plain(cell))


COMMANDS = (query,)
