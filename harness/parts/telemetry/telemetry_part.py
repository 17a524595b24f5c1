"""The counters of the machines, and what changed on them: evidence of many claims, and no claim of its own."""

from __future__ import annotations

from faultbed.harness.parts.part import Part
from faultbed.harness.record.evidence.telemetry_evidence import TelemetryEvidence

__all__ = ["PART"]

PART = Part(name="telemetry", evidence=TelemetryEvidence)
