"""The noise floor of a lab: how much fault-free runs of one workload differ from each other (A/A). Pure.

    floor = measure({"20261121T...-aa-1": (conditions, measurements), ...})

Fault-free runs count, and so do the fault-free twins of other runs. For each quantity the deviation of its logarithm is
stored: two fault-free runs differ by more than `Spread.pair` in only 1 % of cases. The largest ratio of two of them is
the level tolerance by which the judge decides a property of the setting from one run (`tolerance_of`).

A floor holds under the conditions that it was measured under (`Conditions`), and is used for no other run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from faultbed.harness.analysis.intervals import iteration_times, operation_times
from faultbed.harness.analysis.links import emulation_headroom
from faultbed.harness.analysis.timeline import finished_iterations
from faultbed.harness.confidence import LEVEL, student
from faultbed.harness.experiment.run_plan import Plan
from faultbed.harness.json_text import json_text
from faultbed.harness.ledger.statistics.decision import Tolerance
from faultbed.harness.ledger.statistics.level_tolerance import declared_tolerance, measured_tolerance
from faultbed.harness.record.copies import digest_of
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.record.evidence.workload_evidence import RankSeries
from faultbed.harness.record.rundir import RunDir
from faultbed.testbed.errors import UsageError
from faultbed.traffic.flows.flow_spec import FlowSpec
from faultbed.traffic.probes.prober import ProbeSpec

__all__ = [
    "FILE",
    "MIN_RUNS",
    "Conditions",
    "NoiseFloor",
    "Spread",
    "conditions_in",
    "conditions_of",
    "decode",
    "differing",
    "encode",
    "load",
    "measure",
    "tolerance_of",
]

FILE = "noise-floor.json"
"""File in a lab's state folder that holds its noise floor."""
MIN_RUNS = 3

_Value = TypeVar("_Value")


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity over fault-free runs: its geometric mean, in `unit`, and the deviation of its logarithm."""

    runs: int
    middle: float
    unit: str
    log_sd: float

    @property
    def pair(self) -> float:
        """Ratio (above 1) that two such runs exceed, in either direction, in 1 - `LEVEL` of cases."""
        return math.exp(student(self.runs - 1, LEVEL) * math.sqrt(2) * self.log_sd)


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything recorded of a run that its noise depends on.

    `inventory` is the digest of the lab's file, which has its links, rates and VMs. `accelerator` is that of the VMs,
    `cpus` the number of CPUs of the controller, which carries a soft lab. `workload` is as planned, with its ranks and
    queue pairs. `routing` is the routing scheme with its parameters; None: BGP's ECMP. `capture`, `probe` and
    `bystander` ran beside the workload; they are empty or None if there were none.
    """

    lab: str
    inventory: str
    accelerator: str | None
    cpus: int
    workload: dict[str, Any]
    routing: tuple[str, dict[str, Any]] | None = None
    capture: tuple[str, ...] = ()
    probe: ProbeSpec | None = None
    bystander: FlowSpec | None = None


class NoiseFloor(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `noise-floor.json`.

    `conditions` and `iterations` describe the runs; `sources` lists them. `ratios` are those of the job times of
    disjoint pairs of them (A/A), in their order. `conditions` None: an older version measured it, so that what it holds
    for is unknown.
    """

    schema: Literal[1] = 1
    conditions: Conditions | None = None
    iterations: int
    sources: tuple[str, ...]
    spreads: dict[str, Spread]
    ratios: tuple[float, ...] = ()


def conditions_of(plan: Plan, *, lab: str, accelerator: str | None, cpus: int) -> Conditions:
    """Return the conditions of a run by its plan, its lab and the machine of its controller."""
    fabric = plan.fabric or None
    conditions = Conditions(
        lab=lab,
        inventory=plan.inventory,
        accelerator=accelerator,
        cpus=cpus,
        workload=plan.workload,
        routing=None if fabric is None else (fabric.routing, fabric.parameters),
        capture=plan.capture or (),
        probe=plan.probe or None,
        bystander=plan.bystander or None,
    )
    return _as_read(conditions, Conditions)


def conditions_in(directory: RunDir, measured: RunEvidence) -> Conditions:
    """Return the conditions of a finished run.

    Raises:
        UsageError: its plan or environment cannot be read.
    """
    return conditions_of(
        directory.read_plan(),
        lab=measured.lab.name,
        accelerator=measured.lab.accelerator,
        cpus=directory.read_environment().cpu_count,
    )


def differing(one: Conditions, other: Conditions) -> tuple[str, ...]:
    """Return the names of the conditions in which two runs differ."""
    return tuple(name for name in Conditions.__struct_fields__ if getattr(one, name) != getattr(other, name))


def measure(runs: Mapping[str, tuple[Conditions, RunEvidence]]) -> NoiseFloor:
    """Return the noise floor from runs under the same conditions, by name.

    Raises:
        UsageError: different conditions, one run twice, or fewer than `MIN_RUNS` fault-free series.
    """
    names: dict[str, str] = {}
    for name, (_, run) in runs.items():
        if (first := names.setdefault(digest_of(run), name)) != name:
            raise UsageError(f"{name} is a copy of {first}, so it adds no information about noise; name each run once")
    (first, (conditions, _)), *_ = runs.items()
    for name, (others, _) in runs.items():
        if apart := differing(conditions, others):
            raise UsageError(
                f"{first} and {name} differ in {', '.join(apart)}: they have no common noise; name runs of one "
                "experiment on one lab and machine"
            )
    series = {name: part for name, run in runs.items() for name, part in _fault_free(name, *run)}
    iterations = min((finished_iterations(part) for part in series.values()), default=0)
    if len(series) < MIN_RUNS or iterations == 0:
        raise UsageError(
            f"{len(series)} fault-free series with {iterations} common iterations; a noise floor needs at least "
            f"{MIN_RUNS}: runs of an experiment without faults, or twins of runs that bound jct_ratio; a run whose "
            "routing scheme is not proven, that was restarted, or with more load than the emulation forwards, does not "
            "count"
        )
    job_times = [float(iteration_times(part, iterations).sum()) / 1e9 for part in series.values()]
    spreads = {
        "job_time": _spread(job_times, "s"),
        "iteration": _spread([np.median(iteration_times(part, iterations)) / 1e9 for part in series.values()], "s"),
        "collective": _spread([np.median(operation_times(part)[:iterations]) / 1e9 for part in series.values()], "s"),
        "compute": _spread([_compute_s(part, iterations) for part in series.values()], "s"),
    }
    return NoiseFloor(
        conditions=conditions,
        iterations=iterations,
        sources=tuple(series),
        spreads={name: spread for name, spread in spreads.items() if spread is not None},
        ratios=tuple(
            first / second for first, second in zip(job_times[::2], job_times[1::2], strict=False) if first and second
        ),
    )


def tolerance_of(run: RunEvidence, floor: NoiseFloor | None) -> Tolerance:
    """Return the level tolerance for a run: as the noise floor shows it, else as declared for its machine."""
    declared = declared_tolerance(run.lab.kind, run.lab.accelerator)
    return declared if floor is None else measured_tolerance(floor.ratios, declared)


def load(state_dir: Path, conditions: Conditions, say: Callable[[str], object] = lambda _: None) -> NoiseFloor | None:
    """Load the noise floor that is stored for a lab.

    Returns None if there is none, or one that was measured under other conditions; `say` is called with the reason of
    the latter.

    Raises:
        UsageError: the stored file is not a noise floor.
    """
    path = Path(state_dir, FILE)
    try:
        floor = decode(path.read_bytes()) if path.exists() else None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{path}: not a noise floor as this version writes it: {error}; remove it, or measure it again with "
            "`faultbed noise`"
        ) from error
    if floor is None:
        return None
    if floor.conditions is None:
        difference = "under unknown conditions"
    elif apart := differing(floor.conditions, conditions):
        difference = f"with another {', '.join(apart)}"
    else:
        return floor
    say(
        f"{path} is not used: it was measured {difference}; measure a noise floor under the conditions of this run "
        "with `faultbed noise`"
    )
    return None


def encode(floor: NoiseFloor) -> bytes:
    """Return the bytes of `noise-floor.json`."""
    return json_text(floor)


def decode(content: bytes) -> NoiseFloor:
    """Read `noise-floor.json`.

    Raises:
        msgspec.ValidationError: not a noise floor of schema 1.
    """
    return msgspec.json.decode(content, type=NoiseFloor)


def _fault_free(name: str, conditions: Conditions, run: RunEvidence) -> list[tuple[str, Sequence[RankSeries]]]:
    """Return the series of a run without faults, and of its twin; none if the conditions were not those of the plan.

    A job that had to be restarted was disturbed, although by no fault of the plan.
    """
    routing = None if run.routing is None else (run.routing.scheme, _as_read(run.routing.parameters, dict[str, Any]))
    is_as_planned = routing == conditions.routing and not (run.routing and run.routing.unproven)
    load = run.emulation
    is_carried = load is not None and (
        load.offered_bps is None or not emulation_headroom.exceeds_headroom(load.offered_bps, load.carried_bps)
    )
    if not is_as_planned or not is_carried:
        return []
    series: list[tuple[str, Sequence[RankSeries]]] = []
    is_undisturbed = (
        not run.lab.errors
        and run.workload.failure is None
        and not (run.workload.resilience and run.workload.resilience.restarts)
    )
    if not run.injected.faults and is_undisturbed and finished_iterations(run.workload.series):
        series.append((name, run.workload.series))
    if run.fault_free is not None and finished_iterations(run.fault_free):
        series.append((f"{name} (twin)", run.fault_free))
    return series


def _as_read(value: _Value, kind: type[_Value]) -> _Value:
    """Return a value after a round trip through JSON, which changes types: otherwise it differs from one in a file."""
    return msgspec.json.decode(msgspec.json.encode(value), type=kind)


def _compute_s(ranks: Sequence[RankSeries], iterations: int) -> float:
    return float(np.median([step.compute_ns for rank in ranks for step in rank.iterations[:iterations]])) / 1e9


def _spread(values: Sequence[float], unit: str) -> Spread | None:
    """Return the spread of values; None if some value is 0, such as the compute time of a job without compute."""
    if min(values) <= 0:
        return None
    logs = np.log(values)
    return Spread(runs=len(values), middle=float(np.exp(logs.mean())), unit=unit, log_sd=float(logs.std(ddof=1)) or 0.0)
