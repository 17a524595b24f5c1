"""Recovery in phases: where the time went between a fault's first firing and goodput's return. Pure.

    detect      firing → an end noticed the loss: a NAK passed a captured port, a sender's timer expired, or a QP failed
    retransmit  noticed → the lost packet passes again (captured ports only)
    qp_error    firing → the first completion with an error
    rebuild     that error → the last failed queue pair is connected again, with its GID looked up again
    first_data  connected again → its first data has completed
    hold        the last mark of the above → goodput is back permanently (`faultbed.harness.analysis.timeline`)

A phase that did not happen has length 0. A phase that no data shows, or that did not end, is missing.
Marks belong to the fault in whose window they lie, extended by `LATE_NS`. A window begins when the fault may have fired
first, which is before its observed firing: a NAK needs a few milliseconds, and the counter is read every 20 ms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from faultbed.harness.analysis.timeline import Impact
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.record.evidence.workload_evidence import RebuildMark

__all__ = ["ENDING", "NAMES", "Phase", "phases"]

NAMES = ("detect", "retransmit", "qp_error", "rebuild", "first_data", "hold")
ENDING = ("rebuild", "first_data", "hold")
"""Phases that every fault with an impact has: if one is missing, it did not end."""
LATE_NS = 1_000_000_000
"""Time after goodput's return during which marks still belong to the fault."""


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
    run: RunEvidence,
    impacts: Mapping[str, Impact],
    early_ns: Mapping[str, int] | None = None,
    *,
    goings_back: Sequence[tuple[int, int]] = (),
) -> dict[str, tuple[Phase, ...]]:
    """Return the phases of each fault that has an impact, in the order of `NAMES`.

    `early_ns` is by how much a fault may have fired before its observed firing. `goings_back` are times of captured
    packets: when the NAK passed or the timer expired, and when the lost packet passed again.
    """
    begins = {fault_id: impact.fired_ns - (early_ns or {}).get(fault_id, 0) for fault_id, impact in impacts.items()}
    return {
        fault_id: tuple(
            _phases_of_fault(
                impact,
                _marks_in(
                    run,
                    goings_back,
                    impact.fired_ns,
                    begins[fault_id],
                    _until(impact, begins.values(), begins[fault_id]),
                ),
            )
        )
        for fault_id, impact in impacts.items()
    }


def _until(impact: Impact, begins: Iterable[int], mine_ns: int) -> int:
    """Return the time after which marks no longer belong to this fault."""
    end = impact.end_ns + LATE_NS
    return min([end, *(begin for begin in begins if begin > mine_ns)])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Marks:
    """What the run recorded in the window of one fault, in controller ns and in order of time.

    `goings_back` are pairs: when the NAK passed or the timer expired, and when the lost packet passed again.
    """

    fired_ns: int
    errors_ns: tuple[int, ...]
    goings_back: tuple[tuple[int, int], ...]
    rebuilds: tuple[RebuildMark, ...]

    @property
    def first_error_ns(self) -> int:
        """Time of the first completion with an error; the firing if there was none, so that the phase has length 0."""
        return self.errors_ns[0] if self.errors_ns else self.fired_ns


def _marks_in(
    run: RunEvidence, goings_back: Sequence[tuple[int, int]], fired_ns: int, begin_ns: int, until_ns: int
) -> _Marks:
    """Return the marks of a fault: those at `begin_ns` or later and before `until_ns`."""
    errors_ns = sorted(lost_qp.time_ns for lost_qp in run.workload.qps_lost if begin_ns <= lost_qp.time_ns < until_ns)
    return _Marks(
        fired_ns=fired_ns,
        errors_ns=tuple(errors_ns),
        goings_back=tuple(sorted(times for times in goings_back if begin_ns <= times[0] < until_ns)),
        rebuilds=tuple(mark for mark in run.workload.rebuild_marks if begin_ns <= mark.error_ns < until_ns),
    )


def _phases_of_fault(impact: Impact, marks: _Marks) -> list[Phase]:
    before_hold = [*_detect(marks), *_retransmit(marks), _qp_error(marks), *_rebuild_and_first_data(marks)]
    return [*before_hold, *_hold(impact, before_hold)]


def _detect(marks: _Marks) -> Iterator[Phase]:
    """Yield the time until the first NAK, timer or error; nothing if there was none."""
    goings_back_ns = [noticed_ns for noticed_ns, _ in marks.goings_back]
    noticed_ns = min([*marks.errors_ns, *goings_back_ns], default=None)
    if noticed_ns is None:
        return
    notice = "a NAK or a timer" if noticed_ns in goings_back_ns else "a queue pair failed"
    if noticed_ns < marks.fired_ns:
        notice += ", sooner than the fault was seen to fire"
    yield Phase(
        name="detect", start_ns=min(marks.fired_ns, noticed_ns), end_ns=noticed_ns, detail=notice, is_from_firing=True
    )


def _retransmit(marks: _Marks) -> Iterator[Phase]:
    """Yield the time until the first lost packet passed again; nothing if no capture shows it."""
    for noticed_ns, repeated_ns in marks.goings_back[:1]:
        yield Phase(
            name="retransmit",
            start_ns=noticed_ns,
            end_ns=repeated_ns,
            detail="the lost packet passed again",
            is_exact=True,
        )


def _qp_error(marks: _Marks) -> Phase:
    count = len(marks.errors_ns)
    return Phase(
        name="qp_error",
        start_ns=min(marks.fired_ns, marks.first_error_ns),
        end_ns=marks.first_error_ns,
        detail=f"{count} completions with an error" if count else "no queue pair failed",
        is_exact=not count,
        is_from_firing=True,
    )


def _rebuild_and_first_data(marks: _Marks) -> Iterator[Phase]:
    """Yield both phases, each only if it ended for every queue pair that failed."""
    count = len(marks.rebuilds)
    rebuilt_ns = [mark.rebuilt_ns for mark in marks.rebuilds if mark.rebuilt_ns is not None]
    if len(rebuilt_ns) < count:
        return
    connected_ns = max([marks.first_error_ns, *rebuilt_ns])
    yield Phase(
        name="rebuild",
        start_ns=marks.first_error_ns,
        end_ns=connected_ns,
        detail=f"{count} queue pairs connected again" if count else "no queue pair had to be connected again",
        is_exact=not count,
    )
    recovered_ns = [mark.recovered_ns for mark in marks.rebuilds if mark.recovered_ns is not None]
    if len(recovered_ns) < count:
        return
    yield Phase(
        name="first_data",
        start_ns=connected_ns,
        end_ns=max([connected_ns, *recovered_ns]),
        detail="data through the new queue pairs",
        is_exact=not count,
    )


def _hold(impact: Impact, before: Sequence[Phase]) -> Iterator[Phase]:
    """Yield the time from the last mark of the phases before until goodput was back; nothing if it never was."""
    if impact.recovered_ns is None:
        return
    last_ns = max([impact.fired_ns, *(phase.end_ns for phase in before if phase.end_ns <= impact.recovered_ns)])
    yield Phase(
        name="hold",
        start_ns=last_ns,
        end_ns=max(last_ns, impact.recovered_ns),
        detail="goodput back at 95 % of its noise floor, and it stayed there",
        is_exact=not impact.recovery_ns,
        is_from_firing=last_ns == impact.fired_ns,
    )
