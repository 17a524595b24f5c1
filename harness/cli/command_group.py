"""Command groups whose help has headings. A command's module is imported at its first use."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from faultbed.testbed.errors import FaultbedError

__all__ = ["Commands", "Sections", "docstring_of"]

Sections = Mapping[str, Mapping[str, str]]
"""Heading -> module -> names of its commands in that section, separated by spaces. A module lists its commands in
`COMMANDS`."""

_SENTENCE = 300
"""Limit of the first sentence of a help text."""


class Commands(click.Group):
    """Group that lists its commands in a given order, each with the complete first sentence of its help.

    click sorts commands by name and cuts sentences at the end of the line. A command of a section is imported at its
    first use, as click's documentation suggests ("Lazily Loading Subcommands"): importing all takes a second of CPU.

    Args:
        sections: headings with their commands. Other commands of the group are shown under `Other commands`, or under
            `Commands` if there are no sections.
    """

    def __init__(self, *args: Any, sections: Sections | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._names: dict[str, list[str]] = {}
        self._module_of: dict[str, str] = {}
        for heading, modules in (sections or {}).items():
            for module, names in modules.items():
                self._names.setdefault(heading, []).extend(names.split())
                self._module_of |= dict.fromkeys(names.split(), module)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        """Return the names in the order of the sections, then other commands in the order of their registration."""
        return [*self._module_of, *(name for name in self.commands if name not in self._module_of)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command. It is imported at its first use.

        Raises:
            FaultbedError: a package that the command needs is not installed.
        """
        if cmd_name not in self.commands and cmd_name in self._module_of:
            try:
                module = importlib.import_module(self._module_of[cmd_name])
            except ImportError as error:
                raise FaultbedError(
                    f"incomplete installation: {error}; run `make setup` to install what is missing"
                ) from error
            self.add_command(next(command for command in module.COMMANDS if command.name == cmd_name))
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands under their headings, with wrapped sentences."""
        sentences = {name: self._sentence(ctx, name) for name in self.list_commands(ctx)}
        rows = {name: (name, sentence) for name, sentence in sentences.items() if sentence is not None}
        width = max(map(len, rows), default=0)
        for heading, names in self._names.items():
            with formatter.section(heading):
                shown = [rows.pop(name) for name in names if name in rows]
                formatter.write_dl([(name.ljust(width), text) for name, text in shown])
        if rows:
            with formatter.section("Other commands" if self._names else "Commands"):
                formatter.write_dl(list(rows.values()))

    def _sentence(self, ctx: click.Context, name: str) -> str | None:
        """Return the first sentence of a command's help; None for a hidden command."""
        if name not in self.commands and (docstring := docstring_of(self._module_of[name], name)):
            return click.Command(name, help=docstring).get_short_help_str(_SENTENCE)
        command = self.get_command(ctx, name)
        return None if command is None or command.hidden else command.get_short_help_str(_SENTENCE)


def docstring_of(module: str, command: str) -> str | None:
    """Return the docstring of a command's function from the module's source, without importing it.

    Importing all commands takes a second of CPU, parsing them a tenth. Returns None if the module has no function of
    this command that is decorated by `click.command` or `click.group`.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return None
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and command in map(functools.partial(_name, node), node.decorator_list):
            return ast.get_docstring(node)
    return None


def _name(function: ast.FunctionDef, decorator: ast.expr) -> str | None:
    """Return the name that a decorator gives to a command; None if it is not click's decorator of commands."""
    match decorator:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="click"), attr="command" | "group"), args=[]):
            return function.name
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="click"), attr="command" | "group"),
            args=[ast.Constant(value=str(name))],
        ):
            return name
    return None
