"""Watch the logs of a lab during a test: a kernel's warning, bug or lockup, or a daemon's crash, is an error of it.

A log that cannot be read says nothing: the test is INCONCLUSIVE then, because a kernel may have reported a problem.
"""

from __future__ import annotations

import datetime as dt
import time
from dataclasses import dataclass

from faultbed.harness.record import kernel_log
from faultbed.testbed.errors import LabError
from faultbed.testbed.lab import Lab
from faultbed.testbed.observe.telemetry import Change
from faultbed.testbed.side_by_side import on_each

__all__ = ["KernelGuard", "KernelReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelReport:
    """A sentence for each problem that a kernel has reported, and for each machine whose log is unknown."""

    unhealthy: list[str]
    unknown: list[str]


_READ_S = 120.0
"""Deadline for the kernel logs of all machines."""


class KernelGuard:
    """Reader of the kernel logs of all machines of a lab; the first reading is made at once."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._unread: dict[str, str] = {}
        self._read()

    def report(self) -> KernelReport:
        """Return what the kernels have reported since the last call.

        Messages from before a reboot are included (`faultbed.testbed.lab.Lab.kernel_log`). A machine's log is unknown
        if this reading of it fails, or if the last one has: a watcher records from its first reading on.
        """
        before = self._unread
        changes = self._read()
        unread = before | self._unread
        return KernelReport(
            unhealthy=kernel_log.unhealthy(
                changes,
                lab_kind=self._lab.kind,
                ignored=self._lab.inventory_model.ignored_messages,
                today=dt.datetime.now(tz=dt.UTC).date(),
            ),
            unknown=[
                *(f"{machine}: its kernel log could not be read: {unread[machine]}" for machine in sorted(unread)),
                *kernel_log.lost(changes),
            ],
        )

    def _read(self) -> list[Change]:
        unread: dict[str, str] = {}

        def changes_of(machine: str) -> list[Change]:
            try:
                messages = self._lab.kernel_log(machine)
            except LabError as error:  # the machine does not answer, or its log may not be read
                unread[machine] = str(error)
                return []
            at_ns = time.monotonic_ns()
            return [Change(at_ns=at_ns, node=machine, subject="kernel", text=text) for text in messages]

        machines = self._lab.nodes()
        changes = [change for part in on_each(machines, changes_of, timeout_s=_READ_S) for change in part]
        self._unread = unread
        return changes
