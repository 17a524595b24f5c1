"""Fail-slow detection: a rank that computes a few percent slower than before, detected while the job runs. Pure.

    detector = Detector(ranks=8, racks=["rack1"] * 4 + ["rack2"] * 4)
    for times in step_times:              # one compute time for each rank
        alarms = detector.add(times)

Each rank is compared with the **middle half of the other ranks of its rack** in the same iteration, in logarithms.
Common effects cancel: the daily temperature curve (1 to 2 %), another batch, a slower job. Only ranks of one rack are
compared, because racks heat up at different times: two racks that are a tenth of a day apart drift by 1 % against each
other. Two ranks per rack are enough: comparing only two doubles the noise, but a trend learnt from noise would cost
more. Of two ranks, however, one that becomes slower and one that becomes faster look the same. A rank alone in its rack
is compared with all ranks, and with the **line** through its own last `TREND` iterations instead of their mean. Then a
slow-down of 2 % is detected at 1 % of noise, and often not at 2 % of noise.

The result is clipped, because one long iteration is no slow rank, and compared with the rank's own past: mean and
deviation up to `GUARD` iterations ago, so that a slow-down does not become the norm before it is detected. For
correlated noise, the deviation is that of blocks of iterations if theirs is larger. It is at least half of the smallest
slow-down: otherwise, the drift of very quiet GPUs (0.1 %, H100) would count as one. An iteration is never clipped below
the largest shift that is searched for, because then no slow-down could add up.

The score feeds a **Shiryaev-Roberts** statistic for each slow-down of `SLOWDOWNS`: R' = (1 + R) L, with L the
likelihood ratio of a shift by that slow-down. Without a change, R minus the number of iterations is a martingale
(Pollak 1985), so that the sum over ranks reaches `ranks x mean_iterations` only after `mean_iterations` iterations on
average. That limits the false alarms of the whole job. It is exact for normal noise with a known deviation; for
correlated noise with tails, learnt from few iterations, `python -m bench soft-errors` measures it.

A slow-down that the past is too short to separate from its own error is not searched for yet (`Detector.smallest`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Indices = NDArray[np.int64]

__all__ = ["MEAN_ITERATIONS", "SLOWDOWNS", "Alarm", "Detector", "detect"]

SLOWDOWNS = (0.01, 0.02, 0.05, 0.3, 1.0)
"""Slow-downs that are searched for in parallel, as shares of a step."""
MEAN_ITERATIONS = 1000
"""Minimum mean number of fault-free iterations between false alarms of the whole job."""
GUARD, LEARN, KEEP, RELEARN = 40, 10, 1000, 10
"""Iterations: the latest ones, which the norm never includes; the fewest to learn from; the most to learn from; and the
most between two updates of the norm."""
_STORED, _SLACK = KEEP + GUARD + 1, 256
CUT = 3.0
"""Robust standard deviations beyond which an iteration is clipped."""
BLOCK, LONG_BLOCK = 8, 16
"""Lengths of blocks. The long one is used with enough data, because a short block misses half of a long correlation."""
_MANY_BLOCKS = 40
ENOUGH, TREND = 2, 300
"""Ranks per rack that are enough to compare; iterations of a line (over a longer time a day's curve is no line)."""
RESOLVED = 6.0
"""A slow-down is searched for if it is this many standard errors of the rank's own mean."""
MIN_RANKS = 2
_LARGEST_SHIFT = 2.0
"""In deviations. Larger shifts are detected at once, and would make a single long iteration an alarm."""
_SMALLEST_DEVIATION = math.log1p(SLOWDOWNS[0]) / _LARGEST_SHIFT
"""A GPU's compute times may vary by less than 0.1 %. Below this deviation, shifts smaller than the smallest slow-down
would be searched for."""
_HEALED_AFTER = 10
"""Latest iterations whose median decides whether a slow rank has recovered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Rank `rank` is slow: detected at `iteration`, probably since `since`, by about the share `slowdown`."""

    rank: int
    iteration: int
    since: int
    slowdown: float


class Detector:
    """The detector of one job.

    Args:
        ranks: number of ranks; at least 2.
        racks: the rack of each rank; None: all are in one, or it is unknown.
        mean_iterations: required mean number of fault-free iterations between false alarms of the job.

    Raises:
        ValueError: fewer than two ranks, or not one rack for each rank.
    """

    def __init__(
        self, ranks: int, *, racks: Sequence[str] | None = None, mean_iterations: int = MEAN_ITERATIONS
    ) -> None:
        if ranks < MIN_RANKS:
            raise ValueError("a slow rank is slower than others: at least two ranks are needed")
        if racks is not None and len(racks) != ranks:
            raise ValueError(f"{len(racks)} racks are given for {ranks} ranks")
        self.ranks = ranks
        self._peers = _peers(ranks, racks)
        self._drifts = np.zeros(ranks, dtype=np.bool_)
        for lone_rank in (rank for rank, drifts in self._peers if drifts):
            self._drifts[lone_rank] = True
        self._limit = float(ranks * mean_iterations)
        self._shift = np.log1p(SLOWDOWNS)
        self._count = self._learn_at = 0
        self._residuals = np.empty((_STORED + _SLACK, ranks))
        """Residuals of at least the last `_STORED` iterations, oldest first; `_forgotten` earlier rows were removed."""
        self._forgotten = 0
        self._norm: _Norm | None = None
        self._tested: _Norm | None = None
        self._sizes: tuple[Floats, Floats, NDArray[np.bool_]]
        """Shifts in the deviations of the norm `_tested`, half of their squares, and which of them it resolves."""
        self._statistic = np.zeros((ranks, len(SLOWDOWNS)))
        self._slow: dict[int, tuple[int, float]] = {}
        """By rank: since when, and by how much (in logarithms)."""

    @property
    def iteration(self) -> int:
        """Number of iterations so far."""
        return self._count

    @property
    def slow(self) -> tuple[int, ...]:
        """Ranks that are slow now."""
        return tuple(sorted(self._slow))

    @property
    def smallest(self) -> float | None:
        """The smallest slow-down that is searched for on every rank now; None while learning."""
        if self._norm is None:
            return None
        resolvable = self._norm.resolves(self._shift)
        return min((share for place, share in enumerate(SLOWDOWNS) if resolvable[:, place].all()), default=None)

    def add(self, times: Sequence[float] | Floats) -> tuple[Alarm, ...]:
        """Add one iteration's compute times, by rank, and return the alarms that it raises.

        Raises:
            ValueError: not one time above 0 for each rank.
        """
        steps = np.asarray(times, dtype=np.float64)
        if steps.shape != (self.ranks,) or not (steps > 0).all():
            raise ValueError(f"{self.ranks} times above 0 are needed, one a rank")
        self._store(self._compared(np.log(steps)))
        self._learn()
        return () if self._norm is None else self._test(self._norm)

    def _store(self, residuals: Floats) -> None:
        if self._count - self._forgotten == len(self._residuals):
            self._residuals[:_STORED] = self._residuals[_SLACK:]
            self._forgotten += _SLACK
        self._residuals[self._count - self._forgotten] = residuals
        self._count += 1

    def _compared(self, logs: Floats) -> Floats:
        """Return each rank relative to those it is compared with."""
        if len(self._peers) == 1:
            return _against_others(logs)
        residuals = np.empty(self.ranks)
        for own, drifts in self._peers:
            residuals[own] = _against_others(logs)[own] if drifts else _against_others(logs[own])
        return residuals

    def _learn(self) -> None:
        """Learn the norm from the past, except its latest part.

        It is learnt again each time the past has grown by a twentieth, or by `RELEARN` iterations if that is less.
        """
        past = self.iteration - 1 - min(GUARD, self.iteration // 3)
        if past >= LEARN and past >= self._learn_at:
            self._learn_at = past + max(1, min(past // 20, RELEARN))
            self._norm = _Norm.of(self._between(past - KEEP, past), past, self._drifts)

    def _test(self, norm: _Norm) -> tuple[Alarm, ...]:
        if norm is not self._tested:
            size = np.minimum(self._shift[None, :] / norm.deviation[:, None], _LARGEST_SHIFT)
            self._tested, self._sizes = norm, (size, size**2 / 2, norm.resolves(self._shift))
        size, half, resolvable = self._sizes
        score = norm.score(self._between(self._count - 1, self._count), self._count)[0]
        ratio = np.exp(size * score[:, None] - half)
        self._statistic = np.where(resolvable, (1 + self._statistic) * ratio, 0.0)
        alarms = []
        for rank in np.flatnonzero(self._statistic.sum(axis=1) / len(SLOWDOWNS) >= self._limit).tolist():
            shift = size[rank, int(np.argmax(self._statistic[rank]))]
            self._statistic[rank] = 0.0
            if rank not in self._slow:
                since = self._onset(rank, float(shift), norm)
                excess = self._excess(rank, since, norm)
                self._slow[rank] = since, excess
                alarms.append(Alarm(rank=rank, iteration=self.iteration - 1, since=since, slowdown=math.expm1(excess)))
        self._heal(norm)
        return tuple(alarms)

    def _onset(self, rank: int, shift: float, norm: _Norm) -> int:
        """Return when the shift most likely began: where the likelihood ratio of the rest is largest."""
        scores = norm.score(self._between(self.iteration - KEEP, self.iteration), self.iteration)[:, rank]
        backwards = np.cumsum((shift * scores - shift**2 / 2)[::-1])
        return self.iteration - 1 - int(np.argmax(backwards))

    def _heal(self, norm: _Norm) -> None:
        """Clear a rank whose latest iterations have lost more than half of its slow-down."""
        for rank, (since, excess) in tuple(self._slow.items()):
            recent = self.iteration - _HEALED_AFTER
            if recent > since and self._excess(rank, recent, norm) < excess / 2:
                del self._slow[rank]

    def _excess(self, rank: int, since: int, norm: _Norm) -> float:
        recent = self._between(since, self.iteration)
        return float(np.median((recent - norm.expected(len(recent), self.iteration))[:, rank]))

    def _between(self, start: int, stop: int) -> Floats:
        """Return residuals of iterations start to stop that are still stored: array of (iterations, ranks)."""
        start = max(start, self._count - _STORED, 0)
        return self._residuals[start - self._forgotten : stop - self._forgotten]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Norm:
    """The normal behaviour of a rank: arrays by rank, in logarithms of time.

    `mean` is the value at iteration `at`, which changes by `slope` per iteration. `error` is the standard error of the
    value that they predict for the latest iteration, in units of `deviation`.
    """

    at: int
    mean: Floats
    slope: Floats
    cut: Floats
    deviation: Floats
    error: Floats

    @classmethod
    def of(cls, past: Floats, at: int, drifts: NDArray[np.bool_]) -> _Norm:
        """Learn from residuals, an array of (iterations, ranks) whose last row precedes iteration `at`."""
        steady = cls._steady(past, at)
        if not drifts.any():
            return steady
        moving = cls._moving(past[-TREND:], at)
        arrays = {
            name: np.where(drifts, getattr(moving, name), getattr(steady, name))
            for name in ("mean", "slope", "cut", "deviation", "error")
        }
        return cls(at=at, **arrays)

    @classmethod
    def _steady(cls, past: Floats, at: int) -> _Norm:
        count, middle = len(past), _medians(past)
        cut = _outlier_limit(past - middle)
        inner = np.clip(past - middle, -cut, cut)
        return cls(
            at=at,
            mean=middle + inner.mean(axis=0),
            slope=np.zeros_like(middle),
            cut=cut,
            deviation=_deviation(inner),
            error=np.full_like(middle, 1 / math.sqrt(count)),
        )

    @classmethod
    def _moving(cls, past: Floats, at: int) -> _Norm:
        """Fit a line through the last `TREND` iterations, then fit again with the outliers of the first fit clipped."""
        count = len(past)
        far = np.arange(count)[:, None] - (count - 1) / 2
        level, slope = _medians(past), np.zeros(past.shape[1])
        for _ in range(2):
            rest = past - level - slope * far
            inner = np.clip(rest, -_outlier_limit(rest), _outlier_limit(rest))
            level, slope = level + inner.mean(axis=0), slope + (far * inner).sum(axis=0) / (far**2).sum()
        rest = past - level - slope * far
        cut = _outlier_limit(rest)
        ahead = (count - 1) / 2 + GUARD
        return cls(
            at=at,
            mean=level + slope * (count + 1) / 2,
            slope=slope,
            cut=cut,
            deviation=_deviation(np.clip(rest, -cut, cut)),
            error=np.full_like(level, math.sqrt(1 / count + ahead**2 / float((far**2).sum()))),
        )

    def expected(self, count: int, until: int) -> Floats:
        """Return the expected values of the `count` iterations before `until`: array of (count, ranks)."""
        values: Floats = self.mean + self.slope * (np.arange(until - count, until) - self.at)[:, None]
        return values

    def score(self, residuals: Floats, until: int) -> Floats:
        """Return the deviations of the iterations before `until`: array of the shape of the residuals."""
        rest = residuals - self.expected(len(residuals), until)
        cut = np.maximum(self.cut, _LARGEST_SHIFT * self.deviation)
        score: Floats = np.minimum(np.maximum(rest, -cut), cut) / self.deviation
        return score

    def resolves(self, shift: Floats) -> NDArray[np.bool_]:
        """Return which shifts are at least `RESOLVED` standard errors of this norm: array of (ranks, shifts)."""
        large: NDArray[np.bool_] = shift[None, :] >= RESOLVED * (self.error * self.deviation)[:, None]
        return large


def _outlier_limit(rest: Floats) -> Floats:
    """Return the limit beyond which an iteration is an outlier: array by rank."""
    cut: Floats = CUT * np.maximum(1.4826 * _medians(np.abs(rest - _medians(rest))), 1e-6)
    return cut


def _medians(rows: Floats) -> Floats:
    """Return what `np.median(rows, axis=0)` does, in a half to a tenth of the time for the few values here."""
    half = len(rows) // 2
    part = np.partition(rows, (half - 1, half) if half else half, axis=0)
    medians: Floats = part[half] if len(rows) % 2 else (part[half - 1] + part[half]) / 2
    return medians


def _deviation(inner: Floats) -> Floats:
    """Return the deviation by rank of clipped residuals, or that of blocks of iterations if it is larger."""
    count = len(inner)
    block = LONG_BLOCK if count >= _MANY_BLOCKS * LONG_BLOCK else BLOCK
    blocks = count // block
    deviation = inner.std(axis=0, ddof=1)
    if blocks >= 2:  # noqa: PLR2004 - one value has no deviation
        means = inner[: blocks * block].reshape(blocks, block, -1).mean(axis=1)
        deviation = np.maximum(deviation, means.std(axis=0, ddof=1) * math.sqrt(block))
    # Learnt from few values: an underestimated deviation causes false alarms, so add its error.
    careful = 1 + 0.3 / math.sqrt(max(blocks, 1)) + 6 / count
    cautious: Floats = np.maximum(deviation * careful, _SMALLEST_DEVIATION)
    return cautious


def _peers(ranks: int, racks: Sequence[str] | None) -> tuple[tuple[Indices, bool], ...]:
    """Return groups of ranks that are compared with each other, and whether the group drifts (alone in their racks)."""
    names = np.array(list(racks) if racks is not None else [""] * ranks)
    groups = [np.flatnonzero(names == group) for group in dict.fromkeys(names.tolist())]
    if len(groups) == 1:
        return ((groups[0], False),)
    alone = [group for group in groups if len(group) < ENOUGH]
    compared = [(group, False) for group in groups if len(group) >= ENOUGH]
    return (*compared, *([(np.sort(np.concatenate(alone)), True)] if alone else []))


def detect(
    rows: Iterable[Sequence[float]], *, racks: Sequence[str] | None = None, mean_iterations: int = MEAN_ITERATIONS
) -> tuple[Alarm, ...]:
    """Return the alarms over a whole job; each row has the compute times of an iteration by rank."""
    alarms: list[Alarm] = []
    detector: Detector | None = None
    for row in rows:
        detector = detector or Detector(len(row), racks=racks, mean_iterations=mean_iterations)
        alarms += detector.add(row)
    return tuple(alarms)


def _against_others(logs: Floats) -> Floats:
    """Return each rank minus the mean of the middle half of the other ranks."""
    order = np.argsort(logs, kind="stable")
    ordered = logs[order]
    sums = np.zeros(len(logs) + 1)
    np.cumsum(ordered, out=sums[1:])
    first, last, is_middle, count = _middles(len(logs))
    residual = np.empty_like(logs)
    residual[order] = ordered - (sums[last] - sums[first] - np.where(is_middle, ordered, 0.0)) / count
    return residual


@functools.cache
def _middles(ranks: int) -> tuple[Indices, Indices, NDArray[np.bool_], int]:
    """Return where the middle half of the others begins and ends by place in the order, and the number of its ranks.

    Without the rank at a place, the middle is [skip, others - skip) of the rest, shifted by one above it. A rank
    inside the middle (the third array) is removed from the sum; one outside only shifts the edges.
    """
    place, others = np.arange(ranks), ranks - 1
    skip = others // 4
    return (
        np.where(place < skip, skip + 1, skip),
        np.where(place < others - skip, others - skip + 1, others - skip),
        (place >= skip) & (place < others - skip),
        others - 2 * skip,
    )
