"""Metrics of a traffic run: goodput, algbw, busbw, percentiles, time series and the straggler. Pure.

algbw and busbw are those of nccl-tests (doc/PERFORMANCE.md): algbw = size / time, busbw = algbw x a factor that makes
the number comparable with the link speed at any rank count, 2(n-1)/n for an all-reduce. A barrier moves no payload, so
its factor is 0. Sizes are bytes, times are nanoseconds, results are bits per second unless the name says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from faultbed.traffic.engine.run_results import Iteration, Sample

MIN_RANKS = 2

__all__ = [
    "Straggler",
    "algbw_gbytes_per_s",
    "busbw_factor",
    "busbw_gbytes_per_s",
    "goodput_bps",
    "jain_index",
    "operation_times_ns",
    "percentile",
    "straggler",
    "timeline",
]


def goodput_bps(size_bytes: float, time_ns: float) -> float:
    """Return payload bits per second; 0 if no time has passed."""
    return size_bytes * 8 * 1e9 / time_ns if time_ns > 0 else 0.0


def busbw_factor(collective: str, ranks: int) -> float:
    """Return the factor between algbw and busbw of nccl-tests.

    Raises:
        KeyError: the collective has no factor (an all-to-allv has `busiest_bytes` instead).
    """
    share = (ranks - 1) / ranks
    return {
        "all-reduce": 2 * share,
        "all-gather": share,
        "reduce-scatter": share,
        "all-to-all": share,
        "broadcast": 1.0,
        "reduce": 1.0,
        "send-recv": 1.0,
        "barrier": 0.0,
    }[collective]


def algbw_gbytes_per_s(size_bytes: float, time_ns: float) -> float:
    """Return GB/s (10^9 bytes) of the user's buffer, as nccl-tests prints it. One byte per nanosecond is one GB/s."""
    return size_bytes / time_ns if time_ns > 0 else 0.0


def busbw_gbytes_per_s(collective: str, ranks: int, size_bytes: float, time_ns: float) -> float:
    """Return GB/s (10^9 bytes) that each link had to carry, as nccl-tests prints it."""
    return algbw_gbytes_per_s(size_bytes, time_ns) * busbw_factor(collective, ranks)


def percentile(values: Iterable[float], percent: float) -> float:
    """Return a percentile with linear interpolation between order statistics (numpy's default); NaN without values."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def timeline(samples: Iterable[Sample], *, start_ns: int, end_ns: int, bin_ns: int = 100_000_000) -> tuple[float, ...]:
    """Return the bytes in every bin of [start, end), summed over the samples.

    The clocks of nodes are not aligned, so a sample can overlap a bin edge. Its bytes are then divided in proportion.
    Bytes outside the interval are dropped. The last bin may be short.
    """
    bins = [0.0] * max(0, -(-(end_ns - start_ns) // bin_ns))
    for sample in samples:
        start = max(sample.start_ns, start_ns)
        end = min(sample.start_ns + sample.duration_ns, end_ns)
        while start < end:
            index = (start - start_ns) // bin_ns
            edge = min(end, start_ns + (index + 1) * bin_ns)
            bins[index] += sample.size_bytes * (edge - start) / sample.duration_ns
            start = edge
    return tuple(bins)


def operation_times_ns(per_rank: Sequence[Sequence[Iteration]]) -> tuple[int, ...]:
    """Return the time of each collective: the shortest communication phase over the ranks.

    The rank that enters last does not wait, so its phase is the operation itself. The phases of the other ranks include
    the wait for it. No shared clock is needed. Only iterations that every rank has finished are counted.
    """
    by_index = [{item.index: item.comm_ns for item in rank} for rank in per_rank]
    common = set(by_index[0]).intersection(*by_index[1:]) if by_index else set()
    return tuple(min(rank[index] for rank in by_index) for index in sorted(common))


def jain_index(values: Sequence[float]) -> float | None:
    """Return Jain's fairness index, (sum x)^2 / (n sum x^2): 1 if all are equal, 1/n if one has everything.

    None: all are 0.
    """
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """The slowest rank, and how many times slower it is than the median of the other ranks (see `straggler`)."""

    rank: int
    ratio: float


def straggler(per_rank: Sequence[Sequence[Iteration]]) -> Straggler:
    """Return the rank that the other ranks wait for.

    With a compute phase, this is the rank with the longest compute time. Without one, the communication phases decide:
    the rank that enters last does not wait, so it has the shortest phase. The ratio is the other ranks' median phase
    over its own.

    Raises:
        ValueError: fewer than two ranks, or a rank without iterations.
    """
    if len(per_rank) < MIN_RANKS or not all(per_rank):
        raise ValueError("a straggler needs at least two ranks, each with at least one iteration")
    compute = [percentile((item.compute_ns for item in rank), 50) for rank in per_rank]
    if any(compute):
        rank = max(range(len(compute)), key=compute.__getitem__)
        median_of_others = percentile(compute[:rank] + compute[rank + 1 :], 50)
        return Straggler(rank=rank, ratio=compute[rank] / median_of_others if median_of_others else math.inf)
    phases = [percentile((item.comm_ns for item in rank), 50) for rank in per_rank]
    rank = min(range(len(phases)), key=phases.__getitem__)
    return Straggler(rank=rank, ratio=percentile(phases[:rank] + phases[rank + 1 :], 50) / max(phases[rank], 1.0))
