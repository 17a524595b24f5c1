"""The marks of a lab that is not known to be as it was: DIRTY, or a command is (or was) at work on it.

DIRTY: the lab is not as it was, or nobody can tell. It refuses work until `faultbed heal`; the mark holds what the lab
looked like before, which is what healing has to bring back. `faultbed reset` removes it too: the snapshot is a known
state.

At work: a command that changes the lab writes a mark before its first change (`begin`) and removes it once it has
compared the lab (`end`). Where it was killed in between, the next command (`admit`) waits for the leases to run out and
makes that comparison; only what then differs makes the lab DIRTY. Commands that overlap (faults by hand) leave what
they share to the last of them: each one's `before` is the lab without the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from testbed.errors import DirtyLab, FaultbedError, LabError, RevertFailed
from testbed.observe import fingerprint
from testbed.observe.fingerprint import Fingerprint
from testbed.tenancy import durable, in_progress
from testbed.tenancy.in_progress import Mark, Own
from testbed.tenancy.reservation import WHOLE_LAB, overlap

if TYPE_CHECKING:
    from testbed.lab import Lab
    from testbed.model.topology import Topology

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
Nodes = Mapping[str, Mapping[str, str]]
LEASE_S = 10.0
"""How long the faults of a killed command may stay in place, unless it says otherwise."""
_UNKNOWN = "nobody can tell what it is like"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A command that is changing a lab, marked on disk. `before` is the lab as it is when no command is at work."""

    why: str
    before: Fingerprint
    mark: Own


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the end of a command found. `reasons` is empty for a CLEAN lab, `said` is one sentence of what was seen."""

    state: Literal["CLEAN", "DIRTY"]
    reasons: tuple[str, ...]
    said: str


def begin(lab: Lab, why: str, *, lease_s: float = LEASE_S, progress: Progress = lambda _: None) -> Work:
    """Mark that a command is about to change the lab, and take the fingerprint that its end is compared with.

    Raises:
        DirtyLab: the lab is DIRTY, or a command that was killed has left it so.
        LabError: the lab cannot be looked at, or the mark cannot be written. Nothing was changed.
    """
    folder = lab.state_dir
    try:
        with in_progress.locked(folder):
            at_work = in_progress.live(folder, beside=True)  # one that is killed from now on is at work all the same
            _finish_for_the_dead(lab, progress)
            refuse(folder, lab.name)
            before = fingerprint.capture(lab)
            # The faults of those that died just now, or that nobody has compared yet, may still be on.
            for other in {each.path: each for each in (*at_work, *in_progress.dead(folder))}.values():
                if overlap(other.covers, before.covers):
                    before = _without(before, other, lab.topology)
            own = in_progress.write(folder, why=why, before=before, lease_s=lease_s)
    except OSError as error:
        raise LabError(
            f"{error.filename or folder}: {error.strerror or error}; nothing was changed: before a change, a mark has "
            "to be on disk"
        ) from error
    return Work(why=why, before=before, mark=own)


def end(lab: Lab, work: Work, *, not_cleared: Sequence[str] = ()) -> Outcome:
    """Compare the lab with what it was, and replace the mark of the command by the answer. No error is raised.

    `not_cleared` are faults that may still be in place, one sentence each: they make the lab DIRTY, whatever a
    fingerprint shows. An interrupt in the middle leaves the mark of the command: the next one compares.
    """
    folder = lab.state_dir
    marked = bool(not_cleared) and _try_to_mark(folder, not_cleared, work.before)  # before anything can interrupt it
    others: Sequence[Mark] = ()
    kept = ""
    try:
        with in_progress.locked(folder):
            others = _others(folder, work.before.covers)
            left = _compare(lab, work.before, others)
            if not left and not not_cleared:
                kept = _try_to_remove(work.mark)
    except Exception as error:  # noqa: BLE001 (a lab that cannot be compared is not known: DIRTY)
        left = [f"could not compare: {_told(error)}"]
    except BaseException:
        work.mark.abandon()
        raise
    if found := (*not_cleared, *left):
        return _as_dirty(folder, work, found, marked=marked)
    if others:
        names = ", ".join(other.name for other in others)
        return Outcome(
            state="CLEAN", reasons=(), said=f"the lab is compared at the end of {names}, still at work on it{kept}"
        )
    return Outcome(state="CLEAN", reasons=(), said=f"the lab is as it was before{kept}")


def leave_unknown(lab: Lab, work: Work, reasons: Sequence[str]) -> Outcome:
    """Mark the lab DIRTY for these reasons without a look at it. No error is raised."""
    return _as_dirty(lab.state_dir, work, tuple(reasons))


def admit(lab: Lab, progress: Progress = lambda _: None) -> None:
    """Let a command work on the lab: first make the comparison that a killed command did not get to.

    Raises:
        DirtyLab: the lab is DIRTY; the sentence names the way out.
    """
    folder = lab.state_dir
    if in_progress.dead(folder) and not is_marked(folder):
        with in_progress.locked(folder):
            _finish_for_the_dead(lab, progress)
    refuse(folder, lab.name)


def unfinished(folder: Path) -> tuple[str, ...]:
    """One sentence for each command that is at work on the lab, or was when it was killed."""
    return (
        *(f"{one.name} is at work on it" for one in in_progress.live(folder)),
        *(f"{one.name} was killed: the next command compares the lab first" for one in in_progress.dead(folder)),
    )


def mark(folder: Path, reasons: Sequence[str], before: Fingerprint | None, *, command: str = "") -> bool:
    """Mark a lab's state directory as DIRTY; a mark that is there keeps what the lab looked like first.

    `command` is one that did not get to its end, and that removes the mark when it does (`changing`).

    Returns:
        Whether this mark was written; not where there was one.

    Raises:
        OSError: it cannot be written.
    """
    path = _path(folder)
    if path.exists():
        return False
    said = {"since": time.time(), "reasons": list(reasons), "before": before.to_json() if before else None}
    said["covers"] = before.covers if before else (WHOLE_LAB,)
    said |= {"command": command} if command else {}
    temporary = durable.write_new(path, json.dumps(said, indent=1).encode())
    try:
        os.link(temporary, path)  # unlike a rename, it never replaces the mark that another command writes just now
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
    """Mark a lab as DIRTY for as long as a command changes it whose end no comparison follows.

    The mark goes when the block ends, or fails with an error that tells the person what is wrong; a kill, an interrupt,
    a defect of ours or an error of `leaves_unknown` leaves it. The same command, run again to its end, removes it then.
    A mark that another command has written meanwhile stays.

    Raises:
        OSError: the mark cannot be written.
    """
    before = baseline(folder)
    sentence = f"`{command}` (process {os.getpid()}) did not get to its end: run it again"
    is_ours = mark(folder, [sentence], before, command=command)
    is_ours = is_ours or (left_by(folder) == command and before is None)
    ours = _read(folder) if is_ours else {}
    try:
        yield
    except FaultbedError as error:
        if not isinstance(error, leaves_unknown):
            _remove(folder, ours)
        raise
    _remove(folder, ours)


def _remove(folder: Path, said: Mapping[str, Any]) -> None:
    """Remove the mark if it still says this: after a `reset` meanwhile, it may be that of a run that ended DIRTY."""
    if said and _read(folder) == said:
        _path(folder).unlink(missing_ok=True)


def left_by(folder: Path) -> str:
    """Return the command that marked the lab and did not get to its end (`changing`); empty for any other mark."""
    return str(_read(folder).get("command", "")) if is_marked(folder) else ""


def is_marked(folder: Path) -> bool:
    """Whether the lab is marked."""
    return _path(folder).exists()


def is_unknown(folder: Path) -> bool:
    """Whether the lab is marked, or a command that was killed has left it to the next one to compare."""
    return is_marked(folder) or bool(in_progress.dead(folder))


def reasons(folder: Path) -> tuple[str, ...]:
    """Why the lab is marked; empty when it is not."""
    if not is_marked(folder):
        return ()
    said = _read(folder).get("reasons")
    return tuple(map(str, said)) if said and isinstance(said, list) else (_UNKNOWN,)


def refuse(folder: Path, name: str) -> None:
    """Refuse work on a marked lab.

    Raises:
        DirtyLab: it is marked; the sentence names the way out.
    """
    if known := reasons(folder):
        more = f" (and {len(known) - 1} more)" if len(known) > 1 else ""
        raise DirtyLab(
            f"{name} is DIRTY and refuses work: {known[0]}{more}; `faultbed heal` reverts what faults left behind, "
            "on a soft lab `faultbed reset` goes back to the snapshot"
        )


def baseline(folder: Path) -> Fingerprint | None:
    """What a lab looked like before the command that left it DIRTY, or was killed; None: there is none, or unknown."""
    if not is_marked(folder):
        return next((one.before for one in in_progress.dead(folder)), None)
    return in_progress.before_of(_read(folder))


def settle(lab: Lab) -> list[str]:
    """Compare a marked lab with what it was before; without a difference the mark goes.

    Returns:
        The differences that are left; empty when the lab is not marked (any more).
    """
    folder = lab.state_dir
    if is_marked(folder):
        before = baseline(folder)
        if before is None:
            return ["nobody knows what it looked like before: only `faultbed reset` can tell"]
        if left := fingerprint.settle(lab, before):
            return left
        _path(folder).unlink(missing_ok=True)
    if in_progress.dead(folder):
        with in_progress.locked(folder):
            _finish_for_the_dead(lab, lambda _: None)
    return list(reasons(folder))


def clean(folder: Path) -> None:
    """Remove the marks: the lab is in a known state. A command that is at work keeps its own."""
    _path(folder).unlink(missing_ok=True)
    for one in in_progress.dead(folder):
        one.path.unlink(missing_ok=True)


def _finish_for_the_dead(lab: Lab, progress: Progress) -> None:
    """Make the comparison of each command that was killed before its own; what differs marks the lab DIRTY."""
    folder = lab.state_dir
    for one in in_progress.dead(folder):
        if is_marked(folder) or _others(folder, one.covers):
            continue  # healing compares it; or the faults that others hold are on, and one of them ends last
        progress(f"{one.name} was killed: comparing the lab with what it was before")
        left = [f"{one.name} was killed; {line}" for line in _left_by(lab, one)]
        if left and not mark(folder, left, one.before):
            continue  # another command has marked the lab meanwhile, for another part of it: healing compares both
        one.path.unlink(missing_ok=True)


def _left_by(lab: Lab, one: Mark) -> list[str]:
    """Differences that a killed command left, once the leases of its faults have run out."""
    if one.before is None:
        return [f"{one.path} cannot be read"]
    ours = lab.ours
    try:
        return fingerprint.settle(lab, one.before, within_s=one.lease_s + fingerprint.SETTLE_S)
    except Exception as error:  # noqa: BLE001 (as in `end`)
        return [f"could not compare: {_told(error)}"]
    finally:
        lab.ours = ours


def _others(folder: Path, covers: tuple[str, ...]) -> tuple[Mark, ...]:
    """Commands of other processes that are at work now on a part of the same."""
    return tuple(other for other in in_progress.live(folder, beside=True) if overlap(other.covers, covers))


def _without(now: Fingerprint, other: Mark, topology: Topology) -> Fingerprint:
    """Return the lab as it would look without another command: where that works, it counts what was before it."""
    if other.before is None:
        return now
    kept = _outside(now.nodes, topology, other.covers)
    was = fingerprint.part(other.before.nodes, topology, now.covers)
    nodes = {name: {**kept.get(name, {}), **was.get(name, {})} for name in {*kept, *was}}
    return Fingerprint(nodes=nodes, covers=now.covers)


def _compare(lab: Lab, before: Fingerprint, others: Sequence[Mark]) -> list[str]:
    """Differences to `before`, but for the parts that other commands are at work on: these compare them."""
    if not others:
        return fingerprint.settle(lab, before)
    theirs = {name for other in others for name in other.covers}
    if WHOLE_LAB in theirs:
        return []
    own = Fingerprint(nodes=_outside(before.nodes, lab.topology, theirs), covers=before.covers)
    lab.ours, deadline = before.covers, time.monotonic() + fingerprint.SETTLE_S
    while True:
        now = fingerprint.capture(lab)
        rest = Fingerprint(nodes=_outside(now.nodes, lab.topology, theirs), covers=now.covers)
        if not (left := fingerprint.diff(own, rest)) or time.monotonic() > deadline:
            return left
        time.sleep(0.5)


def _outside(nodes: Nodes, topology: Topology, covers: Collection[str]) -> dict[str, dict[str, str]]:
    """Return what of a lab's state lies outside these hosts, switches and links."""
    inside = fingerprint.part(nodes, topology, covers)
    return {
        name: {subject: text for subject, text in facts.items() if subject not in inside.get(name, {})}
        for name, facts in nodes.items()
    }


def _try_to_remove(mark: Own) -> str:
    """Remove the mark of a command whose lab is CLEAN; returns what to say where that fails."""
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
    """Turn the mark of a command into one of a DIRTY lab; `marked` says that it has been written."""
    more = "; run `faultbed heal`"
    try:
        if marked or mark(folder, reasons, work.before):
            work.mark.remove()
        else:  # the mark of another command may cover another part of the lab: healing compares both
            work.mark.abandon()
    except OSError as error:
        more = f"; this could not be written down ({error.strerror or error}): make room, then run `faultbed heal`"
        with contextlib.suppress(OSError):  # a rename needs no room; what is lost are the reasons
            work.mark.path.rename(_path(folder))
        work.mark.abandon()
    said = f"the lab is DIRTY: {reasons[0]}" + (f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else "")
    return Outcome(state="DIRTY", reasons=reasons, said=said + more)


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, (LabError, OSError)) else f"{type(error).__name__}: {error}"


def _read(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(_path(folder).read_text())
        if isinstance(found, dict):
            return found
    return {}


def _path(folder: Path) -> Path:
    return folder / "dirty.json"
