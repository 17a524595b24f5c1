"""Part of the bench: what watching the lab costs its traffic. One flow, watched and not watched by turns.

Within one flow neighbouring seconds are alike, flows of the same lab are not: so it takes few minutes to tell one per
cent.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np

from harness.bench.rows import Row, mark
from harness.statistics import percentile_interval
from testbed import telemetry
from testbed.errors import LabError
from testbed.lab import Lab
from traffic import flow
from traffic.bench import PATIENT
from traffic.flow import FlowSpec
from traffic.results import Sample

__all__ = ["goodput_bps", "measure"]

PAIRS, WINDOW_S, SETTLE_S, MESSAGE_BYTES = 40, 8.0, 3.0, 65536
"""What the beginning of watching costs is told within its first two seconds: a run has it once, and no part here."""
GRACE_S = 60.0
MOST_COST = 0.01
LEVEL = 0.95

_Span = tuple[int, int]


def measure(lab: Lab, src: str, dst: str) -> Iterator[Row]:
    """Goodput of a flow while all machines are watched as in a run, over that right before or after.

    Raises:
        LabError: the flow did not end as it should.
    """
    length_s = 2 * PAIRS * WINDOW_S
    # What starts and ends the watching takes its time, too: the flow is stopped when all is done.
    spec = FlowSpec(src=src, dst=dst, message_bytes=MESSAGE_BYTES, duration_s=2 * length_s, qp=PATIENT)
    running = flow.start(lab, spec)
    try:
        spans = [_pair(lab, watched_first=number % 2 == 0) for number in range(PAIRS)]
    finally:
        running.stop()
        result = running.wait(GRACE_S)
    if result.outcome == "failed":
        raise LabError(f"bench: the flow failed: {result.where}")
    ratios = np.array([goodput_bps(result.samples, on) / goodput_bps(result.samples, off) for on, off in spans])
    middle = float(np.median(ratios))
    interval = percentile_interval(ratios, 50, level=LEVEL)
    if interval is None:
        raise LabError(f"bench: {PAIRS} pairs are too few for an interval")
    spread = f"{interval.low:.3f}..{interval.high:.3f} ({interval.level:.0%}), n={PAIRS}"
    goal = 1 - MOST_COST
    yield "goodput watched / not watched", f"{middle:.3f}", spread, f">= {goal:g}", mark(reached=middle >= goal)


def goodput_bps(samples: Sequence[Sample], span: _Span) -> float:
    """Payload of the samples that are whole inside a span of time, in bits a second.

    Raises:
        LabError: there is none.
    """
    inside = [one for one in samples if span[0] <= one.start_ns and one.start_ns + one.duration_ns <= span[1]]
    if not inside:
        raise LabError("bench: the flow has left no samples of a part of its time")
    length_ns = max(one.start_ns + one.duration_ns for one in inside) - min(one.start_ns for one in inside)
    return sum(one.size_bytes for one in inside) * 8e9 / length_ns


def _pair(lab: Lab, *, watched_first: bool) -> tuple[_Span, _Span]:
    """The spans in which it was watched, and not."""
    found = {watched: _window(lab, watched=watched) for watched in (watched_first, not watched_first)}
    return found[True], found[False]


def _window(lab: Lab, *, watched: bool) -> _Span:
    with contextlib.ExitStack() as stack:
        if watched:
            stack.enter_context(telemetry.start(lab))
        threading.Event().wait(SETTLE_S)
        begin_ns = time.monotonic_ns()
        threading.Event().wait(WINDOW_S - SETTLE_S)
        return begin_ns, time.monotonic_ns()
