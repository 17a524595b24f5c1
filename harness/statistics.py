"""One rule for every performance bound: an interval for what was measured, and where the bound lies to it. Pure.

    interval wholly inside the bound    PASS
    interval wholly outside             FAIL
    the bound lies within it            INCONCLUSIVE: this run cannot tell

Intervals are two-sided with `LEVEL` = 99 %, so that a run whose true value lies exactly on its bound fails wrongly in
0.5 % of cases, and any better run more rarely.

**Times of iterations** are neither normal nor independent, so they are resampled in blocks (circular block bootstrap,
Politis and Romano 1992), of the square root of their number. Few blocks make such an interval too narrow; it is widened
as Student's t is wider than the normal distribution (expansion 26.7.5 of Abramowitz and Stegun).

**A ratio against a twin** (`total_ratio`) holds the fault's own effect fixed and resamples only noise: what iterations
differ from their mean where no fault acted, in the run and in the twin. A lab is not the same twice either: by how much
the run differed from its twin *before the first fault* is known, and the interval is widened to hold the ratio with and
without that drift taken out.

**Shares and percentiles** have exact intervals: Clopper and Pearson (1934), and order statistics.

Everything is seeded with a constant: the same run gives the same interval.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from harness.verdict import Verdict

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

__all__ = [
    "LEVEL",
    "Interval",
    "decide",
    "mean_interval",
    "percentile_bounds",
    "percentile_interval",
    "ratio_interval",
    "resolution",
    "share_interval",
    "student_over_normal",
    "total_ratio",
    "widened",
    "window_ratio",
]

LEVEL = 0.99
RESAMPLES = 4000
MIN_VALUES = 8
"""Fewer values than these say nothing about their own noise."""

_RULE = "decided by its {level:g} % interval: PASS wholly inside, FAIL wholly outside, else INCONCLUSIVE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Where the true value lies with probability `level`; `method` says how that was found."""

    low: float
    high: float
    method: str
    level: float = LEVEL

    @property
    def rule(self) -> str:
        """The rule in words, as it stands in a check."""
        return _RULE.format(level=100 * self.level)

    def __str__(self) -> str:
        return f"{100 * self.level:g} % interval {self.low:.4g}..{self.high:.4g} ({self.method})"


def decide(sign: Literal["min", "max"], bound: float, interval: Interval) -> Verdict:
    """Where a bound lies to an interval."""
    if sign == "max":
        inside, outside = interval.high <= bound, interval.low > bound
    else:
        inside, outside = interval.low >= bound, interval.high < bound
    return Verdict.PASS if inside else Verdict.FAIL if outside else Verdict.INCONCLUSIVE


def total_ratio(
    treated: Floats,
    control: Floats,
    *,
    quiet: NDArray[np.bool_],
    before: int,
    quiet_control: NDArray[np.bool_] | None = None,
) -> Interval | None:
    """The ratio of two sums of as many paired values, such as iteration times of a run and of its twin.

    Args:
        treated: times in the run, of its first k iterations.
        control: times in the twin, of the same.
        quiet: which of `treated` no fault touched; its noise and the twin's are what is resampled.
        before: how many of the first came before any fault; 0: the drift between run and twin is not known.
        quiet_control: the same of `control`; None: all of it, for a twin has no faults.

    None: too few values to know their noise.
    """
    calm = (treated[quiet], control if quiet_control is None else control[quiet_control])
    if not control.all() or all(len(part) < MIN_VALUES for part in calm):
        return None
    noise = np.concatenate([part / part.mean() - 1 for part in calm if len(part) >= MIN_VALUES])
    block, sums = _noise_of_mean(noise, count=len(control), draws=2)
    ratio = float(treated.sum() / control.sum())
    low, high = _quantiles(ratio * (1 + sums[0]) / np.maximum(1 + sums[1], 1e-9))
    words = f"block bootstrap of {len(noise)} fault-free iterations of run and twin in blocks of {block}"
    if before >= 2:  # noqa: PLR2004 - a drift from few is a wild one, and makes the interval wide
        drift = float(treated[:before].sum() / control[:before].sum())
        low, high = low / max(1.0, drift), high / min(1.0, drift)
        words += f"; before any fault the run took {drift:.3f} of its twin's time, which is allowed for"
    return Interval(low=max(low, 0.0), high=high, method=words)


def window_ratio(value: float, baseline: Floats, *, width: int) -> Interval | None:
    """The mean of one window of `width` bins over the mean of the baseline's bins, which came out as `value`.

    The noise is that of windows of the baseline around its mean, and that mean's own. None: too short a baseline.
    """
    mean = float(baseline.mean()) if len(baseline) else 0.0
    if len(baseline) < max(2 * width, MIN_VALUES) or mean <= 0:
        return None
    noise = baseline / mean - 1
    _, windows = _noise_of_mean(noise, count=width, draws=1, block=width)
    _, means = _noise_of_mean(noise, count=len(noise), draws=1, block=width)
    low, high = _quantiles(value * (1 + windows[0]) / np.maximum(1 + means[0], 1e-9))
    words = f"block bootstrap of the baseline's {len(baseline)} bins in blocks of {width}"
    return Interval(low=max(low, 0.0), high=high, method=words)


def mean_interval(values: Floats, *, of: str = "values") -> Interval | None:
    """The mean of a series that may depend on its own past; `of` is what the method calls the values."""
    mean = float(values.mean()) if len(values) else 0.0
    if len(values) < MIN_VALUES or mean <= 0:
        return None
    block, sums = _noise_of_mean(values / mean - 1, count=len(values), draws=1)
    low, high = _quantiles(mean * (1 + sums[0]))
    return Interval(low=max(low, 0.0), high=high, method=f"block bootstrap of {len(values)} {of} in blocks of {block}")


def resolution(low: float, high: float, *, of: str) -> Interval:
    """A value that is only known to the resolution of what measured it: `of` says what that is."""
    return Interval(low=max(0.0, low), high=high, method=of, level=1.0)


def widened(interval: Interval, log_sd: float, *, source: str) -> Interval:
    """Also allow for how much the value differs from run to run: `log_sd` is the deviation of its logarithm."""
    reach = statistics.NormalDist().inv_cdf((1 + interval.level) / 2) * log_sd
    middle = math.sqrt(interval.low * interval.high) if interval.low > 0 else interval.high
    if middle <= 0:
        return interval

    def far(edge: float) -> float:
        return math.exp(math.hypot(math.log(edge / middle), reach)) if edge > 0 else math.inf

    return Interval(
        low=middle / far(interval.low),
        high=middle * far(interval.high),
        level=interval.level,
        method=f"{interval.method}; widened by {source}",
    )


def ratio_interval(over: Interval, under: Interval, ratio: float) -> Interval | None:
    """A ratio of two values that were measured apart, from the interval of each; None: one of them reaches to 0."""
    if min(over.low, under.low, ratio) <= 0:
        return None
    low = math.hypot(*(math.log(one.high / one.low) / 2 for one in (over, under)))
    words = f"both intervals: {over.method}"
    return Interval(low=ratio / math.exp(low), high=ratio * math.exp(low), method=words)


def share_interval(count: int, total: int, *, level: float = LEVEL) -> Interval:
    """A share of independent trials: exact (Clopper and Pearson 1934).

    Raises:
        ValueError: not 0 <= count <= total, or no trial at all.
    """
    if not 0 <= count <= total or total == 0:
        raise ValueError(f"{count} of {total} trials is no share")
    tail = (1 - level) / 2
    low = 0.0 if count == 0 else 1 - _upper(total - count, total, tail)
    high = 1.0 if count == total else _upper(count, total, tail)
    return Interval(low=low, high=high, level=level, method=f"exact binomial, {count} of {total}")


def percentile_interval(values: Floats, percent: float, *, level: float = LEVEL) -> Interval | None:
    """A percentile of independent values, between two of them, whatever their distribution (order statistics).

    None: so few values that the outermost ones do not hold it with this probability.
    """
    found = percentile_bounds(values, percent, independent=len(values), level=level)
    return found if found is not None and found.low > -math.inf and found.high < math.inf else None


def percentile_bounds(
    values: Floats, percent: float, *, independent: int, level: float = LEVEL, least: float = -math.inf
) -> Interval | None:
    """The same of values of which only so many are `independent`, as those of one request are alike.

    Where the outermost values do not hold the percentile, the interval reaches to `least` or to infinity: such a one
    may still lie wholly on the wrong side of a bound. None: no values.
    """
    ordered, share, tail = np.sort(values), percent / 100, (1 - level) / 2
    if not 0 < independent <= len(ordered) or not 0 < share < 1:
        return None
    below = np.cumsum(_binomial(independent, share, independent))
    first = int(np.searchsorted(below, tail, side="right")) - 1
    last = int(np.searchsorted(below, 1 - tail, side="left"))
    each = len(ordered) / independent
    low = least if first < 0 else float(ordered[math.floor(first * each)])
    high = math.inf if last >= independent else float(ordered[math.ceil((last + 1) * each) - 1])
    places = " and ".join([*([] if first < 0 else [f"{first + 1}"]), *([] if last >= independent else [f"{last + 1}"])])
    words = f"order statistics {places} of {independent}" if places else f"{independent} are too few for either end"
    return Interval(low=low, high=high, level=level, method=words)


def _noise_of_mean(noise: Floats, *, count: int, draws: int, block: int | None = None) -> tuple[int, Floats]:
    """Block length, and the resampled mean of `count` values of `noise`: array of (draws, RESAMPLES)."""
    length = len(noise)
    block = min(math.ceil(math.sqrt(length)) if block is None else block, length)
    cumulated = np.concatenate([[0.0], np.cumsum(np.concatenate([noise, noise[:block]]))])
    blocks = -(-count // block)
    starts = np.random.default_rng(0).integers(0, length, size=(draws, RESAMPLES, blocks))
    sums: Floats = (cumulated[starts + block] - cumulated[starts]).sum(axis=2)
    # A whole number of blocks is rarely `count` values; noise grows with the root of their number.
    scale = math.sqrt(count / (blocks * block)) * student_over_normal(length / block - 1)
    return block, sums * scale * math.sqrt(length / (length - 1)) / count


def student_over_normal(freedom: float) -> float:
    """How much wider Student's t is than the normal distribution at `LEVEL` (Abramowitz and Stegun 26.7.5)."""
    z, nu = statistics.NormalDist().inv_cdf((1 + LEVEL) / 2), max(freedom, 1.0)
    return 1 + (z**2 + 1) / (4 * nu) + (5 * z**4 + 16 * z**2 + 3) / (96 * nu**2)


def _quantiles(values: Floats) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _binomial(total: int, share: float, most: int) -> Floats:
    """Probabilities of 0 to `most` successes in `total` trials; `share` lies strictly between 0 and 1."""
    k = np.arange(1, most + 1, dtype=np.float64)
    logs = np.cumsum(np.log((total - k + 1) / k)) + k * (math.log(share) - math.log1p(-share))
    probabilities: Floats = np.exp(np.concatenate([[0.0], logs]) + total * math.log1p(-share))
    return probabilities


def _upper(count: int, total: int, tail: float) -> float:
    """The share at which `count` or fewer successes have probability `tail`: by halving, to a float's end."""
    low, high = count / total, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if _binomial(total, middle, count).sum() > tail else (low, middle)
    return high
