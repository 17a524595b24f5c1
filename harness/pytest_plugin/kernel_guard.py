"""Watch the kernel logs of a lab during a test: a warning, a bug or a lockup is an error of that test."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from harness.record import kernel_log
from testbed.errors import LabError
from testbed.lab import Lab
from testbed.observe.telemetry import Change

__all__ = ["KernelGuard"]


class KernelGuard:
    """Reader of the kernel logs of all machines of a lab; the first reading is made at once."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._read()

    def unhealthy(self) -> list[str]:
        """Return a sentence for each problem that a kernel has reported since the last call.

        Messages from before a reboot, or before the watcher of a machine was restarted, are lost.
        """
        return kernel_log.unhealthy(self._read(), lab_kind=self._lab.kind)

    def _read(self) -> list[Change]:
        def changes_of(machine: str) -> list[Change]:
            try:
                messages = self._lab.request(machine, {"do": "kernel_log"})["messages"]
            except LabError:  # the machine does not answer, or its log may not be read
                return []
            at_ns = time.monotonic_ns()
            return [Change(at_ns=at_ns, node=machine, subject="kernel", text=text) for text in messages]

        machines = self._lab.nodes()
        with ThreadPoolExecutor(max_workers=max(1, len(machines))) as pool:
            return [change for part in pool.map(changes_of, machines) for change in part]
