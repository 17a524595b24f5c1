"""How every command ends: one sentence and the right exit code, never a traceback."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any, NoReturn

import click

from harness.verdict import ExitCode
from testbed.errors import FaultbedError

__all__ = ["end_with"]


def end_with(command: click.Command, name: str) -> NoReturn:
    """Run a command as this process, and end with its exit code.

    Args:
        command: what to run, with the arguments of this process.
        name: how usage and errors call it.
    """
    signal.signal(signal.SIGTERM, _as_interrupt)
    signal.signal(signal.SIGHUP, _as_interrupt)
    sys.exit(_run(command, name))


def _run(command: click.Command, name: str) -> int:
    try:
        return int(command.main(standalone_mode=False, prog_name=name) or 0)
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
