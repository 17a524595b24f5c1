"""Check whether a written `faultbed` command line would parse. Nothing is run."""

import click

from faultbed.harness.cli.main import cli


def parse(argv):
    """Parse a command line down to its last command; raises `click.UsageError` when it would be refused."""
    command, context, rest = cli, None, list(argv)
    while True:
        context = command.make_context(command.name or "faultbed", rest, parent=context)
        if not isinstance(command, click.Group):
            return command
        rest = [*context._protected_args, *context.args] if hasattr(context, "_protected_args") else context.args
        if not rest:
            return command
        name, result, rest = command.resolve_command(context, rest)
        assert result is not None, name
        command = result
