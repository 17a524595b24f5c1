"""Check a run's reservation of the lab while its parts drive it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from faultbed.harness.parts.passes import EarlyEnd
from faultbed.testbed.errors import FaultbedError

__all__ = ["CHECK_INTERVAL_S", "LeaseWatch"]

CHECK_INTERVAL_S = 0.5
"""Interval at which the reservation is checked."""


class LeaseWatch:
    """Checks the reservation twice a second, on a thread of its own, until its `with` block ends.

    A reservation store may take seconds to answer, for which no other watcher waits. If the reservation is lost,
    the end of the pass is requested.
    """

    def __init__(self, verify_lease: Callable[[], None], ending: EarlyEnd) -> None:
        self._verify_lease, self._ending = verify_lease, ending
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="reservation", daemon=True)

    def check(self) -> None:
        """Check the reservation once."""
        try:
            self._verify_lease()
        except FaultbedError as error:
            self._ending.request(f"stopped: {error}", error=str(error))

    def _repeat(self) -> None:
        while not self._done.wait(CHECK_INTERVAL_S) and not self._ending.is_requested:
            try:
                self.check()
            except Exception as error:  # noqa: BLE001  # a defect of ours must not leave faults unguarded
                problem = f"the reservation could not be checked: {type(error).__name__}: {error}"
                self._ending.request(f"stopped: {problem}", error=problem)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join(10.0)
