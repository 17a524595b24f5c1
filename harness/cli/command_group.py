"""A group of commands, as its help shows them."""

from __future__ import annotations

import click

__all__ = ["Commands"]

_SENTENCE = 300
"""No first sentence of a help text is longer."""


class Commands(click.Group):
    """Commands in the order in which one needs them, each with the first sentence of its help, whole.

    click has them by the alphabet, and ends each sentence with its line.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        """In the order in which they were added."""
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list, its sentences wrapped."""
        named = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, one.get_short_help_str(_SENTENCE)) for name, one in named if one is not None and not one.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
