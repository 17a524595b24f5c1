"""Logs of a lab's kernels and switch daemons: which messages are errors, and which mean a broken kernel. Pure.

After a kernel has reported an oops or a BUG, nothing that it reports can be trusted, so the run is an ERROR. Of daemons
only crashes arrive here (`faultbed.testbed.node.logs.daemon_log`).

Two kinds of messages are ignored: those that a busy emulated machine always writes, such as a stalled CPU, and those
that the inventory names with a reason and a last day (`faultbed_ignored_messages`). Neither hides a broken kernel.
"""

from __future__ import annotations

import datetime as dt
import fnmatch
import re
from collections.abc import Sequence

from faultbed.testbed.inventory.schema import IgnoredMessageVars
from faultbed.testbed.model.lab_kind import LabKind, traits_of
from faultbed.testbed.node.gpu.xid import EVENT, SYNTHETIC
from faultbed.testbed.node.logs.daemon_log import MARK
from faultbed.testbed.observe.telemetry import Change

__all__ = ["broken", "errors", "lost", "not_expired", "unhealthy"]

_BROKEN = re.compile(
    r"\bBUG:|kernel BUG at|\bOops\b|Kernel panic|general protection fault|double fault|Unable to handle"
)
_OF_BUSY_MACHINES = (
    # A machine whose process was stopped (host.freeze), or that shares two CPUs with five others, misses its clock.
    re.compile(r"^\d rcu: .*(self-detected stall|detected stalls|detected expedited stalls)"),
    re.compile(r"^\d (watchdog: )?BUG: soft lockup"),
    re.compile(r"^\d (clocksource|hrtimer|perf|sched): "),
    # Messages that the fault gpu.xid writes. They carry its mark, which a driver never writes.
    re.compile(rf"^\d {EVENT.pattern}, {SYNTHETIC}"),
)
_LOST = re.compile(rf"^3 (?:{MARK} )?messages were lost")
_OF_DAEMON = re.compile(rf"^\d {MARK} ")
_UNHEALTHY = re.compile(
    rf"{_BROKEN.pattern}|^\d WARNING: |(soft|hard) (lockup|LOCKUP)|\brcu: .*stall|INFO: task .* blocked|NETDEV WATCHDOG"
    rf"|{_OF_DAEMON.pattern}(?!messages were lost)"
)
_MOST = 5
# Watchdogs that fire on VMs that share two CPUs, or stand still for a while (host.freeze).
_STARVED = re.compile(r"lockup|LOCKUP|rcu: |INFO: task .* blocked|NETDEV WATCHDOG")


def not_expired(ignored: Sequence[IgnoredMessageVars], today: dt.date) -> tuple[IgnoredMessageVars, ...]:
    """Return the entries that hold today."""
    return tuple(entry for entry in ignored if today <= entry.until)


def errors(log: Sequence[Change], ignored: Sequence[IgnoredMessageVars] = ()) -> tuple[Change, ...]:
    """Return the messages that are errors, in order of time; `ignored` are the entries that hold."""
    return tuple(
        change
        for change in log
        if not any(pattern.search(change.text or "") for pattern in _OF_BUSY_MACHINES)
        and (_is_broken(change) or _entry_of(change, ignored) is None)
    )


def lost(log: Sequence[Change]) -> list[str]:
    """Return a sentence for each machine of whose log a part is unknown."""
    texts = {change.node: change.text or "" for change in reversed(log) if _LOST.search(change.text or "")}
    return [f"{node}: a part of its log is unknown: {texts[node].partition(' ')[2]}" for node in sorted(texts)]


def broken(log: Sequence[Change]) -> list[str]:
    """Return a sentence for each machine whose kernel is broken, with the first message that shows it."""
    sentences: dict[str, str] = {}
    for message in errors([change for change in log if change.subject == "kernel"]):
        if _is_broken(message):
            problem = f"{message.node}: its kernel broke: {(message.text or '').partition(' ')[2]}"
            sentences.setdefault(message.node, f"{problem}; run `faultbed reset`, and see its console log")
    return list(sentences.values())


def unhealthy(
    log: Sequence[Change], *, lab_kind: LabKind, ignored: Sequence[IgnoredMessageVars] = (), today: dt.date
) -> list[str]:
    """Return a sentence for each warning, bug, lockup or crashed daemon, at most `_MOST` for each machine.

    Lockups and stalls are ignored on a soft lab, whose machines starve each other. A message whose entry in `ignored`
    has expired is reported with the entry's day and reason.
    """
    sentences: dict[str, list[str]] = {}
    for change in log:
        text = change.text or ""
        if not _UNHEALTHY.search(text) or (traits_of(lab_kind).is_emulated and _STARVED.search(text)):
            continue
        if not _is_broken(change) and _entry_of(change, not_expired(ignored, today)) is not None:
            continue
        expired = _entry_of(change, ignored)
        note = f" (it was to be ignored until {expired.until}: {expired.reason})" if expired is not None else ""
        source, text = ("", text[2:]) if _OF_DAEMON.search(text) else ("kernel: ", text.partition(" ")[2])
        sentence, of_node = f"{change.node}: {source}{text}{note}", sentences.setdefault(change.node, [])
        if len(of_node) < _MOST and sentence not in of_node:
            of_node.append(sentence)
    return [sentence for of_node in sentences.values() for sentence in of_node]


def _is_broken(change: Change) -> bool:
    text = change.text or ""
    return _OF_DAEMON.search(text) is None and _BROKEN.search(text) is not None


def _entry_of(change: Change, ignored: Sequence[IgnoredMessageVars]) -> IgnoredMessageVars | None:
    text = (change.text or "").partition(" ")[2]
    return next(
        (
            entry
            for entry in ignored
            if (not entry.machines or any(fnmatch.fnmatchcase(change.node, name) for name in entry.machines))
            and re.search(entry.pattern, text)
        ),
        None,
    )
