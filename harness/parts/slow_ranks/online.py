"""Detection of slow ranks while the job runs: the fail-slow detector gets each iteration as ranks report it.

with Online(ranks, topology, progress) as online:
    ...                                 # `online.on_event` takes the workload's events; `online.count()` any time

The detector has a thread of its own. Every tenth iteration it learns again, which takes milliseconds. The workload's
thread must not wait for that, because it handles lost queue pairs.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from faultbed.harness.analysis.ranks.slow_ranks import StepFeed
from faultbed.testbed.errors import FaultbedError
from faultbed.testbed.model.topology import Topology
from faultbed.traffic.workloads.ranks import task_name

__all__ = ["Online"]


class Online:
    """Detects slow ranks while its `with` block lasts. All iterations reported until its end are examined.

    Args:
        ranks: the RNIC of each rank (`host3:rxe0`), in rank order; empty for flows.
        topology: provides the racks of the hosts.
        report: called once with a sentence for each alarm.
    """

    def __init__(self, ranks: Sequence[str], topology: Topology, report: Callable[[str], None]) -> None:
        self._ranks, self._report = tuple(ranks), report
        self._number = {task_name(rank): rank for rank in range(len(ranks))}
        self._lock = threading.Lock()
        self._feed = StepFeed(ranks, topology)
        self._error: FaultbedError | None = None
        self._steps: queue.SimpleQueue[tuple[int, int, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._detect, name="slow ranks", daemon=True)

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Queue an event of the workload (`traffic/engine/running_traffic.py`). Does not wait for the detection."""
        if event["event"] == "iteration" and event["task"] in self._number:
            self._steps.put((self._number[event["task"]], event["index"], event["compute_ns"]))

    def count(self) -> int | None:
        """Return how many ranks are slow now; None: unknown.

        Raises:
            FaultbedError: the detection has failed.
        """
        if self._error is not None:
            raise self._error
        with self._lock:
            slow = self._feed.slow
        return None if slow is None else len(slow)

    def _detect(self) -> None:
        try:
            while (step := self._steps.get()) is not None:
                with self._lock:
                    alarms = self._feed.add(*step)
                for alarm in alarms:
                    self._say(
                        f"rank {alarm.rank} ({self._ranks[alarm.rank]}) computes about {100 * alarm.slowdown:.0f} % "
                        f"slower since iteration {alarm.since}; found at iteration {alarm.iteration}"
                    )
        except Exception as error:  # noqa: BLE001  # a defect of ours must not leave faults unguarded
            self._error = FaultbedError(f"slow ranks are no longer detected: {type(error).__name__}: {error}")
            self._say(str(self._error))

    def _say(self, text: str) -> None:
        # A report renews the reservation. If that is lost, the live guard ends the run.
        with contextlib.suppress(FaultbedError):
            self._report(text)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._steps.put(None)
        while self._thread.is_alive():  # in small steps, so that Ctrl-C reaches the main thread
            self._thread.join(0.2)
