"""The faults of the measured pass: prepared before the workload starts, and armed and cleared while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from faultbed.harness.live.use_by_workloads import use_of
from faultbed.harness.parts.faults.drive_faults import drive_all, prepare_all
from faultbed.harness.parts.faults.hop_packet_bounds import passed
from faultbed.harness.parts.pass_records import FaultsRecord
from faultbed.harness.parts.passes import Active, Pass, Setting
from faultbed.harness.record.evidence.fault_evidence import FaultRun, FaultsEvidence
from faultbed.inject.injector import Injector
from faultbed.testbed.observe.telemetry import Recorded

__all__ = ["active_of", "faults_of"]


class _Faults(Active):
    def __init__(self, run: Pass) -> None:
        self._run = run

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        setting, record = self._run.setting, self._run.injected
        record.injector = Injector(setting.lab, setting.journal, mutate=setting.mutations.get("faults"))
        with record.injector as injector:
            if setting.faults:
                self._run.progress(f"preparing {len(setting.faults)} faults on their targets")
            record.ready = prepare_all(injector, setting.faults)
            yield

    def begin(self) -> None:
        running, injector, lab = self._run.work.running, self._run.injected.injector, self._run.setting.lab
        if injector is not None and running is not None:
            injector.use_of = lambda _: use_of(lab, [running])

    def drive(self) -> None:
        running = self._run.work.running
        if self._run.injected.ready and running is not None:
            drive_all(self._run, running)

    def sealed(self) -> FaultsEvidence:
        run = self._run
        return faults_of(run.injected, run.setting, run.readings.recorded)


def active_of(run: Pass) -> Active | None:
    """Return the faults of the measured pass. The twin has none."""
    return _Faults(run) if run.phase == "measured" else None


def faults_of(record: FaultsRecord, setting: Setting, counted: Recorded) -> FaultsEvidence:
    """Return what became of each planned fault. `counted` are the counters of the machines over time."""
    places = {fault.spec.id: fault.place.name for fault in (*setting.faults, *record.planned)}
    receipts = [(spec, record.receipts.get(spec.id)) for spec in setting.plan.faults]
    return FaultsEvidence(
        faults=tuple(
            FaultRun(
                plan=spec,
                receipt=receipt,
                passed=None if receipt is None else passed(counted.samples, receipt, node=places[spec.id]),
            )
            for spec, receipt in receipts
        )
    )
