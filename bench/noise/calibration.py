"""Part `calibration` of the bench: how often verdicts on synthetic noise are wrong if the bound is the true value.

An interval lies wholly above the true value in 0.5 % of cases (a wrong FAIL), and wholly below it in 0.5 % (a wrong
PASS). INCONCLUSIVE is never wrong. Noise is AR(1) with lag-1 correlation φ. Its values are normal, heavy-tailed
(Student's t with 3 degrees of freedom), or lognormal (deviation of the logarithm 0.5). With *shift*, the level of
normal noise moves once, by two deviations, somewhere in the middle half of the series; the true value is half way
between the two levels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from scipy import special

from bench.rows import Row, mark
from faultbed.harness import confidence
from faultbed.harness.confidence import Interval

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

__all__ = [
    "COLUMNS",
    "LENGTHS",
    "METRICS",
    "PHIS",
    "SHAPES",
    "Cell",
    "cell",
    "measure",
    "measure_limits",
    "noise",
    "worst",
]

Shape = Literal["normal", "heavy tail", "lognormal", "shift"]
SHAPES: tuple[Shape, ...] = ("normal", "heavy tail", "lognormal", "shift")
PHIS = (0.0, 0.5, 0.8, 0.9, 0.95)
LENGTHS = (8, 16, 30, 100, 300)
SERIES = 1000
"""Number of series in one cell."""
ALLOWED = 0.005
COLUMNS = ("metric, noise", "n", *(f"φ = {phi:g}" for phi in PHIS))

_SPREAD = 0.1
"""Scale of normal and heavy-tailed noise around a mean of 1."""
_LOG_SPREAD = 0.5
"""Deviation of the logarithm of lognormal noise."""
_SHIFT = 2.0
"""Change of the level in deviations."""
_CHANCE = 1e-4
"""Significance level: an interval counts as not calibrated if so many errors have a smaller probability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Counts over `series` intervals: wholly `above` the truth, wholly `below` it, and not computed (`refused`)."""

    series: int
    above: int
    below: int
    refused: int

    @property
    def is_calibrated(self) -> bool:
        """Whether the errors are compatible with the share `ALLOWED`."""
        return float(special.bdtrc(max(self.above, self.below) - 1, self.series, ALLOWED)) > _CHANCE

    def __str__(self) -> str:
        above, below, refused = (100 * count / self.series for count in (self.above, self.below, self.refused))
        return f"{above:.2f} / {below:.2f} ({refused:.0f})"


def noise(shape: Shape, rng: np.random.Generator, series: int, count: int, phi: float) -> Floats:
    """Return AR(1) noise around 1, array of (series, count), whose true mean is 1."""
    values = np.empty((series, count))
    value = rng.normal(size=series)
    for index in range(count):
        values[:, index] = value
        value = phi * value + math.sqrt(1 - phi**2) * rng.normal(size=series)
    if shape == "heavy tail":
        return 1 + _SPREAD * _heavy(values)
    if shape == "lognormal":
        return _lognormal(values)
    if shape == "shift":
        at = count * rng.uniform(0.25, 0.75, size=(series, 1))
        sign = rng.choice([-1.0, 1.0], size=(series, 1))
        values = values + sign * _SHIFT * ((np.arange(count) >= at) - 0.5)
    shifted: Floats = 1 + _SPREAD * values
    return shifted


def cell(metric: str, shape: Shape, count: int, phi: float, *, series: int = SERIES, seed: int = 1) -> Cell:
    """Compute the intervals of one metric for one kind of noise."""
    key = (seed, list(METRICS).index(metric), SHAPES.index(shape), count, round(100 * phi))
    rng = np.random.default_rng(key)
    above = below = refused = 0
    for interval, truth in METRICS[metric](rng, shape, count, phi, series):
        if interval is None:
            refused += 1
        else:
            above += interval.low > truth
            below += interval.high < truth
    return Cell(series=series, above=above, below=below, refused=refused)


def measure(progress: Callable[[str], None] = lambda _: None) -> Iterator[tuple[list[Row], Row]]:
    """Yield, for each metric and noise, one row per length and a row with the worst cell."""
    for metric in METRICS:
        for shape in SHAPES:
            progress(f"{metric}, {shape}")
            cells = {(count, phi): cell(metric, shape, count, phi) for count in LENGTHS for phi in PHIS}
            rows: list[Row] = [
                (f"{metric}, {shape}", str(count), *(str(cells[count, phi]) for phi in PHIS)) for count in LENGTHS
            ]
            yield rows, worst(f"{metric}, {shape}", list(cells.values()))


def worst(title: str, cells: list[Cell]) -> Row:
    """Return a row of the bench for cells: the largest share of errors on either side."""
    series = cells[0].series
    above, below = (100 * max(getattr(cell, side) for cell in cells) / series for side in ("above", "below"))
    error = 100 * math.sqrt(ALLOWED * (1 - ALLOWED) / series)
    return (
        title,
        f"{above:.2f} % / {below:.2f} %",
        f"worst of {len(cells)} cells of {series:,} series, ± {error:.2f} %",
        f"<= {100 * ALLOWED:g} %",
        mark(reached=all(cell.is_calibrated for cell in cells)),
    )


_Pairs = Iterator[tuple[Interval | None, float]]


def _mean(rng: np.random.Generator, shape: Shape, count: int, phi: float, series: int) -> _Pairs:
    for values in noise(shape, rng, series, count, phi):
        yield confidence.mean_interval(values), 1.0


def _mean_ratio(rng: np.random.Generator, shape: Shape, count: int, phi: float, series: int) -> _Pairs:
    """Yield (interval, true ratio) of a fault that leaves 60 % of goodput, with equally many bins before and during."""
    under = noise(shape, rng, series, count, phi)
    for before, values in zip(noise(shape, rng, series, count, phi), 0.6 * under, strict=True):
        clean, impaired = confidence.mean_interval(before), confidence.mean_interval(values)
        if clean is None or impaired is None:
            yield None, 0.6
        else:
            yield confidence.ratio_interval(impaired, clean, (float(values.mean()), float(before.mean()))), 0.6


def _jct(rng: np.random.Generator, shape: Shape, count: int, phi: float, series: int) -> _Pairs:
    """Yield (interval, true ratio 1.1): a fault in one iteration of ten adds a tenth of the job's time."""
    hit = slice(count // 2, count // 2 + max(1, count // 10))
    quiet = np.ones(count, dtype=np.bool_)
    quiet[hit] = False
    runs, twins = noise(shape, rng, series, count, phi), noise("normal", rng, series, count, phi)
    if shape != "shift":
        twins = noise(shape, rng, series, count, phi)
    runs[:, hit] += 0.1 * count / (hit.stop - hit.start)
    for run, twin in zip(runs, twins, strict=True):
        yield confidence.total_ratio(run, twin, quiet=quiet, before=count // 2), 1.1


def _lowest(dip: float) -> Callable[[np.random.Generator, Shape, int, float, int], _Pairs]:
    """Return a generator of (interval, true value) for the lowest goodput during a fault of 12 s.

    Goodput falls to `dip` for one second of the fault. `dip` is a share of the baseline, which has `count` bins of 0.1
    s.
    """

    def pairs(rng: np.random.Generator, shape: Shape, count: int, phi: float, series: int) -> _Pairs:
        width, after = 10, 120
        for values in noise(shape, rng, series, count + after, phi):
            bins = np.maximum(values, 0.0)  # goodput is never negative
            if shape == "shift":  # the level shifts within the baseline
                bins[: count // 2] += _SPREAD * _SHIFT * rng.choice([-1.0, 1.0])
            bins[count + 60 : count + 60 + width] *= dip
            baseline, cumulated = bins[:count], np.cumsum(np.concatenate([[0.0], bins[count:]]))
            rolling = (cumulated[width:] - cumulated[:-width]) / width
            value = float(rolling.min() / max(baseline.mean(), 1e-9))
            yield confidence.lowest_window(value, baseline, width=width, windows=len(rolling)), dip

    return pairs


def _percentile(percent: float) -> Callable[[np.random.Generator, Shape, int, float, int], _Pairs]:
    def pairs(rng: np.random.Generator, shape: Shape, count: int, phi: float, series: int) -> _Pairs:
        truth = _quantile(shape, percent / 100)
        for values in noise(shape, rng, series, count, phi):
            independent = confidence.independent_of(values)
            if independent is None:
                yield None, truth
            else:
                yield confidence.percentile_bounds(values, percent, independent=int(independent), least=0.0), truth

    return pairs


def _share(rng: np.random.Generator, shape: Shape, count: int, phi: float, series: int) -> _Pairs:
    """Yield (interval, true share 0.9) of values that are below their 90th percentile."""
    most = _quantile(shape, 0.9)
    for values in noise(shape, rng, series, count, phi):
        independent = confidence.independent_of(values)
        if independent is None:
            yield None, 0.9
        else:
            yield confidence.share_interval(int((values <= most).sum()), count, independent=independent), 0.9


def _heavy(normal: Floats) -> Floats:
    """Turn normal values into those of Student's t with 3 degrees of freedom, at the same quantiles."""
    heavy: Floats = special.stdtrit(3, special.ndtr(normal))
    return heavy


def _lognormal(normal: Floats) -> Floats:
    """Turn normal values into lognormal ones with mean 1."""
    skewed: Floats = np.exp(_LOG_SPREAD * normal - _LOG_SPREAD**2 / 2)
    return skewed


def _quantile(shape: Shape, share: float) -> float:
    """Return the true quantile of the values of `noise`."""
    normal = np.array([special.ndtri(share)])
    if shape == "heavy tail":
        return float(1 + _SPREAD * _heavy(normal)[0])
    if shape == "lognormal":
        return float(_lognormal(normal)[0])
    if shape == "shift":
        from scipy.optimize import brentq  # noqa: PLC0415 - a quarter of a second of CPU time for each unit test worker

        def excess_share(value: float) -> float:
            return float((special.ndtr(value - _SHIFT / 2) + special.ndtr(value + _SHIFT / 2)) / 2 - share)

        return float(1 + _SPREAD * brentq(excess_share, -10, 10))
    return float(1 + _SPREAD * normal[0])


METRICS: dict[str, Callable[[np.random.Generator, Shape, int, float, int], _Pairs]] = {
    "goodput.mean, busbw.mean, ettr": _mean,
    "goodput_mean_ratio": _mean_ratio,
    "jct_ratio": _jct,
    "goodput_min_ratio, dip: no dip": _lowest(1.0),
    "goodput_min_ratio, dip: 0.8": _lowest(0.8),
    "ttft.p50, tpot.p50": _percentile(50),
    "ttft.p99, tpot.p99": _percentile(99),
    "slo_attainment": _share,
}
"""Generators of (interval, true value) by kind of metric. The interval is None if it was not computed."""


_LIMIT_SERIES = 1000
"""Number of series in each row of the known limits."""


def measure_limits() -> Iterator[Row]:
    """Yield rows about noise that violates the assumptions of the intervals. These rows have no goal."""
    count, rare_share, rng = 100, 0.02, np.random.default_rng(2)
    white, slow = (noise("normal", rng, _LIMIT_SERIES, count, phi) - 1 for phi in (0.0, 0.98))
    rare = (
        np.where(rng.random((_LIMIT_SERIES, count)) < rare_share, 0.5, 0.0)
        + noise("normal", rng, _LIMIT_SERIES, count, 0.0) / 5
        + 0.8
    )
    for noise_name, series, truth in (
        ("white noise that hides equally large slow noise (φ = 0.98)", 1 + (white + slow) / math.sqrt(2), 1.0),
        ("one iteration in fifty takes 1.5 times as long", rare, 1 + 0.5 * rare_share),
    ):
        intervals = [confidence.mean_interval(values) for values in series]
        decided = [interval for interval in intervals if interval is not None]
        wrong = sum(interval.low > truth for interval in decided), sum(interval.high < truth for interval in decided)
        above, below = (100 * count_beyond / _LIMIT_SERIES for count_beyond in wrong)
        refused = 100 * (_LIMIT_SERIES - len(decided)) / _LIMIT_SERIES
        details = f"{refused:.0f} % without an interval, n = {count}, {_LIMIT_SERIES:,} series"
        yield f"known limit: {noise_name}", f"{above:.1f} % / {below:.1f} %", details, "", ""
