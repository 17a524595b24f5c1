"""What runs and preflights read of the health of GPUs, and the thresholds that it has reached. Pure.

The newest reading of a GPU replaces all earlier ones: an error that made it a GPU to drain is gone after its reset.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from harness.attribution.confusion import truth_of
from harness.attribution.host_causes import gpu_events
from harness.record.measurements import Measurements
from testbed.model.topology import Topology
from testbed.observe.gpu_thresholds import Breach, breach_in, breaches, xid_breaches
from testbed.preflight.gpu_health_check import CHECK

__all__ = ["GpuReading", "newest", "readings_of_preflight", "readings_of_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """The state of one GPU at one time. `breaches` are the thresholds that it had reached, the severest first."""

    name: str
    origin: str
    at: datetime
    breaches: tuple[Breach, ...]


def readings_of_run(
    run: Measurements, *, origin: str, at: datetime, drills: bool = False, rehearsal: bool = False
) -> tuple[GpuReading, ...]:
    """Return the readings at a run's end, with the XID events of the whole run.

    Args:
        run: its measurements.
        origin: name of the run.
        at: when it began.
        drills: read runs with injected faults as well, but not the GPUs that one of those faults explains.
        rehearsal: read all of it as if nothing had been injected.
    """
    if run.faults and not (drills or rehearsal):
        return ()
    explained = set[str]() if rehearsal else {name for one in run.faults for name in truth_of(one, run.topology).names}
    events = gpu_events(run, with_synthetic=rehearsal)
    readings = []
    for host in run.topology.hosts:
        values = run.counters_after.get(host.name, {})
        for gpu in host.gpus:
            name, prefix = f"{host.name}:{gpu.name}", f"{gpu.name}."
            own = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
            if name in explained or ("ecc_uncorrected" not in own and name not in events):
                continue
            reached = (*breaches(own), *xid_breaches(events.get(name, {})))
            readings.append(GpuReading(name=name, origin=origin, at=at, breaches=reached))
    return tuple(readings)


def readings_of_preflight(content: Any, topology: Topology, *, origin: str, at: datetime) -> tuple[GpuReading, ...]:
    """Return the readings of a preflight, as `faultbed preflight --json` prints it; none if it checked no GPU."""
    if CHECK.name not in content.get("checked", ()):
        return ()
    unknown = {_place(one) for one in content.get("not_looked", ()) if one.get("check") == CHECK.name}
    reached: dict[str, list[Breach]] = {}
    for one in content["wrong"]:
        if one["check"] == CHECK.name and (breach := breach_in(str(one.get("found")), do=str(one.get("wanted")))):
            reached.setdefault(_place(one), []).append(breach)
    return tuple(
        GpuReading(name=name, origin=origin, at=at, breaches=tuple(reached.get(name, ())))
        for host in topology.hosts
        for name in (f"{host.name}:{gpu.name}" for gpu in host.gpus)
        if name in reached or not {name, host.name} & unknown
    )


def newest(readings: Iterable[GpuReading]) -> dict[str, GpuReading]:
    """Return the newest reading of each GPU, by its name."""
    return {one.name: one for one in sorted(readings, key=lambda one: one.at)}


def _place(one: dict[str, Any]) -> str:
    """Return the place of a row of preflight without the bus address behind it."""
    return str(one.get("where")).partition(" ")[0]
