"""Shared parts of all commands: the lab, the console, and progress."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from faultbed.harness.verdict import Verdict
from faultbed.testbed import shipped, stopping
from faultbed.testbed.inventory import lab_inventory as inventory_module
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.lab import Lab, open_lab
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.testbed.tenancy import dirty
from faultbed.testbed.tenancy.lab_lease import hold

__all__ = ["COLOURS", "Session", "json_option", "pass_session", "styled"]

COLOURS = {Verdict.PASS: "green", Verdict.FAIL: "red", Verdict.INCONCLUSIVE: "yellow", Verdict.ERROR: "magenta"}
"""Colours of the verdicts on a terminal."""
_Rows = Sequence[Sequence[str | Text]]


class Session:
    """One call of the command line.

    `out` and `err` print strings without interpreting rich's markup, because a string may come from a file, a node or a
    user. Coloured text is a `rich.text.Text`: use `styled`, or `Text.assemble` for a part of a line.
    """

    def __init__(self, lab: Path | None, *, timestamps: bool = False) -> None:
        self._lab, self._timestamps = lab, timestamps
        self.out = _console()
        self.err = _console(stderr=True)

    def inventory(self) -> Inventory:
        """Return the lab that `--lab` or FAULTBED_LAB names; default `inventory/soft.yml`."""
        return inventory_module.load(self.inventory_path())

    def inventory_path(self) -> Path:
        """Return the path of the lab's inventory file."""
        return _relative(shipped.inventory_named(str(self._lab or "soft")))

    @contextlib.contextmanager
    def working(self, inventory: Inventory, names: Sequence[str], *, why: str) -> Iterator[Lab]:
        """Open the lab with a shared reservation of `names`.

        Raises:
            Reserved: another session has reserved some of them.
            DirtyLab: the lab differs from its recorded state.
        """
        with open_lab(inventory) as lab, hold(inventory, names, why=why, mode="shared") as holding:
            lab.guard, lab.held_by_others = holding.refresh, holding.held_by_others
            if not traits_of(lab.kind).has_snapshot:  # a soft lab is one user's
                lab.reserved = holding.covers
            with self.progress() as progress:
                dirty.admit(lab, progress)
            yield lab

    @contextlib.contextmanager
    def progress(self, also: Callable[[], None] = lambda: None) -> Iterator[Callable[[str], None]]:
        """Yield a function that prints a progress line on stderr, with the elapsed seconds.

        On a terminal, a spinner shows the latest line, too. `also` is called with each line, for example to refresh a
        reservation.
        """
        started = time.monotonic()

        def line(text: str) -> None:
            also()
            stopping.report_activity(text)
            at = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} " if self._timestamps else ""
            at += f"{time.monotonic() - started:6.1f} s"
            with contextlib.suppress(OSError):  # if the terminal is gone, an error must still be reported
                self.err.print(Text.assemble((at, "dim"), f"  {text}"), soft_wrap=True)

        if not self.err.is_terminal:
            yield line
            return
        with self.err.status(Text("working")) as status:  # rich would interpret markup in a str here

            def line_and_status(text: str) -> None:
                line(text)
                status.update(Text(text))

            yield line_and_status

    def json(self, value: Any) -> None:
        """Print one JSON document on stdout. NaN and infinity become null, because JSON does not have them."""
        text = json.dumps(value, default=_plain)
        plain = json.loads(text, parse_constant=lambda _: None)
        with contextlib.suppress(BrokenPipeError):  # its reader has ended; the command keeps its own exit code
            sys.stdout.write(json.dumps(plain, indent=2, allow_nan=False) + "\n")

    def table(self, columns: Sequence[str], rows: _Rows, *, title: str | None = None) -> None:
        """Print a table. In a pipe it is up to 200 characters wide, whatever the terminal's width is."""
        table = Table(title=title, box=None, pad_edge=False, header_style="bold", title_justify="left")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*row)
        if self.out.is_terminal:
            self.out.print(table)
        else:
            _console(width=200).print(table)


def _relative(path: Path) -> Path:
    """Return the path relative to the current directory if it is below it, else unchanged."""
    with contextlib.suppress(ValueError):
        return path.relative_to(Path.cwd())
    return path


def styled(text: str, style: str) -> Text:
    """Return text in a style, for a cell or a line."""
    return Text(text, style=style)


class _Console(Console):
    """A console that tolerates a closed pipe: the command continues and keeps its own exit code."""

    def on_broken_pipe(self) -> None:
        """Suppress further output. rich would end the process with Python's exit code 1, which means FAIL."""
        self.quiet = True


def _console(**options: Any) -> Console:
    return _Console(markup=False, emoji=False, highlight=False, **options)


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    raise TypeError(f"not JSON: {value!r}")


pass_session = click.make_pass_decorator(Session)

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON for programs instead of text for people."
)
