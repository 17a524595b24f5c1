"""The marks of a lab whose state may differ from its known state: it is DIRTY, or a command is (or was) changing it.

DIRTY: the lab differs from its state before a command, or cannot be compared. It refuses work until `faultbed heal`.
The mark contains the earlier state, which healing has to restore. `faultbed reset` removes the mark too: the snapshot
is a known state.

In progress: a command that changes the lab writes a mark before its first change (`begin`) and removes it once it has
compared the lab (`end`). If it was killed in between, the next command (`admit`) waits for the leases to expire and
makes that comparison; only a difference makes the lab DIRTY. If commands change the same part at the same time (faults
by hand), the last of them to end compares that part. The `before` of each is the lab's state without the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from faultbed.testbed import stopping
from faultbed.testbed.errors import DirtyLab, FaultbedError, LabError, RevertFailed
from faultbed.testbed.observe import fingerprint
from faultbed.testbed.observe.fingerprint import Fingerprint, Look
from faultbed.testbed.tenancy import durable, in_progress
from faultbed.testbed.tenancy.in_progress import Mark, OwnMark
from faultbed.testbed.tenancy.reservation import WHOLE_LAB, overlap

if TYPE_CHECKING:
    from faultbed.testbed.lab import Lab
    from faultbed.testbed.model.topology import Topology

__all__ = [
    "Outcome",
    "Work",
    "admit",
    "baseline",
    "begin",
    "changing",
    "clean",
    "end",
    "is_marked",
    "is_unknown",
    "leave_unknown",
    "left_by",
    "mark",
    "reasons",
    "refuse",
    "settle",
    "unfinished",
]

Progress = Callable[[str], None]
_Known = TypeVar("_Known")
LEASE_S = 10.0
"""How long the faults of a killed command may stay in place, unless its mark says otherwise."""
_UNKNOWN = "its state is unknown"
_NOT_COMPARED = "the command was ended by force before it could compare the lab"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A command that is changing a lab, marked on disk. `before` is the lab's state without any running command."""

    why: str
    before: Fingerprint
    mark: OwnMark


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a command's end. `reasons` is empty for a CLEAN lab; `sentence` is for the user."""

    state: Literal["CLEAN", "DIRTY"]
    reasons: tuple[str, ...]
    sentence: str


def begin(lab: Lab, why: str, *, lease_s: float = LEASE_S, progress: Progress = lambda _: None) -> Work:
    """Mark that a command is about to change the lab, and capture the fingerprint for the comparison at its end.

    Raises:
        DirtyLab: the lab is DIRTY, or a command that was killed left it so.
        LabError: the lab cannot be read, or the mark cannot be written. Nothing was changed.
    """
    folder = lab.state_dir
    stopping.allow(stopping.WORKLOAD_S)
    try:
        with in_progress.locked(folder):
            running = in_progress.live(folder, others_only=True)  # read once: one killed from now on counts as running
            _compare_for_killed(lab, progress)
            refuse(folder, lab.name)
            before = fingerprint.capture(lab)
            # Faults of commands that died just now, or that were not compared yet, may still be on.
            for other in {
                running_mark.path: running_mark for running_mark in (*running, *in_progress.dead(folder))
            }.values():
                if overlap(other.covers, before.covers):
                    before = _without(before, other, lab.topology)
            if unknown := fingerprint.unknown(before):
                raise LabError(
                    f"{lab.name}: its state cannot be read, so it could not be compared at the end: {unknown[0]}; "
                    "nothing was changed. Repair that, or run `faultbed reset` on a soft lab"
                )
            own = in_progress.write(folder, why=why, before=before, lease_s=lease_s)
    except OSError as error:
        raise LabError(
            f"{error.filename or folder}: {error.strerror or error}; nothing was changed, because the lab must be "
            "marked on disk first; free disk space"
        ) from error
    work = Work(why=why, before=before, mark=own)
    stopping.owe(work, lambda reasons: leave_unknown(lab, work, reasons or (_NOT_COMPARED,)).sentence)
    return work


def end(lab: Lab, work: Work, *, not_cleared: Sequence[str] = ()) -> Outcome:
    """Compare the lab with its state before, and replace the command's mark by the result. Raises no error.

    `not_cleared` has a sentence for each fault that may still be in place; these make the lab DIRTY, whatever its
    fingerprint shows. An interrupt in the middle leaves the command's mark, and the next command compares.
    """
    folder = lab.state_dir
    stopping.allow(stopping.COMPARE_S)
    marked = bool(not_cleared) and _try_to_mark(folder, not_cleared, work.before)  # before anything can interrupt it
    others_running: Sequence[Mark] = ()
    kept = ""
    try:
        with in_progress.locked(folder):
            others_running = _others_running(folder, work.before.covers)
            left = _compare(lab, work.before, others_running)
            if not left and not not_cleared:
                kept = _try_to_remove(work.mark)
    except Exception as error:  # noqa: BLE001 (a lab that cannot be compared is in an unknown state: DIRTY)
        left = [f"could not compare: {_error_text(error)}"]
    except BaseException:
        stopping.settle(work)
        work.mark.abandon()
        raise
    if problems := (*not_cleared, *left):
        return _as_dirty(folder, work, problems, marked=marked)
    stopping.settle(work)
    if others_running:
        names = ", ".join(running.name for running in others_running)
        return Outcome(
            state="CLEAN", reasons=(), sentence=f"the lab will be compared when {names} end, which still run{kept}"
        )
    return Outcome(state="CLEAN", reasons=(), sentence=f"the lab is as it was before{kept}")


def leave_unknown(lab: Lab, work: Work, reasons: Sequence[str]) -> Outcome:
    """Mark the lab DIRTY for these reasons, without comparing it. Raises no error."""
    return _as_dirty(lab.state_dir, work, tuple(reasons))


def admit(lab: Lab, progress: Progress = lambda _: None) -> None:
    """Admit a command to the lab. If an earlier command was killed before it compared the lab, compare it first.

    Raises:
        DirtyLab: the lab is DIRTY; the message says what to do.
    """
    folder = lab.state_dir
    if in_progress.dead(folder) and not is_marked(folder):
        with in_progress.locked(folder):
            _compare_for_killed(lab, progress)
    refuse(folder, lab.name)


def unfinished(folder: Path) -> tuple[str, ...]:
    """Return a sentence for each command that is changing the lab, or was when it was killed."""
    return (
        *(f"{running.name} is changing it" for running in in_progress.live(folder)),
        *(f"{killed.name} was killed: the next command compares the lab first" for killed in in_progress.dead(folder)),
    )


def mark(folder: Path, reasons: Sequence[str], before: Fingerprint | None, *, command: str = "") -> bool:
    """Mark a lab's state directory as DIRTY. An existing mark is not changed.

    `before` is the lab's state before the command that changed it, if known. `command` is set by `changing`: that
    command removes the mark when it is run to its end.

    Returns:
        Whether this mark was written; False if one existed.

    Raises:
        OSError: it cannot be written.
    """
    path = _path(folder)
    if path.exists():
        return False
    fields = {"since": time.time(), "reasons": list(reasons), "before": before.to_json() if before else None}
    fields["covers"] = before.covers if before else (WHOLE_LAB,)
    fields |= {"command": command} if command else {}
    temporary = durable.write_new(path, json.dumps(fields, indent=1).encode())
    try:
        os.link(temporary, path)  # unlike a rename, it never replaces the mark of another command
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    durable.sync_folder(folder)
    return True


@contextlib.contextmanager
def changing(
    folder: Path, command: str, *, leaves_unknown: tuple[type[FaultbedError], ...] = (RevertFailed,)
) -> Iterator[None]:
    """Mark a lab as DIRTY while a command changes it, for commands that do not compare the lab afterwards.

    The mark is removed when the block ends, or fails with a `FaultbedError` that is not one of `leaves_unknown`. It
    stays after a kill, an interrupt, a bug or an error of `leaves_unknown`; the same command removes it when it is run
    again to its end. A mark that another command has written meanwhile stays.

    Raises:
        OSError: the mark cannot be written.
    """
    before = baseline(folder)
    sentence = f"`{command}` (process {os.getpid()}) did not finish; run it again"
    is_own = mark(folder, [sentence], before, command=command)
    is_own = is_own or (left_by(folder) == command and before is None)
    own = _read(folder) if is_own else {}
    try:
        yield
    except FaultbedError as error:
        if not isinstance(error, leaves_unknown):
            _remove(folder, own)
        raise
    _remove(folder, own)


def _remove(folder: Path, fields: Mapping[str, Any]) -> None:
    """Remove the mark if it is unchanged: after a `reset` meanwhile, it may belong to a run that ended DIRTY."""
    if fields and _read(folder) == fields:
        _path(folder).unlink(missing_ok=True)


def left_by(folder: Path) -> str:
    """Return the command that marked the lab and did not finish (`changing`); empty for any other mark."""
    return str(_read(folder).get("command", "")) if is_marked(folder) else ""


def is_marked(folder: Path) -> bool:
    """Return whether the lab is marked."""
    return _path(folder).exists()


def is_unknown(folder: Path) -> bool:
    """Return whether the lab is marked, or waits for the comparison that a killed command did not make."""
    return is_marked(folder) or bool(in_progress.dead(folder))


def reasons(folder: Path) -> tuple[str, ...]:
    """Return why the lab is marked; empty if it is not."""
    if not is_marked(folder):
        return ()
    sentences = _read(folder).get("reasons")
    return tuple(map(str, sentences)) if sentences and isinstance(sentences, list) else (_UNKNOWN,)


def refuse(folder: Path, name: str) -> None:
    """Refuse work on a marked lab.

    Raises:
        DirtyLab: it is marked; the message says what to do.
    """
    if known := reasons(folder):
        more = f" (and {len(known) - 1} more)" if len(known) > 1 else ""
        raise DirtyLab(
            f"{name} is DIRTY and refuses work: {known[0]}{more}; `faultbed heal` reverts what faults left behind, "
            "on a soft lab `faultbed reset` restores the snapshot"
        )


def baseline(folder: Path) -> Fingerprint | None:
    """Return the lab's state before the command that left it DIRTY or was killed.

    Returns None if there is no such command, or if the state is not known.
    """
    if not is_marked(folder):
        return next((killed.before for killed in in_progress.dead(folder)), None)
    return in_progress.before_of(_read(folder))


def settle(lab: Lab) -> list[str]:
    """Compare a marked lab with its state before, and remove the mark if there is no difference.

    Returns:
        The differences that are left; empty if the lab is not marked (any more).
    """
    folder = lab.state_dir
    if is_marked(folder):
        before = baseline(folder)
        if before is None:
            return ["the state before the command is unknown; run `faultbed reset`"]
        if left := fingerprint.settle(lab, before):
            return left
        _path(folder).unlink(missing_ok=True)
    if in_progress.dead(folder):
        with in_progress.locked(folder):
            _compare_for_killed(lab, lambda _: None)
    return list(reasons(folder))


def clean(folder: Path) -> None:
    """Remove the marks: the lab is in a known state. A running command keeps its own mark."""
    _path(folder).unlink(missing_ok=True)
    for killed in in_progress.dead(folder):
        killed.path.unlink(missing_ok=True)


def _compare_for_killed(lab: Lab, progress: Progress) -> None:
    """Compare the lab for each command that was killed before it could; a difference marks the lab DIRTY."""
    folder = lab.state_dir
    for killed in in_progress.dead(folder):
        if is_marked(folder) or _others_running(folder, killed.covers):
            continue  # `heal` compares it; or other commands' faults are on, and the last one of them compares it
        progress(f"{killed.name} was killed: comparing the lab with its state before")
        left = [f"{killed.name} was killed; {line}" for line in _left_by(lab, killed)]
        if left and not mark(folder, left, killed.before):
            continue  # another command has marked another part of the lab meanwhile: healing compares both
        killed.path.unlink(missing_ok=True)


def _left_by(lab: Lab, killed: Mark) -> list[str]:
    """Return the differences that a killed command left, once the leases of its faults have expired."""
    if killed.before is None:
        return [f"{killed.path} cannot be read"]
    covers = lab.reserved
    try:
        return fingerprint.settle(lab, killed.before, within_s=killed.lease_s + fingerprint.SETTLE_S)
    except Exception as error:  # noqa: BLE001 (as in `end`)
        return [f"could not compare: {_error_text(error)}"]
    finally:
        lab.reserved = covers


def _others_running(folder: Path, covers: tuple[str, ...]) -> tuple[Mark, ...]:
    """Return the running commands of other processes that change some of these hosts, switches and links."""
    return tuple(running for running in in_progress.live(folder, others_only=True) if overlap(running.covers, covers))


def _without(now: Fingerprint, other: Mark, topology: Topology) -> Fingerprint:
    """Return the lab's state without another command: in the part it changes, the state before that command."""
    if other.before is None:
        return now
    kept = _outside(now.nodes, topology, other.covers)
    was = fingerprint.part(other.before.nodes, topology, now.covers)
    nodes = {name: {**kept.get(name, {}), **was.get(name, {})} for name in {*kept, *was}}
    return Fingerprint(nodes=nodes, covers=now.covers)


def _compare(lab: Lab, before: Fingerprint, running_commands: Sequence[Mark]) -> list[str]:
    """Return the differences to `before`, except in parts that other commands are changing and will compare."""
    if not running_commands:
        return fingerprint.settle(lab, before)
    covered_by_others = {name for command in running_commands for name in command.covers}
    if WHOLE_LAB in covered_by_others:
        return []
    own = Fingerprint(nodes=_outside(before.nodes, lab.topology, covered_by_others), covers=before.covers)
    lab.reserved = before.covers

    def look() -> Look:
        now = fingerprint.capture(lab)
        rest = replace(
            now,
            nodes=_outside(now.nodes, lab.topology, covered_by_others),
            moved=_outside(now.moved, lab.topology, covered_by_others),
        )
        return fingerprint.look_of(fingerprint.diff(own, rest), rest)

    return fingerprint.wait_for_quiet(look, within_s=fingerprint.SETTLE_S)


def _outside(
    nodes: Mapping[str, Mapping[str, _Known]], topology: Topology, covers: Collection[str]
) -> dict[str, dict[str, _Known]]:
    """Return the part of what is known by node and subject that is outside these hosts, switches and links."""
    inside = fingerprint.part(nodes, topology, covers)
    return {
        name: {subject: text for subject, text in facts.items() if subject not in inside.get(name, {})}
        for name, facts in nodes.items()
    }


def _try_to_remove(mark: OwnMark) -> str:
    """Remove the mark of a command whose lab is CLEAN; return a note for the user if that fails."""
    try:
        mark.remove()
    except OSError as error:
        mark.abandon()
        return f"; {mark.path}: {error.strerror or error}: the next command compares it again"
    return ""


def _try_to_mark(folder: Path, reasons: Sequence[str], before: Fingerprint) -> bool:
    try:
        return mark(folder, reasons, before)
    except OSError:
        return False


def _as_dirty(folder: Path, work: Work, reasons: tuple[str, ...], *, marked: bool = False) -> Outcome:
    """Turn the mark of a command into one of a DIRTY lab; `marked` says that it was written already."""
    more = "; run `faultbed heal`"
    try:
        if marked or mark(folder, reasons, work.before):
            work.mark.remove()
        else:  # another command's mark may cover another part of the lab: healing compares both
            work.mark.abandon()
    except OSError as error:
        more = f"; this could not be recorded ({error.strerror or error}): free disk space, then run `faultbed heal`"
        with contextlib.suppress(OSError):  # a rename works on a full disk; only the reasons are lost
            work.mark.path.rename(_path(folder))
        work.mark.abandon()
    sentence = f"the lab is DIRTY: {reasons[0]}" + (f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else "")
    stopping.owe(work, lambda _: sentence + more)  # if a second signal ends the command, it still prints this
    return Outcome(state="DIRTY", reasons=reasons, sentence=sentence + more)


def _error_text(error: Exception) -> str:
    return str(error) if isinstance(error, (LabError, OSError)) else f"{type(error).__name__}: {error}"


def _read(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError):
        return in_progress.decoded(_path(folder).read_bytes())
    return {}


def _path(folder: Path) -> Path:
    return folder / "dirty.json"
