"""The points of a scorecard: each program, setting and fault as an experiment, resolved against the lab. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from faultbed.harness.experiment.experiment_file import decode
from faultbed.harness.experiment.parameters import Parameter
from faultbed.harness.experiment.toml_text import experiment_toml
from faultbed.harness.run.prepare.resolve import refusal, resolve
from faultbed.harness.run.sweeps.sweep_points import MOST_RUNS, Point
from faultbed.harness.scorecard.program_file import Program, ScoredFault
from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory.lab_inventory import Inventory

__all__ = ["EXPERIMENT", "FAULT", "experiment_of", "parameters_of", "points_of"]

EXPERIMENT, FAULT = "scorecard", "fault"
"""Name of every experiment of a scorecard, and the id of its fault."""
_AT_NS = 8_000_000_000
"""When the fault is armed, after the first data: the time before it is what the time after it is compared with."""
_BACK = 0.75
"""Share of the time after a fault within which a program must be back: one that hangs does not survive."""


def parameters_of(programs: Sequence[Program], faults: Sequence[ScoredFault]) -> tuple[Parameter, ...]:
    """Return the axes of the scorecard as the parameters of a sweep."""
    settings = tuple(dict.fromkeys(name for program in programs for name in program.settings))
    return (
        Parameter(path="program", values=tuple(program.name for program in programs)),
        Parameter(path="setting", values=settings),
        Parameter(path="fault", values=tuple(fault.name for fault in faults)),
    )


def points_of(
    programs: Sequence[Program], faults: Sequence[ScoredFault], inventory: Inventory, *, seed: int, seeds: int
) -> tuple[Point, ...]:
    """Decide every run of a scorecard; touches nothing.

    Raises:
        ConfigError: a program's file is wrong, or does not fit the lab.
        UsageError: there are too many runs, or a fault does not fit its target.
        Unsupported: the lab does not support a fault.
        Forbidden: the lab's owner does not allow it.
    """
    chosen = list(_combinations(programs, faults))
    if len(chosen) * seeds > MOST_RUNS:
        raise UsageError(f"{len(chosen) * seeds} runs, of at most {MOST_RUNS}; name fewer programs or faults")
    points = []
    for number, (program, setting, fault) in enumerate(chosen, start=1):
        content = experiment_of(program, setting, fault)
        experiment = decode(content, source=f"{program.name} ({setting}, {fault.name})")
        runs = tuple(resolve(experiment, content, inventory, seed=seed + index) for index in range(seeds))
        if reason := next(filter(None, (refusal(run, inventory) for run in runs)), None):
            raise reason
        parameters = {"program": program.name, "setting": setting, "fault": fault.name}
        points.append(Point(number=number, parameters=parameters, experiment=runs[0].experiment, runs=runs))
    return tuple(points)


def _combinations(
    programs: Sequence[Program], faults: Sequence[ScoredFault]
) -> Iterator[tuple[Program, str, ScoredFault]]:
    yield from ((program, setting, fault) for program in programs for setting in program.settings for fault in faults)


def experiment_of(program: Program, setting: str, fault: ScoredFault) -> bytes:
    """Return the experiment of one combination as TOML."""
    ends = program.ends()
    values = {**ends} | {f"{role}_host": rnic.rpartition(":")[0] for role, rnic in ends.items()}
    raw = _merged({"workload": program.workload}, program.settings[setting])
    last_ns = _AT_NS + fault.for_ns + fault.after_ns
    raw["workload"] = {**raw["workload"], "duration": f"{last_ns // 10**6}ms"}
    if "command" in raw["workload"]:
        raw["workload"].setdefault("timeout", f"{last_ns // 10**9 + 120}s")
    planned: dict[str, Any] = {
        "id": FAULT,
        "kind": fault.kind,
        "target": fault.target.format(**values),
        "at": f"{_AT_NS // 10**6}ms",
        "for": fault.for_,
    }
    planned |= {"set": fault.set} if fault.set else {}
    back = {"metric": "recovery.total", "max": f"{(fault.for_ns + round(_BACK * fault.after_ns)) // 10**6}ms"}
    return experiment_toml({"name": EXPERIMENT, **raw, "faults": [planned], "expect": [back]})


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with the values of another one in place of its own, table by table."""
    both = dict(below)
    for key, value in above.items():
        is_table = isinstance(value, Mapping) and isinstance(both.get(key), Mapping)
        both[key] = _merged(both[key], value) if is_table else value
    return both
