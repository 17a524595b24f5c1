"""What is known of a pass while it runs: its workload, its faults, and what the machines of the lab reported.

Parts fill these records in, and read in them what others found. What the evidence contains is decided when a part
seals it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from faultbed.harness.record.evidence.workload_evidence import Paths
from faultbed.harness.record.workload_series import Result
from faultbed.inject.evidence.receipt import Receipt
from faultbed.inject.injector import Injector
from faultbed.inject.mechanisms.planned_fault import PlannedFault
from faultbed.inject.own_reads import recorded
from faultbed.inject.prepared_fault import PreparedFault
from faultbed.testbed.observe.machine_load import MachineLoad
from faultbed.testbed.observe.telemetry import Recorded
from faultbed.traffic.engine.run_results import Standstill
from faultbed.traffic.engine.running_traffic import Running

__all__ = ["FaultsRecord", "Readings", "WorkloadRecord"]


@dataclass(kw_only=True)
class WorkloadRecord:
    """The workload of one pass. `paths` are those of its connections when it had just begun.

    `running` None: it has not been started. Times are the controller's, in ns.
    """

    running: Running[Any] | None = None
    began_ns: int = 0
    t0_ns: int = 0
    end_ns: int = 0
    result: Result | None = None
    standstills: tuple[Standstill, ...] = ()
    paths: Paths = field(default_factory=dict)
    load: MachineLoad | None = None


@dataclass(kw_only=True)
class FaultsRecord:
    """The faults of a pass.

    Attributes:
        injector: carries out the faults; None before they are prepared.
        ready: the faults that are prepared, in the order of the plan.
        receipts: by the fault's name.
        planned: the faults, with the targets that were chosen when they were armed; empty: none was.
    """

    injector: Injector | None = None
    ready: Sequence[PreparedFault] = ()
    receipts: dict[str, Receipt] = field(default_factory=dict)
    planned: tuple[PlannedFault, ...] = ()

    @property
    def windows(self) -> dict[str, tuple[int, int]]:
        """By fault id, the time of the first firing (or arming) and that of the removal."""
        windows = {}
        for fault_id, receipt in self.receipts.items():
            start, end = receipt.fired.first_ns or receipt.armed.at_ns, receipt.cleared.at_ns
            if start is not None and end is not None:
                windows[fault_id] = (start, max(start, end))
        return windows


def _unheard() -> Mapping[str, int]:
    return {}


def _nothing_followed() -> Sequence[str]:
    return ("every machine",)


@dataclass(kw_only=True)
class Readings:
    """What the machines of the lab reported in a pass.

    Attributes:
        before: counters by node, before the workload.
        after: the same counters after it.
        counted_s: the time in seconds between the two readings of the counters.
        recorded: counters over time, and changes.
        reads: (begin, end) of each time at which the harness itself read from the lab while the workload ran.
        heard_ns: returns, by machine, the time of its latest message (controller ns).
        without_log: returns the machines whose kernel's log is not followed.
    """

    before: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    after: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    counted_s: float = 0.0
    recorded: Recorded = field(default_factory=Recorded)
    reads: list[tuple[int, int]] = field(default_factory=list)
    heard_ns: Callable[[], Mapping[str, int]] = _unheard
    without_log: Callable[[], Sequence[str]] = _nothing_followed

    def reading(self) -> AbstractContextManager[None]:
        """Record the time in which the harness itself reads from the lab while the workload runs."""
        return recorded(self.reads)
