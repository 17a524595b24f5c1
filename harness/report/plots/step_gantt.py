"""Iterations of each rank around a fault, bar by bar, and a description of the longest stall. Pure.

There is one chart per fault, around the iteration that it delayed most. For a failed job the flight recorders continue
where the reported iterations end. A begun iteration is `open`; one that ended but was not reported is `whole`, because
a recorder does not separate compute from waiting.

The stall is described from the first available source: the flight recorders of a failed job, the capture, a queue pair
that failed meanwhile, or its length relative to the rank's own median.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from faultbed.harness.attribution.packet_stalls import Wait
from faultbed.harness.attribution.stalls import Stall
from faultbed.harness.findings import Attribution
from faultbed.harness.quantities import format_duration
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.record.evidence.workload_evidence import Iteration, connection_between
from faultbed.harness.report.fabric.fabric_states import Window
from faultbed.traffic.engine.flight_recorder import Flight

__all__ = ["MOST", "MOST_ROWS", "Bar", "BarKind", "Gantt", "Row", "StallMark", "gantts"]

BarKind = Literal["ingest", "compute", "wait", "comm", "checkpoint", "whole", "open"]
MOST, MOST_ROWS = 4, 16
"""Charts in a report; ranks in one chart (those that stalled longest)."""

_BEFORE, _AFTER, _FAR = 2.5, 3.0, 16.0
"""Median iterations shown before and after the longest one; how far it may be from the firing to show both."""
_WAITING = 0.5
"""Weight of a wait when the longest bar is chosen, because a waiting rank is usually not the late one."""
_ROUNDING_NS = 1_000_000
_DID = {
    "ingest": "waited for data",
    "compute": "computed",
    "wait": "waited",
    "comm": "communicated",
    "checkpoint": "waited for its checkpoint",
}
_PARTS: tuple[BarKind, ...] = ("ingest", "compute", "wait", "comm", "checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One part of an iteration, seconds since the workload's start."""

    kind: BarKind
    iteration: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rank's bars."""

    rank: int
    name: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StallMark:
    """The longest stall: its row, start and end, a short label and a sentence."""

    rank: int
    start_s: float
    end_s: float
    short: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gantt:
    """One chart. `fault` is its number in the report."""

    fault: int
    start_s: float
    end_s: float
    rows: tuple[Row, ...]
    stall: StallMark

    @property
    def kinds(self) -> tuple[BarKind, ...]:
        """Kinds of bars in the chart."""
        return tuple(dict.fromkeys(bar.kind for row in self.rows for bar in row.bars))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Worst:
    """The bar with the largest excess over its rank's median of the same kind."""

    rank: int
    kind: BarKind
    bar: Bar
    excess_s: float
    median_s: float


class _KnownStalls(NamedTuple):
    """Known stalls. `silent` ranks left no recording although others did: when they last reported (s)."""

    stalled: Sequence[tuple[Stall, str]]
    waits: Sequence[Wait]
    findings: Sequence[Attribution]
    silent: Mapping[int, float]


def gantts(
    run: RunEvidence,
    windows: Sequence[Window],
    *,
    recovered_ns: Mapping[int, int],
    flights: Sequence[Flight] = (),
    stalled: Sequence[tuple[Stall, str]] = (),
    waits: Sequence[Wait] = (),
    findings: Sequence[Attribution] = (),
) -> tuple[Gantt, ...]:
    """Return a chart for each of the first `MOST` faults with iterations during or after it.

    Args:
        run: the run with its iterations.
        windows: the active faults.
        recovered_ns: by number of a fault, when goodput was back; missing if unknown.
        flights: flight recorders of a failed job.
        stalled: stalls derived from them, each with its sentence.
        waits: waits derived from a capture.
        findings: causes and places by attribution; a link on the path is named.
    """
    bars = _bars(run, flights)
    if not any(bars.values()):
        return ()
    medians = _medians(bars)
    usual_s = (
        statistics.median(
            [iteration.end_ns - iteration.start_ns for series in run.workload.series for iteration in series.iterations]
            or [1e8]
        )
        / 1e9
    )
    silent = _silent(run, flights)
    charts = []
    for window in sorted(windows, key=lambda candidate: candidate.start_ns)[:MOST]:
        until_ns = max(window.end_ns, recovered_ns.get(window.number, 0)) + round(usual_s * 1e9)
        span_s = (window.start_ns - run.workload.t0_ns) / 1e9, (until_ns - run.workload.t0_ns) / 1e9
        worst = _worst(bars, medians, span_s)
        if worst is not None:
            charts.append(
                _gantt(run, window, bars, worst, usual_s, known_stalls=_KnownStalls(stalled, waits, findings, silent))
            )
    return tuple(charts)


def _bars(run: RunEvidence, flights: Sequence[Flight]) -> dict[int, tuple[Bar, ...]]:
    """Return bars by rank, in order of time."""
    now_ns = max((entry.at_ns for flight in flights for entry in flight.entries), default=run.workload.end_ns)
    now_ns = max(now_ns, run.workload.end_ns) if flights else now_ns
    by_rank: dict[int, tuple[Bar, ...]] = {}
    recorders = {flight.rank: flight for flight in flights}
    for series in run.workload.series:
        known = [bar for iteration in series.iterations for bar in _parts(iteration, run.workload.t0_ns)]
        last_ns = max((iteration.end_ns for iteration in series.iterations), default=run.workload.t0_ns)
        if series.rank in recorders:
            known += _bars_of_recorder(recorders[series.rank], last_ns, t0_ns=run.workload.t0_ns, now_ns=now_ns)
        by_rank[series.rank] = tuple(sorted(known, key=lambda bar: bar.start_s))
    return by_rank


def _parts(iteration: Iteration, t0_ns: int) -> list[Bar]:
    at_ns, bars = iteration.start_ns, []
    for kind in _PARTS:
        length_ns = getattr(iteration, f"{kind}_ns")
        if length_ns:
            start_s, end_s = (at_ns - t0_ns) / 1e9, (at_ns + length_ns - t0_ns) / 1e9
            bars.append(Bar(kind=kind, iteration=iteration.index, start_s=start_s, end_s=end_s))
        at_ns += length_ns
    return bars


def _bars_of_recorder(flight: Flight, last_ns: int, *, t0_ns: int, now_ns: int) -> list[Bar]:
    """Return the iterations after the last reported one, from the recorder, which also counts the warm-up."""
    begun = {
        entry.iteration: entry.at_ns
        for entry in flight.entries
        if entry.what == "begin" and entry.at_ns >= last_ns - _ROUNDING_NS
    }
    ended = {entry.iteration: entry.at_ns for entry in flight.entries if entry.what == "end"}
    return [
        Bar(
            kind="whole" if index in ended else "open",
            iteration=index,
            start_s=(at_ns - t0_ns) / 1e9,
            end_s=(ended.get(index, now_ns) - t0_ns) / 1e9,
        )
        for index, at_ns in begun.items()
    ]


def _silent(run: RunEvidence, flights: Sequence[Flight]) -> dict[int, float]:
    reported = {flight.rank for flight in flights}
    return {
        rank.rank: (
            max((iteration.end_ns for iteration in rank.iterations), default=run.workload.t0_ns) - run.workload.t0_ns
        )
        / 1e9
        for rank in run.workload.series
        if reported and rank.rank not in reported
    }


def _medians(bars: Mapping[int, Sequence[Bar]]) -> dict[tuple[int, BarKind], float]:
    lengths: dict[tuple[int, BarKind], list[float]] = {}
    for rank, rank_bars in bars.items():
        for bar in rank_bars:
            lengths.setdefault((rank, bar.kind), []).append(bar.end_s - bar.start_s)
    return {key: statistics.median(bar_lengths) for key, bar_lengths in lengths.items()}


def _worst(
    bars: Mapping[int, Sequence[Bar]],
    medians: Mapping[tuple[int, BarKind], float],
    span_s: tuple[float, float],
) -> _Worst | None:
    """Return the bar that is longest relative to its rank's median, among those that overlap a span of time."""
    best: tuple[float, _Worst] | None = None
    for rank, rank_bars in bars.items():
        for bar in rank_bars:
            if bar.end_s <= span_s[0] or bar.start_s >= span_s[1]:
                continue
            # An iteration without an end has no comparison; all of it counts.
            median_s = 0.0 if bar.kind == "open" else medians[rank, bar.kind]
            excess_s = bar.end_s - bar.start_s - median_s
            weight = excess_s * (_WAITING if bar.kind == "wait" else 1)
            if best is None or weight > best[0]:
                worst = _Worst(rank=rank, kind=bar.kind, bar=bar, excess_s=excess_s, median_s=median_s)
                best = weight, worst
    return None if best is None else best[1]


def _gantt(
    run: RunEvidence,
    window: Window,
    bars: Mapping[int, Sequence[Bar]],
    worst: _Worst,
    usual_s: float,
    *,
    known_stalls: _KnownStalls,
) -> Gantt:
    fired_s = (window.start_ns - run.workload.t0_ns) / 1e9
    near = abs(worst.bar.start_s - fired_s) <= _FAR * usual_s
    start_s = max(0.0, (min(worst.bar.start_s, fired_s) if near else worst.bar.start_s) - _BEFORE * usual_s)
    last_s = max(bar.end_s for rank_bars in bars.values() for bar in rank_bars)
    end_s = min(worst.bar.end_s + _AFTER * usual_s, last_s + usual_s / 2)
    names = {rank.rank: f"{rank.host}:{rank.rnic}" for rank in run.workload.ranks}
    stall = _mark(run, worst, names, known_stalls=known_stalls)
    rows = [
        Row(
            rank=rank,
            name=names.get(rank, f"rank {rank}"),
            bars=tuple(bar for bar in rank_bars if bar.end_s > start_s and bar.start_s < end_s),
        )
        for rank, rank_bars in bars.items()
    ]
    if len(rows) > MOST_ROWS:
        longest = {row.rank: max((bar.end_s - bar.start_s for bar in row.bars), default=0.0) for row in rows}
        kept = sorted(rows, key=lambda row: (row.rank != stall.rank, -longest[row.rank]))[:MOST_ROWS]
        rows = sorted(kept, key=lambda row: row.rank)
    return Gantt(fault=window.number, start_s=start_s, end_s=end_s, rows=tuple(rows), stall=stall)


def _mark(run: RunEvidence, worst: _Worst, names: Mapping[int, str], *, known_stalls: _KnownStalls) -> StallMark:
    """Describe the stall from the most detailed source."""
    of_recorders = None
    if worst.kind == "open":
        of_recorders = _recorded_stall(worst, known_stalls.stalled) or _silent_rank(worst, names, known_stalls.silent)
    return of_recorders or _captured_wait(run, worst, known_stalls.waits) or _long_bar(run, worst, names, known_stalls)


def _recorded_stall(worst: _Worst, stalled: Sequence[tuple[Stall, str]]) -> StallMark | None:
    """Return the longest stall of the flight recorders; None without any."""
    if not stalled:
        return None
    stall, words = max(stalled, key=lambda known: known[0].waited_ns)
    return StallMark(
        rank=stall.waiter,
        start_s=max(worst.bar.start_s, worst.bar.end_s - stall.waited_ns / 1e9),
        end_s=worst.bar.end_s,
        short=f"step {stall.step}, rank {stall.sender}→{stall.receiver}",
        words=words,
    )


def _silent_rank(worst: _Worst, names: Mapping[int, str], silent: Mapping[int, float]) -> StallMark | None:
    """Return the only rank without a recording; None if all or several ranks have none."""
    if len(silent) != 1:
        return None
    ((rank, last_s),) = silent.items()
    return StallMark(
        rank=rank,
        start_s=last_s,
        end_s=max(last_s, worst.bar.end_s),
        short="no recording",
        words=f"rank {rank} ({names.get(rank, '?')}) left no recording, the others did; it reported nothing after "
        f"{last_s:.2f} s",
    )


def _captured_wait(run: RunEvidence, worst: _Worst, waits: Sequence[Wait]) -> StallMark | None:
    """Return the first wait of the capture in the iteration of the worst bar; None if the capture shows none."""
    wait = next((wait for wait in waits if wait.receiver is not None and wait.iteration == worst.bar.iteration), None)
    if wait is None or wait.receiver is None:
        return None
    until_s = (wait.until_ns - run.workload.t0_ns) / 1e9
    return StallMark(
        rank=wait.receiver,
        start_s=until_s - wait.waited_ns / 1e9,
        end_s=until_s,
        short=f"rank {wait.sender}→{wait.receiver}, {format_duration(wait.waited_ns)}",
        words=wait.words,
    )


def _long_bar(run: RunEvidence, worst: _Worst, names: Mapping[int, str], known_stalls: _KnownStalls) -> StallMark:
    """Return the worst bar itself, with a queue pair of its rank that failed meanwhile."""
    length_s = worst.bar.end_s - worst.bar.start_s
    name = names.get(worst.rank, "?")
    if worst.kind in {"open", "whole"}:
        words = f"iteration {worst.bar.iteration}, rank {worst.rank} ({name}): {length_s:.2f} s" + (
            ", and it did not end" if worst.kind == "open" else ""
        )
    else:
        words = (
            f"iteration {worst.bar.iteration}: rank {worst.rank} ({name}) {_DID[worst.kind]} "
            f"{format_duration(length_s * 1e9)}, its median is {format_duration(worst.median_s * 1e9)}"
        )
    return StallMark(
        rank=worst.rank,
        start_s=worst.bar.start_s,
        end_s=worst.bar.end_s,
        short=f"iteration {worst.bar.iteration}, {format_duration(length_s * 1e9)}",
        words=words + _failed_queue_pair(run, worst, name, known_stalls.findings),
    )


def _failed_queue_pair(run: RunEvidence, worst: _Worst, name: str, findings: Sequence[Attribution]) -> str:
    """Describe a failed queue pair of the rank, with its path, or the link on it that the attribution names."""
    for lost_qp in run.workload.qps_lost:
        at_s = (lost_qp.time_ns - run.workload.t0_ns) / 1e9
        if name not in {lost_qp.endpoint, lost_qp.peer} or not worst.bar.start_s <= at_s <= worst.bar.end_s:
            continue
        connection = connection_between(
            run.workload, (lost_qp.endpoint, lost_qp.peer), index=lost_qp.connection, qpn=lost_qp.qpn
        )
        path = connection.path if connection else ()
        links = {link.name: {link.a.node, link.b.node} for link in run.lab.topology.links}
        lossy_link = next((finding.name for finding in findings if links.get(finding.name, {""}) <= set(path)), None)
        location = f", stalled at {lossy_link}" if lossy_link else f" over {' → '.join(path)}" if path else ""
        return f"; its queue pair {lost_qp.endpoint} → {lost_qp.peer} failed meanwhile ({lost_qp.status}){location}"
    return ""
