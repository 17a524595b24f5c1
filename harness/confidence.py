"""One rule for every performance bound: compare the bound with the confidence interval of the measured value. Pure.

    interval wholly inside the bound    PASS
    interval wholly outside             FAIL
    the bound lies within it            INCONCLUSIVE: this run cannot tell
    no interval                         INCONCLUSIVE: too few independent values

Intervals are two-sided with `LEVEL` = 99 %, so that a run whose true value lies exactly on its bound fails wrongly in
at most 0.5 % of cases, and any better run more rarely. An experiment with more noisy checks than two has wider ones
(`level_for`), so that a whole run fails wrongly in at most 1 % (Bonferroni). `python -m bench calibration`
measures how often each kind of interval errs.

**Times and rates** depend on their own past, and are skewed. `noise_of` gives the standard error of their mean:

* The number of independent values is that of an AR(1) series (Zwiers and von Storch 1995, J. Climate 8:336). Its lag-1
  correlation is corrected for bias (Kendall 1954, Biometrika 41:403) and then taken `_CAUTION` standard errors higher,
  for a short series looks less correlated than it is.
* Student's t with that number less one, corrected for skewness (Willink 2005, Metrologia 42:L1), as the batch-means
  method Skart does (Tafazzoli et al. 2011, INFORMS J. Computing 23:249).
* There is no interval from fewer than `MIN_INDEPENDENT` independent values, or from a mean that one tail dominates.
* The level of a series moves if its cumulative sum strays too far (Inclan and Tiao's form of the CUSUM test). Such a
  series has no percentiles, shares or windows. Its mean has the interval of four values, the means of its quarters
  (batch means, Schmeiser 1982, Operations Research 30:556): wide, but it decides a bound that is far away.

**A ratio against a twin** (`total_ratio`) treats the fault's effect as fixed. Its noise is that of the iterations that
no fault affected, in the run and in the twin. Two runs on one lab also differ as a whole. The difference *before the
first fault* is known, and the interval is widened to hold the ratio with and without that drift.

**A minimum over windows** (`lowest_window`) is lower than the truth by chance alone, the more windows there are. Its
lower end has the noise of one window, its upper end that of the lowest of all (Bonferroni over every window).

**Shares and percentiles** have exact binomial intervals (Clopper and Pearson 1934; order statistics) of as many trials
as there are independent values (Korn and Graubard 1998, Survey Methodology 24:193).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from scipy import special

from harness.verdict import Verdict

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

__all__ = [
    "LEVEL",
    "MIN_INDEPENDENT",
    "MIN_VALUES",
    "Interval",
    "Noise",
    "decide",
    "independent_of",
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

LEVEL = 0.99
RUN_RISK = 0.01
"""Most wrong FAILs of a run whose values all lie on their bounds."""
MIN_VALUES = 16
"""Fewer values than these say nothing about how they depend on each other."""
MIN_INDEPENDENT = 4.0
"""Fewer independent values than these give no interval."""

_CAUTION = 1.75
"""Standard errors by which the lag-1 correlation is taken higher than it is estimated."""
_STRAYS = 1.25
"""Largest distance of the cumulative sum, in standard errors of the whole: 9 % of steady series go beyond it."""
_QUARTERS = 4
"""Parts whose means are the independent values of a series whose level moves."""
_SKEWED = 2.0
"""Largest skewness of a mean: beyond it one tail dominates."""
_TAIL_UNSEEN = 1.5
"""Factor on sample skewness and kurtosis, which are below the truth: the longest values are rarely in the sample."""

_RULE = "decided by its {level:g} % interval: PASS wholly inside, FAIL wholly outside, else INCONCLUSIVE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A range that holds the true value with probability `level`; `method` says how it was computed."""

    low: float
    high: float
    method: str
    level: float = LEVEL

    @property
    def rule(self) -> str:
        """The rule in words, as a check shows it."""
        return _RULE.format(level=100 * self.level)

    def __str__(self) -> str:
        return f"{100 * self.level:g} % interval {self.low:.4g}..{self.high:.4g} ({self.method})"


def decide(sign: Literal["min", "max"], bound: float, interval: Interval) -> Verdict:
    """Return the verdict of a bound on a value with an interval: INCONCLUSIVE if the bound is inside."""
    if sign == "max":
        inside, outside = interval.high <= bound, interval.low > bound
    else:
        inside, outside = interval.low >= bound, interval.high < bound
    return Verdict.PASS if inside else Verdict.FAIL if outside else Verdict.INCONCLUSIVE


def tail_of(level: float) -> float:
    """Return the probability beyond one end of a two-sided interval."""
    return (1 - level) / 2


def level_for(checks: int) -> float:
    """Return the level of each interval in a run with so many noisy checks, so that `RUN_RISK` holds for the run."""
    return 1 - 2 * min(tail_of(LEVEL), RUN_RISK / max(checks, 1))


def student(freedom: float, level: float = LEVEL) -> float:
    """Return Student's t quantile of a two-sided interval; exact for any positive `freedom`."""
    return float(special.stdtrit(freedom, (1 + level) / 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """What is known about the noise of `count` values that depend on their own past.

    `error` is the standard error of `mean`, `deviation` that of one value, both in the values' unit. `independent` is
    the number of independent values with the same information, `memory` the lag-1 correlation used. `skewness`
    and `kurtosis` (excess) are those of one value, with the part of the tails that a sample rarely shows. If the level
    `moves`, its quarters' means are the independent values: `skewness` is theirs, and more values do not settle the
    level.
    """

    count: int
    mean: float
    error: float
    deviation: float
    independent: float
    memory: float
    skewness: float
    kurtosis: float
    moves: bool = False

    def error_of(self, count: int) -> float:
        """Return the standard error of the mean of `count` consecutive values."""
        return self.error if self.moves else self.deviation / math.sqrt(self.independent_of(count))

    def independent_of(self, count: int) -> float:
        """Return how many independent values `count` consecutive ones are worth."""
        return self.independent if self.moves else count / _dependence(self.memory, count)

    def skewness_of(self, count: float) -> float:
        """Return the skewness of the mean of `count` independent values."""
        return self.skewness / math.sqrt(count)

    def __str__(self) -> str:
        if self.moves:
            return f"worth {self.independent:.0f}, the means of their quarters, because their level moves"
        return f"worth {self.independent:.0f} independent ones at a lag-1 correlation of up to {self.memory:.2f}"


def noise_of(values: Floats) -> Noise | None:
    """Return the noise of a series in the order of time; None: too little is known, or its level moves.

    Equal values have no noise.
    """
    noise = noise_of_mean(values)
    return None if noise is None or noise.moves else noise


def noise_of_mean(values: Floats) -> Noise | None:
    """Return the noise of the mean of a series in the order of time; its level may move. None: too little is known.

    Equal values have no noise.
    """
    count = len(values)
    if count < MIN_VALUES or not np.isfinite(values).all():
        return None
    mean = float(values.mean())
    deviations = values - mean
    squares = float(deviations @ deviations)
    if squares <= (1e-12 * mean) ** 2 * count:
        return Noise(
            count=count, mean=mean, error=0.0, deviation=0.0, independent=count, memory=0.0, skewness=0.0, kurtosis=0.0
        )
    correlation = float(deviations[1:] @ deviations[:-1]) / squares
    unbiased = min(max((correlation + 1 / count) / (1 - 4 / count), -0.99), 0.99)
    caution = _CAUTION * math.sqrt((1 - unbiased**2) / count + 4 / count**2)
    memory = min(max(unbiased + caution, 0.0), 0.995)
    dependence = _dependence(memory, count)
    independent = count / dependence
    if independent < MIN_INDEPENDENT:
        return None
    variance = squares / (count - dependence)
    error = math.sqrt(variance / independent)
    cusum_range = float(np.abs(np.cumsum(deviations)).max()) / (count * error)
    skewness = _TAIL_UNSEEN * float((deviations**3).mean()) / (squares / count) ** 1.5
    if abs(skewness) / math.sqrt(independent) > _SKEWED:
        return None
    noise = Noise(
        count=count,
        mean=mean,
        error=error,
        deviation=math.sqrt(variance),
        independent=independent,
        memory=memory,
        skewness=skewness,
        kurtosis=_TAIL_UNSEEN * max(float((deviations**4).mean()) / (squares / count) ** 2 - 3, 0.0)
        + math.sqrt(24 / count),
    )
    return _of_quarters(values, noise) if cusum_range > _STRAYS else noise


def _of_quarters(values: Floats, noise: Noise) -> Noise:
    """Return the noise of a series whose level moves; `noise` is what it has if the level does not."""
    means = np.array([quarter.mean() for quarter in np.array_split(values, _QUARTERS)])
    error = max(noise.error, float(means.std(ddof=1)) / math.sqrt(_QUARTERS))
    skewness = noise.skewness_of(noise.independent / _QUARTERS)
    return replace(noise, error=error, independent=_QUARTERS, skewness=skewness, moves=True)


def independent_of(values: Floats) -> float | None:
    """Return the number of independent values that a series is worth, from its ranks; for its percentiles and shares.

    No share of a series is more correlated than its ranks are. None: as `noise_of`.
    """
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    noise = noise_of(ranks[place].astype(np.float64))
    return None if noise is None else noise.independent


def total_ratio(
    treated: Floats,
    control: Floats,
    *,
    quiet: NDArray[np.bool_],
    before: int,
    quiet_control: NDArray[np.bool_] | None = None,
    level: float = LEVEL,
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

    Returns:
        The interval; None: too few values to know their noise.
    """
    if not control.all():
        return None
    count = len(control)
    quiet_parts = (treated[quiet], control if quiet_control is None else control[quiet_control])
    noises = [noise_of_mean(part / part.mean()) for part in quiet_parts if len(part) >= MIN_VALUES]
    known = [noise for noise in noises if noise is not None]
    if not noises or len(known) < len(noises):
        return None
    run_noise, twin_noise = known[0], known[-1]
    # If the fault made the run longer, its noise is a smaller share of the total.
    errors = (
        run_noise.error_of(count) * count * _mean_of(quiet_parts[0], treated) / float(treated.sum()),
        twin_noise.error_of(count),
    )
    error = math.hypot(*errors)
    skewness = 0.0
    for noise, error_of_part, sign in ((run_noise, errors[0], 1), (twin_noise, errors[1], -1)):
        if error:
            skewness += sign * noise.skewness_of(noise.independent_of(count)) * (error_of_part / error) ** 3
    down, up = _reach(min(run_noise.independent, twin_noise.independent) - 1, skewness, level)
    ratio = float(treated.sum() / control.sum())
    low, high = ratio * math.exp(-down * error), ratio * math.exp(up * error)
    words = (
        f"{run_noise.count} fault-free iterations of the run, {run_noise}; {twin_noise.count} of its twin, {twin_noise}"
    )
    if before >= 2:  # noqa: PLR2004 - a drift from few is a wild one, and makes the interval wide
        drift = float(treated[:before].sum() / control[:before].sum())
        low, high = low / max(1.0, drift), high / min(1.0, drift)
        words += f"; before any fault the run took {drift:.3f} of its twin's time, which is allowed for"
    return Interval(low=low, high=high, method=words, level=level)


def lowest_window(value: float, baseline: Floats, *, width: int, windows: int, level: float = LEVEL) -> Interval | None:
    """Return the interval of the lowest of `windows` windows, of `width` bins each, over the mean of the baseline.

    `value` is the observed ratio. The noise of a window is that of the baseline's bins. None: as `noise_of`.
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
    """Return the share of the baseline's mean that none of `windows` windows falls below by chance alone.

    The noise of a window is computed from the baseline's bins and from the baseline's own windows; the smaller one
    counts, because bins of a bursty workload differ more than windows that hold whole iterations. The share is 0 if the
    noise is unknown, or large enough to explain any fall.
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
    values = max(width / _dependence(noise.memory, width), 1.0)
    shape = noise.skewness_of(values), noise.kurtosis / values
    own = student(freedom, level) * noise.error
    above = math.hypot(_stray(freedom, *shape, tail_of(level)) * error, own)
    below = math.hypot(_stray(freedom, -shape[0], shape[1], tail_of(level) / max(windows, 1)) * error, own)
    return above, below


def mean_interval(values: Floats, *, of: str = "values", level: float = LEVEL) -> Interval | None:
    """Return the interval of the mean of a series that may depend on its own past; None: as `noise_of_mean`.

    `of` is what the method calls the values.
    """
    noise = noise_of_mean(values)
    if noise is None or noise.mean <= 0:
        return None
    down, up = _reach(noise.independent - 1, noise.skewness_of(noise.independent), level)
    low, high = noise.mean - down * noise.error, noise.mean + up * noise.error
    return Interval(low=max(low, 0.0), high=high, method=f"{noise.count} {of}, {noise}", level=level)


def resolution(low: float, high: float, *, of: str) -> Interval:
    """Return the interval of a value that is known only to a resolution; `of` names its source."""
    return Interval(low=max(0.0, low), high=high, method=of, level=1.0)


def widened(interval: Interval, value: float, log_sd: float, *, freedom: int, source: str) -> Interval:
    """Return the interval of `value`, wider by how much the value differs from run to run.

    `log_sd` is the deviation of its logarithm, with so many degrees of `freedom`. Each end is moved by itself: an
    interval that reaches far in one direction need not reach far in the other one.
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


def ratio_interval(over: Interval, under: Interval, values: tuple[float, float]) -> Interval | None:
    """Return the interval of a ratio from those of both values, `values`; None: one interval reaches 0.

    Each end of the ratio comes from the two ends that lead to it: an interval need not reach as far up as down, least
    of all that of a high percentile (MOVER, of the logarithms: Zou and Donner 2008, Statistics in Medicine 27:1693).
    """
    if min(over.low, under.low, *values) <= 0:
        return None
    (value, base), ratio = values, values[0] / values[1]
    down = math.hypot(_log_reach(value, over.low), _log_reach(under.high, base))
    up = math.hypot(_log_reach(over.high, value), _log_reach(base, under.low))
    words = f"both intervals: {over.method}"
    return Interval(low=ratio / math.exp(down), high=ratio * math.exp(up), method=words)


def share_interval(count: int, total: int, *, level: float = LEVEL, independent: float | None = None) -> Interval:
    """Return the exact interval of a share (Clopper and Pearson 1934).

    `independent` is how many independent trials the `total` ones are worth; None: all are independent.

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
    """Return a percentile's interval between two of the independent values (order statistics, any distribution).

    None: so few values that the outermost ones do not hold it with this probability.
    """
    interval = percentile_bounds(values, percent, independent=len(values), level=level)
    return interval if interval is not None and interval.low > -math.inf and interval.high < math.inf else None


def percentile_bounds(
    values: Floats, percent: float, *, independent: int, level: float = LEVEL, least: float = -math.inf
) -> Interval | None:
    """Return a percentile's interval for values that depend on each other; only so many are `independent`.

    If the outermost values do not hold the percentile, the interval extends to `least` or to infinity. It may still lie
    wholly on the wrong side of a bound. None: no values.
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


def _dependence(memory: float, count: int) -> float:
    """Return the variance of the mean of `count` values of an AR(1) series over that of independent ones."""
    return (1 + memory) / (1 - memory) - 2 * memory * (1 - memory**count) / (count * (1 - memory) ** 2)


def _reach(freedom: float, skewness: float, level: float) -> tuple[float, float]:
    """Return how many standard errors an interval of a mean reaches down and up; at least as far as Student's t.

    `skewness` is that of the mean. Willink 2005, equation 13: G(T) makes the t statistic T of a skewed sample
    symmetric; `inverse` is its inverse.
    """
    t, scaled_skewness = student(freedom, level), skewness / 6
    if abs(scaled_skewness) < 1e-6:  # noqa: PLR2004 - the limit is t itself
        return t, t

    def inverse(x: float) -> float:
        return float((np.cbrt(1 + 6 * scaled_skewness * (x - scaled_skewness)) - 1) / (2 * scaled_skewness))

    return max(t, inverse(t)), max(t, -inverse(-t))


def _stray(freedom: float, skewness: float, kurtosis: float, tail: float) -> float:
    """Return how many standard errors a mean strays above the truth with probability `tail` (Cornish and Fisher)."""
    t = student(freedom, 1 - 2 * tail)
    return t + max(skewness, 0.0) / 6 * (t * t - 1) + kurtosis / 24 * (t**3 - 3 * t)


def _mean_of(quiet: Floats, everything: Floats) -> float:
    """Return the mean of the quiet values, or of all values if there are none."""
    return float(quiet.mean()) if len(quiet) else float(everything.mean())
