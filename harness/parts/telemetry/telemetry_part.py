"""The part `telemetry`: counters of the machines and what changed on them, evidence of many claims and none of its own.

Every pass has it, so that the twin has the same cost. Only the measured pass reads the counters and keeps what was
recorded.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import time
from collections.abc import Iterator

from faultbed.harness.parts.part import Part
from faultbed.harness.parts.pass_records import Readings
from faultbed.harness.parts.passes import Active, Pass
from faultbed.harness.record import kernel_log
from faultbed.harness.record.evidence.telemetry_evidence import TelemetryEvidence
from faultbed.testbed.lab import Lab
from faultbed.testbed.observe import counters, telemetry
from faultbed.testbed.observe.telemetry import Following

__all__ = ["PART", "telemetry_of"]


class _Telemetry(Active):
    def __init__(self, run: Pass) -> None:
        self._run, self._readings = run, run.readings
        self._following: Following | None = None

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        lab, readings, is_measured = self._run.setting.lab, self._readings, self._run.phase == "measured"
        with telemetry.start(lab, on_change=self._run.on_change) as following:
            self._following, readings.heard_ns, readings.without_log = (
                following,
                following.heard_ns,
                following.without_log,
            )
            # Counted from here, because the start of all parts is not part of the run: a holder takes ten seconds on
            # an emulated host.
            counted_from_s = time.monotonic()
            if is_measured:
                readings.before = counters.read(lab)
            yield
            if is_measured:
                readings.after = counters.read(lab)
            readings.counted_s = time.monotonic() - counted_from_s

    def end(self) -> None:
        if self._following is not None:
            self._readings.recorded = self._following.stop()

    def sealed(self) -> TelemetryEvidence | None:
        run = self._run
        if run.phase != "measured":
            return None
        errors = run.setting.errors
        errors += [error for error in kernel_log.broken(self._readings.recorded.changes) if error not in errors]
        run.setting.run_dir.write_telemetry(self._readings.recorded, t0_ns=run.work.t0_ns)
        return telemetry_of(self._readings, run.setting.lab)


def telemetry_of(readings: Readings, lab: Lab) -> TelemetryEvidence:
    """Return counters and changes of the machines as evidence."""
    changes = readings.recorded.changes
    return TelemetryEvidence(
        counters_before={node: dict(values) for node, values in readings.before.items()},
        counters_after={node: dict(values) for node, values in readings.after.items()},
        changes=tuple(change for change in changes if change.node in lab.topology.switch_by_name),
        kernel=tuple(change for change in changes if change.subject == "kernel"),
        ignored=kernel_log.not_expired(lab.inventory_model.ignored_messages, dt.datetime.now(tz=dt.UTC).date()),
        watched=readings.recorded.machines,
        reads=tuple(sorted(readings.reads)),
    )


PART = Part(name="telemetry", evidence=TelemetryEvidence, active=_Telemetry)
