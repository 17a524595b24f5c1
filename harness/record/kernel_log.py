"""Kernel logs of a lab during a run: which messages are errors, and which mean a broken kernel. Pure.

After a kernel has reported an oops or a BUG, nothing that it reports can be trusted, so the run is an ERROR. Messages
that a busy emulated machine always writes, such as a stalled CPU, are ignored; each pattern has its reason.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from faultbed.testbed.model.lab_kind import LabKind, traits_of
from faultbed.testbed.node.gpu.xid import EVENT, SYNTHETIC
from faultbed.testbed.observe.telemetry import Change

__all__ = ["broken", "errors", "unhealthy"]

_BROKEN = re.compile(
    r"\bBUG:|kernel BUG at|\bOops\b|Kernel panic|general protection fault|double fault|Unable to handle"
)
_IGNORED = (
    # A machine whose process was stopped (host.freeze), or that shares two CPUs with five others, misses its clock.
    re.compile(r"^\d rcu: .*(self-detected stall|detected stalls|detected expedited stalls)"),
    re.compile(r"^\d (watchdog: )?BUG: soft lockup"),
    re.compile(r"^\d (clocksource|hrtimer|perf|sched): "),
    # Messages that the fault gpu.xid writes. They carry its mark, which a driver never writes.
    re.compile(rf"^\d {EVENT.pattern}, {SYNTHETIC}"),
)
_UNHEALTHY = re.compile(
    rf"{_BROKEN.pattern}|^\d WARNING: |(soft|hard) (lockup|LOCKUP)|\brcu: .*stall|INFO: task .* blocked|NETDEV WATCHDOG"
)
_MOST = 5
# Watchdogs that fire on VMs that share two CPUs, or stand still for a while (host.freeze).
_STARVED = re.compile(r"lockup|LOCKUP|rcu: |INFO: task .* blocked|NETDEV WATCHDOG")


def errors(log: Sequence[Change]) -> tuple[Change, ...]:
    """Return the messages that are errors, in order of time."""
    return tuple(change for change in log if not any(pattern.search(change.text or "") for pattern in _IGNORED))


def broken(log: Sequence[Change]) -> list[str]:
    """Return a sentence for each machine whose kernel is broken, with the first message that shows it."""
    sentences: dict[str, str] = {}
    for message in errors([change for change in log if change.subject == "kernel"]):
        if _BROKEN.search(message.text or ""):
            problem = f"{message.node}: its kernel broke: {(message.text or '').partition(' ')[2]}"
            sentences.setdefault(message.node, f"{problem}; run `faultbed reset`, and see its console log")
    return list(sentences.values())


def unhealthy(log: Sequence[Change], *, lab_kind: LabKind) -> list[str]:
    """Return a sentence for each warning, bug or lockup that a kernel has reported, at most `_MOST` for each machine.

    Lockups and stalls are ignored on a soft lab, whose machines starve each other.
    """
    sentences: dict[str, list[str]] = {}
    for change in log:
        text = change.text or ""
        if not _UNHEALTHY.search(text) or (traits_of(lab_kind).is_emulated and _STARVED.search(text)):
            continue
        sentences_of_node = sentences.setdefault(change.node, [])
        if (
            len(sentences_of_node) < _MOST
            and (sentence := f"{change.node}: kernel: {text.partition(' ')[2]}") not in sentences_of_node
        ):
            sentences_of_node.append(sentence)
    return [sentence for sentences_of_node in sentences.values() for sentence in sentences_of_node]
