"""Generators of noise like that of real labs, with a known true value, for `bench.noise.decisions`.

Within a run: independent, correlated, skewed, bursts, slow noise under white noise, alternation, quantised times,
misses in clusters, periodic stalls, and a level that hops, drifts or has two values. Across runs: equal runs, two
levels, rare slow runs, and correlated runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from bench.noise.decisions import Generator, Pair
from faultbed.harness.experiment.metrics import METRICS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Shape = Callable[[np.random.Generator, int], Floats]

__all__ = ["ACROSS", "WITHIN", "generators"]

FACTOR = 1.2
"""True factor by which the faults lengthen a run; goodput falls to its reciprocal."""
_HALF, _FIFTH, _TENTH, _RARE, _CLUSTER = 0.5, 0.2, 0.1, 0.01, 0.001
_TRUTH_VALUES = 400_000
"""Number of values from which the true quantile of a shape is estimated."""


def _ar(rng: np.random.Generator, n: int, phi: float) -> Floats:
    shocks = rng.normal(size=n) * math.sqrt(1 - phi**2)
    values = np.empty(n)
    value = rng.normal()
    for index, shock in enumerate(shocks):
        value = phi * value + shock if index else value
        values[index] = value
    return values


def _hops(rng: np.random.Generator, n: int) -> Floats:
    """Levels that last 10 to 40 values each."""
    levels: list[float] = []
    while len(levels) < n:
        levels += [float(rng.choice([-1.0, 1.0]))] * int(rng.integers(10, 41))
    return np.array(levels[:n])


def _stalls(rng: np.random.Generator, n: int) -> Floats:
    at = int(rng.integers(20))
    return 0.95 + 0.02 * rng.normal(size=n) + np.where(np.arange(at, at + n) % 20 == 0, 1.0, 0.0)


def _two_levels(rng: np.random.Generator, n: int) -> Floats:
    level = 1.03 if rng.random() < _HALF else 0.97
    return level * (1 + 0.03 * rng.normal(size=n))


def _drift(rng: np.random.Generator, n: int) -> Floats:
    slope = 0.04 if rng.random() < _HALF else -0.04
    return 1 + slope * (np.arange(n) / max(n - 1, 1) - 0.5) + 0.03 * rng.normal(size=n)


WITHIN: Mapping[str, Shape] = {
    "independent 5 %": lambda rng, n: 1 + 0.05 * rng.normal(size=n),
    "AR(1) .7, 5 %": lambda rng, n: 1 + 0.05 * _ar(rng, n, 0.7),
    "lognormal .4": lambda rng, n: np.exp(0.4 * rng.normal(size=n) - 0.08),
    "bursts, 1 in 100 of 5 times": lambda rng, n: (
        (1 + 0.05 * rng.normal(size=n)) * np.where(rng.random(n) < _RARE, 5.0, 1.0) / 1.04
    ),
    "white with 20 % slow noise": lambda rng, n: (
        1 + 0.1 * (math.sqrt(0.8) * rng.normal(size=n) + math.sqrt(0.2) * _ar(rng, n, 0.97))
    ),
    "alternation": lambda rng, n: (
        1 + 0.1 * np.where((np.arange(n) + rng.integers(2)) % 2, 1, -1) + 0.02 * rng.normal(size=n)
    ),
    "quantised, 1 % one step up": lambda rng, n: np.where(rng.random(n) < _RARE, 1.1, 1.0) / 1.001,
    "stalls, every 20th twice as long": _stalls,
    "level hops of 5 %": lambda rng, n: 1 + 0.05 * _hops(rng, n) + 0.02 * rng.normal(size=n),
    "drift of 4 %": _drift,
    "two levels, 6 % apart": _two_levels,
}
"""Shapes of the series of one run, whose mean is 1."""

ACROSS: Mapping[str, Shape] = {
    "equal runs": lambda _rng, k: np.ones(k),
    "runs differ by 2.7 %": lambda rng, k: np.exp(0.027 * rng.normal(size=k)),
    "two levels of runs, 6 % apart": lambda rng, k: rng.choice([0.97, 1.03], size=k),
    "one run in five 6 % slower": lambda rng, k: np.where(rng.random(k) < _FIFTH, 1.06, 1.0),
    "one run in ten 20 % slower": lambda rng, k: np.where(rng.random(k) < _TENTH, 1.2, 1.0),
    "runs AR(1) .8, 2.7 %": lambda rng, k: np.exp(0.027 * _ar(rng, k, 0.8)),
}
"""Levels of runs, in their order, whose median is 1 or lies between the two levels."""


def _clustered(rng: np.random.Generator, n: int) -> Floats:
    """Return kept requests (1) and missed ones (0): 1 % are missed, in clusters of ten."""
    starts = np.flatnonzero(rng.random(n + 9) < _CLUSTER)
    kept = np.ones(n + 9)
    for start in starts:
        kept[start : start + 10] = 0
    return kept[9:]


def _pair(rng: np.random.Generator, shape: Shape, n: int, first: int, levels: tuple[float, float]) -> Pair:
    """Return a pair whose faults lengthen the run by `FACTOR`, in a tenth of its iterations."""
    length = max(1, n // 10)
    run, twin = (np.maximum(level * shape(rng, n), 0.05) for level in levels)
    run[first : first + length] *= 1 + (FACTOR - 1) * n / length
    return 0.08 * run, 0.08 * twin, first, first + length - 1


def _pairs(shape: Shape, across: Shape, place: float) -> Callable[[np.random.Generator, int, int], list[Pair]]:
    def pairs(rng: np.random.Generator, k: int, n: int) -> list[Pair]:
        first, second = across(rng, 2 * k).reshape(k, 2).T
        is_run_first = rng.random(k) < _HALF
        runs, twins = np.where(is_run_first, first, second), np.where(is_run_first, second, first)
        return [_pair(rng, shape, n, int(place * n), (run, twin)) for run, twin in zip(runs, twins, strict=True)]

    return pairs


def _runs(shape: Shape, across: Shape) -> Callable[[np.random.Generator, int, int], list[Floats]]:
    def runs(rng: np.random.Generator, k: int, n: int) -> list[Floats]:
        return [level * shape(rng, n) for level in across(rng, k)]

    return runs


def _quantile(shape: Shape, percent: int) -> float:
    rng = np.random.default_rng(99)
    runs = [shape(rng, 400) for _ in range(_TRUTH_VALUES // 400)]
    return float(np.percentile(np.concatenate(runs), percent))


def generators() -> Iterator[tuple[str, Generator]]:
    """Yield the name and the generator of every metric and noise."""
    for name, shape in WITHIN.items():
        yield f"goodput.mean, {name}", Generator(metric=METRICS["goodput.mean"], truth=1.0, values=shape)
        for percent in (50, 99):
            metric = METRICS[f"latency.p{percent}"]
            yield f"{metric.name}, {name}", Generator(metric=metric, truth=_quantile(shape, percent), values=shape)
        for place in (0.0, 0.5):
            where = "at the start" if place == 0 else "in the middle"
            pairs = _pairs(shape, ACROSS["runs differ by 2.7 %"], place)
            yield f"jct_ratio, {name}, fault {where}", Generator(metric=METRICS["jct_ratio"], truth=FACTOR, pairs=pairs)
    yield (
        "slo_attainment, misses in clusters of 10",
        Generator(metric=METRICS["slo_attainment"], truth=0.99, values=_clustered),
    )
    usual = WITHIN["independent 5 %"]
    for name, across in ACROSS.items():
        for of_run in ("goodput.mean", "latency.p50"):
            yield f"{of_run}, {name}", Generator(metric=METRICS[of_run], truth=1.0, runs=_runs(usual, across))
        pairs = _pairs(usual, across, 0.5)
        yield f"jct_ratio, {name}", Generator(metric=METRICS["jct_ratio"], truth=FACTOR, pairs=pairs)
