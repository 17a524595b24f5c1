"""How routing followed a fault: which change came when, on which switch. Pure.

    fired → detected: the first link, next hop or route that changed on a switch
          → converged: the last route that changed before the fault was lifted
    lifted → restored: the last route that changed after it

A change belongs to a fault when it came between its firing and the next one's, and no more than `TAIL_NS` after it was
lifted. The kernels told the changes; nothing here is sampled, so the error is that of the clocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from testbed.telemetry import Change

__all__ = ["TAIL_NS", "Routing", "routing"]

TAIL_NS = 30_000_000_000
"""BGP with a hold time of 3 s is settled long before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Of one fault: ns from its firing (`restored_ns`: from its removal); None: nothing changed."""

    detected_ns: int | None
    converged_ns: int | None
    restored_ns: int | None
    detected_by: str = ""
    changes: int = 0


def routing(changes: Sequence[Change], fired: Mapping[str, tuple[int, int]]) -> dict[str, Routing]:
    """By fault; `fired` gives first firing and removal, in the order of firing. Changes on hosts do not count."""
    starts = [start for start, _ in fired.values()]
    found = {}
    for index, (fault_id, (start, cleared)) in enumerate(fired.items()):
        until = min([cleared + TAIL_NS, *starts[index + 1 :]])
        mine = [one for one in changes if start <= one.at_ns < until]
        ways = [one for one in mine if not one.subject.startswith("link ")]
        under, after = [x for x in ways if x.at_ns <= cleared], [x for x in ways if x.at_ns > cleared]
        found[fault_id] = Routing(
            detected_ns=mine[0].at_ns - start if mine and mine[0].at_ns <= cleared else None,
            converged_ns=under[-1].at_ns - start if under else None,
            restored_ns=after[-1].at_ns - cleared if after else None,
            detected_by=f"{mine[0].node}: {mine[0].subject}" if mine else "",
            changes=len(mine),
        )
    return found
