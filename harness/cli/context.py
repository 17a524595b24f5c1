"""What every command shares: which lab, how to print, how to tell progress."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from testbed import dirty, shipped
from testbed import inventory as inventory_module
from testbed.holding import hold
from testbed.inventory import Inventory
from testbed.lab import Lab, open_lab

__all__ = ["Session", "json_option", "pass_session"]

_Rows = Sequence[Sequence[str]]


class Session:
    """One call of the command line."""

    def __init__(self, lab: Path | None) -> None:
        self._lab = lab
        self.out = Console(highlight=False)
        self.err = Console(stderr=True, highlight=False)

    def inventory(self) -> Inventory:
        """The lab that `--lab` or FAULTBED_LAB names; default `inventory/soft.yml`."""
        return inventory_module.load(self.inventory_path())

    def inventory_path(self) -> Path:
        """The file of that lab."""
        return _relative(shipped.inventory_named(str(self._lab or "soft")))

    @contextlib.contextmanager
    def working(self, inventory: Inventory, names: Sequence[str], *, why: str) -> Iterator[Lab]:
        """The lab, open, with `names` held beside what others do there.

        Raises:
            Reserved: somebody else has them.
            DirtyLab: the lab is not as it was, and takes no work.
        """
        with open_lab(inventory) as lab, hold(inventory, names, why=why, mode="shared") as holding:
            lab.guard = holding.refresh
            dirty.refuse(lab.state_dir, lab.name)
            yield lab

    @contextlib.contextmanager
    def progress(self, also: Callable[[], None] = lambda: None) -> Iterator[Callable[[str], None]]:
        """Tell what is being done: lines with elapsed seconds on stderr, a spinner besides when that is a terminal.

        `also` is called each time: what lives by progress (a reservation) is refreshed by it.
        """
        started = time.monotonic()

        def line(text: str) -> None:
            also()
            self.err.print(f"[dim]{time.monotonic() - started:6.1f} s[/dim]  {_escape(text)}", soft_wrap=True)

        if not self.err.is_terminal:
            yield line
            return
        with self.err.status("working") as status:

            def both(text: str) -> None:
                line(text)
                status.update(_escape(text))

            yield both

    def json(self, value: Any) -> None:
        """Print one JSON document on stdout."""
        sys.stdout.write(json.dumps(value, indent=2, default=_plain) + "\n")

    def table(self, columns: Sequence[str], rows: _Rows, *, title: str | None = None) -> None:
        """Print a table; in a pipe too, as wide as it needs to be."""
        table = Table(title=title, box=None, pad_edge=False, header_style="bold", title_justify="left")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*row)
        if self.out.is_terminal:
            self.out.print(table)
        else:
            Console(width=200, highlight=False).print(table)


def _relative(path: Path) -> Path:
    """The path as a person would type it from here, when that is shorter."""
    with contextlib.suppress(ValueError):
        return path.relative_to(Path.cwd())
    return path


def _escape(text: str) -> str:
    return text.replace("[", r"\[")


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
