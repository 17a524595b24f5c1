"""A group of commands, as its help shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

__all__ = ["Commands"]

_SENTENCE = 300
"""No first sentence of a help text is longer."""


class Commands(click.Group):
    """Commands in the order in which one needs them, each with the whole first sentence of its help.

    click has them by the alphabet, and ends each sentence with its line.

    Args:
        sections: headings with the names of their commands, separated by spaces; without any, all commands have the
            heading `Commands`. A command that no section names is shown under `Other commands`.
    """

    def __init__(self, *args: Any, sections: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sections = {heading: tuple(names.split()) for heading, names in (sections or {}).items()}

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        """In the order of the sections; without any, in that in which they were added."""
        in_sections = [name for names in self._sections.values() for name in names if name in self.commands]
        return [*in_sections, *(name for name in self.commands if name not in in_sections)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list, its sentences wrapped."""
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = {
            name: (name, one.get_short_help_str(_SENTENCE))
            for name, one in commands.items()
            if one is not None and not one.hidden
        }
        width = max(map(len, rows), default=0)
        for heading, names in self._sections.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [(name.ljust(width), text) for name, text in map(rows.pop, filter(rows.__contains__, names))]
                )
        if rows:
            with formatter.section("Other commands" if self._sections else "Commands"):
                formatter.write_dl(list(rows.values()))
