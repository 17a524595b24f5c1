"""Silence of single flows that the goodput of all flows together does not show. Pure.

Ranks of a collective wait for each other, so that one that stands still stops all of them. Flows do not: of 64 flows,
one that stands still costs 1.6 % of the goodput, which is no dip. A source that carries nothing under a fault, for at
least `LEAST_NS` and for twice as long as it ever did in the fault-free start, is an outage of its own. Recovery lasts
until each such source carries data again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from faultbed.harness.analysis.timeline import HOLD_NS, Baseline, Goodput, Impact, Window
from faultbed.harness.quantities import format_duration

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["LEAST_NS", "with_silences"]

LEAST_NS = 1_000_000_000
_LONGER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Silence:
    """A stretch without data of one source, in controller ns; `is_open`: the data end before it does.

    It begins up to a bin before `begun_ns`, which is the end of its first silent bin.
    """

    begin_ns: int
    begun_ns: int
    end_ns: int
    source: str
    is_open: bool


def with_silences(
    impacts: Mapping[str, Impact],
    sources: Mapping[str, Goodput],
    base: Baseline,
    windows: Mapping[str, Window],
) -> dict[str, Impact]:
    """Return the impacts, each with a recovery that lasts until every source carries data again.

    Args:
        impacts: the impacts on the goodput of all flows, by fault id.
        sources: the goodput of each RNIC that carries flows, by its name.
        base: the fault-free start.
        windows: when each fault may have acted, by its id.
    """
    silences = [silence for name, series in sources.items() for silence in _silences(name, series, base)]
    return {
        fault_id: _lengthened(fault_id, impact, silences, windows) if fault_id in windows else impact
        for fault_id, impact in impacts.items()
    }


def _silences(source: str, series: Goodput, base: Baseline) -> Iterator[_Silence]:
    """Yield the silences of a source after the fault-free start; none of a source that was silent in all of that."""
    first, last = series.bin_of(base.start_ns), series.bin_of(base.end_ns)
    silent = series.bytes == 0
    if silent[first:last].all():
        return
    usual = max((end - begin for begin, end in _stretches(silent[first:last])), default=0)
    least = max(LEAST_NS // series.step_ns, _LONGER * usual)
    for begin, end in _stretches(silent):
        if begin >= last and end - begin >= least:
            # The last bin is short, so that it may be silent by chance.
            is_open = end >= len(silent) - 1
            yield _Silence(
                begin_ns=series.time_of(begin),
                begun_ns=series.time_of(begin + 1),
                end_ns=series.time_of(end),
                source=source,
                is_open=is_open,
            )


def _stretches(silent: NDArray[np.bool_]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(silent.astype(np.int8), prepend=0, append=0))
    return [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]


def _lengthened(fault_id: str, impact: Impact, silences: list[_Silence], windows: Mapping[str, Window]) -> Impact:
    """Return an impact that lasts at least as long as the longest silence that began while its fault acted."""
    own = windows[fault_id]
    begun = [silence for silence in silences if own.start_ns <= silence.begun_ns <= own.cleared_ns + HOLD_NS]
    longest = max(begun, key=lambda silence: (silence.end_ns, silence.source), default=None)
    if longest is None or longest.end_ns - impact.fired_ns <= impact.recovery_ns:
        return impact
    others = sorted(
        name
        for name, window in windows.items()
        if name != fault_id and window.start_ns < longest.end_ns and longest.begin_ns <= window.cleared_ns + HOLD_NS
    )
    length = format_duration(longest.end_ns - longest.begin_ns)
    reason = f"{longest.source} carried nothing for {length}"
    if longest.is_open:
        reason = f"{reason}, and still nothing when the data end"
    if others:
        reason = f"{reason}, perhaps because of {' or '.join(others)}"
    is_known = not longest.is_open and not others and not impact.censored
    recovery_ns = longest.end_ns - impact.fired_ns
    return replace(
        impact,
        recovered_ns=longest.end_ns if is_known else None,
        recovery_ns=impact.recovery_ns if others else recovery_ns,
        after_clear_ns=impact.after_clear_ns if others else max(0, longest.end_ns - impact.cleared_ns),
        censored=not is_known,
        reason="" if is_known else reason,
        dip_ns=longest.begin_ns if impact.dip_ns is None else min(impact.dip_ns, longest.begin_ns),
        acted_until_ns=max(impact.acted_until_ns, longest.end_ns),
        is_back=impact.is_back and not longest.is_open,
    )
