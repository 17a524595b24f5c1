"""Live state of a run, and the watcher that compares it with stop conditions.

with StopWatcher(guard, live, run.ending):
    ...                                 # faults are armed and cleared, at once if the end of the pass is requested
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from faultbed.harness.analysis import timeline
from faultbed.harness.parts.passes import EarlyEnd
from faultbed.harness.parts.stops.stop_guard import Guard
from faultbed.harness.record import kernel_log
from faultbed.testbed.observe.telemetry import Change
from faultbed.traffic.engine.run_results import Standstill
from faultbed.traffic.engine.samples import BIN_NS

__all__ = ["CHECK_INTERVAL_S", "Live", "StopWatcher"]

CHECK_INTERVAL_S = 0.5
"""Interval at which stop conditions are checked."""
LAG_NS = 1_000_000_000
"""Samples of traffic arrive twice a second, so all samples older than this have arrived."""
WINDOW_NS = 1_000_000_000
"""Length of the window of `goodput_ratio`."""
SILENT_NS = 5_000_000_000
"""Time without a byte, before the first fault, from which the workload counts as not making progress."""
STANDSTILL_SHARE = 0.2
"""Share of the fault-free start for which a host may have stood still."""
_GATE_NS = (1_500_000_000, 300_000_000)
"""Begin and end of the check, as times before the first fault: an unhealthy workload then keeps all faults unarmed."""


class Live:
    """Live state of a run, updated by events of its traffic and of its machines. Thread-safe.

    `heard_ns` returns, by machine, the time of its latest message (controller ns); None: without telemetry.
    `without_log` returns the machines whose kernel's log is not followed.
    `slow_ranks` returns how many ranks are slow now; None: without detection.
    `is_over` returns whether the workload has ended. `standstills` returns when hosts stood still, and `reads` when the
    harness read counters, up to now. `needs_baseline`: the experiment bounds a metric that is compared with the
    fault-free start.
    """

    def __init__(self) -> None:
        self.heard_ns: Callable[[], Mapping[str, int]] | None = None
        self.without_log: Callable[[], Sequence[str]] = tuple
        self.slow_ranks: Callable[[], float | None] | None = None
        self.is_over: Callable[[], bool] = lambda: False
        self.standstills: Callable[[], Sequence[Standstill]] = tuple
        self.reads: Callable[[], Sequence[tuple[int, int]]] = tuple
        self.needs_baseline = False
        self._lock = threading.Lock()
        self._bytes: Counter[int] = Counter()
        self._qp_errors = 0
        self._reported_ns: int | None = None
        self._lengths: list[int] = []
        self._kernel: list[Change] = []
        self._start_ns: int | None = None
        self._fault_ns: int | None = None
        self._before_bps: float | None = None
        self._is_gate_done = False

    def begin(self, *, start_ns: int, fault_ns: int) -> None:
        """Note the start of the workload. Its goodput until the first fault, at `fault_ns`, is the baseline."""
        with self._lock:
            self._start_ns, self._fault_ns = start_ns, fault_ns
            self._reported_ns = time.monotonic_ns()

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Record an event of the workload (`faultbed.traffic.engine.running_traffic`)."""
        with self._lock:
            if event["event"] == "qp_error":
                self._qp_errors += 1
            elif event["event"] == "sample":
                self._reported_ns = event.get("time_ns", self._reported_ns)
                if not event.get("has_arrived", True):  # UC and UD: the receiver counts what came
                    return
                first = event["start_ns"] // BIN_NS
                for index, size in enumerate(event["sizes"]):
                    self._bytes[first + index] += size
            elif event["event"] == "iteration":
                self._lengths.append(event["end_ns"] - event["start_ns"])

    def on_change(self, change: Change) -> None:
        """Record a change that a machine's kernel has reported (`faultbed.testbed.observe.telemetry`)."""
        if change.subject == "kernel":
            with self._lock:
                self._kernel.append(change)

    def values(self, now_ns: int) -> dict[str, float | None]:
        """Return the current values of `faultbed.harness.experiment.stop.METRICS`; None: unknown, or not yet known."""
        heard = self.heard_ns() if self.heard_ns is not None else {}
        slow = self.slow_ranks() if self.slow_ranks is not None else None
        unlogged = self.without_log()
        with self._lock:
            is_known, broken = self._is_reporting(now_ns), len(kernel_log.broken(self._kernel))
            return {
                "qp_errors": self._qp_errors if is_known else None,
                "goodput_ratio": self._goodput_ratio(now_ns) if is_known else None,
                "silence": max(((now_ns - at_ns) / 1e9 for at_ns in heard.values()), default=None),
                "kernel.broken": broken if broken or not unlogged else None,
                "slow_ranks": slow,
            }

    def due(self, now_ns: int) -> frozenset[str]:
        """Return the metrics that must be known by now: all except `slow_ranks`, which needs enough iterations."""
        with self._lock:
            if self._start_ns is None or self._fault_ns is None or self.is_over():
                return frozenset()
            can_compare = now_ns - LAG_NS - WINDOW_NS >= self._fault_ns
        return frozenset({"qp_errors", "silence", "kernel.broken", *(["goodput_ratio"] if can_compare else [])})

    def expected_ns(self) -> dict[str, int]:
        """Return from when on each metric of `due` must be known (controller, ns)."""
        with self._lock:
            if self._start_ns is None or self._fault_ns is None:
                return {}
            fault_ns = self._fault_ns
        counted = dict.fromkeys(("qp_errors", "silence", "kernel.broken"), fault_ns)
        return {**counted, "goodput_ratio": fault_ns + LAG_NS + WINDOW_NS}

    def why_gate_missed(self) -> str | None:
        """Return why the health of the workload before the first fault is unknown; None: it was checked."""
        with self._lock:
            if self._start_ns is None or self._is_gate_done:
                return None
        begin_s, end_s = (offset_ns / 1e9 for offset_ns in _GATE_NS)
        return (
            f"the health of the workload was not checked in the time from {begin_s:g} s to {end_s:g} s before it; "
            "begin the fault later, or repeat the run on a controller that is less busy"
        )

    def _is_reporting(self, now_ns: int) -> bool:
        """Return whether ranks have reported within `LAG_NS`, or need not, because the workload is over."""
        return self._reported_ns is None or now_ns - self._reported_ns <= LAG_NS or self.is_over()

    def unhealthy(self, now_ns: int) -> str | None:
        """Return what is wrong with the workload just before the first fault; None: nothing, or not the time."""
        reads, standstills = self.reads(), self.standstills()
        with self._lock:
            start_ns, fault_ns = self._start_ns, self._fault_ns
            if start_ns is None or fault_ns is None or not _GATE_NS[1] <= fault_ns - now_ns <= _GATE_NS[0]:
                return None
            self._is_gate_done = True
            first = -(-start_ns // BIN_NS)
            sizes = np.array([self._bytes[at] for at in range(first, (now_ns - LAG_NS) // BIN_NS)], dtype=np.float64)
            lost, length_ns = self._qp_errors, int(np.median(self._lengths)) if self._lengths else 0
        if lost:
            return f"{lost} queue pairs were lost before the first fault"
        start = timeline.Goodput(t0_ns=first * BIN_NS, step_ns=BIN_NS, bytes=sizes)
        reason = _no_progress(sizes) or _standstill(standstills, start_ns, now_ns)
        return reason or (_unsteady(start, length_ns, reads) if self.needs_baseline else None)

    def _goodput_ratio(self, now_ns: int) -> float | None:
        end_ns = now_ns - LAG_NS
        if self._start_ns is None or self._fault_ns is None or end_ns - WINDOW_NS < self._fault_ns:
            return None
        if self._before_bps is None:
            self._before_bps = self._mean(self._start_ns, self._fault_ns)
        return self._mean(end_ns - WINDOW_NS, end_ns) / self._before_bps if self._before_bps else None

    def _mean(self, start_ns: int, end_ns: int) -> float:
        """Return the mean bytes per bin over the bins that begin within a time."""
        bins = range(-(-start_ns // BIN_NS), -(-end_ns // BIN_NS))
        return sum(self._bytes[number] for number in bins) / len(bins) if bins else 0.0


def _no_progress(sizes: np.ndarray[Any, np.dtype[np.float64]]) -> str | None:
    """Return a reason if no bytes arrive; a pause of up to twice the longest one before is normal."""
    carrying = np.flatnonzero(sizes)
    if not len(carrying):
        silent_ns, usual_ns = len(sizes) * BIN_NS, 0
    else:
        silent_ns = (len(sizes) - 1 - int(carrying[-1])) * BIN_NS
        usual_ns = int(np.diff(carrying, prepend=0).max()) * BIN_NS
    if silent_ns <= max(SILENT_NS, 2 * usual_ns):
        return None
    return f"the workload makes no progress: no byte in the last {silent_ns / 1e9:.1f} s"


def _standstill(standstills: Sequence[Standstill], start_ns: int, now_ns: int) -> str | None:
    stood_ns: Counter[str] = Counter()
    for standstill in standstills:
        stood_ns[standstill.host] += max(0, standstill.end_ns - max(standstill.start_ns, start_ns))
    host, most_ns = max(stood_ns.items(), key=lambda item: item[1], default=("", 0))
    if most_ns <= STANDSTILL_SHARE * (now_ns - start_ns):
        return None
    return (
        f"{host} stood still for {most_ns / 1e9:.1f} s of the {(now_ns - start_ns) / 1e9:.1f} s before the first fault"
    )


def _unsteady(start: timeline.Goodput, iteration_ns: int, reads: Sequence[tuple[int, int]]) -> str | None:
    window_ns = -(-max(timeline.ROLLING_NS, 2 * iteration_ns) // BIN_NS) * BIN_NS
    share = timeline.steadiness(start, until_ns=start.end_ns, window_ns=window_ns, reads=reads)
    if share is None or share >= timeline.STEADY_SHARE:
        return None
    return (
        f"goodput varies too much to measure a recovery: rolling goodput falls to {share:.2f} of its mean without a "
        f"fault (at least {timeline.STEADY_SHARE:g} is needed)"
    )


class StopWatcher:
    """Evaluates stop conditions twice a second, on a thread of its own, until its `with` block ends.

    It requests the end of the pass when a stop condition holds or has no data, and when the workload is not healthy
    before the first fault. `Guard` has the reason, too.
    """

    def __init__(self, guard: Guard, live: Live, ending: EarlyEnd) -> None:
        self._guard, self._live, self._ending = guard, live, ending
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="stop conditions", daemon=True)

    def _repeat(self) -> None:
        while not self._done.wait(CHECK_INTERVAL_S) and not self._ending.is_requested:
            try:
                self.check_conditions()
            except Exception as error:  # noqa: BLE001  # a defect of ours must not leave faults unguarded
                problem = f"stop conditions could not be evaluated: {type(error).__name__}: {error}"
                self._ending.request(f"stopped: {problem}", error=problem)

    def check_conditions(self) -> None:
        """Evaluate the stop conditions once, and the workload's health if the first fault is near."""
        guard, now_ns = self._guard, time.monotonic_ns()
        held = guard.evaluate(now_ns, self._live.values(now_ns), due=self._live.due(now_ns))
        if held is None and guard.missing is None:
            guard.refused = self._live.unhealthy(now_ns)
        if held is not None:
            condition = held.condition
            self._ending.request(f"stopped: {condition.metric.name} was {held.value:g}, bound {condition.bound:g}")
        elif guard.missing is not None:
            metric = guard.missing.condition.metric.name
            self._ending.request(f"stopped: no more data of {metric}, which a stop condition needs")
        elif guard.refused is not None:
            self._ending.request(f"no fault was armed: {guard.refused}")

    def __enter__(self) -> Self:
        self._guard.expect(self._live.expected_ns())
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended_ns, was_ended = time.monotonic_ns(), self._ending.is_requested
        self._done.set()
        self._thread.join(10.0)
        if not was_ended:  # otherwise the faults ended, and with them the time to be covered, when it was requested
            self._guard.end(ended_ns)
