"""What is known of a run while it runs, and the evidence that each part of it seals when its pass is over."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from faultbed.harness.ledger.sealed import Phase
from faultbed.harness.parts.pass_records import WorkloadRecord
from faultbed.harness.parts.passes import Pass, Setting
from faultbed.harness.parts.registry import PARTS
from faultbed.harness.record.evidence.lab_evidence import LabEvidence
from faultbed.harness.record.evidence.workload_evidence import RebuildMark, WorkloadEvidence
from faultbed.harness.record.workload_series import connections_of, ranks_of, series_of
from faultbed.harness.run.workload_kinds import kind_of
from faultbed.harness.verdict import LabState
from faultbed.inject.evidence.receipt import Receipt
from faultbed.inject.injector import TTL_S, Injector
from faultbed.testbed.lab import Lab

__all__ = ["RunRecord", "begin_pass", "seal", "seal_lab", "sealed_at_end"]


@dataclass(kw_only=True)
class RunRecord:
    """A run while it runs, so that one that ends early keeps what it has measured.

    Attributes:
        setting: what its passes have in common.
        passes: those that have begun, in their order.
        lease_s: how long faults may outlive the run's process.
    """

    setting: Setting
    passes: list[Pass] = field(default_factory=list)
    lease_s: float = TTL_S
    lab_state: LabState = "CLEAN"
    lab_diff: tuple[str, ...] = ()

    @property
    def errors(self) -> list[str]:
        """Errors of the harness itself."""
        return self.setting.errors

    @property
    def injector(self) -> Injector | None:
        """What carries out the faults of the last pass; None: there are none."""
        return self.last.injected.injector if self.last is not None else None

    @property
    def receipts(self) -> tuple[Receipt, ...]:
        """The receipts of the faults of all passes."""
        return tuple(receipt for run in self.passes for receipt in run.injected.receipts.values())

    @property
    def last(self) -> Pass | None:
        """The pass that was the last one to begin; None: none has begun."""
        return self.passes[-1] if self.passes else None


def begin_pass(record: RunRecord, phase: Phase) -> Pass:
    """Return a new pass of a run, with the parts that take part in it. Nothing on the lab changes."""
    run = Pass(phase=phase, setting=record.setting, earlier={one.phase: one for one in record.passes})
    made = {part.name: part.active(run) for part in PARTS}
    run.active.update({name: active for name, active in made.items() if active is not None})
    record.passes.append(run)
    return run


def seal(run: Pass) -> None:
    """Write what every part knows of a pass, whether or not it came to its end.

    Raises:
        OSError: the run directory cannot be written.
    """
    run_dir = run.setting.run_dir
    for name, active in run.active.items():
        if (evidence := active.sealed()) is not None:
            run_dir.write_evidence(name, run.phase, evidence)
    run_dir.write_evidence("workload", run.phase, workload_of(run.work, run.setting))
    run.is_sealed = True


def workload_of(record: WorkloadRecord, setting: Setting) -> WorkloadEvidence:
    """Return what the workload of a pass did."""
    result, work = record.result, setting.experiment.workload
    rebuilds = result.rebuilds if result else ()
    return WorkloadEvidence(
        planned=setting.plan.workload,
        began_ns=record.began_ns,
        t0_ns=record.t0_ns,
        end_ns=record.end_ns or time.monotonic_ns(),
        clock_error_ns=max(result.clock_error_ns.values(), default=0) if result else 0,
        ranks=ranks_of(result),
        series=series_of(result) if result else (),
        connections=connections_of(result, record.paths),
        qp_errors=len(result.qp_errors) if result else 0,
        rebuilds=len(rebuilds),
        qps_lost=tuple(result.qp_errors) if result else (),
        rebuild_marks=tuple(
            RebuildMark(error_ns=mark.error_ns, rebuilt_ns=mark.rebuilt_ns, recovered_ns=mark.recovered_ns)
            for mark in rebuilds
        ),
        standstills=record.standstills,
        load=record.load,
        failure=None if result is None or result.outcome != "failed" else result.where or "unknown place",
        wrong_elements=getattr(result, "wrong_elements", 0),  # flows have none
        **(kind_of(work).measured(work, result) if result else {}),
    )


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
    record.setting.run_dir.write_evidence("lab", "measured", evidence)


@contextlib.contextmanager
def sealed_at_end(run: Pass) -> Iterator[None]:
    """Write the evidence of a pass when the block is over, also after an error in it.

    After Ctrl-C nothing is written: the packets of a capture take a minute to read.

    Raises:
        OSError: the run directory cannot be written.
    """
    try:
        yield
    except Exception:
        with contextlib.suppress(Exception):  # the error of the pass is the one to report
            seal(run)
        raise
    seal(run)
