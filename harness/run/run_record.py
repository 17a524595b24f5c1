"""What is known of a run while it runs: one record for each part that every run has, which seals its own evidence."""

from __future__ import annotations

import contextlib
import datetime as dt
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from faultbed.harness.ledger.sealed import Phase
from faultbed.harness.parts.passes import Active, Ended
from faultbed.harness.parts.stops.stop_guard import Guard
from faultbed.harness.record import kernel_log
from faultbed.harness.record.evidence.emulation_evidence import EmulationEvidence
from faultbed.harness.record.evidence.fault_evidence import FaultRun, FaultsEvidence
from faultbed.harness.record.evidence.lab_evidence import LabEvidence
from faultbed.harness.record.evidence.telemetry_evidence import TelemetryEvidence
from faultbed.harness.record.evidence.workload_evidence import Paths, RebuildMark, WorkloadEvidence
from faultbed.harness.record.rundir import RunDir
from faultbed.harness.record.workload_series import Result, connections_of, ranks_of, series_of
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

__all__ = [
    "FaultsRecord",
    "PassRecord",
    "RunRecord",
    "TelemetryRecord",
    "WorkloadRecord",
    "seal_lab",
    "seal_measured",
    "seal_twin",
    "sealed_at_end",
]


@dataclass(kw_only=True)
class WorkloadRecord:
    """The workload of one pass. `paths` are those of its connections when it had just begun."""

    began_ns: int = 0
    t0_ns: int = 0
    end_ns: int = 0
    result: Result | None = None
    standstills: tuple[Standstill, ...] = ()
    paths: Paths = field(default_factory=dict)
    load: MachineLoad | None = None

    def sealed(self, resolved: ResolvedRun) -> WorkloadEvidence:
        """Return what the workload did."""
        result, work = self.result, resolved.experiment.workload
        rebuilds = result.rebuilds if result else ()
        return WorkloadEvidence(
            planned=resolved.plan.workload,
            began_ns=self.began_ns,
            t0_ns=self.t0_ns,
            end_ns=self.end_ns or time.monotonic_ns(),
            clock_error_ns=max(result.clock_error_ns.values(), default=0) if result else 0,
            ranks=ranks_of(result),
            series=series_of(result) if result else (),
            connections=connections_of(result, self.paths),
            qp_errors=len(result.qp_errors) if result else 0,
            rebuilds=len(rebuilds),
            qps_lost=tuple(result.qp_errors) if result else (),
            rebuild_marks=tuple(
                RebuildMark(error_ns=mark.error_ns, rebuilt_ns=mark.rebuilt_ns, recovered_ns=mark.recovered_ns)
                for mark in rebuilds
            ),
            standstills=self.standstills,
            load=self.load,
            failure=None if result is None or result.outcome != "failed" else result.where or "unknown place",
            wrong_elements=getattr(result, "wrong_elements", 0),  # flows have none
            **(kind_of(work).measured(work, result) if result else {}),
        )


@dataclass(kw_only=True)
class FaultsRecord:
    """The faults of a run.

    Attributes:
        injector: carries out the faults; None before the workload is prepared.
        receipts: by the fault's name.
        planned: the faults, with the targets that were chosen when they were armed; empty: none was.
    """

    injector: Injector | None = None
    receipts: dict[str, FaultReceipt] = field(default_factory=dict)
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

    def sealed(self, resolved: ResolvedRun, counted: Recorded) -> FaultsEvidence:
        """Return what became of each planned fault. `counted` are the counters of the machines over time."""
        planned_by_name = {fault.spec.name: fault for fault in (*resolved.faults, *self.planned)}
        runs = []
        for scheduled in resolved.plan.faults:
            planned = planned_by_name[scheduled.id]
            own = self.receipts.get(scheduled.id)
            receipt = own.record(id=scheduled.id) if own else None
            node = planned.place.netns or planned.place.node
            runs.append(
                FaultRun(
                    plan=scheduled,
                    receipt=receipt,
                    doubts=own.doubts if own else (),
                    edges=own.edges if own else (),
                    colour=planned.colour,
                    passed=passed(counted.samples, receipt, node=node) if receipt is not None else None,
                )
            )
        return FaultsEvidence(faults=tuple(runs))


@dataclass(kw_only=True)
class TelemetryRecord:
    """What the machines reported. `counted_s` is the time in seconds between the counter readings."""

    before: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    after: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    counted_s: float = 0.0
    recorded: Recorded = field(default_factory=Recorded)
    reads: list[tuple[int, int]] = field(default_factory=list)

    def reading(self) -> AbstractContextManager[None]:
        """Record the time in which the harness itself reads from the lab while the workload runs."""
        return recorded(self.reads)

    def sealed(self, lab: Lab) -> TelemetryEvidence:
        """Return counters and changes of the machines."""
        changes = self.recorded.changes
        return TelemetryEvidence(
            counters_before={node: dict(values) for node, values in self.before.items()},
            counters_after={node: dict(values) for node, values in self.after.items()},
            changes=tuple(change for change in changes if change.node in lab.topology.switch_by_name),
            kernel=tuple(change for change in changes if change.subject == "kernel"),
            ignored=kernel_log.not_expired(lab.inventory_model.ignored_messages, dt.datetime.now(tz=dt.UTC).date()),
            watched=self.recorded.machines,
            reads=tuple(sorted(self.reads)),
        )


@dataclass(kw_only=True)
class PassRecord:
    """One pass: its workload, and the parts that ran beside it, by name. `is_sealed`: its evidence is on disk."""

    phase: Phase
    workload: WorkloadRecord = field(default_factory=WorkloadRecord)
    active: dict[str, Active] = field(default_factory=dict)
    is_sealed: bool = False


@dataclass(kw_only=True)
class RunRecord:
    """A run while it runs, so that one that ends early keeps what it has measured.

    Attributes:
        lease_s: how long faults may outlive the run's process.
        errors: errors of the harness itself.
        routing: receipt of the routing scheme of the pass that was the last one; None: none was applied.
        twin_not_routed: reasons to believe that the routing scheme did not route the fault-free twin.
    """

    run_dir: RunDir
    stops: Guard = field(default_factory=Guard)
    twin: PassRecord = field(default_factory=lambda: PassRecord(phase="twin"))
    measured: PassRecord = field(default_factory=lambda: PassRecord(phase="measured"))
    faults: FaultsRecord = field(default_factory=FaultsRecord)
    telemetry: TelemetryRecord = field(default_factory=TelemetryRecord)
    emulation: EmulationEvidence = field(default_factory=EmulationEvidence)
    lease_s: float = TTL_S
    lab_state: LabState = "CLEAN"
    lab_diff: tuple[str, ...] = ()
    errors: list[str] = field(default_factory=list)
    routing: RoutingReceipt | None = None
    twin_not_routed: tuple[str, ...] = ()
    mutate_routing: Mutation | None = None


def seal_twin(resolved: ResolvedRun, record: RunRecord) -> None:
    """Write the evidence of the fault-free twin.

    Raises:
        OSError: the run directory cannot be written.
    """
    _seal_pass(resolved, record, record.twin)


def seal_measured(resolved: ResolvedRun, lab: Lab, record: RunRecord) -> None:
    """Write the evidence of the measured pass, whether or not it began.

    Raises:
        OSError: the run directory cannot be written.
    """
    run_dir = record.run_dir
    broken = kernel_log.broken(record.telemetry.recorded.changes)
    record.errors += [error for error in broken if error not in record.errors]
    run_dir.write_evidence("faults", "measured", record.faults.sealed(resolved, record.telemetry.recorded))
    run_dir.write_evidence("telemetry", "measured", record.telemetry.sealed(lab))
    run_dir.write_evidence("emulation", "measured", record.emulation)
    run_dir.write_evidence("stops", "measured", record.stops.sealed(t0_ns=record.measured.workload.t0_ns))
    run_dir.write_telemetry(record.telemetry.recorded, t0_ns=record.measured.workload.t0_ns)
    _seal_pass(resolved, record, record.measured)


def seal_lab(lab: Lab, record: RunRecord) -> None:
    """Write what is known of the lab, which is compared after all passes.

    Raises:
        OSError: the run directory cannot be written.
    """
    evidence = LabEvidence(
        name=lab.name,
        kind=lab.kind,
        accelerator=lab.accelerator,
        topology=lab.topology,
        rate_scale=lab.inventory_model.rate_scale,
        state=record.lab_state,
        diff=record.lab_diff,
        errors=tuple(record.errors),
    )
    record.run_dir.write_evidence("lab", "measured", evidence)


@contextlib.contextmanager
def sealed_at_end(resolved: ResolvedRun, lab: Lab, record: RunRecord, phase: Phase) -> Iterator[None]:
    """Write the evidence of a pass when the block is over, also after an error in it.

    After Ctrl-C nothing is written: the packets of a capture take a minute to read.

    Raises:
        OSError: the run directory cannot be written.
    """

    def seal() -> None:
        if phase == "twin":
            seal_twin(resolved, record)
        else:
            seal_measured(resolved, lab, record)

    try:
        yield
    except Exception:
        with contextlib.suppress(Exception):  # the error of the pass is the one to report
            seal()
        raise
    seal()


def _seal_pass(resolved: ResolvedRun, record: RunRecord, one: PassRecord) -> None:
    ended = Ended(
        phase=one.phase, run_dir=record.run_dir, t0_ns=one.workload.t0_ns,
        windows=record.faults.windows if one.phase == "measured" else {},
    )  # fmt: skip
    for name, active in one.active.items():
        if (evidence := active.sealed(ended)) is not None:
            record.run_dir.write_evidence(name, one.phase, evidence)
    record.run_dir.write_evidence("workload", one.phase, one.workload.sealed(resolved))
    one.is_sealed = True
