"""How busy this machine was over a stretch of time: pressure stall information and steal time.

    watch = MachineLoad.watch()
    ...
    load = watch()

Pressure is the share of time in which at least one task waited for CPU, input/output or memory ("some" of
`/proc/pressure/*`, Documentation/accounting/psi.rst). Steal is the share of CPU time that a hypervisor took away
(`/proc/stat`, proc_stat(5)).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MachineLoad", "differences"]

_PROC = Path("/proc")
_RESOURCES = ("cpu", "io", "memory")
_STEAL = 7  # user nice system idle iowait irq softirq steal
_FIELDS = 8
_MUCH_PRESSURE, _MUCH_STEAL = 0.1, 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLoad:
    """Pressure as shares of `wall_ns`, and steal as a share of CPU time, each 0 to 1.

    A value that could not be read is None; `missing` names its file.
    """

    wall_ns: int
    cpu: float | None = None
    io: float | None = None
    memory: float | None = None
    steal: float | None = None
    missing: tuple[str, ...] = ()

    @staticmethod
    def watch(proc: Path = _PROC) -> Callable[[], MachineLoad]:
        """Begin to measure; the returned function returns the load since then."""
        before, begin_ns = _totals(proc), time.monotonic_ns()

        def load() -> MachineLoad:
            return _between(before, _totals(proc), time.monotonic_ns() - begin_ns)

        return load


def _between(before: Mapping[str, int], after: Mapping[str, int], wall_ns: int) -> MachineLoad:
    def share(name: str, whole: float) -> float | None:
        if name not in before or name not in after or whole <= 0:
            return None
        return min(1.0, max(0.0, (after[name] - before[name]) / whole))

    ticks = after.get("ticks", 0) - before.get("ticks", 0)
    shares = {name: share(name, wall_ns / 1000) for name in _RESOURCES}
    steal = share("steal", ticks)
    missing = [f"/proc/pressure/{name}" for name, value in shares.items() if value is None]
    return MachineLoad(
        wall_ns=wall_ns, **shares, steal=steal, missing=(*missing, *(["steal in /proc/stat"] if steal is None else []))
    )


def _totals(proc: Path) -> dict[str, int]:
    """Return µs of pressure by resource, `steal` and all CPU time in `ticks`; unreadable values are left out."""
    totals = {}
    for name in _RESOURCES:
        try:
            some = next(
                line for line in (proc / "pressure" / name).read_text().splitlines() if line.startswith("some ")
            )
            totals[name] = int(some.rpartition("total=")[2])
        except (OSError, StopIteration, ValueError):
            continue
    try:
        times = [int(field) for field in (proc / "stat").read_text().splitlines()[0].split()[1 : 1 + _FIELDS]]
    except (OSError, IndexError, ValueError):
        return totals
    if len(times) == _FIELDS:
        totals |= {"steal": times[_STEAL], "ticks": sum(times)}
    return totals


def differences(run: MachineLoad | None, twin: MachineLoad | None) -> str:
    """Describe how the machine's load differed between a run and its twin; empty if the difference is small."""
    if run is None or twin is None:
        return ""
    words = []
    for name, of_run, of_twin, much in (
        ("CPU pressure", run.cpu, twin.cpu, _MUCH_PRESSURE),
        ("I/O pressure", run.io, twin.io, _MUCH_PRESSURE),
        ("memory pressure", run.memory, twin.memory, _MUCH_PRESSURE),
        ("steal time", run.steal, twin.steal, _MUCH_STEAL),
    ):
        if of_run is not None and of_twin is not None and abs(of_run - of_twin) > much:
            words.append(f"{name} {of_run:.0%} in the run, {of_twin:.0%} in the twin")
    if missing := sorted({*run.missing, *twin.missing}):
        words.append(f"{', '.join(missing)} not available")
    return f"on the controller: {'; '.join(words)}" if words else ""
