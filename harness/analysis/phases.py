"""Recovery in phases: where the time went between a fault's first firing and goodput's return. Pure.

    detect      firing → an end has noticed: a NAK passed a captured port, a sender's timer ran out, or a QP died
    retransmit  noticed → the lost packet passes again (captured ports only)
    qp_error    firing → the first completion with an error
    rebuild     that error → the last queue pair that died is connected anew, its GID looked up again
    first_data  connected anew → its first data is through
    hold        the last mark of the above → goodput is back for good (`harness.analysis.timeline`)

A phase that did not happen is 0 (no queue pair died); one that nothing could show is missing. Marks belong to the fault
whose window, with `LATE_NS` after it, they lie in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.analysis.timeline import Impact
from harness.record.measurements import Measurements

__all__ = ["NAMES", "Phase", "phases"]

NAMES = ("detect", "retransmit", "qp_error", "rebuild", "first_data", "hold")
LATE_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase, in controller ns; `detail` says what marks its end."""

    name: str
    start_ns: int
    end_ns: int
    detail: str

    @property
    def length_ns(self) -> int:
        """How long it took."""
        return self.end_ns - self.start_ns


def phases(run: Measurements, impacts: Mapping[str, Impact]) -> dict[str, tuple[Phase, ...]]:
    """The phases of each fault that has an impact, in the order of `NAMES`."""
    return {fault_id: tuple(_of(run, impact, _until(impact, impacts))) for fault_id, impact in impacts.items()}


def _until(impact: Impact, impacts: Mapping[str, Impact]) -> int:
    """Marks after this are not this fault's."""
    end = max(impact.cleared_ns, impact.fired_ns + impact.recovery_ns) + LATE_NS
    return min([end, *(other.fired_ns for other in impacts.values() if other.fired_ns > impact.fired_ns)])


def _of(run: Measurements, impact: Impact, until_ns: int) -> list[Phase]:
    fired = impact.fired_ns
    errors = sorted(one.time_ns for one in run.qps_lost if fired <= one.time_ns < until_ns)
    backs = [] if run.packets is None else sorted(one for one in run.packets.goings_back if fired <= one[0] < until_ns)
    rebuilds = [one for one in run.rebuild_marks if fired <= one.error_ns < until_ns]
    found = []
    noticed = min([*errors[:1], *(one[0] for one in backs[:1])], default=None)
    if noticed is not None:
        what = "a NAK or a timer" if backs and backs[0][0] == noticed else "a queue pair died"
        found.append(Phase(name="detect", start_ns=fired, end_ns=noticed, detail=what))
    if backs:
        seen, again = backs[0]
        found.append(Phase(name="retransmit", start_ns=seen, end_ns=again, detail="the lost packet passed again"))
    dead = errors[0] if errors else fired
    words = f"{len(errors)} completions with an error" if errors else "no queue pair died"
    found.append(Phase(name="qp_error", start_ns=fired, end_ns=dead, detail=words))
    anew = [one.rebuilt_ns for one in rebuilds if one.rebuilt_ns is not None]
    through = [one.recovered_ns for one in rebuilds if one.recovered_ns is not None]
    if len(anew) == len(rebuilds):
        connected = max([dead, *anew])
        words = f"{len(rebuilds)} queue pairs connected anew" if rebuilds else "none had to be"
        found.append(Phase(name="rebuild", start_ns=dead, end_ns=connected, detail=words))
        if len(through) == len(rebuilds):
            data = max([connected, *through])
            found.append(
                Phase(name="first_data", start_ns=connected, end_ns=data, detail="data through the new queue pairs")
            )
    if impact.recovered_ns is not None:
        last = max([fired, *(one.end_ns for one in found if one.end_ns <= impact.recovered_ns)])
        words = "goodput back at 95 % of its noise floor, and it stayed there"
        found.append(Phase(name="hold", start_ns=last, end_ns=max(last, impact.recovered_ns), detail=words))
    return found
