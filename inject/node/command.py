"""A command run to its end, whose every failure is an OSError: what a holder knows how to answer and to survive.

Whatever waits here, for a command or for the target, calls `still_alive`: a holder that only waits must not be taken
for dead by its watchdog.
"""

from __future__ import annotations

import subprocess
import time

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["call_while_waiting", "run", "still_alive"]

_LOOK_S = 0.5
_waiting: list[Callable[[], None]] = []


def call_while_waiting(alive: Callable[[], None]) -> None:
    """Call `alive` twice a second or more often while this process waits for something of its target."""
    _waiting[:] = [alive]


def still_alive() -> None:
    """Say that this process waits and has not died; does nothing outside a holder."""
    for alive in _waiting:
        alive()


def run(argv: list[str], *, stdin: str = "", timeout_s: float = 30.0, alive: Callable[[], None] = still_alive) -> str:
    """What it printed. `alive` is called twice a second while it runs: who waits for a command is not dead.

    Raises:
        OSError: it is not there, ended with an error, or did not end by the deadline.
    """
    alive()  # of several commands, each may be too quick to be waited for, and all of them slow
    words, deadline = " ".join(argv)[:200], time.monotonic() + timeout_s
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, text=True, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        said: str | None = stdin
        while True:
            try:
                out, err = process.communicate(said, timeout=_LOOK_S)
                break
            except subprocess.TimeoutExpired:
                said = None  # it has it
                alive()
            except BaseException:
                process.kill()
                raise
            if time.monotonic() > deadline:
                process.kill()
                raise OSError(f"`{words}` did not end within {timeout_s:g} s")
    if process.returncode:
        told = " ".join((err or out).split())[:300]
        raise OSError(f"`{words}` ended with {process.returncode}: {told}")
    return out
