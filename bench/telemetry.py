"""Part `telemetry` of the bench: the cost of telemetry. One flow, in alternation with and without telemetry.

One flow is used, because flows of the same lab differ. Even so, the goodput of a flow that is limited by the CPUs
differs by a fifth from one span to the next, so that an effect of 1 % cannot be measured. CPU time can: it is measured
while CPUs are idle, without traffic and beside a paced flow. Telemetry lowers the goodput of a flow that is limited by
the CPUs by at most its share of all CPU time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Self, TypeAlias, TypeVar

import numpy as np

from bench.rows import Row, decided
from bench.throughput.perftest import PATIENT
from faultbed.harness.confidence import Interval, percentile_interval
from faultbed.testbed.backends.soft.vm_process import cpu_s
from faultbed.testbed.errors import LabError
from faultbed.testbed.lab import Lab
from faultbed.testbed.observe import telemetry
from faultbed.traffic.engine.run_results import Sample
from faultbed.traffic.flows import flow_run
from faultbed.traffic.flows.flow_run import FlowSpec

__all__ = ["goodput_bps", "measure"]

PAIRS, WINDOW_S, SETTLE_S, MESSAGE_BYTES = 40, 8.0, 3.0, 65536
"""`SETTLE_S` excludes the start of the telemetry, which takes less than two seconds and happens once in a run."""
CPU_PAIRS, CPU_WINDOW_S, PACED_BPS = 10, 20.0, 8e6
LONGEST_S, GRACE_S = 3600.0, 60.0
MOST_COST = 0.01
LEVEL = 0.95

Value = TypeVar("Value", int, float)
_Span: TypeAlias = tuple[Value, Value]
"""A value at the begin of a span of time, and the same value at its end."""


def measure(lab: Lab, src: str, dst: str, progress: Callable[[str], None]) -> Iterator[Row]:
    """Yield the goodput of a flow with telemetry over that without it, and the CPU time of telemetry.

    Raises:
        LabError: a flow failed.
    """
    progress(f"a flow, in turn with and without telemetry: {PAIRS} pairs of {WINDOW_S:g} s")
    with _Flow(lab, src, dst) as running:
        spans = [_pair(lab, number, WINDOW_S, time.monotonic_ns) for number in range(PAIRS)]
    ratios = [goodput_bps(running.samples, on) / goodput_bps(running.samples, off) for on, off in spans]
    interval, goal = _interval(ratios), 1 - MOST_COST
    spread = f"{interval.low:.3f}..{interval.high:.3f} ({interval.level:.0%}), n={PAIRS}"
    verdict = decided(interval, least=goal)
    yield "goodput with telemetry / without it", f"{np.median(ratios):.3f}", spread, f">= {goal:g}", verdict

    progress(f"CPU time without traffic: {CPU_PAIRS} pairs of {CPU_WINDOW_S:g} s")
    yield _cpu(lab, "no traffic")
    progress(f"CPU time beside a flow of {PACED_BPS / 1e6:g} Mb/s: {CPU_PAIRS} pairs of {CPU_WINDOW_S:g} s")
    with _Flow(lab, src, dst, rate_bps=PACED_BPS):
        yield _cpu(lab, f"{PACED_BPS / 1e6:g} Mb/s")


def _cpu(lab: Lab, load: str) -> Row:
    """Return a row about the CPU time that telemetry adds, in the VMs and in this process, as a share of all CPUs."""
    pids = [*(lab.vm_pid(name) for name in lab.nodes()), os.getpid()]
    cpus, length_s = len(os.sched_getaffinity(0)), CPU_WINDOW_S - SETTLE_S
    cpu_readings = [_pair(lab, number, CPU_WINDOW_S, lambda: sum(map(cpu_s, pids))) for number in range(CPU_PAIRS)]
    shares = [((on[1] - on[0]) - (off[1] - off[0])) / length_s / cpus for on, off in cpu_readings]
    other_share = float(np.median([off[1] - off[0] for _, off in cpu_readings])) / length_s / cpus
    interval = _interval(shares)
    spread = f"{interval.low:.2%}..{interval.high:.2%} ({interval.level:.0%}), n={CPU_PAIRS}"
    title = f"CPU time of telemetry / all {cpus} CPUs, {load} (VMs and bench used {other_share:.1%} without it)"
    return title, f"{np.median(shares):.2%}", spread, f"<= {MOST_COST:.0%}", decided(interval, most=MOST_COST)


def goodput_bps(samples: Sequence[Sample], span: tuple[int, int]) -> float:
    """Return the payload rate in bits per second of the samples that lie wholly in a span of time.

    Raises:
        LabError: there is no such sample.
    """
    inside = [
        sample for sample in samples if span[0] <= sample.start_ns and sample.start_ns + sample.duration_ns <= span[1]
    ]
    if not inside:
        raise LabError("bench: the flow reported no sample in a measured span; measure again on an idle machine")
    length_ns = max(sample.start_ns + sample.duration_ns for sample in inside) - min(
        sample.start_ns for sample in inside
    )
    return sum(sample.size_bytes for sample in inside) * 8e9 / length_ns


class _Flow:
    """A flow that runs until its `with` block ends, however long the telemetry takes to start and stop."""

    samples: Sequence[Sample] = ()

    def __init__(self, lab: Lab, src: str, dst: str, *, rate_bps: float = 0.0) -> None:
        spec = FlowSpec(
            src=src, dst=dst, message_bytes=MESSAGE_BYTES, duration_s=LONGEST_S, rate_bps=rate_bps, qp=PATIENT
        )
        self._running = flow_run.start(lab, spec)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.stop()
        result = self._running.wait(GRACE_S)
        if result.outcome == "failed":
            raise LabError(f"bench: the flow failed: {result.where}")
        self.samples = result.samples


def _interval(values: Sequence[float]) -> Interval:
    interval = percentile_interval(np.array(values), 50, level=LEVEL)
    if interval is None:
        raise LabError(f"bench: {len(values)} pairs are too few for an interval")
    return interval


def _pair(lab: Lab, number: int, length_s: float, read: Callable[[], Value]) -> tuple[_Span[Value], _Span[Value]]:
    """Return the readings at both ends of a span with telemetry, and those of a neighbouring span without it.

    Which of the two spans comes first alternates with `number`.
    """
    spans = {watched: _window(lab, length_s, read, watched=watched) for watched in (number % 2 == 0, number % 2 == 1)}
    return spans[True], spans[False]


def _window(lab: Lab, length_s: float, read: Callable[[], Value], *, watched: bool) -> _Span[Value]:
    """Return what `read` returns at the begin and the end of a span, whose first `SETTLE_S` are left out."""
    with ExitStack() as stack:
        if watched:
            stack.enter_context(telemetry.start(lab))
        threading.Event().wait(SETTLE_S)
        begin = read()
        threading.Event().wait(length_s - SETTLE_S)
        return begin, read()
