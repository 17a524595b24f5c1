"""Errors of the command line as one sentence: `<command>: <what is wrong>; <what to do>`, with the value given."""

from __future__ import annotations

import re

import click
from click.exceptions import MissingParameter, NoSuchCommand, NoSuchOption

from faultbed.testbed.suggestions import nearest

__all__ = ["sentence"]


def sentence(error: click.ClickException, program: str) -> str:
    """Return what click refuses as one sentence, such as `faultbed rnu: no such command; did you mean run?`."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else program
    see = f"`{command} --help` explains it"
    if isinstance(error, NoSuchCommand):
        near = _nearest_command(error)
        return f"{command} {error.command_name}: no such command; " + (f"did you mean {near}?" if near else see)
    if isinstance(error, NoSuchOption):
        near = error.possibilities[0] if error.possibilities else None
        return f"{command} {error.option_name}: no such option; " + (f"did you mean {near}?" if near else see)
    if isinstance(error, MissingParameter):
        return f"{command}: {_name(error)} is missing; {see}"
    if isinstance(error, click.BadParameter):
        return f"{command}: {_name(error)}: {_problem(error.message)}; {_remedy(error, see)}"
    return f"{command}: {_problem(error.format_message())}; {see}"


def _nearest_command(error: NoSuchCommand) -> str | None:
    # `possibilities` has only the commands that were imported already.
    context = error.ctx
    group = context.command if context is not None else None
    if context is None or not isinstance(group, click.Group):
        return None
    return nearest(error.command_name, group.list_commands(context))


def _name(error: click.BadParameter) -> str:
    parameter = error.param
    if parameter is None:
        return str(error.param_hint or "a value")
    if isinstance(parameter, click.Option):
        return max(parameter.opts, key=len)
    return (parameter.name or "argument").upper()


def _problem(message: str) -> str:
    """Return click's message without its capital letter, its final dot and its list of choices."""
    text = re.sub(r" is not one of .*", " is none of its choices", message.strip().rstrip("."), flags=re.DOTALL)
    text = re.sub(r" is not a valid (\w+)(?: range)?$", r" is no \1", text)
    text = re.sub(r"is not in the range (.*)$", r"is not in the range \1", text)
    return text[:1].lower() + text[1:]


def _remedy(error: click.BadParameter, see: str) -> str:
    kind = error.param.type if error.param is not None else None
    if not isinstance(kind, click.Choice):
        return see
    choices = [str(choice) for choice in kind.choices]
    given = re.match(r"'(.*)' is not one of", error.message, flags=re.DOTALL)
    near = nearest(given[1], choices) if given else None
    return f"did you mean {near}?" if near else f"choose one of {', '.join(choices)}"
