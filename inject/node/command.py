"""A command run to its end, whose every failure is an OSError: what a holder knows how to answer and to survive."""

from __future__ import annotations

import subprocess

__all__ = ["run"]


def run(argv: list[str], *, stdin: str = "", timeout_s: float = 30.0) -> str:
    """What it printed.

    Raises:
        OSError: it is not there, ended with an error, or did not end by the deadline.
    """
    words = " ".join(argv)[:200]
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise OSError(f"`{words}` did not end within {timeout_s:g} s") from None
    if done.returncode:
        told = " ".join((done.stderr or done.stdout).split())[:300]
        raise OSError(f"`{words}` ended with {done.returncode}: {told}")
    return done.stdout
