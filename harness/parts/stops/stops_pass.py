"""The part `stops` in the measured pass: it watches live values while faults are on, and ends the run by them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from faultbed.harness.experiment.metrics import needs_baseline
from faultbed.harness.parts.passes import Active, Pass
from faultbed.harness.parts.stops.live_values import Live, StopWatcher
from faultbed.harness.parts.stops.stop_evidence import StopsEvidence
from faultbed.harness.parts.stops.stop_guard import Guard
from faultbed.testbed.observe.telemetry import Change

__all__ = ["active_of"]


class _Stops(Active):
    def __init__(self, run: Pass) -> None:
        self._run = run
        self._guard = Guard(run.setting.experiment.stops)
        self._live = Live()

    def begin(self) -> None:
        run, live = self._run, self._live
        running, readings, faults = run.work.running, run.readings, run.setting.plan.faults
        if running is None or not faults:
            return
        live.heard_ns, live.without_log = readings.heard_ns, readings.without_log
        live.slow_ranks = lambda: run.value("slow_ranks")
        live.is_over, live.standstills = lambda: running.ended_ns > 0, lambda: tuple(running.standstills)
        live.reads = lambda: [*readings.reads, *(read for fault in run.injected.ready for read in fault.reads)]
        expectations = run.setting.experiment.expectations
        live.needs_baseline = any(needs_baseline(expectation.metric.name) for expectation in expectations)
        live.begin(start_ns=run.work.t0_ns, fault_ns=run.work.t0_ns + faults[0].at_ns)

    def on_event(self, event: dict[str, Any]) -> None:
        self._live.on_event(event)

    def on_change(self, change: Change) -> None:
        self._live.on_change(change)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        if not self._run.setting.plan.faults:
            yield
            return
        with StopWatcher(self._guard, self._live, self._run.ending):
            yield

    def doubts(self) -> Iterable[str]:
        why = self._live.why_gate_missed()
        return () if why is None else (why,)

    def sealed(self) -> StopsEvidence:
        return self._guard.sealed(t0_ns=self._run.work.t0_ns)


def active_of(run: Pass) -> Active | None:
    """Return the stop conditions of the measured pass."""
    return _Stops(run) if run.phase == "measured" else None
