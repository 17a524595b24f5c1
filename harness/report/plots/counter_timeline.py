"""Counters and events of the lab on the run's time axis, for the report's chart. Pure.

**Error counters** (`TROUBLE`). A watcher samples as often as it can (ten times a second on a quiet machine, once in
four seconds on an emulated one) and records what has changed. A series here consists of steps: the growth from one
sample of its node to the next, divided by the time between them. The exact moment of the growth is unknown.

**Events.** Kernels report changes of links, routes and logs as they happen. Equal events of one node within
`TOGETHER_NS` of each other are one mark.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from faultbed.harness.report.fabric.fabric_states import link_state
from faultbed.testbed.observe.counters import delta
from faultbed.testbed.observe.telemetry import Change, Sample

__all__ = [
    "MOST",
    "TOGETHER_NS",
    "TROUBLE",
    "EventKind",
    "EventMark",
    "Series",
    "Step",
    "event_marks",
    "series",
    "thinned",
]

EventKind = Literal["down", "up", "link", "routes", "gone", "kernel"]

TOGETHER_NS = 300_000_000
"""Equal events of one node that are at most this far apart become one mark."""
MOST = 8
"""Maximum number of series in one chart. The report's table of counters has all of them."""

TROUBLE = {
    "out_of_seq_request": "gaps seen",
    "out_of_sequence": "gaps seen",
    "rcvd_seq_err": "NAKs received",
    "packet_seq_err": "NAKs received",
    "completer_retry_err": "timers ran out",
    "local_ack_timeout_err": "timers ran out",
    "retry_exceeded_err": "retries used up",
    "duplicate_request": "duplicates received",
    "send_err": "failed to send",
    "rcvd_rnr_err": "RNR NAKs received",
    "send_rnr_err": "RNR NAKs sent",
    "rnr_nak_retry_err": "RNR NAKs received",
    "InCEPkts": "packets marked CE",
    "np_cnp_sent": "CNPs sent",
    "rp_cnp_handled": "CNPs handled",
    "nr_throttled": "periods throttled",
    "FragFails": "too large to forward",
    "InNoRoutes": "no route",
    "queue_drops": "dropped by its queue",
    "tx_dropped": "dropped on the way out",
    "rx_dropped": "dropped on the way in",
}
"""Meaning of a counter by the last part of its name (rdma_rxe, mlx5, netdev and cgroup names)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Growth per second between two samples, in seconds since the workload's start."""

    start_s: float
    end_s: float
    per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One counter of one node over a run. `grown` is the total growth; the steps have the part within the run."""

    node: str
    name: str
    words: str
    grown: int
    steps: tuple[Step, ...]

    @property
    def place(self) -> str:
        """Name such as `host1:rxe0`."""
        return f"{self.node}:{self.name.rpartition('.')[0]}"

    @property
    def label(self) -> str:
        """Label such as `host1:rxe0 timers ran out (completer_retry_err)`."""
        return f"{self.place} {self.words} ({self.name.rpartition('.')[2]})"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventMark:
    """One mark: `count` equal changes on a node from `start_s` to `end_s` since the workload's start."""

    node: str
    start_s: float
    end_s: float
    kind: EventKind
    words: str
    count: int


def series(samples: Sequence[Sample], *, t0_ns: int, end_ns: int) -> tuple[Series, ...]:
    """Return the error counters that grew in the run, the largest growth first, alternating between meanings.

    The first few series therefore cover every kind of trouble, instead of only the most frequent kind.
    """
    times: dict[str, list[int]] = {}
    values: dict[tuple[str, str], dict[int, int]] = {}
    for sample in samples:
        times.setdefault(sample.node, []).append(sample.at_ns)
        for name, value in sample.values.items():
            if name.rpartition(".")[2] in TROUBLE:
                values.setdefault((sample.node, name), {})[sample.at_ns] = value
    grown = [
        grown_series
        for (node, name), readings in values.items()
        if (grown_series := _series(node, name, sorted(times[node]), readings, (t0_ns, end_ns))) is not None
    ]
    grown.sort(key=lambda grown_series: (-grown_series.grown, grown_series.node, grown_series.name))
    by_meaning: dict[str, list[Series]] = {words: [] for words in TROUBLE.values()}
    for grown_series in grown:
        by_meaning[grown_series.words].append(grown_series)
    turns = itertools.zip_longest(*by_meaning.values())
    return tuple(grown_series for turn in turns for grown_series in turn if grown_series is not None)


def _series(
    node: str, name: str, times_ns: Sequence[int], readings: Mapping[int, int], within: tuple[int, int]
) -> Series | None:
    t0_ns, end_ns = within
    steps, grown, last, last_ns = [], 0, None, 0
    for at_ns in times_ns:
        value = readings.get(at_ns, last)
        if value is None:
            continue
        start_ns, stop_ns = max(last_ns, t0_ns), min(at_ns, end_ns)
        if last is not None and start_ns < stop_ns:
            more = delta(last, value)
            grown += more
            per_s = more / ((at_ns - last_ns) / 1e9)
            steps.append(Step(start_s=(start_ns - t0_ns) / 1e9, end_s=(stop_ns - t0_ns) / 1e9, per_s=per_s))
        last, last_ns = value, at_ns
    if not grown:
        return None
    return Series(node=node, name=name, words=TROUBLE[name.rpartition(".")[2]], grown=grown, steps=tuple(steps))


def thinned(steps: Sequence[Step], width_s: float) -> tuple[Step, ...]:
    """Merge neighbouring steps until all but the last are at least `width_s` long. A merged step has the mean rate."""
    merged: list[Step] = []
    pending: list[Step] = []
    for step in steps:
        pending.append(step)
        if step.end_s - pending[0].start_s >= width_s:
            merged.append(_joined(pending))
            pending = []
    return (*merged, *([_joined(pending)] if pending else ()))


def _joined(steps: Sequence[Step]) -> Step:
    start_s, end_s = steps[0].start_s, steps[-1].end_s
    if len(steps) == 1:
        return steps[0]
    grown = sum(step.per_s * (step.end_s - step.start_s) for step in steps)
    return Step(start_s=start_s, end_s=end_s, per_s=grown / (end_s - start_s))


def event_marks(changes: Iterable[Change], *, t0_ns: int, end_ns: int) -> tuple[EventMark, ...]:
    """Return the marks of a run, in order of time."""
    drawn: list[EventMark] = []
    latest: dict[tuple[str, EventKind, str], int] = {}
    before: dict[tuple[str, str], str | None] = {}
    for change in sorted(changes, key=lambda change: change.at_ns):
        key = change.node, change.subject
        mark = _mark_of(change, before.get(key), known=key in before)
        before[key] = change.text
        if mark is None or not t0_ns <= change.at_ns <= end_ns:
            continue
        kind, words = mark
        at_s = (change.at_ns - t0_ns) / 1e9
        index = latest.get((change.node, kind, words))
        if index is not None and at_s - drawn[index].end_s <= TOGETHER_NS / 1e9:
            latest_mark = drawn[index]
            drawn[index] = EventMark(
                node=latest_mark.node,
                start_s=latest_mark.start_s,
                end_s=at_s,
                kind=kind,
                words=words,
                count=latest_mark.count + 1,
            )
            continue
        latest[change.node, kind, words] = len(drawn)
        drawn.append(EventMark(node=change.node, start_s=at_s, end_s=at_s, kind=kind, words=words, count=1))
    return tuple(_counted(mark) for mark in drawn)


def _mark_of(change: Change, before: str | None, *, known: bool) -> tuple[EventKind, str] | None:
    """Describe a change in a few words; None if nothing changed."""
    kind, _, name = change.subject.partition(" ")
    if kind == "kernel":
        return "kernel", "kernel log"
    if known and before == change.text:
        return None
    if kind == "link":
        state = link_state(change.text)
        if state == "up" and (not known or link_state(before) == "up"):
            # The carrier did not return, because no loss was seen before: the event reports changed settings.
            return "link", f"{name} {_settings(change.text)}"
        return ("up" if state == "up" else "down"), f"{name} {state}"
    noun = "next hop" if kind == "nexthop" else "route"
    if change.text is None:
        return "gone", f"{noun} gone"
    words = change.text.replace(",", " ").split()
    devices = sorted({word for keyword, word in itertools.pairwise(words) if keyword == "dev"})
    return "routes", f"{noun} → {', '.join(devices)}" if devices else f"{noun} changed"


def _settings(text: str | None) -> str:
    """Return text such as `mtu 4200 qdisc noqueue`, without flags, address and kind."""
    words = (text or "").split()
    return " ".join(f"{name} {value}" for name, value in itertools.pairwise(words) if name in {"mtu", "qdisc"})


def _counted(mark: EventMark) -> EventMark:
    if mark.count == 1 or mark.kind not in {"routes", "gone"}:
        return mark
    noun, _, rest = mark.words.rpartition(" gone") if mark.kind == "gone" else mark.words.partition(" →")
    words = f"{mark.count} {noun}s gone" if mark.kind == "gone" else f"{mark.count} {noun}s →{rest}"
    return EventMark(
        node=mark.node, start_s=mark.start_s, end_s=mark.end_s, kind=mark.kind, words=words, count=mark.count
    )
