"""The kernels of a lab while a test runs: a warning, a bug or a lockup is an error of that test."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from harness.record import kernel_log
from testbed.errors import LabError
from testbed.lab import Lab
from testbed.observe.telemetry import Change

__all__ = ["KernelGuard"]


class KernelGuard:
    """Listens to the kernel log of every machine from its making on."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._read()

    def found(self) -> list[str]:
        """Return a sentence for each thing that a kernel has reported since the last call.

        What a machine logged before it was booted again, or before its watcher was started again, is not known.
        """
        return kernel_log.unhealthy(self._read(), lab_kind=self._lab.kind)

    def _read(self) -> list[Change]:
        def one(machine: str) -> list[Change]:
            try:
                messages = self._lab.ask(machine, {"do": "kernel_log"})["messages"]
            except LabError:  # a machine that does not answer, or whose log is not ours to read
                return []
            at_ns = time.monotonic_ns()
            return [Change(at_ns=at_ns, node=machine, subject="kernel", text=text) for text in messages]

        machines = self._lab.nodes()
        with ThreadPoolExecutor(max_workers=max(1, len(machines))) as pool:
            return [change for part in pool.map(one, machines) for change in part]
