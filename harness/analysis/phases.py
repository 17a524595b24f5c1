"""Recovery in phases: where the time went between a fault's first firing and goodput's return. Pure.

    detect      firing → an end noticed the loss: a NAK passed a captured port, a sender's timer expired, or a QP failed
    retransmit  noticed → the lost packet passes again (captured ports only)
    qp_error    firing → the first completion with an error
    rebuild     that error → the last failed queue pair is connected again, with its GID looked up again
    first_data  connected again → its first data has completed
    hold        the last mark of the above → goodput is back permanently (`harness.analysis.timeline`)

A phase that did not happen has length 0. A phase that no data shows, or that did not end, is missing.
Marks belong to the fault in whose window they lie, extended by `LATE_NS`. A window begins when the fault may have fired
first, which is before its observed firing: a NAK needs a few milliseconds, and the counter is read every 20 ms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from harness.analysis.timeline import Impact
from harness.record.measurements import Measurements

__all__ = ["ENDING", "NAMES", "Phase", "phases"]

NAMES = ("detect", "retransmit", "qp_error", "rebuild", "first_data", "hold")
ENDING = ("rebuild", "first_data", "hold")
"""Phases that every fault with an impact has, if they ended."""
LATE_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase, in controller ns; `detail` says what marks its end.

    `is_exact`: it did not happen, or both times are of one clock. `is_from_firing`: it begins at the observed firing.
    """

    name: str
    start_ns: int
    end_ns: int
    detail: str
    is_exact: bool = False
    is_from_firing: bool = False

    @property
    def length_ns(self) -> int:
        """Length of the phase."""
        return self.end_ns - self.start_ns


def phases(
    run: Measurements, impacts: Mapping[str, Impact], early_ns: Mapping[str, int] | None = None
) -> dict[str, tuple[Phase, ...]]:
    """Return the phases of each fault that has an impact, in the order of `NAMES`.

    `early_ns` is by how much a fault may have fired before its observed firing.
    """
    begins = {fault_id: impact.fired_ns - (early_ns or {}).get(fault_id, 0) for fault_id, impact in impacts.items()}
    return {
        fault_id: tuple(
            _phases_of_fault(run, impact, begins[fault_id], _until(impact, begins.values(), begins[fault_id]))
        )
        for fault_id, impact in impacts.items()
    }


def _until(impact: Impact, begins: Iterable[int], mine_ns: int) -> int:
    """Return the time after which marks no longer belong to this fault."""
    end = impact.end_ns + LATE_NS
    return min([end, *(begin for begin in begins if begin > mine_ns)])


def _phases_of_fault(run: Measurements, impact: Impact, begin_ns: int, until_ns: int) -> list[Phase]:
    fired = impact.fired_ns
    errors = sorted(lost_qp.time_ns for lost_qp in run.qps_lost if begin_ns <= lost_qp.time_ns < until_ns)
    backs = (
        []
        if run.packets is None
        else sorted(going_back for going_back in run.packets.goings_back if begin_ns <= going_back[0] < until_ns)
    )
    rebuilds = [mark for mark in run.rebuild_marks if begin_ns <= mark.error_ns < until_ns]
    phases_found = []
    noticed = min([*errors[:1], *(going_back[0] for going_back in backs[:1])], default=None)
    if noticed is not None:
        notice = "a NAK or a timer" if backs and backs[0][0] == noticed else "a queue pair died"
        if noticed < fired:
            notice += ", sooner than the fault was seen to fire"
        phases_found.append(
            Phase(name="detect", start_ns=min(fired, noticed), end_ns=noticed, detail=notice, is_from_firing=True)
        )
    if backs:
        lost_ns, repeated_ns = backs[0]
        phases_found.append(
            Phase(
                name="retransmit",
                start_ns=lost_ns,
                end_ns=repeated_ns,
                detail="the lost packet passed again",
                is_exact=True,
            )
        )
    dead = errors[0] if errors else fired
    words = f"{len(errors)} completions with an error" if errors else "no queue pair died"
    phases_found.append(
        Phase(
            name="qp_error",
            start_ns=min(fired, dead),
            end_ns=dead,
            detail=words,
            is_exact=not errors,
            is_from_firing=True,
        )
    )
    rebuilt_ns = [mark.rebuilt_ns for mark in rebuilds if mark.rebuilt_ns is not None]
    through = [mark.recovered_ns for mark in rebuilds if mark.recovered_ns is not None]
    if len(rebuilt_ns) == len(rebuilds):
        connected = max([dead, *rebuilt_ns])
        words = f"{len(rebuilds)} queue pairs connected again" if rebuilds else "none had to be"
        phases_found.append(Phase(name="rebuild", start_ns=dead, end_ns=connected, detail=words, is_exact=not rebuilds))
        if len(through) == len(rebuilds):
            data = max([connected, *through])
            words = "data through the new queue pairs"
            phases_found.append(
                Phase(name="first_data", start_ns=connected, end_ns=data, detail=words, is_exact=not rebuilds)
            )
    if impact.recovered_ns is not None:
        last = max([fired, *(phase.end_ns for phase in phases_found if phase.end_ns <= impact.recovered_ns)])
        phases_found.append(
            Phase(
                name="hold",
                start_ns=last,
                end_ns=max(last, impact.recovered_ns),
                detail="goodput back at 95 % of its noise floor, and it stayed there",
                is_exact=not impact.recovery_ns,
                is_from_firing=last == fired,
            )
        )
    return phases_found
