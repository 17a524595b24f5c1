"""Run a command to its end; every failure is an OSError, which the holder handles.

Code that waits for a command or for the target calls `heartbeat`. Otherwise the watchdog would consider the waiting
holder dead.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import time

from faultbed.inject.node.actuator import Refused

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["call_on_heartbeat", "heartbeat", "match_lines", "quote_output", "require", "run"]

_POLL_S = 0.5
_callbacks: list[Callable[[], None]] = []


def call_on_heartbeat(callback: Callable[[], None]) -> None:
    """Set the function that `heartbeat` calls, at least twice a second while this process waits for its target."""
    _callbacks[:] = [callback]


def heartbeat() -> None:
    """Report that this process waits and has not died; does nothing outside a holder."""
    for callback in _callbacks:
        callback()


def run(argv: list[str], *, stdin: str = "", timeout_s: float = 30.0) -> str:
    """Run a command and return its output, with a heartbeat twice a second.

    Raises:
        OSError: there is no such program, it failed, or it did not end by the deadline.
    """
    heartbeat()  # many quick commands may together take longer than the watchdog allows
    words, deadline = " ".join(argv)[:200], time.monotonic() + timeout_s
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, text=True, stdin=pipe, stdout=pipe, stderr=pipe) as process:  # deadline: killed below
        rest: str | None = stdin
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    out, err = process.communicate(rest, timeout=_POLL_S)
                    break
                rest = None  # it was sent before the timeout
                heartbeat()
                if time.monotonic() > deadline:
                    raise OSError(f"`{words}` did not end within {timeout_s:g} s")  # noqa: TRY301 (killed below)
        except BaseException:  # including an error of the heartbeat: leaving `with` waits for the command
            process.kill()
            raise
    if process.returncode:
        output = " ".join((err or out).split())[:300]
        raise OSError(f"`{words}` ended with {process.returncode}: {output}")
    return out


def require(command: list[str], pattern: str, missing: str) -> None:
    """Run a command that reports a capability of the target.

    Raises:
        Refused: the command fails, or its output does not match `pattern`; the message is `missing` and the output.
    """
    try:
        output = run(command)
    except OSError as error:
        raise Refused(f"{missing} ({error})") from None
    if not match_lines(pattern, output):
        raise Refused(f"{missing} ({quote_output(command, output)})")


def quote_output(command: list[str], output: str) -> str:
    """Return a command and the end of its output, for a message."""
    return f"`{shlex.join(command)}` printed {' '.join(output.split())[-80:]!r}"


def match_lines(pattern: str, text: str) -> re.Match[str] | None:
    """Return the first match of a pattern whose anchors are those of lines, as grep sees them."""
    # Python sees an empty line after the last newline, grep does not: `^(None)?$` would match any output.
    return re.search(pattern, text.removesuffix("\n"), re.MULTILINE)
