"""What is seen of a run while it goes on, and the guard that looks at it: stop conditions, and whose the lab is.

with Watching(guard, live, lab.guard) as watching:
    ...                                 # faults come and go; `watching.stopped` tells that they have to go at once
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from harness.experiment.stop import Guard
from harness.record import kernel_log
from testbed.errors import FaultbedError
from testbed.telemetry import Change
from traffic.samples import BIN_NS

__all__ = ["LOOK_S", "Live", "Watching"]

LOOK_S = 0.5
"""How often it is looked at."""
LAG_NS = 1_000_000_000
"""Samples of traffic are told twice a second: what is older than this has come."""
WINDOW_NS = 1_000_000_000


class Live:
    """Grows as a run goes on: fed by the events of its traffic and by what its machines tell. Thread-safe.

    `heard_ns` gives, by machine, when something of it was heard last (controller ns); None: nobody listens.
    `slow_ranks` gives how many ranks are slow now (`harness.run.online`); None: nobody looks for them.
    """

    def __init__(self) -> None:
        self.heard_ns: Callable[[], Mapping[str, int]] | None = None
        self.slow_ranks: Callable[[], int | None] | None = None
        self._lock = threading.Lock()
        self._bytes: Counter[int] = Counter()
        self._qp_errors = 0
        self._kernel: list[Change] = []
        self._start_ns: int | None = None
        self._fault_ns: int | None = None
        self._before_bps: float | None = None

    def begin(self, *, start_ns: int, fault_ns: int) -> None:
        """The workload has started; its goodput from then until the first fault is what the rest is compared with."""
        with self._lock:
            self._start_ns, self._fault_ns = start_ns, fault_ns

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Take an event of the workload (`traffic.run`)."""
        with self._lock:
            if event["event"] == "qp_error":
                self._qp_errors += 1
            elif event["event"] == "sample":
                first = event["start_ns"] // BIN_NS
                for index, size in enumerate(event["sizes"]):
                    self._bytes[first + index] += size

    def on_change(self, change: Change) -> None:
        """Take what a machine's kernel has told (`testbed.telemetry`)."""
        if change.subject == "kernel":
            with self._lock:
                self._kernel.append(change)

    def values(self, now_ns: int) -> dict[str, float | None]:
        """What `harness.experiment.stop.METRICS` names, as it is now; None: not known (yet)."""
        heard = self.heard_ns() if self.heard_ns is not None else {}
        slow = self.slow_ranks() if self.slow_ranks is not None else None
        with self._lock:
            return {
                "qp_errors": self._qp_errors,
                "goodput_ratio": self._goodput_ratio(now_ns),
                "silence": max(((now_ns - at_ns) / 1e9 for at_ns in heard.values()), default=None),
                "kernel.broken": len(kernel_log.broken(self._kernel)),
                "slow_ranks": slow,
            }

    def _goodput_ratio(self, now_ns: int) -> float | None:
        end_ns = now_ns - LAG_NS
        if self._start_ns is None or self._fault_ns is None or end_ns - WINDOW_NS < self._fault_ns:
            return None
        if self._before_bps is None:
            self._before_bps = self._mean(self._start_ns, self._fault_ns)
        return self._mean(end_ns - WINDOW_NS, end_ns) / self._before_bps if self._before_bps else None

    def _mean(self, start_ns: int, end_ns: int) -> float:
        """Bytes in each bin, on average, over the bins that begin within a time."""
        bins = range(-(-start_ns // BIN_NS), -(-end_ns // BIN_NS))
        return sum(self._bytes[number] for number in bins) / len(bins) if bins else 0.0


class Watching:
    """Looks twice a second, on a thread of its own, for as long as its `with` block lasts.

    `stopped` is set when a stop condition holds, or when the lab is no longer ours: `error` says so then.
    """

    def __init__(self, guard: Guard, live: Live, ours: Callable[[], None]) -> None:
        self.stopped = threading.Event()
        self.error: FaultbedError | None = None
        self._guard, self._live, self._ours = guard, live, ours
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stop conditions", daemon=True)

    def _watch(self) -> None:
        while not self._done.wait(LOOK_S) and not self.stopped.is_set():
            try:
                self.look()
            except Exception as error:  # noqa: BLE001  # a defect of ours must not leave faults unguarded
                self.error = FaultbedError(f"stop conditions could not be looked at: {type(error).__name__}: {error}")
                self.stopped.set()

    def look(self) -> None:
        """Look once."""
        now_ns = time.monotonic_ns()
        if self._guard.look(now_ns, self._live.values(now_ns)) is not None:
            self.stopped.set()
            return
        try:
            self._ours()
        except FaultbedError as error:
            self.error = error
            self.stopped.set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join(10.0)
