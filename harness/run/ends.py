"""End a command that injects faults: faults cleared or left to their leases, the lab compared or marked DIRTY."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from faultbed.harness.error_words import describe, show_unforeseen
from faultbed.harness.verdict import ExitCode
from faultbed.inject.evidence.receipt import Receipt, not_cleared
from faultbed.inject.injector import Injector
from faultbed.testbed.errors import DirtyLab, Interrupted
from faultbed.testbed.lab import Lab
from faultbed.testbed.tenancy import dirty
from faultbed.testbed.tenancy.dirty import Outcome, Work

__all__ = ["finish", "interrupted", "reraise"]

_NOT_COMPARED = "the lab was not compared with its state before: the next command does that first"


def finish(
    lab: Lab, work: Work, injector: Injector | None, receipts: Iterable[Receipt] = (), left: Iterable[str] = ()
) -> Outcome:
    """Compare the lab with its state before, and replace the command's mark by the result.

    `left` has a sentence for everything else that may be left on the lab. After a second Ctrl-C, faults may be in an
    unknown state: the lab is then marked DIRTY without a comparison, because the user wants the command to end.
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
    """Finish a command after an exception, and raise the exception again with the state of faults and lab.

    `left` is as in `finish`.

    Raises:
        Interrupted: the exception was a KeyboardInterrupt (Ctrl-C or SIGTERM).
        DirtyLab: it was an error, and the lab is not in its state before.
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
    """Raise Interrupted if the error is a KeyboardInterrupt (Ctrl-C or SIGTERM); otherwise do nothing.

    Raises:
        Interrupted: with the end of the faults, and the state of the lab (`lab_sentence`).
    """
    if isinstance(error, KeyboardInterrupt):
        faults = injector.end_sentence if injector is not None else ""
        code = ExitCode.DIRTY if is_dirty else ExitCode.ERROR
        raise Interrupted("; ".join(filter(None, (faults, lab_sentence))), exit_code=code) from error
