"""How every command ends: one sentence and the right exit code.

Only an unexpected exception prints a traceback. It ends with 3 (ERROR), because Python's exit code 1 means FAIL.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
import traceback
from typing import NoReturn

import click

from faultbed.harness.cli import stop_signals, usage_errors
from faultbed.harness.exit_code import ExitCode
from faultbed.testbed.errors import FaultbedError, Interrupted

__all__ = ["end_with"]


def end_with(command: click.Command, name: str) -> NoReturn:
    """Run a command as this process, and end with its exit code.

    Args:
        command: what to run, with the arguments of this process.
        name: how usage and errors call it.
    """
    _make_output_usable()
    stop_signals.answer(_say)
    code = _run(command, name)
    try:
        sys.stdout.flush()
    except OSError as error:  # at the interpreter's end it would replace the exit code
        if not isinstance(error, BrokenPipeError):
            _say(f"stdout: {error.strerror or error}; the output is not complete")
            code = code or ExitCode.ERROR
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    try:
        sys.stderr.flush()
    except OSError:  # its reader has ended, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    sys.exit(code)


def _make_output_usable() -> None:
    """Let no character end a command: a terminal or pipe whose encoding is ASCII gets `?` for what it cannot show."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _run(command: click.Command, name: str) -> int:
    try:
        return _main(command, name)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        _report_usage(error, name)
        return ExitCode.USAGE
    except FaultbedError as error:
        _say(str(error))
        return error.exit_code
    except (KeyboardInterrupt, click.Abort) as error:
        return _report_interrupted(error)
    except Exception as error:  # noqa: BLE001 - reported, and ended with the exit code of an ERROR
        _report_unforeseen(error)
        return ExitCode.ERROR


def _report_usage(error: click.ClickException, name: str) -> None:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):  # a group without a command: its help
        with contextlib.suppress(OSError):
            error.show()
    else:
        _say(usage_errors.sentence(error, name))


def _main(command: click.Command, name: str) -> int:
    """Run a command and return its exit code.

    click ends a process with 1 after a BrokenPipeError of any pipe or socket, but here 1 means FAIL.

    Raises:
        BrokenPipeError: click would have ended the process with 1.
    """
    try:
        return int(command.main(standalone_mode=False, prog_name=name) or 0)
    except SystemExit as stop:
        if stop.code != 1:
            raise
        raise BrokenPipeError(errno.EPIPE, "a pipe or socket was closed by its other end") from None


def _report_interrupted(error: BaseException) -> int:
    """Report an interruption and return its exit code: with the lab's state if an `Interrupted` says what it is.

    click turns a KeyboardInterrupt into an Abort, so the causes of the error are searched.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, Interrupted):  # a second Ctrl-C hides the first one's error
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        _say(f"interrupted: {cause}")
        return cause.exit_code
    _say("interrupted; `faultbed status` shows the state of the lab")
    return ExitCode.ERROR


def _report_unforeseen(error: Exception) -> None:
    """Report an unexpected exception: an error of the machine in one line, a defect of ours with its traceback."""
    if isinstance(error, BrokenPipeError) and not _has_reader(1):
        return
    if isinstance(error, OSError):
        file_prefix = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        _say(f"{file_prefix}{error.strerror or error}; correct that, then repeat the command")
    else:
        traceback.print_exception(error)
        _say(f"internal error: {type(error).__name__}: {error}; please report it with the lines above")


def _has_reader(pipe: int) -> bool:
    """Return whether the other end of a pipe is open; True for a file or a terminal (poll(2), POLLERR)."""
    poll = select.poll()
    poll.register(pipe, 0)
    return not any(event & select.POLLERR for _, event in poll.poll(0))


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # its reader has ended; the exit code is still the right one
        click.echo(f"{click.style('faultbed:', fg='red', bold=True)} {text}", err=True)
