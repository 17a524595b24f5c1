"""What makes a receipt the proof of its fault: when it fired, and for how long it was on. Pure.

A fault is proven when it was armed, counted and witnessed (`inject.evidence.receipt`), and when all of these hold:

* It first fired while the workload ran.
* It was on as planned. Each phase (from the moment the change is there to the moment its removal begins) lasts as
  long as planned, and so does each pause of a train. The tolerance is 100 ms or 5 % of the planned time, whichever is
  more; 100 ms are all of a short phase, so that all phases together last for half of the planned time at least. The
  time that a change and its removal take themselves lies outside the phase, and is reported. Each may take
  2 s (measured on an emulated switch that forwards meanwhile: 0.03 to 0.15 s), and longer where the mechanism declares
  it (`switching_ns`, a daemon that starts); beyond that it is not known how long the fault was on.
* It was on while the workload ran: time before its start or after its end does not count.

A fault that is over by its nature once it has struck (a reset, a killed rank, one packet by its PSN, so many forged
packets) has no on-time: it is complete after `complete_after` hits, whenever it was taken away.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "RULE",
    "OnTime",
    "Span",
    "begun",
    "is_off_during",
    "measured_spans",
    "on_time_of",
    "planned_spans",
    "tolerance_ns",
    "why_not_as_planned",
    "why_outside",
]

_FLOOR_NS = 100_000_000
_SHARE = 0.05
_LEAST = 0.5
"""Share of the planned time that a fault is on for at least, however short its phases are."""
_SWITCHING_NS = 2_000_000_000

RULE = (
    f"on as planned within {_FLOOR_NS / 1e6:g} ms or {_SHARE:.0%}, whichever is more, and for {_LEAST:.0%} of it at "
    "least, while the workload ran"
)
"""The rule as reports print it."""

Span = tuple[int, int]
"""Beginning and end in ns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnTime:
    """When a fault was on, and when it was to be; made by `on_time_of`.

    `planned` are the phases from the onset on, `measured` those that were read back, in controller time: from the
    change being there to its removal being begun; `planned_ns` and `measured_ns` are their sums, `tolerance_ns` how far
    these may be apart. `changing_ns` is how long changes and removals took together, of which `switching_ns` is what
    their mechanism may need each time. `complete`: the fault has struck as often as it was to, so that its phases are
    no matter. `late_ns` is how much later than requested it began. `until_cleared`: it was to last until it was
    cleared, however soon that was.
    """

    planned_ns: int
    measured_ns: int
    tolerance_ns: int
    planned: tuple[Span, ...]
    measured: tuple[Span, ...]
    changing_ns: int = 0
    switching_ns: int = 0
    complete: bool = False
    late_ns: int = 0
    until_cleared: bool = False


def on_time_of(
    planned: tuple[Span, ...],
    changes: Sequence[Sequence[Any]],
    *,
    switching_ns: int = 0,
    complete: bool = False,
    late_ns: int = 0,
    until_cleared: bool = False,
) -> OnTime:
    """Compare planned phases with the changes that a holder has read back (`measured_spans`)."""
    measured, changing_ns = measured_spans(changes)
    planned_ns = _total(planned)
    return OnTime(
        planned_ns=planned_ns,
        measured_ns=_total(measured),
        tolerance_ns=tolerance_ns(planned_ns),
        planned=planned,
        measured=measured,
        changing_ns=changing_ns,
        switching_ns=switching_ns,
        complete=complete,
        late_ns=late_ns,
        until_cleared=until_cleared,
    )


def tolerance_ns(planned_ns: int) -> int:
    """How far a measured time may be from a planned one."""
    return max(_FLOOR_NS, int(planned_ns * _SHARE))


def planned_spans(edges: Sequence[Sequence[Any]], window_ns: int) -> tuple[Span, ...]:
    """Return the phases in which a fault is to be on, from its onset.

    Args:
        edges: (seconds from the onset, on) of each change, in order, as the holder is told.
        window_ns: when all is over; phases that begin later are left out, and the last one ends there.
    """
    spans: list[Span] = []
    since: int | None = None
    for at_s, on in edges:
        at_ns = int(at_s * 1e9)
        if at_ns >= window_ns:
            break
        if on and since is None:
            since = at_ns
        elif not on and since is not None:
            spans.append((since, at_ns))
            since = None
    if since is not None:
        spans.append((since, window_ns))
    return tuple(spans)


def begun(edges: Sequence[Sequence[Any]], window_ns: int, changes: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
    """Return the edges without those that were due within the tolerance before the window's end and were not made."""
    made = sum(1 for _, _, on in changes if on)
    left = [edge for edge in edges if int(edge[0] * 1e9) < window_ns - _FLOOR_NS]
    return list(edges) if sum(1 for _, on in left if on) < made else left


def measured_spans(changes: Sequence[Sequence[Any]]) -> tuple[tuple[Span, ...], int]:
    """Return the phases in which a fault was on for certain, and how long switching took together.

    Args:
        changes: (begin, end, on) of each change that was read back, in order. A phase without an end is left out: when
            it ended is not known.
    """
    spans: list[Span] = []
    since: int | None = None
    changing_ns = 0
    for begin_ns, end_ns, on in changes:
        changing_ns += end_ns - begin_ns
        if on and since is None:
            since = end_ns
        elif not on and since is not None:
            spans.append((since, begin_ns))
            since = None
    return tuple(spans), changing_ns


def why_not_as_planned(on_time: OnTime, workload: Span | None = None) -> tuple[str, ...]:
    """Say why the time that a fault was on is not the planned one; empty when it is.

    Args:
        on_time: of the fault.
        workload: start and end of the workload in controller ns; only time within it counts. None: there was none.
    """
    if on_time.complete:
        return ()
    measured, planned = on_time.measured, on_time.planned
    if not planned:
        return ("was planned to be on at no time",)
    if workload is not None:
        measured = tuple(
            (max(begin, workload[0]), min(end, workload[1]))
            for begin, end in measured
            if begin < workload[1] and end > workload[0]
        )
    total_ns, wanted_ns = _total(measured), on_time.planned_ns
    during = "" if measured == on_time.measured else " while the workload ran"
    if len(measured) != len(planned):
        if len(planned) == 1:
            return (f"was on for {_s(total_ns)} of {_s(wanted_ns)}{during}",)
        return (f"was on {len(measured)} times of {len(planned)}, for {_s(total_ns)} of {_s(wanted_ns)}{during}",)
    wrong = [*_wrong_spans(measured, planned, during), *_wrong_spans(_gaps(measured), _gaps(planned), during, "off")]
    if len(planned) > 1 and abs(total_ns - wanted_ns) > tolerance_ns(wanted_ns) + on_time.changing_ns:
        wrong.append(f"was on for {_s(total_ns)} of {_s(wanted_ns)} in all{during}")
    if not wrong and not on_time.until_cleared and total_ns < _LEAST * wanted_ns:
        wrong.append(f"was on for {_s(total_ns)} of {_s(wanted_ns)}{during}, which is less than half")
    allowed_ns = 2 * len(planned) * (_SWITCHING_NS + on_time.switching_ns)
    if on_time.changing_ns > allowed_ns:
        wrong.append(
            f"took {_s(on_time.changing_ns)} to be switched on and off, {_s(allowed_ns)} at most were to be: how long "
            "it was on is not known"
        )
    return tuple(wrong)


def is_off_during(on_time: OnTime, workload: Span) -> bool:
    """Whether none of the phases that were read back, nor a change before or after one, lies in a workload's time.

    A fault that is complete by its hits has no phases to tell it by.
    """
    if on_time.complete or not on_time.measured:
        return False
    margin_ns = on_time.changing_ns + tolerance_ns(on_time.planned_ns)
    return all(begin - margin_ns > workload[1] or end + margin_ns < workload[0] for begin, end in on_time.measured)


def why_outside(between_ns: Span, workload: Span) -> str | None:
    """Say why a fault that first fired between two moments did not fire while the workload ran; None: it did."""
    start_ns, end_ns = workload
    first_ns, last_ns = between_ns
    if first_ns > end_ns:
        return f"fired {_s(first_ns - end_ns)} after the workload ended"
    if last_ns < start_ns:
        return f"fired {_s(start_ns - last_ns)} before the workload started"
    if last_ns > end_ns:
        return f"may have fired after the workload ended: up to {_s(last_ns - end_ns)} later"
    if first_ns < start_ns:
        return f"may have fired before the workload started: up to {_s(start_ns - first_ns)} earlier"
    return None


def _wrong_spans(measured: Sequence[Span], planned: Sequence[Span], during: str, word: str = "on") -> list[str]:
    wrong = [
        f"{word} for {_s(got[1] - got[0])} of {_s(want[1] - want[0])}"
        for got, want in zip(measured, planned, strict=True)
        if abs((got[1] - got[0]) - (want[1] - want[0])) > tolerance_ns(want[1] - want[0])
    ]
    if not wrong:
        return []
    if len(planned) == 1:
        return [f"was {wrong[0]}{during}"]
    return [f"was {word} too long or too short {len(wrong)} times of {len(planned)}{during}: once {wrong[0]}"]


def _total(spans: Sequence[Span]) -> int:
    return sum(end - begin for begin, end in spans)


def _gaps(spans: Sequence[Span]) -> list[Span]:
    return [(one[1], two[0]) for one, two in itertools.pairwise(spans)]


def _s(ns: float) -> str:
    """Seconds, to the hundredth below ten of them."""
    return f"{ns / 1e9:.2f} s" if abs(ns) < 1e10 else f"{ns / 1e9:.4g} s"  # noqa: PLR2004
