"""Health of GPUs, as runs and preflights have read it, and the thresholds that each GPU has reached. Pure.

The newest reading of a GPU's registers replaces all earlier ones, because a reset clears errors. XID events are not in
registers but in the kernel log. They are replaced only by a newer run that followed the kernel log and saw none; a
preflight does not read XIDs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from faultbed.harness.attribution.confusion import truth_of
from faultbed.harness.attribution.host_causes import gpu_events
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.observe.gpu_thresholds import Breach, breach_in, breaches, severest_first, xid_breaches
from faultbed.testbed.preflight.gpu_health_check import CHECK

__all__ = ["CLOCK_ERROR", "GpuReading", "newest", "readings_of_preflight", "readings_of_run"]

CLOCK_ERROR = timedelta(days=1)
"""How far the clock of a machine that wrote a reading may be ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """The state of one GPU at one time.

    Attributes:
        name: the GPU, as in the inventory with its host.
        origin: name of the run or the preflight.
        at: when, in UTC.
        registers: thresholds that ECC errors, remapped rows or temperature had reached; None if they were not read.
        events: what its XID events call for; None if nothing followed the kernel log.
    """

    name: str
    origin: str
    at: datetime
    registers: tuple[Breach, ...] | None
    events: tuple[Breach, ...] | None

    @property
    def breaches(self) -> tuple[Breach, ...]:
        """All thresholds and events that call for an action, the severest first."""
        return severest_first((*(self.registers or ()), *(self.events or ())))


def readings_of_run(
    run: RunEvidence, *, origin: str, at: datetime, drills: bool = False, rehearsal: bool = False
) -> tuple[GpuReading, ...]:
    """Return the readings at a run's end, with the XID events of the whole run.

    Args:
        run: its measurements.
        origin: name of the run.
        at: when it began. The readings are of its end, which may be hours later.
        drills: read runs with injected faults as well, except GPUs whose readings one of those faults explains.
        rehearsal: read everything as if nothing had been injected.
    """
    if run.injected.faults and not (drills or rehearsal):
        return ()
    explained = (
        set[str]()
        if rehearsal
        else {name for fault in run.injected.faults for name in truth_of(fault, run.lab.topology).names}
    )
    events = gpu_events(run, with_synthetic=rehearsal)
    ended = _end_of(run, at)
    followed = {machine.name for machine in run.telemetry.watched if machine.no_log is None and machine.lost is None}
    readings = []
    for host in run.lab.topology.hosts:
        values = run.telemetry.counters_after.get(host.name, {})
        for gpu in host.gpus:
            name, prefix = f"{host.name}:{gpu.name}", f"{gpu.name}."
            own = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
            if name in explained:
                continue
            registers = breaches(own) if "ecc_uncorrected" in own else None
            is_known = host.name in followed or name in events
            by_event = xid_breaches(events.get(name, {})) if is_known else None
            if registers is not None or by_event is not None:
                readings.append(GpuReading(name=name, origin=origin, at=ended, registers=registers, events=by_event))
    return tuple(readings)


def _end_of(run: RunEvidence, began: datetime) -> datetime:
    length = timedelta(microseconds=max(0, run.workload.end_ns - (run.workload.began_ns or run.workload.t0_ns)) // 1000)
    return min(began, datetime.max.replace(tzinfo=UTC) - length) + length


def readings_of_preflight(content: Any, topology: Topology, *, origin: str, at: datetime) -> tuple[GpuReading, ...]:
    """Return the readings of a preflight, as `faultbed preflight --json` prints it; none if it checked no GPU."""
    if CHECK.name not in content.get("checked", ()):
        return ()
    unknown = {_place(row) for row in content.get("not_looked", ()) if row.get("check") == CHECK.name}
    reached: dict[str, list[Breach]] = {}
    for row in content["wrong"]:
        if row["check"] == CHECK.name and (breach := breach_in(str(row.get("found")), do=str(row.get("wanted")))):
            reached.setdefault(_place(row), []).append(breach)
    return tuple(
        GpuReading(name=name, origin=origin, at=at, registers=tuple(reached.get(name, ())), events=None)
        for host in topology.hosts
        for name in (f"{host.name}:{gpu.name}" for gpu in host.gpus)
        if name in reached or not {name, host.name} & unknown
    )


def newest(readings: Iterable[GpuReading], *, now: datetime) -> dict[str, GpuReading]:
    """Return the newest state of each GPU, by its name: the newest registers and the newest events that are known.

    A reading dated in the future has a wrong date. It counts as the oldest, so that it hides no breach.
    """
    state: dict[str, GpuReading] = {}
    for reading in sorted(readings, key=lambda reading: (reading.at <= now + CLOCK_ERROR, reading.at)):
        if (before := state.get(reading.name)) is None:
            state[reading.name] = reading
        else:
            registers = before.registers if reading.registers is None else reading.registers
            events = before.events if reading.events is None else reading.events
            state[reading.name] = replace(reading, registers=registers, events=events)
    return state


def _place(row: dict[str, Any]) -> str:
    """Return the place of a row of preflight without the bus address behind it."""
    return str(row.get("where")).partition(" ")[0]
