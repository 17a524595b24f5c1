"""Errors in words, for people who did not write the code."""

from __future__ import annotations

import traceback

from faultbed.testbed.errors import FaultbedError

__all__ = ["describe", "show_unforeseen"]


def describe(error: BaseException) -> str:
    """Return an error in words: with its file for an OSError, with its type for one that was not raised on purpose."""
    if isinstance(error, FaultbedError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def show_unforeseen(error: Exception) -> None:
    """Print the traceback of an error that is a defect of ours, before its sentence hides where it comes from."""
    if not isinstance(error, FaultbedError | OSError):
        traceback.print_exception(error)
