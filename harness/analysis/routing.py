"""How routing followed a fault: which change came when, on which switch. Pure.

    fired → detected: the first link, next hop or route that changed on a switch
          → converged: the last route that changed before the fault was lifted
    lifted → restored: the last route that changed after it

Between the first two, where they can be told: `carrier`, a switch lost a link; `next hop`, such a switch took the first
way over it out of its routes, or all; `withdrawn`, the first route changed on a switch that had lost no link, so that
BGP had told it. When traffic moved is seen in the goodput (`harness.analysis.phases`), which is sampled.

A change belongs to a fault when it came between its firing and the next one's, and no more than `TAIL_NS` after it was
lifted. The kernels told the changes; nothing here is sampled, so the error is that of the clocks, and of when the fault
was seen to fire, before which it may have acted.

A route that changed under the fault and not again is not as it was: it is `left`, and nothing is restored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from testbed.observe.telemetry import Change

__all__ = ["STAGES", "TAIL_NS", "TIMES", "Routing", "Stage", "routing"]

STAGES = ("carrier", "next hop", "withdrawn")

TAIL_NS = 30_000_000_000
"""BGP with a hold time of 3 s is settled long before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One step on the way to other routes: ns from the fault's firing, and what was told of it first, and where."""

    name: str
    after_ns: int
    node: str
    subject: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Of one fault: ns from its firing (`restored_ns`: from its removal); None: nothing changed.

    `left` are routes that did not come back, as `switch: route ...`; `restored_ns` is None then, too.
    """

    detected_ns: int | None
    converged_ns: int | None
    restored_ns: int | None
    detected_by: str = ""
    changes: int = 0
    stages: tuple[Stage, ...] = ()
    left: tuple[str, ...] = ()

    def stage_ns(self, name: str) -> int | None:
        """When a stage was reached; None: it cannot be told."""
        return next((one.after_ns for one in self.stages if one.name == name), None)


TIMES: Mapping[str, Callable[[Routing], int | None]] = {
    "detected": lambda one: one.detected_ns,
    "next-hop": lambda one: one.stage_ns("next hop"),
    "withdrawn": lambda one: one.stage_ns("withdrawn"),
    "converged": lambda one: one.converged_ns,
    "restored": lambda one: one.restored_ns,
}
"""What the metrics `routing.*` are taken from, ns."""


def routing(
    changes: Sequence[Change], fired: Mapping[str, tuple[int, int]], early_ns: Mapping[str, int] | None = None
) -> dict[str, Routing]:
    """By fault; `fired` gives first firing and removal, in the order of firing. Changes on hosts do not count.

    `early_ns` is by how much a fault may have fired before it was seen to.
    """
    begins = {fault_id: start - (early_ns or {}).get(fault_id, 0) for fault_id, (start, _) in fired.items()}
    found = {}
    for fault_id, (start, cleared) in fired.items():
        later = [begin for begin in begins.values() if begin > begins[fault_id]]
        until = min([cleared + TAIL_NS, *later])
        mine = [one for one in changes if begins[fault_id] <= one.at_ns < until]
        ways = [one for one in mine if not one.subject.startswith("link ")]
        under, after = [x for x in ways if x.at_ns <= cleared], [x for x in ways if x.at_ns > cleared]
        left = _left(under, after)
        found[fault_id] = Routing(
            detected_ns=max(0, mine[0].at_ns - start) if mine and mine[0].at_ns <= cleared else None,
            converged_ns=max(0, under[-1].at_ns - start) if under else None,
            restored_ns=after[-1].at_ns - cleared if after and not left else None,
            detected_by=f"{mine[0].node}: {mine[0].subject}" if mine else "",
            changes=len(mine),
            stages=_stages([one for one in mine if one.at_ns <= cleared], start),
            left=left,
        )
    return found


def _left(under: Sequence[Change], after: Sequence[Change]) -> tuple[str, ...]:
    """Routes that changed once and not back; next hops are made and dropped by number, which says nothing."""
    times = Counter((one.node, one.subject) for one in (*under, *after))
    changed = dict.fromkeys((one.node, one.subject) for one in under if one.subject.startswith("route "))
    return tuple(f"{node}: {subject}" for node, subject in changed if times[node, subject] == 1)


def _stages(under: Sequence[Change], start_ns: int) -> tuple[Stage, ...]:
    lost: dict[str, str] = {}  # by switch, the port whose link it lost first
    first: dict[str, Change] = {}
    for one in under:
        kind, _, port = one.subject.partition(" ")
        if kind == "link":
            if "LOWER_UP" not in (one.text or "").split():
                lost.setdefault(one.node, port)
                first.setdefault("carrier", one)
        elif one.node not in lost:
            if lost:
                first.setdefault("withdrawn", one)
        elif f"dev {lost[one.node]}" not in (one.text or ""):
            first.setdefault("next hop", one)
    return tuple(
        Stage(
            name=name, after_ns=max(0, first[name].at_ns - start_ns), node=first[name].node, subject=first[name].subject
        )
        for name in STAGES
        if name in first
    )
