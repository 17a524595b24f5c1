"""Exit codes of the command line, in a module of their own: a command that starts has no time for the verdict's."""

from __future__ import annotations

import enum

__all__ = ["ExitCode"]


class ExitCode(enum.IntEnum):
    """Exit codes of the command line."""

    PASS = 0
    FAIL = 1
    INCONCLUSIVE = 2
    ERROR = 3
    USAGE = 4
    DIRTY = 5
