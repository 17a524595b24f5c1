"""How a command that does faults ends: faults cleared or left to their leases, the lab compared or marked DIRTY."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from typing import NoReturn

from harness.verdict import ExitCode
from inject.evidence.receipt import FaultReceipt, not_cleared
from inject.injector import Injector
from testbed.errors import DirtyLab, FaultbedError, Interrupted
from testbed.lab import Lab
from testbed.tenancy import dirty
from testbed.tenancy.dirty import Outcome, Work

__all__ = ["describe", "finish", "interrupted", "reraise", "show_unforeseen"]

_NOT_COMPARED = "the lab was not compared with its state before: the next command does that first"


def finish(
    lab: Lab, work: Work, injector: Injector | None, receipts: Iterable[FaultReceipt] = (), left: Iterable[str] = ()
) -> Outcome:
    """Compare the lab and replace the mark of the command by the answer. `left` says what else may be left on it.

    A lab with a fault whose end was not seen (a second Ctrl-C) is DIRTY without a look: its user wants to leave.
    """
    reasons = dict.fromkeys((*not_cleared(receipts), *left))
    if injector is not None:
        reasons |= dict.fromkeys(injector.not_cleared)
        if injector.abandoned:
            return dirty.leave_unknown(lab, work, tuple(reasons))
    return dirty.end(lab, work, not_cleared=tuple(reasons))


def reraise(
    error: BaseException, lab: Lab, work: Work, injector: Injector | None, left: Iterable[str] = ()
) -> NoReturn:
    """End a command that an exception has ended, and raise it again with what was seen; `left` as in `finish`.

    Raises:
        Interrupted: it was Ctrl-C or SIGTERM.
        DirtyLab: it was an error, and the lab is not as it was.
    """
    try:
        outcome = finish(lab, work, injector, left=left)
        lab_sentence, is_dirty = outcome.sentence, outcome.state == "DIRTY"
    except KeyboardInterrupt as second:
        error, lab_sentence, is_dirty = second, _NOT_COMPARED, True
    interrupted(error, injector, lab_sentence, is_dirty=is_dirty)
    if is_dirty and isinstance(error, Exception):
        show_unforeseen(error)
        raise DirtyLab(f"{describe(error)}; {lab_sentence}") from error
    raise error


def interrupted(error: BaseException, injector: Injector | None, lab_sentence: str, *, is_dirty: bool) -> None:
    """Raise Interrupted when that is what happened.

    Raises:
        Interrupted: with what was seen of the faults, and of the lab (`lab_sentence`).
    """
    if isinstance(error, KeyboardInterrupt):
        faults = injector.end_sentence if injector is not None else ""
        code = ExitCode.DIRTY if is_dirty else ExitCode.ERROR
        raise Interrupted("; ".join(filter(None, (faults, lab_sentence))), exit_code=code) from error


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
