"""A run, assembled from the evidence of the parts that every run has."""

from __future__ import annotations

from dataclasses import dataclass, field

from faultbed.harness.ledger.sealed import Kind, Sealed
from faultbed.harness.record.evidence.emulation_evidence import EmulationEvidence
from faultbed.harness.record.evidence.fault_evidence import FaultsEvidence
from faultbed.harness.record.evidence.lab_evidence import LabEvidence
from faultbed.harness.record.evidence.telemetry_evidence import TelemetryEvidence
from faultbed.harness.record.evidence.workload_evidence import RankSeries, WorkloadEvidence
from faultbed.harness.verdict import RoutingReceipt

__all__ = ["ALWAYS", "OF_RUNS", "RunEvidence", "assembled"]

ALWAYS: dict[str, Kind] = {
    "lab": LabEvidence,
    "workload": WorkloadEvidence,
    "faults": FaultsEvidence,
    "telemetry": TelemetryEvidence,
}
"""Evidence of the measured pass that every finished run has, by the names of its files."""

OF_RUNS: dict[str, Kind] = {**ALWAYS, "emulation": EmulationEvidence, "routing": RoutingReceipt}
"""Evidence of which a run is assembled, by the names of its files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvidence:
    """What a run recorded: the evidence of its measured pass, and of its fault-free twin.

    `emulation` None: it is not known how much the emulation carries. `routing` None: the experiment chose no routing
    scheme, or it was never applied. `twin` None: there was none.
    """

    lab: LabEvidence
    workload: WorkloadEvidence
    injected: FaultsEvidence = field(default_factory=FaultsEvidence)
    telemetry: TelemetryEvidence = field(default_factory=TelemetryEvidence)
    emulation: EmulationEvidence | None = None
    routing: RoutingReceipt | None = None
    twin: WorkloadEvidence | None = None

    @property
    def fault_free(self) -> tuple[RankSeries, ...] | None:
        """The series of the twin; None: there was none, or it did not end as a fault-free run does."""
        twin = self.twin
        if twin is None or twin.failure is not None or (twin.resilience is not None and twin.resilience.restarts):
            return None
        return twin.series


def assembled(sealed: Sealed) -> RunEvidence:
    """Return the run of which these are the evidence.

    Raises:
        KeyError: what is missing of it, by the name of its file.
    """
    lab, work = sealed.of(LabEvidence), sealed.of(WorkloadEvidence)
    injected, telemetry = sealed.of(FaultsEvidence), sealed.of(TelemetryEvidence)
    if lab is None or work is None or injected is None or telemetry is None:
        raise KeyError(next(name for name, kind in ALWAYS.items() if sealed.of(kind) is None))
    return RunEvidence(
        lab=lab,
        workload=work,
        injected=injected,
        telemetry=telemetry,
        emulation=sealed.of(EmulationEvidence, "calibrate"),
        routing=sealed.of(RoutingReceipt),
        twin=sealed.of(WorkloadEvidence, "twin"),
    )
