"""When a fault fired and how long it was on, compared with the plan. Pure.

A fault is proven if it was armed, counted and witnessed (`faultbed.inject.evidence.receipt`), and if all of these hold:

* It first fired while the workload ran.
* It was on as planned. Each phase lasts from the completed change to the beginning of its removal. Its length, and that
  of each pause between phases, may differ from the plan by 100 ms or 5 %, whichever is more. Because 100 ms can be all
  of a short phase, all phases together must last for at least half of the planned time. The time that changes and
  removals take lies outside the phases and is reported. Each may take 2 s (measured on an emulated switch that forwards
  meanwhile: 0.03 to 0.15 s), and longer if the mechanism declares it (`switching_ns`, such as a daemon that starts);
  beyond that it is unknown how long the fault was on.
* It was on while the workload ran: time before its start or after its end does not count.

Some faults are complete once they have hit (a reset, a killed rank, one packet by its PSN, a number of forged packets).
They have no on-time: they are complete after `complete_after` hits, whenever they were cleared.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from faultbed.inject.evidence.observation import Observation
    from faultbed.inject.mechanisms.planned_fault import PlannedFault

__all__ = [
    "RULE",
    "OnTime",
    "Span",
    "drop_unmade_edges",
    "measured_spans",
    "on_time_of",
    "on_time_of_fault",
    "planned_spans",
    "tolerance_ns",
    "why_not_as_planned",
    "why_outside",
]

_FLOOR_NS = 100_000_000
_SHARE = 0.05
"""Allowed difference from the plan: this share of the planned time, but at least `_FLOOR_NS`."""
_LEAST = 0.5
"""Least share of the planned time that a fault must be on for, however short its phases are."""
_SWITCHING_NS = 2_000_000_000
"""Time that one change or removal may take, unless the mechanism declares more."""

RULE = (
    f"on for the planned time, within {_FLOOR_NS / 1e6:g} ms or {_SHARE:.0%}, whichever is larger; on for at least "
    f"{_LEAST:.0%} of it; only time while the workload ran counts"
)
"""The rule as printed in reports."""

Span = tuple[int, int]
"""Beginning and end in ns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnTime:
    """When a fault was on, and when it was planned to be; made by `on_time_of`.

    `planned` are the phases relative to the onset. `measured` are the phases that were read back, in controller time:
    from the completed change to the beginning of its removal. `planned_ns` and `measured_ns` are their sums,
    `tolerance_ns` is the allowed difference. `changing_ns` is how long changes and removals took together;
    `switching_ns` is how long the mechanism may need for each. `complete`: the fault has hit as often as planned, so
    that its phases do not matter. `late_ns` is how much later than requested it began. `until_cleared`: it was planned
    to last until it was cleared. `drifted_ns` is by how much at least its target's clock and the controller's moved
    apart meanwhile: the phases are in time of the target, which stands still while a VM is paused.
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
    drifted_ns: int = 0


def on_time_of(
    planned: tuple[Span, ...],
    changes: Sequence[Sequence[Any]],
    *,
    switching_ns: int = 0,
    complete: bool = False,
    late_ns: int = 0,
    until_cleared: bool = False,
    drifted_ns: int = 0,
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
        drifted_ns=drifted_ns,
    )


def on_time_of_fault(
    planned: PlannedFault, observed: Observation, *, count: int, until_cleared: bool, drifted_ns: int = 0
) -> OnTime:
    """Return a fault's on-time from its holder's observation (`faultbed.inject.node.holder`) and its `count` of hits.

    With `until_cleared` the window ends when the fault is cleared, if that is before its planned end.
    """
    edges, window_ns = planned.request["edges"], planned.spec.for_ns
    changes, clear_ns = observed.changes, observed.clear_ns
    is_shortened = False
    if until_cleared and changes and clear_ns is not None:
        is_shortened = True
        # The window of one change begins when the change is complete, that of a train when its first change begins.
        begin_ns = changes[0][1 if len(edges) == 1 else 0]
        window_ns = min(window_ns, max(0, clear_ns - begin_ns))
        edges = drop_unmade_edges(edges, window_ns, changes)
    return on_time_of(
        planned_spans(edges, window_ns),
        changes,
        switching_ns=int(1e9 * (observed.patience_s + planned.request.get("patience_s", 0.0))),
        complete=planned.mechanism.complete_after is not None and count >= planned.mechanism.complete_after,
        late_ns=observed.late_ns,
        until_cleared=is_shortened,
        drifted_ns=drifted_ns,
    )


def tolerance_ns(planned_ns: int) -> int:
    """Return the allowed difference between a measured and a planned time."""
    return max(_FLOOR_NS, int(planned_ns * _SHARE))


def planned_spans(edges: Sequence[Sequence[Any]], window_ns: int) -> tuple[Span, ...]:
    """Return the phases in which a fault is planned to be on, relative to its onset.

    Args:
        edges: (seconds from the onset, on) of each change, in order, as in the holder's request.
        window_ns: the end of the window; later phases are left out, and the last phase ends there.
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


def drop_unmade_edges(
    edges: Sequence[Sequence[Any]], window_ns: int, changes: Sequence[Sequence[Any]]
) -> list[Sequence[Any]]:
    """Drop the edges after a shortened window, and those in its last 100 ms that the holder did not make any more."""
    onsets_made = sum(1 for _, _, on in changes if on)
    kept = [edge for edge in edges if int(edge[0] * 1e9) < window_ns - _FLOOR_NS]
    return list(edges) if sum(1 for _, on in kept if on) < onsets_made else kept


def measured_spans(changes: Sequence[Sequence[Any]]) -> tuple[tuple[Span, ...], int]:
    """Return the phases in which a fault was certainly on, and how long all changes took together.

    Args:
        changes: (begin, end, on) of each change that was read back, in order. A phase whose end is unknown is left
            out.
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
    """Return why a fault's on-time is not as planned; empty if it is.

    Args:
        on_time: the fault's on-time.
        workload: start and end of the workload in controller ns; only time within it counts. None: there was none.
    """
    if on_time.complete:
        return ()
    planned = on_time.planned
    if not planned:
        return ("was never planned to be on",)
    measured = on_time.measured if workload is None else _parts_within(on_time.measured, workload)
    total_ns, planned_ns = _total(measured), on_time.planned_ns
    during = "" if measured == on_time.measured else " while the workload ran"
    time_on = f"for {_seconds(total_ns)} of the planned {_seconds(planned_ns)}"
    if len(measured) != len(planned):
        times = "" if len(planned) == 1 else f" {len(measured)} of {len(planned)} planned times,"
        return (f"was on{times} {time_on}{during}",)
    wrong = [*_wrong_spans(measured, planned, during), *_wrong_spans(_gaps(measured), _gaps(planned), during, "off")]
    if len(planned) > 1 and abs(total_ns - planned_ns) > tolerance_ns(planned_ns) + on_time.changing_ns:
        wrong.append(f"was on {time_on} in all{during}")
    if not wrong and not on_time.until_cleared and total_ns < _LEAST * planned_ns:
        wrong.append(f"was on {time_on}{during}, which is less than {_LEAST:.0%}")
    return (*wrong, *_why_unknown(on_time))


def _parts_within(spans: Sequence[Span], window: Span) -> tuple[Span, ...]:
    """Return the parts of spans that lie within a window."""
    return tuple(
        (max(begin, window[0]), min(end, window[1])) for begin, end in spans if begin < window[1] and end > window[0]
    )


def _why_unknown(on_time: OnTime) -> Iterator[str]:
    """Yield why it is unknown how long a fault was on; nothing if it is known."""
    allowed_ns = 2 * len(on_time.planned) * (_SWITCHING_NS + on_time.switching_ns)
    if on_time.changing_ns > allowed_ns:
        yield (
            f"took {_seconds(on_time.changing_ns)} to switch on and off, more than the {_seconds(allowed_ns)} "
            "allowed: it is unknown how long it was on"
        )
    if on_time.drifted_ns > on_time.tolerance_ns:
        yield (
            f"its target's clock and the controller's moved {_seconds(on_time.drifted_ns)} apart meanwhile (a VM that "
            "was paused, or loaded from a snapshot): it is unknown how long it was on"
        )


def why_outside(between_ns: Span, workload: Span) -> str | None:
    """Return why a fault whose first hit lies between two moments may have missed the workload; None: it has not."""
    start_ns, end_ns = workload
    first_ns, last_ns = between_ns
    if first_ns > end_ns:
        return f"fired {_seconds(first_ns - end_ns)} after the workload ended"
    if last_ns < start_ns:
        return f"fired {_seconds(start_ns - last_ns)} before the workload started"
    if last_ns > end_ns:
        return f"may have fired after the workload ended: up to {_seconds(last_ns - end_ns)} later"
    if first_ns < start_ns:
        return f"may have fired before the workload started: up to {_seconds(start_ns - first_ns)} earlier"
    return None


def _wrong_spans(measured: Sequence[Span], planned: Sequence[Span], during: str, word: str = "on") -> list[str]:
    wrong = [
        f"{word} for {_seconds(real[1] - real[0])} of the planned {_seconds(want[1] - want[0])}"
        for real, want in zip(measured, planned, strict=True)
        if abs((real[1] - real[0]) - (want[1] - want[0])) > tolerance_ns(want[1] - want[0])
    ]
    if not wrong:
        return []
    if len(planned) == 1:
        return [f"was {wrong[0]}{during}"]
    return [f"was {word} too long or too short {len(wrong)} of {len(planned)} times{during}; the first: {wrong[0]}"]


def _total(spans: Sequence[Span]) -> int:
    return sum(end - begin for begin, end in spans)


def _gaps(spans: Sequence[Span]) -> list[Span]:
    return [(earlier[1], later[0]) for earlier, later in itertools.pairwise(spans)]


def _seconds(ns: float) -> str:
    """Return seconds as text: two decimals below 10 s, four digits above."""
    return f"{ns / 1e9:.2f} s" if abs(ns) < 1e10 else f"{ns / 1e9:.4g} s"  # noqa: PLR2004
