"""Fit the model's parameters to fault-free runs of a lab, and estimate its error. Pure except for `load`.

    calibration = fit({"20261127T...-ring": sample, ...}, conditions)

The time of an iteration is linear in its features (`step_times.Features`): steps, messages, transfer and compute. The
parameters are fitted by non-negative least squares of the relative errors (Lawson and Hanson, 1974). Features whose
effects the runs do not separate are fitted together, in the ratio of the default parameters. The interval of a
parameter is the 95 % percentile interval over bootstrap samples of runs (Efron and Tibshirani, 1993).

The band is the expected deviation of a further run from its prediction. Each run is predicted from the other runs; the
band contains 95 % of a Student distribution with the spread of these errors. It is valid only within the range of the
calibrating runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

from faultbed.harness.json_text import json_text
from faultbed.harness.model.step_times import Features, StepParameters
from faultbed.harness.quantities import format_bytes
from faultbed.testbed.errors import UsageError

__all__ = [
    "FILE",
    "MIN_RUNS",
    "Calibration",
    "Conditions",
    "Estimate",
    "Range",
    "Sample",
    "encode",
    "fit",
    "load",
    "outside",
]

FILE = "calibration.json"
"""File in a lab's state folder that holds its calibration."""
MIN_RUNS = 4
LEVEL = 0.95
_RESAMPLES = 200
_CONDITION = 1e3
"""Maximum condition number of the scaled features up to which they are fitted separately."""

Floats = npt.NDArray[np.float64]


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """The lab and machine of the runs: name and digest of the inventory, accelerator of the VMs, CPUs."""

    lab: str
    inventory: str
    accelerator: str | None
    cpus: int


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter with its 95 % interval."""

    value: float
    low: float
    high: float


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """The lowest and the highest value among the calibrating runs."""

    least: float
    most: float

    def has(self, value: float) -> bool:
        """Return whether a value lies within the range."""
        return self.least <= value <= self.most


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A fault-free run: its features with the default parameters, and its measured time of an iteration (s)."""

    features: Features
    seconds: float
    ranks: int
    size_bytes: int
    qps: int
    algorithm: str = ""


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `calibration.json`.

    `alpha_ns`, `overhead_ns`, `rate` (share of the nominal capacity of links) and `compute_ns` (of one unit) are the
    parameters; None: no run depends on it. `band` is relative: 0.14 is ±14 %. `together` names the features whose
    effects could not be separated.
    """

    schema: Literal[1] = 1
    conditions: Conditions
    runs: int
    sources: tuple[str, ...]
    alpha_ns: Estimate
    overhead_ns: Estimate
    rate: Estimate
    compute_ns: Estimate | None
    band: float
    ranks: Range
    size_bytes: Range
    qps: Range
    algorithms: tuple[str, ...]
    together: tuple[str, ...] = ()

    @property
    def parameters(self) -> StepParameters:
        """The fitted parameters."""
        return StepParameters(
            alpha_ns=self.alpha_ns.value,
            overhead_ns=self.overhead_ns.value,
            rate=self.rate.value,
            compute_ns=None if self.compute_ns is None else self.compute_ns.value,
        )


def fit(samples: Mapping[str, Sample], conditions: Conditions, defaults: StepParameters) -> Calibration:
    """Fit the parameters to fault-free runs.

    `samples` has the name of each run as its key.

    Raises:
        UsageError: fewer than `MIN_RUNS` runs, or a time that is not above 0.
    """
    for name, sample in samples.items():
        if not (math.isfinite(sample.seconds) and sample.seconds > 0):
            raise UsageError(f"{name}: an iteration took {sample.seconds} s; name a run that finished its iterations")
    if len(samples) < MIN_RUNS:
        raise UsageError(
            f"{len(samples)} fault-free series; a calibration needs at least {MIN_RUNS}, of different sizes: runs "
            "without faults, or twins of runs that bound jct_ratio"
        )
    rows = list(samples.values())
    groups = _separable(rows, defaults)
    fitted = _solve(rows, groups, defaults)
    rng = np.random.default_rng(1)
    resampled = [
        _solve([rows[index] for index in rng.integers(len(rows), size=len(rows))], groups, defaults)
        for _ in range(_RESAMPLES)
    ]
    errors = [
        math.log(_seconds(row.features, _solve(rows[:index] + rows[index + 1 :], groups, defaults)) / row.seconds)
        for index, row in enumerate(rows)
    ]
    spread = math.sqrt(float(np.mean(np.square(errors))) * (1 + 1 / len(rows)))
    quantile = float(stats.t.ppf((1 + LEVEL) / 2, len(rows) - 1))
    estimates = [_estimate(fitted[index], [item[index] for item in resampled]) for index in range(len(_NAMES))]
    # The third coefficient is the inverse of the rate.
    rate = estimates[2]
    return Calibration(
        conditions=conditions,
        runs=len(rows),
        sources=tuple(samples),
        alpha_ns=estimates[0],
        overhead_ns=estimates[1],
        rate=Estimate(value=1 / rate.value, low=1 / rate.high, high=1 / max(rate.low, _LEAST)),
        compute_ns=estimates[3] if any(row.features.compute_units for row in rows) else None,
        band=math.expm1(quantile * spread),
        ranks=_range([row.ranks for row in rows]),
        size_bytes=_range([row.size_bytes for row in rows]),
        qps=_range([row.qps for row in rows]),
        algorithms=tuple(sorted({row.algorithm for row in rows})),
        together=tuple(_NAMES[index] for group in groups if len(group) > 1 for index in group),
    )


_NAMES = ("alpha_ns", "overhead_ns", "rate", "compute_ns")
_LEAST = 1e-3
"""Lower bound of the inverse of `rate`: no link is over a thousand times as fast as its nominal capacity."""
_Groups = Sequence[tuple[int, ...]]


def _columns(rows: Sequence[Sample]) -> Floats:
    """Return the features of runs in seconds for a coefficient of 1: shape (runs, 4), in the order of `_NAMES`."""
    table = [
        (
            row.features.steps / 1e9,
            row.features.messages / 1e9,
            row.features.transfer_s,
            row.features.compute_units / 1e9,
        )
        for row in rows
    ]
    return np.array(table, dtype=np.float64)


def _default_coefficients(defaults: StepParameters) -> Floats:
    return np.array([defaults.alpha_ns, defaults.overhead_ns, 1 / defaults.rate, defaults.compute_ns or 1.0])


def _separable(rows: Sequence[Sample], defaults: StepParameters) -> _Groups:
    """Return the groups of features whose effects the runs separate."""
    choices: tuple[_Groups, ...] = (
        ((0,), (1,), (2,), (3,)),
        ((0, 1), (2,), (3,)),
        ((0, 1, 2), (3,)),
        ((0, 1, 2, 3),),
    )
    for groups in choices:
        design = _design(rows, groups, defaults)
        present = design[:, design.any(axis=0)]
        if present.shape[1] <= len(rows) - 2 and np.linalg.cond(present / np.linalg.norm(present, axis=0)) < _CONDITION:
            return [group for group, column in zip(groups, design.T, strict=True) if column.any()]
    return choices[-1]


def _design(rows: Sequence[Sample], groups: _Groups, defaults: StepParameters) -> Floats:
    """Return the relative time that each group contributes with the default parameters: shape (runs, groups)."""
    seconds = np.array([row.seconds for row in rows])
    contributed = _columns(rows) * _default_coefficients(defaults) / seconds[:, None]
    return np.stack([contributed[:, list(group)].sum(axis=1) for group in groups], axis=1)


def _solve(rows: Sequence[Sample], groups: _Groups, defaults: StepParameters) -> Floats:
    """Return the coefficients in the order of `_NAMES`. A feature that no run has keeps its default coefficient."""
    factors, _ = optimize.nnls(_design(rows, groups, defaults), np.ones(len(rows)))
    coefficients = _default_coefficients(defaults)
    for group, factor in zip(groups, factors, strict=True):
        for index in group:
            coefficients[index] *= factor
    coefficients[2] = max(coefficients[2], _LEAST)
    return coefficients


def _seconds(features: Features, coefficients: Floats) -> float:
    parameters = StepParameters(
        alpha_ns=float(coefficients[0]),
        overhead_ns=float(coefficients[1]),
        rate=1 / float(coefficients[2]),
        compute_ns=float(coefficients[3]),
    )
    return max(features.seconds(parameters), 1e-12)


def _estimate(value: float, resampled: Sequence[float]) -> Estimate:
    low, high = np.percentile(resampled, (100 * (1 - LEVEL) / 2, 100 * (1 + LEVEL) / 2))
    return Estimate(value=float(value), low=min(float(low), float(value)), high=max(float(high), float(value)))


def _range(values: Sequence[float]) -> Range:
    return Range(least=min(values), most=max(values))


def outside(
    calibration: Calibration, *, ranks: int, size_bytes: int, qps: int, compute_units: float = 0.0
) -> tuple[str, ...]:
    """Return a phrase for each property of a workload that is outside the range of a calibration."""
    reasons = []
    for value, known, words in (
        (ranks, calibration.ranks, lambda number: f"{number:g} ranks"),
        (size_bytes, calibration.size_bytes, format_bytes),
        (qps, calibration.qps, lambda number: f"{number:g} queue pairs per peer"),
    ):
        if not known.has(value):
            side, bound = ("to", known.most) if value > known.most else ("from", known.least)
            reasons.append(f"{words(value)}, calibrated {side} {words(bound)}")
    if compute_units and calibration.compute_ns is None:
        reasons.append(f"{compute_units:g} units of compute, calibrated without compute")
    return tuple(reasons)


def encode(calibration: Calibration) -> bytes:
    """Return the bytes of `calibration.json`."""
    return json_text(calibration)


def load(state_dir: Path, *, inventory: str) -> Calibration | None:
    """Return the calibration that is stored for a lab; None: there is none for this inventory.

    Raises:
        UsageError: the stored file is not a calibration.
    """
    path = Path(state_dir, FILE)
    try:
        calibration = _decode(path.read_bytes()) if path.exists() else None
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{path}: not a calibration as this version writes it: {error}; remove it, or calibrate again with "
            "`faultbed calibrate`"
        ) from error
    if calibration is None or calibration.conditions.inventory != inventory:
        return None
    return calibration


def _decode(content: bytes) -> Calibration:
    calibration = msgspec.json.decode(content, type=Calibration)
    parameters: list[Any] = [calibration.alpha_ns, calibration.overhead_ns, calibration.rate, calibration.compute_ns]
    values = [value for item in parameters if item is not None for value in (item.value, item.low, item.high)]
    if (
        not all(math.isfinite(value) and value >= 0 for value in (*values, calibration.band))
        or not calibration.rate.low
    ):
        raise ValueError("a parameter or the band is negative or not finite")
    return calibration
