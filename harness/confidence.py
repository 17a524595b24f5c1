"""Intervals of the values of one run, from the noise that the run itself shows. Pure.

They are two-sided with `LEVEL` = 99 %, and wider if more than two bounds of an experiment share its risk (`level_for`).
They know nothing of the level that the machine has in this run: a bound on the setting is decided by such an interval
together with the level tolerance (`faultbed.harness.ledger.statistics`). `python -m bench calibration` measures how
often each kind of interval misses the true value.

**Times and rates** depend on their own past, and are skewed. `noise_of` gives the standard error of their mean:

* The number of independent values is that of an AR(1) series (Zwiers and von Storch 1995, J. Climate 8:336). Its lag-1
  correlation is corrected for bias (Kendall 1954, Biometrika 41:403) and then raised by `_CAUTION` standard errors,
  because a short series looks less correlated than it is.
* The interval has the width of Student's t with one degree of freedom less than that number. It is corrected for
  skewness (Willink 2005, Metrologia 42:L1), as in the batch-means method Skart (Tafazzoli et al. 2011, INFORMS J.
  Computing 23:249).
* There is no interval from fewer than `MIN_INDEPENDENT` independent values, or from a mean that one tail dominates.
* The level of a series moves if its cumulative sum strays too far (Inclan and Tiao's form of the CUSUM test). Such a
  series has no percentiles, shares or windows. Its mean has the interval of four values, the means of its quarters
  (batch means, Schmeiser 1982, Operations Research 30:556): wide, but it decides a bound that is far away.

**A ratio against a twin** (`total_ratio`) treats the fault's effect as fixed. Its noise is that of the iterations that
no fault affected, in the run and in the twin. For a comparison of two runs, the drift *before the first fault* is
known, and the interval is widened to include the ratio with and without it.

**A minimum over windows** (`lowest_window`) is lower than the truth by chance alone, and the more so the more windows
there are. The lower end of its interval has the noise of one window, the upper end that of the lowest of all windows
(Bonferroni over every window).

**Shares and percentiles** have exact binomial intervals (Clopper and Pearson 1934; order statistics) of as many trials
as there are independent values (Korn and Graubard 1998, Survey Methodology 24:193).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from scipy import special

from faultbed.harness.ledger.statistics.decision import TAIL, tail_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

__all__ = [
    "LEVEL",
    "MIN_INDEPENDENT",
    "MIN_VALUES",
    "Interval",
    "Noise",
    "independent_of",
    "independent_of_all",
    "level_for",
    "lowest_by_chance",
    "lowest_window",
    "mean_interval",
    "noise_of",
    "noise_of_mean",
    "percentile_bounds",
    "percentile_interval",
    "ratio_interval",
    "resolution",
    "share_interval",
    "student",
    "tail_of",
    "total_ratio",
    "widened",
]

LEVEL = 1 - 2 * TAIL
MIN_VALUES = 16
"""Fewer values do not show how strongly they are correlated."""
MIN_INDEPENDENT = 4.0
"""Fewer independent values give no interval."""

_CAUTION = 1.75
"""Number of standard errors that are added to the estimated lag-1 correlation."""
_MIN_ROUGH = 8
"""Fewer values do not have even a rough noise."""
_LEAST_ROUGH = 3.0
"""Number of independent values that a rough noise assumes at least: what is slower belongs to the level."""
_MOST_ROUGH_LAG1 = 0.9
"""Largest lag-1 correlation of a rough noise."""
_MAX_CUSUM = 1.25
"""Largest cumulative sum of deviations of a steady series, in standard errors of the total; 9 % of them exceed it."""
_QUARTERS = 4
"""Parts whose means are the independent values of a series whose level moves."""
_MAX_SKEWNESS = 2.0
"""Largest skewness of a mean. Above it, one tail dominates the mean."""
_UNSEEN_TAIL = 1.5
"""Factor on sample skewness and kurtosis. Both underestimate, because a sample rarely contains the longest values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A range that holds the true value with probability `level`; `method` says how it was computed."""

    low: float
    high: float
    method: str
    level: float = LEVEL

    def __str__(self) -> str:
        return f"{100 * self.level:g} % interval {self.low:.4g}..{self.high:.4g} ({self.method})"


def tail_of(level: float) -> float:
    """Return the probability beyond one end of a two-sided interval."""
    return (1 - level) / 2


def level_for(checks: int) -> float:
    """Return the level of each interval of an experiment with so many bounds that chance can make wrong."""
    return 1 - 2 * tail_for(checks)


def student(freedom: float, level: float = LEVEL) -> float:
    """Return Student's t quantile of a two-sided interval; exact for any positive `freedom`."""
    return float(special.stdtrit(freedom, (1 + level) / 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Noise of `count` autocorrelated values.

    Attributes:
        count: number of values.
        mean: their mean.
        error: standard error of the mean, in the values' unit.
        deviation: standard deviation of one value, in the values' unit.
        independent: number of independent values with the same information about the mean.
        lag1: the lag-1 correlation that was used.
        skewness: of one value, corrected for the part of the tails that a sample rarely shows.
        kurtosis: excess kurtosis of one value, corrected likewise.
        is_rough: only the fast part of the noise counts (`noise_of_mean`).
        moves: the level of the series moves. Then the independent values are the means of its four quarters, and
            `skewness` is that of such a mean. A longer series would not make the error smaller.
    """

    count: int
    mean: float
    error: float
    deviation: float
    independent: float
    lag1: float
    skewness: float
    kurtosis: float
    moves: bool = False
    is_rough: bool = False

    @property
    def freedom(self) -> float:
        """Degrees of freedom of the error: a rough one counts every value."""
        return (self.count if self.is_rough else self.independent) - 1

    def error_of(self, count: int) -> float:
        """Return the standard error of the mean of `count` consecutive values."""
        return self.error if self.moves else self.deviation / math.sqrt(self.independent_of(count))

    def independent_of(self, count: int) -> float:
        """Return the number of independent values with the same information as `count` consecutive ones."""
        return self.independent if self.moves else count / _variance_inflation(self.lag1, count)

    def skewness_of(self, count: float) -> float:
        """Return the skewness of the mean of `count` independent values."""
        return self.skewness / math.sqrt(count)

    def __str__(self) -> str:
        if self.moves:
            return f"worth {self.independent:.0f} (the means of their quarters), because their level moves"
        return f"worth {self.independent:.0f} independent ones at a lag-1 correlation of up to {self.lag1:.2f}"


def noise_of(values: Floats, *, is_rough: bool = False) -> Noise | None:
    """Return the noise of a series in the order of time; None: too little is known, or its level moves.

    Equal values have no noise. `is_rough` is as in `noise_of_mean`.
    """
    noise = noise_of_mean(values, is_rough=is_rough)
    return None if noise is None or noise.moves else noise


def noise_of_mean(values: Floats, *, is_rough: bool = False) -> Noise | None:
    """Return the noise of the mean of a series in the order of time; its level may move. None: too little is known.

    Equal values have no noise. `is_rough`: for a decision that tolerates the level of the machine, so that only the
    fast part of the noise counts: a shorter series will do, with the correlation that it shows.
    """
    count = len(values)
    if count < (_MIN_ROUGH if is_rough else MIN_VALUES) or not np.isfinite(values).all():
        return None
    mean = float(values.mean())
    deviations = values - mean
    squares = float(deviations @ deviations)
    if squares <= (1e-12 * mean) ** 2 * count:
        return Noise(
            count=count, mean=mean, error=0.0, deviation=0.0, independent=count, lag1=0.0, skewness=0.0, kurtosis=0.0
        )
    lag1 = _lag1(deviations, squares, caution=0.0 if is_rough else _CAUTION)
    inflation = _variance_inflation(lag1, count)
    independent = count / inflation
    if is_rough:
        independent = max(independent, _LEAST_ROUGH)
        inflation, lag1 = count / independent, min(lag1, _MOST_ROUGH_LAG1)
    if independent < MIN_INDEPENDENT and not is_rough:
        return None
    variance = squares / (count - inflation)
    error = math.sqrt(variance / independent)
    cusum = float(np.abs(np.cumsum(deviations)).max()) / (count * error)
    skewness = (1.0 if is_rough else _UNSEEN_TAIL) * float((deviations**3).mean()) / (squares / count) ** 1.5
    if abs(skewness) / math.sqrt(independent) > _MAX_SKEWNESS:
        if not is_rough:
            return None
        skewness = math.copysign(_MAX_SKEWNESS * math.sqrt(independent), skewness)
    sample_kurtosis = float((deviations**4).mean()) / (squares / count) ** 2 - 3
    noise = Noise(
        count=count,
        mean=mean,
        error=error,
        deviation=math.sqrt(variance),
        independent=independent,
        lag1=lag1,
        skewness=skewness,
        kurtosis=_UNSEEN_TAIL * max(sample_kurtosis, 0.0) + math.sqrt(24 / count),
        is_rough=is_rough,
    )
    return _of_quarters(values, noise) if cusum > _MAX_CUSUM and not is_rough else noise


def _lag1(deviations: Floats, squares: float, *, caution: float) -> float:
    """Return the lag-1 correlation of a series, corrected for bias, and raised by `caution` standard errors.

    `deviations` are those from the mean, `squares` the sum of their squares.
    """
    count = len(deviations)
    correlation = float(deviations[1:] @ deviations[:-1]) / squares
    unbiased = min(max((correlation + 1 / count) / (1 - 4 / count), -0.99), 0.99)
    standard_error = math.sqrt((1 - unbiased**2) / count + 4 / count**2)
    return min(max(unbiased + caution * standard_error, 0.0), 0.995)


def _of_quarters(values: Floats, noise: Noise) -> Noise:
    """Return the noise of a series whose level moves, from the means of its quarters.

    `noise` is the noise that the series would have if its level did not move.
    """
    means = np.array([quarter.mean() for quarter in np.array_split(values, _QUARTERS)])
    error = max(noise.error, float(means.std(ddof=1)) / math.sqrt(_QUARTERS))
    skewness = noise.skewness_of(noise.independent / _QUARTERS)
    return replace(noise, error=error, independent=_QUARTERS, skewness=skewness, moves=True)


def independent_of(values: Floats, *, is_rough: bool = False) -> float | None:
    """Return the effective sample size of a series for its percentiles and shares; None: as `noise_of`.

    It is computed from the ranks of the values, because no share of a series is more correlated than its ranks.
    """
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    noise = noise_of(ranks[place].astype(np.float64), is_rough=is_rough)
    if noise is None:
        return None
    return max(noise.independent, float(_MIN_ROUGH)) if is_rough else noise.independent


def independent_of_all(series: Sequence[Floats], *, is_rough: bool = False) -> float | None:
    """Return the effective sample size of simultaneous series together; None: there is none, or as `noise_of` for one.

    Series with a common cause, such as flows through one queue or readers of one storage, move together. Together they
    are worth no more independent values than the one that is worth the least.
    """
    counts = [independent_of(values, is_rough=is_rough) for values in series]
    known = [count for count in counts if count is not None]
    return min(known) if known and len(known) == len(counts) else None


def total_ratio(
    treated: Floats,
    control: Floats,
    *,
    quiet: NDArray[np.bool_],
    before: int,
    quiet_control: NDArray[np.bool_] | None = None,
    level: float = LEVEL,
    is_rough: bool = False,
) -> Interval | None:
    """Return the interval of the ratio of two sums of paired values, such as iteration times of a run and its twin.

    Args:
        treated: times of the first k iterations of the run.
        control: times of the same iterations of the twin.
        quiet: mask of the iterations of `treated` that no fault affected. If they are too few, the twin's noise is
            used.
        before: number of iterations before the first fault; 0: the drift between run and twin is unknown.
        quiet_control: the same mask for `control`; None: all iterations, because a twin has no faults.
        level: confidence level of the interval.
        is_rough: as in `noise_of_mean`.

    Returns:
        The interval; None: too few values to know their noise.
    """
    if not control.all():
        return None
    count = len(control)
    quiet_parts = (treated[quiet], control if quiet_control is None else control[quiet_control])
    least = _MIN_ROUGH if is_rough else MIN_VALUES
    noises = [noise_of_mean(part / part.mean(), is_rough=is_rough) for part in quiet_parts if len(part) >= least]
    known = [noise for noise in noises if noise is not None]
    if not noises or len(known) < len(noises):
        return None
    run_noise, twin_noise = known[0], known[-1]
    # If the fault made the run longer, its noise is a smaller share of the total.
    run_error = run_noise.error_of(count) * count * _mean_of(quiet_parts[0], treated) / float(treated.sum())
    twin_error = twin_noise.error_of(count)
    error = math.hypot(run_error, twin_error)
    skewness = 0.0
    if error:
        for noise, error_of_part, sign in ((run_noise, run_error, 1), (twin_noise, twin_error, -1)):
            skewness += sign * noise.skewness_of(noise.independent_of(count)) * (error_of_part / error) ** 3
    down, up = _reach(min(run_noise.freedom, twin_noise.freedom), skewness, level)
    ratio = float(treated.sum() / control.sum())
    low, high = ratio * math.exp(-down * error), ratio * math.exp(up * error)
    words = (
        f"{run_noise.count} fault-free iterations of the run, {run_noise}; {twin_noise.count} of its twin, {twin_noise}"
    )
    if before >= 2:  # noqa: PLR2004 - the drift of few iterations is uncertain, which makes the interval wide
        drift = float(treated[:before].sum() / control[:before].sum())
        low, high = low / max(1.0, drift), high / min(1.0, drift)
        words += f"; before any fault the run took {drift:.3f} of its twin's time, which is allowed for"
    return Interval(low=low, high=high, method=words, level=level)


def lowest_window(value: float, baseline: Floats, *, width: int, windows: int, level: float = LEVEL) -> Interval | None:
    """Return the interval of a ratio: the lowest of `windows` windows, each of `width` bins, over the baseline's mean.

    `value` is the observed ratio. The noise of a window is computed from the baseline's bins. None: as `noise_of`.
    """
    mean = float(baseline.mean()) if len(baseline) else 0.0
    noise = noise_of(baseline / mean) if mean > 0 and len(baseline) >= 2 * width else None
    if noise is None:
        return None
    above, below = _window_reach(noise, width=width, windows=windows, level=level)
    high = 0.0 if value == 0 else value / (1 - below) if below < 1 else math.inf
    words = f"{noise.count} bins of the baseline, {noise}; the lowest of {windows} windows of {width} bins"
    return Interval(low=value / (1 + above), high=high, method=words, level=level)


def lowest_by_chance(baseline: Floats, *, width: int, windows: int, level: float = LEVEL) -> float:
    """Return the share of the baseline's mean below which none of `windows` windows falls by chance alone.

    The noise of a window is computed twice: from the baseline's bins, and from the baseline's own windows. The smaller
    one counts, because bins of a bursty workload differ more than windows that contain whole iterations. The share is 0
    if the noise is unknown, or large enough to explain any drop.
    """
    mean = float(baseline.mean()) if len(baseline) else 0.0
    if mean <= 0 or len(baseline) < 3 * width:
        return 0.0
    scaled = baseline / mean
    noise = noise_of(scaled)
    reaches = [] if noise is None else [_window_reach(noise, width=width, windows=windows, level=level)[1]]
    rolling = np.convolve(scaled, np.full(width, 1 / width), mode="valid")
    apart = len(baseline) / width
    reaches.append(student(apart - 1, 1 - 2 * tail_of(level) / max(windows, 1)) * float(rolling.std(ddof=1)))
    return max(0.0, 1 - min(reaches))


def _window_reach(noise: Noise, *, width: int, windows: int, level: float) -> tuple[float, float]:
    """Return how far one window may be above the mean, and the lowest of all below it, as shares of the mean."""
    freedom, error = noise.independent - 1, noise.error_of(width)
    independent = max(noise.independent_of(width), 1.0)
    skewness, kurtosis = noise.skewness_of(independent), noise.kurtosis / independent
    mean_reach = student(freedom, level) * noise.error
    above = math.hypot(_upper_quantile(freedom, skewness, kurtosis, tail_of(level)) * error, mean_reach)
    lowest_tail = tail_of(level) / max(windows, 1)
    below = math.hypot(_upper_quantile(freedom, -skewness, kurtosis, lowest_tail) * error, mean_reach)
    return above, below


def mean_interval(
    values: Floats, *, of: str = "values", level: float = LEVEL, is_rough: bool = False
) -> Interval | None:
    """Return the interval of the mean of a series that may be autocorrelated; None: as `noise_of_mean`.

    `of` names the values in the interval's `method`.
    """
    noise = noise_of_mean(values, is_rough=is_rough)
    if noise is None or noise.mean <= 0:
        return None
    down, up = _reach(noise.freedom, noise.skewness_of(noise.independent), level)
    low, high = noise.mean - down * noise.error, noise.mean + up * noise.error
    return Interval(low=max(low, 0.0), high=high, method=f"{noise.count} {of}, {noise}", level=level)


def resolution(low: float, high: float, *, of: str) -> Interval:
    """Return the interval of a value that is known only to a resolution; `of` names its source."""
    return Interval(low=max(0.0, low), high=high, method=of, level=1.0)


def widened(interval: Interval, value: float, log_sd: float, *, freedom: int, source: str) -> Interval:
    """Return the interval of `value`, widened by how much the value differs from run to run.

    `log_sd` is the standard deviation of its logarithm, estimated with `freedom` degrees of freedom. Each end is moved
    separately, because the two ends may be at different distances from the value.
    """
    if value <= 0:
        return interval
    reach = student(freedom, interval.level) * log_sd
    up = math.hypot(_log_reach(interval.high, value), reach)
    return Interval(
        low=value / math.exp(math.hypot(_log_reach(value, interval.low), reach)) if interval.low > 0 else 0.0,
        high=value * math.exp(up),
        level=interval.level,
        method=f"{interval.method}; widened by {source}",
    )


def ratio_interval(numerator: Interval, denominator: Interval, values: tuple[float, float]) -> Interval | None:
    """Return the interval of the ratio of two `values` from their intervals; None: one interval reaches 0.

    The lower end comes from the low end of `numerator` and the high end of `denominator`, the upper end from the other
    two. The method is MOVER on logarithms (Zou and Donner 2008, Statistics in Medicine 27:1693), which accepts
    intervals that are not symmetric, such as those of high percentiles.
    """
    if min(numerator.low, denominator.low, *values) <= 0:
        return None
    (value, base), ratio = values, values[0] / values[1]
    down = math.hypot(_log_reach(value, numerator.low), _log_reach(denominator.high, base))
    up = math.hypot(_log_reach(numerator.high, value), _log_reach(base, denominator.low))
    words = f"both intervals: {numerator.method}"
    return Interval(low=ratio / math.exp(down), high=ratio * math.exp(up), method=words)


def share_interval(count: int, total: int, *, level: float = LEVEL, independent: float | None = None) -> Interval:
    """Return the exact interval of a share (Clopper and Pearson 1934).

    `independent` is the effective number of independent trials; None: all trials are independent.

    Raises:
        ValueError: not 0 <= count <= total, or no trial at all.
    """
    if not 0 <= count <= total or total == 0:
        raise ValueError(f"{count} of {total} trials is no share")
    trials = float(total if independent is None else min(independent, total))
    hits, tail = count / total * trials, tail_of(level)
    low = 0.0 if count == 0 else float(special.betaincinv(hits, trials - hits + 1, tail))
    high = 1.0 if count == total else float(special.betaincinv(hits + 1, trials - hits, 1 - tail))
    words = f"exact binomial, {count} of {total}" + (
        "" if trials == total else f", worth {trials:.0f} independent ones"
    )
    return Interval(low=low, high=high, level=level, method=words)


def percentile_interval(values: Floats, percent: float, *, level: float = LEVEL) -> Interval | None:
    """Return a percentile's interval, whose ends are two of the values (order statistics; any distribution).

    The values must be independent. None: there are too few values for this level.
    """
    interval = percentile_bounds(values, percent, independent=len(values), level=level)
    return interval if interval is not None and interval.low > -math.inf and interval.high < math.inf else None


def percentile_bounds(
    values: Floats, percent: float, *, independent: int, level: float = LEVEL, least: float = -math.inf
) -> Interval | None:
    """Return a percentile's interval for correlated values; `independent` is the effective sample size.

    If there are too few values for one end, the interval extends to `least` or to infinity on that side. It may still
    lie wholly on the wrong side of a bound. None: no values.
    """
    ordered, share, tail = np.sort(values), percent / 100, tail_of(level)
    if not 0 < independent <= len(ordered) or not 0 < share < 1:
        return None
    below = special.bdtr(np.arange(independent + 1.0), independent, share)
    first = int(np.searchsorted(below, tail, side="right")) - 1
    last = int(np.searchsorted(below, 1 - tail, side="left"))
    spacing = len(ordered) / independent
    low = least if first < 0 else float(ordered[math.floor(first * spacing)])
    high = math.inf if last >= independent else float(ordered[min(math.ceil((last + 1) * spacing), len(ordered)) - 1])
    places = " and ".join([*([] if first < 0 else [f"{first + 1}"]), *([] if last >= independent else [f"{last + 1}"])])
    words = f"order statistics {places} of {independent}" if places else f"{independent} are too few for either end"
    return Interval(low=low, high=high, level=level, method=words)


def _log_reach(above: float, below: float) -> float:
    """Return how far one end of an interval is from its value, as a logarithm; 0 if the value lies beyond it."""
    return max(math.log(above / below), 0.0)


def _variance_inflation(lag1: float, count: int) -> float:
    """Return the variance of the mean of `count` values of an AR(1) series over that of independent values."""
    return (1 + lag1) / (1 - lag1) - 2 * lag1 * (1 - lag1**count) / (count * (1 - lag1) ** 2)


def _reach(freedom: float, skewness: float, level: float) -> tuple[float, float]:
    """Return how many standard errors an interval of a mean reaches down and up; at least as far as Student's t.

    `skewness` is that of the mean. In Willink 2005, equation 13, a function G makes the t statistic of a skewed sample
    symmetric; `inverse` is the inverse of G.
    """
    t, scaled_skewness = student(freedom, level), skewness / 6
    if abs(scaled_skewness) < 1e-6:  # noqa: PLR2004 - the limit is t itself
        return t, t

    def inverse(x: float) -> float:
        return float((np.cbrt(1 + 6 * scaled_skewness * (x - scaled_skewness)) - 1) / (2 * scaled_skewness))

    return max(t, inverse(t)), max(t, -inverse(-t))


def _upper_quantile(freedom: float, skewness: float, kurtosis: float, tail: float) -> float:
    """Return how many standard errors a mean exceeds the truth with probability `tail` (Cornish and Fisher)."""
    t = student(freedom, 1 - 2 * tail)
    return t + max(skewness, 0.0) / 6 * (t * t - 1) + kurtosis / 24 * (t**3 - 3 * t)


def _mean_of(quiet: Floats, everything: Floats) -> float:
    """Return the mean of the quiet values, or of all values if there are none."""
    return float(quiet.mean()) if len(quiet) else float(everything.mean())
