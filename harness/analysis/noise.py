"""The noise floor of a lab: how much fault-free runs of one workload differ from each other (A/A). Pure.

    floor = measure({"20261121T...-aa-1": measurements, ...})

Fault-free runs count, and so do the fault-free twins of other runs. For each quantity the deviation of its logarithm is
stored: two fault-free runs differ by more than `Spread.pair` in only 1 % of cases. A bound closer to 1 than that cannot
be decided on this lab, however long the run is. The judge widens `jct_ratio` by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from harness.analysis.intervals import iteration_times, operation_times
from harness.analysis.observe import Observed
from harness.analysis.timeline import finished_iterations
from harness.confidence import LEVEL, student, widened
from harness.json_text import json_text
from harness.record.copies import digest_of
from harness.record.measurements import Measurements, RankSeries
from testbed.errors import UsageError

__all__ = ["FILE", "MIN_RUNS", "NoiseFloor", "Spread", "allow_for", "decode", "encode", "load", "measure"]

FILE = "noise-floor.json"
"""File in a lab's state folder that holds its noise floor."""
MIN_RUNS = 3


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


class NoiseFloor(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `noise-floor.json`.

    `accelerator` (that of the VMs), `workload` and `iterations` describe the runs; `sources` lists them.
    """

    schema: Literal[1] = 1
    lab: str
    accelerator: str | None = None
    workload: dict[str, Any]
    iterations: int
    sources: tuple[str, ...]
    spreads: dict[str, Spread]


def measure(runs: Mapping[str, Measurements]) -> NoiseFloor:
    """Return the noise floor from runs of one workload on one lab, by name.

    Raises:
        UsageError: different labs, accelerators, workloads or routing schemes, one run twice, or fewer than `MIN_RUNS`
            fault-free series.
    """
    names: dict[str, str] = {}
    for name, run in runs.items():
        if (first := names.setdefault(digest_of(run), name)) != name:
            raise UsageError(
                f"{name} is a copy of {first}: it does not differ from it by any noise; name each run once"
            )
    if len({_conditions(run) for run in runs.values()}) > 1:
        raise UsageError(
            "runs of different labs, accelerators, workloads or routing schemes have no common noise; name runs of one "
            "experiment on one machine"
        )
    series = {name: part for name, run in runs.items() for name, part in _fault_free(name, run)}
    iterations = min((finished_iterations(part) for part in series.values()), default=0)
    if len(series) < MIN_RUNS or iterations == 0:
        raise UsageError(
            f"{len(series)} fault-free series with {iterations} common iterations; a noise floor needs at least "
            f"{MIN_RUNS}: runs of an experiment without faults, or twins of runs that bound jct_ratio"
        )
    measured = next(iter(runs.values()))
    spreads = {
        "job_time": _spread([iteration_times(part, iterations).sum() / 1e9 for part in series.values()], "s"),
        "iteration": _spread([np.median(iteration_times(part, iterations)) / 1e9 for part in series.values()], "s"),
        "collective": _spread([np.median(operation_times(part)[:iterations]) / 1e9 for part in series.values()], "s"),
        "compute": _spread([_compute_s(part, iterations) for part in series.values()], "s"),
    }
    return NoiseFloor(
        lab=measured.lab,
        accelerator=measured.accelerator,
        workload=measured.workload,
        iterations=iterations,
        sources=tuple(series),
        spreads={name: spread for name, spread in spreads.items() if spread is not None},
    )


def allow_for(observed: Observed, floor: NoiseFloor | None) -> Observed:
    """Widen `jct_ratio` by the difference that two runs on this lab have."""
    job_time_ratio, spread = observed.metrics.get("jct_ratio"), floor.spreads.get("job_time") if floor else None
    if job_time_ratio is None or job_time_ratio.interval is None or spread is None:
        return observed
    source = f"the lab's noise floor of {spread.runs} fault-free runs"
    interval = widened(job_time_ratio.interval, math.sqrt(2) * spread.log_sd, freedom=spread.runs - 1, source=source)
    return replace(observed, metrics={**observed.metrics, "jct_ratio": replace(job_time_ratio, interval=interval)})


def load(state_dir: Path, workload: Mapping[str, Any], accelerator: str | None) -> NoiseFloor | None:
    """Return the noise floor stored for a lab; None if there is none, or one of another workload or accelerator.

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
    fits = floor is not None and (floor.workload, floor.accelerator) == (workload, accelerator)
    return floor if fits else None


def encode(floor: NoiseFloor) -> bytes:
    """Return the bytes of `noise-floor.json`."""
    return json_text(floor)


def decode(content: bytes) -> NoiseFloor:
    """Read `noise-floor.json`.

    Raises:
        msgspec.ValidationError: not a noise floor of schema 1.
    """
    return msgspec.json.decode(content, type=NoiseFloor)


def _conditions(run: Measurements) -> bytes:
    """Return what the noise of a run depends on, as far as its measurements say."""
    scheme = run.routing and (run.routing.scheme, run.routing.parameters)
    return msgspec.json.encode((run.lab, run.accelerator, run.workload, scheme), order="sorted")


def _fault_free(name: str, run: Measurements) -> list[tuple[str, Sequence[RankSeries]]]:
    series: list[tuple[str, Sequence[RankSeries]]] = []
    if not run.faults and not run.errors and run.failure is None and finished_iterations(run.series):
        series.append((name, run.series))
    if run.twin is not None and finished_iterations(run.twin):
        series.append((f"{name} (twin)", run.twin))
    return series


def _compute_s(ranks: Sequence[RankSeries], iterations: int) -> float:
    return float(np.median([step.compute_ns for rank in ranks for step in rank.iterations[:iterations]])) / 1e9


def _spread(values: Sequence[float], unit: str) -> Spread | None:
    """Return the spread of values; None if some value is 0, such as the compute time of a job without compute."""
    if min(values) <= 0:
        return None
    logs = np.log(values)
    return Spread(runs=len(values), middle=float(np.exp(logs.mean())), unit=unit, log_sd=float(logs.std(ddof=1)) or 0.0)
