"""The command `witness`: a receipt around an injector of another author."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Sequence

import click

from faultbed.harness.cli.context import Session, json_option, pass_session, styled
from faultbed.harness.cli.options.numbers import FiniteRange
from faultbed.harness.run.outside_command import watch_lab
from faultbed.harness.verdict import ExitCode
from faultbed.inject.evidence.outside_fault import opinion_of
from faultbed.testbed import stopping
from faultbed.testbed.errors import UsageError
from faultbed.testbed.lab import open_lab

__all__ = ["COMMANDS"]

_CODES = {"confirmed": ExitCode.PASS, "mismatch": ExitCode.FAIL, "inconclusive": ExitCode.INCONCLUSIVE}
_STYLES = {"confirmed": "green", "mismatch": "red", "inconclusive": "yellow"}
_MOST_ROWS = 12
_UNDO_S = 3.0
"""How long an interrupted command may take to undo its fault before SIGTERM, and again before it is killed."""


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--watch", "watch_s", type=FiniteRange(1), help="Watch for this number of seconds; a fault is made by hand."
)
@click.option("--quiet", "quiet_s", type=FiniteRange(1), default=5, show_default=True, help="Seconds before it.")
@click.option("--hold", "hold_s", type=FiniteRange(0), default=3, show_default=True, help="Seconds after it.")
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@pass_session
def witness(
    session: Session, *, watch_s: float | None, quiet_s: float, hold_s: float, as_json: bool, command: tuple[str, ...]
) -> ExitCode:
    """Run COMMAND, an injector that is not faultbed's, and report what it did to the lab.

    The lab must carry traffic. The command is confirmed (0) if the lab's state changed where traffic is, and counters
    of loss moved; a mismatch (1) if nothing changed, or no traffic was there; otherwise the result is inconclusive (2).

    \b
    faultbed witness -- ssh switch1 'tc qdisc add dev swp1 root netem loss 5%; sleep 5; tc qdisc del dev swp1 root'
    faultbed witness --watch 60                        # somebody pulls a cable
    """  # noqa: D301 (click's mark for text that is not to be wrapped)
    if bool(command) == (watch_s is not None):
        raise UsageError("witness needs either a command after -- or --watch SECONDS")
    codes: list[int] = []

    def act() -> None:
        if watch_s is not None:
            time.sleep(watch_s)
            return
        codes.append(_run(command))

    with open_lab(session.inventory()) as lab, session.progress() as progress:
        fault = watch_lab(lab, act, quiet_s=quiet_s, hold_s=hold_s, say=progress)
    opinion = opinion_of(fault)
    changed = [*fault.changed.values()]
    if as_json:
        session.json(
            {
                "result": opinion.result,
                "why": opinion.why,
                "changed": changed,
                "moved": dict(opinion.moved),
                "undone": opinion.undone,
                "left": list(fault.left),
                "unknown": list(fault.unknown),
                "exit_code": codes[0] if codes else None,
            }
        )
    else:
        session.out.print(styled(opinion.result, _STYLES[opinion.result]), opinion.why)
        rows = [("changed", line) for line in changed[:_MOST_ROWS]]
        rows += [("moved", f"{name} by {growth:,}") for name, growth in list(opinion.moved.items())[:_MOST_ROWS]]
        rows += [("not undone", line) for line in fault.left[:_MOST_ROWS]]
        rows += [("unknown", line) for line in fault.unknown[:_MOST_ROWS]]
        rows += [("exit code", str(code)) for code in codes if code]
        rows += [("undone", "everything")] if opinion.undone and changed else []
        session.table(("", ""), rows)
    return _CODES[opinion.result]


def _run(command: Sequence[str]) -> int:
    """Run a command until it ends, however long that takes, and return its exit code.

    If faultbed is stopped meanwhile, the command has time to undo what it did.

    Raises:
        UsageError: it cannot be started.
    """
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise UsageError(f"{command[0]}: {error.strerror}; name a program of this machine") from error
    try:
        while process.poll() is None:  # in steps, so that a signal is answered
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=stopping.STEP_S)
    except BaseException:
        _end(process)
        raise
    return process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait until an interrupted command ends; request it with SIGTERM if it does not, and kill it in the end.

    Ctrl-C in a terminal has reached the command, too, and SIGTERM at once would end it before its fault is undone.
    """
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=stopping.Deadline(_UNDO_S).left_s)
        process.terminate()  # does nothing if it has ended
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=stopping.Deadline(_UNDO_S).left_s)
    finally:
        process.kill()  # does nothing if it has ended
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=stopping.STEP_S)


COMMANDS = (witness,)
