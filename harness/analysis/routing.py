"""How routing reacted to a fault: the times of its changes, and their switches. Pure.

    fired → detected: the first link, next hop or route that changed on a switch
          → converged: the last route that changed before the fault was removed
    removed → restored: the last route that changed after that

Three stages between detected and converged, if they can be determined:

    carrier      a switch lost a link
    next hop     such a switch removed the first or all next hops over that link
    withdrawn    a route changed on a switch that had lost no link, so BGP had announced the change

The goodput, which is sampled, shows when the traffic moved (`faultbed.harness.analysis.phases`).

A change belongs to a fault if it came between the firing of this fault and that of the next one, at most `TAIL_NS`
after the removal. The kernels report changes as events, so no sampling adds to the error. What remains is the error of
the clocks and of the observed firing: the fault may have acted before it.

A route that changed under the fault and did not change back is `left`; then nothing counts as restored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from faultbed.testbed.observe.telemetry import Change

__all__ = ["STAGES", "TAIL_NS", "TIMES", "Routing", "Stage", "routing"]

STAGES = ("carrier", "next hop", "withdrawn")

_OF_ROUTING = ("link ", "nexthop ", "route ")
"""Beginnings of the subjects that count; a line of a switch's kernel log is no change of its routes."""

TAIL_NS = 30_000_000_000
"""Time after a fault's removal in which changes belong to it. BGP with a hold time of 3 s converges much sooner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One step towards new routes: ns from the fault's firing, and the first change that shows it, with its node."""

    name: str
    after_ns: int
    node: str
    subject: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Routing's reaction to one fault.

    Times are ns from the fault's firing, `restored_ns` from its removal; None: nothing changed. `left` are routes that
    did not change back, as `switch: route ...`; then `restored_ns` is None, too.
    """

    detected_ns: int | None
    converged_ns: int | None
    restored_ns: int | None
    detected_by: str = ""
    changes: int = 0
    stages: tuple[Stage, ...] = ()
    left: tuple[str, ...] = ()

    def stage_ns(self, name: str) -> int | None:
        """Return when a stage was reached; None if it cannot be determined."""
        return next((stage.after_ns for stage in self.stages if stage.name == name), None)


TIMES: Mapping[str, Callable[[Routing], int | None]] = {
    "detected": lambda reaction: reaction.detected_ns,
    "next-hop": lambda reaction: reaction.stage_ns("next hop"),
    "withdrawn": lambda reaction: reaction.stage_ns("withdrawn"),
    "converged": lambda reaction: reaction.converged_ns,
    "restored": lambda reaction: reaction.restored_ns,
}
"""Metrics `routing.*` by the last part of their name, as functions that return ns."""


def routing(
    changes: Sequence[Change], fired: Mapping[str, tuple[int, int]], early_ns: Mapping[str, int] | None = None
) -> dict[str, Routing]:
    """Return routing's reaction to each fault.

    Args:
        changes: changes on switches, in any order.
        fired: first firing and removal of each fault, by time of firing.
        early_ns: by fault, how long before its observed firing it may have fired.
    """
    begins = {fault_id: start - (early_ns or {}).get(fault_id, 0) for fault_id, (start, _) in fired.items()}
    ordered = sorted(changes, key=lambda change: change.at_ns)
    by_fault = {}
    for fault_id, (start, cleared) in fired.items():
        later = [begin for begin in begins.values() if begin > begins[fault_id]]
        until = min([cleared + TAIL_NS, *later])
        own = [
            change
            for change in ordered
            if begins[fault_id] <= change.at_ns < until and change.subject.startswith(_OF_ROUTING)
        ]
        on_routes = [change for change in own if not change.subject.startswith("link ")]
        during = [change for change in on_routes if change.at_ns <= cleared]
        after = [change for change in on_routes if change.at_ns > cleared]
        # Under another fault, a route's last change is no sign of how it was without faults.
        is_alone = not any(begins[other] < begins[fault_id] < end for other, (_, end) in fired.items())
        before = [change for change in ordered if is_alone and change.at_ns < begins[fault_id]]
        left = _left(before, during, after)
        by_fault[fault_id] = Routing(
            detected_ns=max(0, own[0].at_ns - start) if own and own[0].at_ns <= cleared else None,
            converged_ns=max(0, during[-1].at_ns - start) if during else None,
            restored_ns=after[-1].at_ns - cleared if after and not left else None,
            detected_by=f"{own[0].node}: {own[0].subject}" if own else "",
            changes=len(own),
            stages=_stages([change for change in own if change.at_ns <= cleared], start),
            left=left,
        )
    return by_fault


def _left(before: Sequence[Change], during: Sequence[Change], after: Sequence[Change]) -> tuple[str, ...]:
    """Return the routes that changed during the fault and are not what they were before.

    A route's last change before the fault shows what it was. For a route without one, its own changes decide: it is
    left if it changed only once, or if its last change is the same as its first one, with another one in between.

    Next hops are excluded, because their numbers are not stable.
    """
    former = {(change.node, change.subject): change.text for change in before}
    texts: dict[tuple[str, str], list[str | None]] = {}
    for change in (*during, *after):
        texts.setdefault((change.node, change.subject), []).append(change.text)
    changed = dict.fromkeys((change.node, change.subject) for change in during if change.subject.startswith("route "))

    def is_left(key: tuple[str, str]) -> bool:
        first, *_, last = (*texts[key], texts[key][-1])
        if key in former:
            return last != former[key]
        return len(texts[key]) == 1 or (first == last and len(set(texts[key])) > 1)

    return tuple(f"{node}: {subject}" for node, subject in changed if is_left((node, subject)))


def _stages(during: Sequence[Change], start_ns: int) -> tuple[Stage, ...]:
    lost: dict[str, str] = {}  # by switch, the port whose link it lost first
    first: dict[str, Change] = {}
    for change in during:
        kind, _, port = change.subject.partition(" ")
        if kind == "link":
            if "LOWER_UP" not in (change.text or "").split():
                lost.setdefault(change.node, port)
                first.setdefault("carrier", change)
        elif change.node not in lost:
            if lost:
                first.setdefault("withdrawn", change)
        elif f"dev {lost[change.node]}" not in (change.text or ""):
            first.setdefault("next hop", change)
    return tuple(
        Stage(
            name=name, after_ns=max(0, first[name].at_ns - start_ns), node=first[name].node, subject=first[name].subject
        )
        for name in STAGES
        if name in first
    )
