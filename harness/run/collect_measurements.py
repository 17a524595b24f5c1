"""Collect the results of a run while it happens, and convert them to measurements at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from faultbed.harness.ledger.sealed import Phase
from faultbed.harness.parts.passes import Active
from faultbed.harness.parts.stops.stop_guard import Guard
from faultbed.harness.record import kernel_log
from faultbed.harness.record.measurements import (
    FaultRun,
    Measurements,
    Paths,
    RankSeries,
    RebuildMark,
)
from faultbed.harness.record.workload_series import (
    Result,
    connections_of,
    ranks_of,
    series_of,
)
from faultbed.harness.run.hop_packet_bounds import passed
from faultbed.harness.run.prepare.resolve import ResolvedRun
from faultbed.harness.run.workload_kinds import kind_of
from faultbed.harness.verdict import LabState, RoutingReceipt
from faultbed.inject.evidence.receipt import FaultReceipt
from faultbed.inject.fault_plan import PlannedFault
from faultbed.inject.injector import TTL_S, Injector, Mutation
from faultbed.inject.own_reads import recorded
from faultbed.testbed.lab import Lab
from faultbed.testbed.observe.machine_load import MachineLoad
from faultbed.testbed.observe.telemetry import Recorded
from faultbed.traffic.engine.run_results import Standstill

__all__ = ["RunData", "measurements_of", "windows"]

_COPIED = (
    "offered_bps", "carried_bps", "began_ns", "t0_ns", "standstills", "twin", "lab_state", "lab_diff",
    "twin_failure", "load", "twin_load", "routing",
)  # fmt: skip
"""Fields that `RunData` and `Measurements` share, under the same name and with the same value."""


@dataclass(kw_only=True)
class RunData:
    """Data of a run, filled in during the run, so that a run that ends early keeps what it has measured.

    Attributes:
        lease_s: how long faults may outlive the run's process.
        injector: carries out the faults; None before the workload is prepared.
        twin_failure: wrong data of the fault-free twin, after which no fault was tried.
        counted_s: time in seconds between the counter readings `before` and `after`.
        planned: the faults, with the targets that were chosen when they were armed; empty: none was.
        paths_of_faults: paths of all connections by which a fault's target was chosen, by the fault's name.
        active: the parts that ran beside the workload, by pass and name.
        twin_not_routed: reasons to believe that the routing scheme did not route the fault-free twin.
    """

    began_ns: int = 0
    t0_ns: int = 0
    end_ns: int = 0
    stops: Guard = field(default_factory=Guard)
    result: Result | None = None
    twin: tuple[RankSeries, ...] | None = None
    twin_failure: str | None = None
    receipts: dict[str, FaultReceipt] = field(default_factory=dict)
    before: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    after: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    counted_s: float = 0.0
    standstills: tuple[Standstill, ...] = ()
    paths: Paths = field(default_factory=dict)
    planned: tuple[PlannedFault, ...] = ()
    paths_of_faults: dict[str, Paths] = field(default_factory=dict)
    recorded: Recorded = field(default_factory=Recorded)
    lease_s: float = TTL_S
    injector: Injector | None = None
    lab_state: LabState = "CLEAN"
    lab_diff: tuple[str, ...] = ()
    errors: list[str] = field(default_factory=list)
    reads: list[tuple[int, int]] = field(default_factory=list)
    load: MachineLoad | None = None
    twin_load: MachineLoad | None = None
    offered_bps: float | None = None
    carried_bps: float | None = None
    routing: RoutingReceipt | None = None
    twin_not_routed: tuple[str, ...] = ()
    mutate_routing: Mutation | None = None
    active: dict[tuple[Phase, str], Active] = field(default_factory=dict)

    def reading(self) -> AbstractContextManager[None]:
        """Record the time in which the harness itself reads from the lab while the workload runs."""
        return recorded(self.reads)


def measurements_of(resolved: ResolvedRun, lab: Lab, data: RunData) -> Measurements:
    """Return the results of a run in the form of `measurements.json`."""
    result, work = data.result, resolved.experiment.workload
    data.errors += kernel_log.broken(data.recorded.changes)
    return Measurements(
        lab=lab.name,
        lab_kind=lab.kind,
        accelerator=lab.accelerator,
        topology=lab.topology,
        rate_scale=lab.inventory_model.rate_scale,
        end_ns=data.end_ns or time.monotonic_ns(),
        clock_error_ns=max(result.clock_error_ns.values(), default=0) if result else 0,
        workload=resolved.plan.workload,
        ranks=ranks_of(result),
        series=series_of(result) if result else (),
        connections=connections_of(result, data.paths),
        qp_errors=len(result.qp_errors) if result else 0,
        rebuilds=len(result.rebuilds) if result else 0,
        qps_lost=tuple(result.qp_errors) if result else (),
        rebuild_marks=tuple(
            RebuildMark(error_ns=rebuild.error_ns, rebuilt_ns=rebuild.rebuilt_ns, recovered_ns=rebuild.recovered_ns)
            for rebuild in (result.rebuilds if result else ())
        ),
        faults=tuple(_fault_runs(resolved, data)),
        counters_before={node: dict(values) for node, values in data.before.items()},
        counters_after={node: dict(values) for node, values in data.after.items()},
        changes=tuple(change for change in data.recorded.changes if change.node in lab.topology.switch_by_name),
        kernel=tuple(change for change in data.recorded.changes if change.subject == "kernel"),
        watched=data.recorded.machines,
        reads=tuple(sorted(data.reads)),
        failure=None if result is None or result.outcome != "failed" else result.where or "unknown place",
        errors=tuple(data.errors),
        **{name: getattr(data, name) for name in _COPIED},
        **(kind_of(work).measured(work, result) if result else {}),
    )


def windows(data: RunData) -> dict[str, tuple[int, int]]:
    """Return, by fault id, the time of the first firing (or arming) and that of the removal."""
    windows = {}
    for fault_id, receipt in data.receipts.items():
        start, end = receipt.fired.first_ns or receipt.armed.at_ns, receipt.cleared.at_ns
        if start is not None and end is not None:
            windows[fault_id] = (start, max(start, end))
    return windows


def _fault_runs(resolved: ResolvedRun, data: RunData) -> Iterator[FaultRun]:
    planned_by_name = {fault.spec.name: fault for fault in (*resolved.faults, *data.planned)}
    for scheduled in resolved.plan.faults:
        planned = planned_by_name[scheduled.id]
        receipt_of_fault = data.receipts.get(scheduled.id)
        receipt = receipt_of_fault.record(id=scheduled.id) if receipt_of_fault else None
        yield FaultRun(
            plan=scheduled,
            receipt=receipt,
            doubts=receipt_of_fault.doubts if receipt_of_fault else (),
            edges=receipt_of_fault.edges if receipt_of_fault else (),
            colour=planned.colour,
            passed=passed(data.recorded.samples, receipt, node=planned.place.netns or planned.place.node)
            if receipt is not None
            else None,
            paths=data.paths_of_faults.get(scheduled.id),
        )
