"""Part `soft-errors` of the bench: delay and false alarms of the fail-slow detector, on synthetic step times.

The noise resembles that of jobs: ranks differ; times vary by 1 to 3 % between iterations, with some correlation; a few
iterations are much longer; a part is common to all ranks; and a daily curve of 2 % is added. With `racks`, the curve of
each rack is a tenth of a day behind that of the rack before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bench.rows import OPEN, Row, decided
from faultbed.harness.analysis.ranks.fail_slow import Detector, detect
from faultbed.harness.confidence import Interval, percentile_bounds, share_interval

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["NOISES", "Noise", "false_alarms", "healthy_times", "measure"]

JOBS, FAULT_FREE, SLOW_JOBS, SLOW_FROM, AFTER = 10, 2000, 24, 400, 200
"""Jobs without a slow rank and their iterations; jobs with one, its first slow iteration, and iterations from there."""
SHARES = (0.5, 0.05, 0.02, 0.01)
_DAY = 2000
"""Iterations of the daily curve, of some 40 s each."""
_APART = 200
"""Iterations by which the curve of a rack lags behind that of the rack before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Noise of a job's steps.

    `deviation` is that of a step's time, `correlation` its lag-1 correlation, `long` the share of long
    iterations. The job has `ranks` ranks in `racks` racks.
    """

    deviation: float
    correlation: float
    long: float
    ranks: int
    racks: int = 1

    @property
    def rack_of(self) -> list[str]:
        """The rack of each rank."""
        return [f"rack{1 + rank * self.racks // self.ranks}" for rank in range(self.ranks)]

    def __str__(self) -> str:
        words = f"noise {100 * self.deviation:g} %, correlation {self.correlation:g}, {100 * self.long:g} % long"
        return f"{words}, {self.ranks} ranks" + (f" in {self.racks} racks" if self.racks > 1 else "")


NOISES = (
    Noise(deviation=0.0007, correlation=0.5, long=0.0, ranks=4),
    Noise(deviation=0.01, correlation=0.0, long=0.0, ranks=8),
    Noise(deviation=0.02, correlation=0.0, long=0.01, ranks=8),
    Noise(deviation=0.02, correlation=0.0, long=0.01, ranks=4),
    Noise(deviation=0.02, correlation=0.5, long=0.02, ranks=8),
    Noise(deviation=0.03, correlation=0.0, long=0.02, ranks=8),
    Noise(deviation=0.03, correlation=0.3, long=0.02, ranks=16),
    Noise(deviation=0.01, correlation=0.0, long=0.0, ranks=8, racks=2),
    Noise(deviation=0.02, correlation=0.0, long=0.01, ranks=8, racks=2),
    Noise(deviation=0.02, correlation=0.0, long=0.01, ranks=4, racks=2),
)


def healthy_times(noise: Noise, iterations: int, rng: np.random.Generator, *, day: float = 0.02) -> NDArray[np.float64]:
    """Return step times of healthy ranks, an array of (iterations, ranks)."""
    own = np.empty((iterations, noise.ranks))
    value = rng.normal(size=noise.ranks)
    for index in range(iterations):
        value = noise.correlation * value + np.sqrt(1 - noise.correlation**2) * rng.normal(size=noise.ranks)
        own[index] = value
    times = np.exp(noise.deviation * own + 0.05 * rng.normal(size=noise.ranks))
    long = rng.random((iterations, noise.ranks)) < noise.long
    times *= np.where(long, 1 + rng.exponential(0.3, size=times.shape), 1)
    common = np.exp(0.02 * rng.normal(size=iterations))
    later = _APART * np.unique(noise.rack_of, return_inverse=True)[1]
    heat = 1 + day * np.sin(2 * np.pi * (np.arange(iterations)[:, None] - later) / _DAY)
    slowed: NDArray[np.float64] = times * common[:, None] * heat
    return slowed


def measure() -> Iterator[Row]:
    """Yield the rows of `python -m bench soft-errors`."""
    for noise in NOISES:
        rng = np.random.default_rng(3)
        false = sum(len(detect(healthy_times(noise, FAULT_FREE, rng), racks=noise.rack_of)) for _ in range(JOBS))
        yield false_alarms(false, JOBS * FAULT_FREE, str(noise))
        for share in SHARES:
            delays = np.array([_delay(noise, share, rng) for _ in range(SLOW_JOBS)])
            in_time = float(np.mean(delays <= 60))  # noqa: PLR2004 (the goal)
            middle = np.median(delays)
            between = percentile_bounds(delays, 50, independent=SLOW_JOBS, level=0.95)
            spread = (
                f", median {between.low:.0f}..{between.high:.0f} (95 %)" if between and between.high < np.inf else ""
            )
            yield (
                f"  {100 * share:g} % slower: iterations until the rank is named",
                f"{middle:.0f}" if middle < np.inf else f"> {AFTER}",
                f"{100 * in_time:.0f} % within 60{spread}, n={SLOW_JOBS}",
                "<= 60" if share >= 0.02 else "",  # noqa: PLR2004 (the goal)
                "" if share < 0.02 else decided(between, most=60) if between else OPEN,  # noqa: PLR2004
            )


def false_alarms(count: int, iterations: int, noise: str) -> Row:
    """Return the row of a number of false alarms; its goal is decided by the whole interval."""
    share = share_interval(count, iterations)
    interval = Interval(low=1000 * share.low, high=1000 * share.high, method=share.method)
    return (
        f"false alarms in 1,000 iterations of the job; {noise}",
        f"{1000 * count / iterations:.2f}",
        f"{interval.low:.2f}..{interval.high:.2f}, n={iterations:,}",
        "<= 1",
        decided(interval, most=1),
    )


def _delay(noise: Noise, share: float, rng: np.random.Generator) -> float:
    """Return the iterations from the slow-down of rank 1 until it is detected; infinity: not within `AFTER`."""
    times = healthy_times(noise, SLOW_FROM + AFTER, rng)
    times[SLOW_FROM:, 1] *= 1 + share
    detector = Detector(noise.ranks, racks=noise.rack_of)
    for row in times[:SLOW_FROM]:
        detector.add(row)
    for index, row in enumerate(times[SLOW_FROM:]):
        detector.add(row)
        if 1 in detector.slow:
            return index + 1.0
    return float("inf")
