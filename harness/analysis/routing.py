"""How routing reacted to a fault: which change came when, on which switch. Pure.

    fired → detected: the first link, next hop or route that changed on a switch
          → converged: the last route that changed before the fault was removed
    removed → restored: the last route that changed after that

Between detected and converged, if it can be determined: `carrier`, a switch lost a link; `next hop`, such a switch
removed the first or all next hops over that link; `withdrawn`, the first route changed on a switch that had lost no
link, so BGP had announced the change. When traffic moved shows in the goodput (`harness.analysis.phases`), which is
sampled.

A change belongs to a fault if it came between its firing and the next one's, at most `TAIL_NS` after its removal. The
kernels report changes as events without sampling. The error is that of the clocks and of the observed firing, before
which the fault may have acted.

A route that changed under the fault and did not change back is `left`; then nothing counts as restored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from testbed.observe.telemetry import Change

__all__ = ["STAGES", "TAIL_NS", "TIMES", "Routing", "Stage", "routing"]

STAGES = ("carrier", "next hop", "withdrawn")

TAIL_NS = 30_000_000_000
"""BGP with a hold time of 3 s converges long before."""


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
    did not come back, as `switch: route ...`; then `restored_ns` is None, too.
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
        return next((one.after_ns for one in self.stages if one.name == name), None)


TIMES: Mapping[str, Callable[[Routing], int | None]] = {
    "detected": lambda one: one.detected_ns,
    "next-hop": lambda one: one.stage_ns("next hop"),
    "withdrawn": lambda one: one.stage_ns("withdrawn"),
    "converged": lambda one: one.converged_ns,
    "restored": lambda one: one.restored_ns,
}
"""Source of the metrics `routing.*`, in ns."""


def routing(
    changes: Sequence[Change], fired: Mapping[str, tuple[int, int]], early_ns: Mapping[str, int] | None = None
) -> dict[str, Routing]:
    """Return the routing reaction by fault. Changes on hosts do not count.

    `fired` has first firing and removal, in the order of firing. `early_ns` is by how much a fault may have fired
    before its observed firing.
    """
    begins = {fault_id: start - (early_ns or {}).get(fault_id, 0) for fault_id, (start, _) in fired.items()}
    by_fault = {}
    for fault_id, (start, cleared) in fired.items():
        later = [begin for begin in begins.values() if begin > begins[fault_id]]
        until = min([cleared + TAIL_NS, *later])
        mine = [one for one in changes if begins[fault_id] <= one.at_ns < until]
        ways = [one for one in mine if not one.subject.startswith("link ")]
        under, after = [x for x in ways if x.at_ns <= cleared], [x for x in ways if x.at_ns > cleared]
        left = _left(under, after)
        by_fault[fault_id] = Routing(
            detected_ns=max(0, mine[0].at_ns - start) if mine and mine[0].at_ns <= cleared else None,
            converged_ns=max(0, under[-1].at_ns - start) if under else None,
            restored_ns=after[-1].at_ns - cleared if after and not left else None,
            detected_by=f"{mine[0].node}: {mine[0].subject}" if mine else "",
            changes=len(mine),
            stages=_stages([one for one in mine if one.at_ns <= cleared], start),
            left=left,
        )
    return by_fault


def _left(under: Sequence[Change], after: Sequence[Change]) -> tuple[str, ...]:
    """Return routes that changed once and not back. Next hops are excluded: their numbers are not stable."""
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
