"""The root command, and how every command ends: one sentence and the right exit code, never a traceback."""

from __future__ import annotations

import os
import signal
import sys
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from harness.cli import (
    attribution,
    ci,
    faults,
    history,
    inventories,
    jobs,
    labs,
    packets,
    preflights,
    probing,
    profiles,
    provisioning,
    replay,
    runs,
    safety,
    serving,
    sharing,
    shrinking,
    watching,
)
from harness.cli.commands import Commands
from harness.cli.context import Session
from harness.verdict import ExitCode
from testbed.errors import FaultbedError
from traffic import asking

__all__ = ["cli", "main"]

_EPILOG = """
\b
Exit codes: 0 PASS, 1 FAIL, 2 INCONCLUSIVE, 3 ERROR, 4 usage, 5 DIRTY lab.
SIGUSR1 (kill -USR1 PID) makes a command that runs ranks write down what their flight recorders hold, and go on.
State is kept in FAULTBED_HOME (~/.local/state/faultbed), images in FAULTBED_CACHE (~/.cache/faultbed).
"""


@click.group(
    cls=Commands, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.option(
    "--lab",
    type=click.Path(path_type=Path),
    envvar="FAULTBED_LAB",
    metavar="INVENTORY",
    help="The lab: an Ansible inventory, or the name of one of ours (soft, soft-mini, soft-3rack). Default: soft.",
)
@click.version_option(metadata.version("faultbed"), prog_name="faultbed")
@click.pass_context
def cli(ctx: click.Context, lab: Path | None) -> None:
    """A RoCE fabric to hurt on purpose: lab, traffic, faults that prove they fired, verdicts.

    \b
    First steps:
      faultbed doctor                              what is missing here, before it hurts
      faultbed up                                  a lab of soft-RoCE VMs: hosts, switches, BGP, ECMP
      faultbed run tests/experiments/demo.toml     a job, three faults, a verdict, a report
      faultbed down
    """  # noqa: D301 - that is click's sign for a paragraph that keeps its lines, and must be the character itself
    ctx.obj = Session(lab)


for module in (
    labs,
    watching,
    inventories,
    provisioning,
    preflights,
    probing,
    sharing,
    safety,
    faults,
    profiles,
    jobs,
    replay,
    serving,
    runs,
    shrinking,
    attribution,
    history,
    packets,
    ci,
):
    for command in module.COMMANDS:
        cli.add_command(command)


def main() -> NoReturn:
    """Entry point of the console command."""
    signal.signal(signal.SIGTERM, _as_interrupt)
    signal.signal(signal.SIGHUP, _as_interrupt)
    signal.signal(signal.SIGUSR1, asking.note)  # its default is to end the process
    sys.exit(_run())


def _run() -> int:
    try:
        return int(cli.main(standalone_mode=False, prog_name="faultbed") or 0)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return ExitCode.USAGE
    except FaultbedError as error:
        _say(str(error))
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted: what was started has been ended, faults that were in place have been cleared")
        return ExitCode.ERROR
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.ERROR


def _say(text: str) -> None:
    click.echo(f"{click.style('faultbed:', fg='red', bold=True)} {text}", err=True)


def _as_interrupt(number: int, frame: FrameType | None) -> Any:  # noqa: ARG001 (signal's signature)
    # One way out for every way of being asked to stop, so that every clean-up runs.
    raise KeyboardInterrupt
