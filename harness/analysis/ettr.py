"""Effective training time ratio: the share of a job's time that produced progress. Pure.

    measured     iterations finished x the time of a fault-free iteration / wall time
    predicted    (1 - lost / wall) / (1 + w / D)

The prediction is that of Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters"
(HPCA 2025, arXiv 2410.21680), E[ETTR] = (1 - N r (u + D / 2)) / (1 + w / D). Interruptions have the rate N r. Each
costs u to recover and half of the work between two checkpoints. A checkpoint stops a job for w after each D of work.

A job without restarts continues where it stood: no work is repeated, and D / 2 becomes 0. Instead of N r u, the faults'
own `lost` is known: the time that fault-free goodput would have needed for the bytes that were not carried. w includes
the wait for data.

A job with restarts has all inputs of the published formula: the number of interruptions, u from the loss until the
state was restored, D as the checkpoint interval in fault-free iterations, and w. The interval of the prediction has
two sources: the moments of the losses (the work lost by each is anything between 0 and D, all equally likely; staggered
checkpoints of n ranks add D - D / n), and the noise of the iterations, by which the later ones differ from the
fault-free start.

A job that goes on with fewer ranks (`shrink`) does less work in an iteration, because each rank's part stays the same.
Such an iteration counts in proportion to the ranks that are left (`work_share`).

The time of an iteration is the mean over the run's own fault-free start, without its waits for storage. Measurement and
prediction share only that: the measurement counts the later iterations, the prediction the later bytes and waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from faultbed.harness.analysis.timeline import Baseline, Impact, finished_iterations, iterations_done
from faultbed.harness.confidence import LEVEL, Interval, mean_interval, noise_of, student
from faultbed.harness.record.evidence.run_evidence import RunEvidence

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Ettr", "Formula", "ettr", "work_share"]

_UNIFORM_HALF = 0.475
"""Half of the range that holds 95 % of a value uniform over [0, 1]."""
_FORMULA_LEVEL = 0.95
"""Share of measured ratios that the formula's interval holds."""
_NORMAL = 1.96
"""Standard deviations on either side that hold 95 % of a normal value."""
_ENOUGH = 3
"""Number of fault-free iterations needed to know how long one takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """The published formula for a job with `interruptions`, with its inputs.

    `low` to `high` hold the measured ratio with 95 %; None: the noise of the iterations is unknown. `recovery_ns` is
    the mean time from a loss until the state was restored, `interval_ns` the work between two checkpoints,
    `checkpoint_share` w / D.
    """

    predicted: float
    low: float | None
    high: float | None
    interruptions: int
    recovery_ns: float
    interval_ns: float
    checkpoint_share: float

    def holds(self, ratio: float) -> bool | None:
        """Return whether a measured ratio is in the interval; None: there is none."""
        return None if self.low is None or self.high is None else self.low <= ratio <= self.high

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.predicted:.3f} (no interval: the noise of the iterations is unknown)"
        return f"{self.predicted:.3f} (95 %: {self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ettr:
    """Effective training time of a job: `ratio` of `wall_ns` was productive, in `iterations` of `healthy_ns` each.

    `lost_ns` is the time that faults cost, `storage_ns` the mean wait of an iteration for storage. `predicted` is None
    if goodput has no fault-free start. `alone_ns` are the fault-free iterations whose mean is `healthy_ns`, and
    `settled_ns` those after the last fault.
    `work_share` is the work of the iterations over that of as many iterations of all ranks.
    """

    iterations: int
    healthy_ns: float
    wall_ns: int
    lost_ns: float
    storage_ns: float
    predicted: float | None
    alone_ns: tuple[float, ...] = ()
    settled_ns: tuple[float, ...] = ()
    formula: Formula | None = None
    work_share: float = 1.0

    @property
    def ratio(self) -> float:
        """Productive time over wall time. Noise may raise it above 1."""
        return self.iterations * self.work_share * self.healthy_ns / self.wall_ns

    def interval(self, level: float = LEVEL) -> Interval | None:
        """Return the range of `ratio` over the healthy time of both controls: before the first fault, after the last.

        The level of the machine may have moved in between, and nothing in the run tells which of them it had under
        the faults. None: one control has too few iterations.
        """
        before, after = (
            mean_interval(np.array(times_ns), of="fault-free iterations", level=level)
            for times_ns in (self.alone_ns, self.settled_ns)
        )
        if before is None or after is None:
            return None
        share = self.iterations * self.work_share / self.wall_ns
        return Interval(
            low=share * min(before.low, after.low),
            high=share * max(before.high, after.high),
            method=f"before the faults {before.method}; after them {after.method}",
            level=level,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Iterations:
    """Iterations that all ranks finished, over all ranks.

    `alone_ns` are the lengths of those before the first fault, `settled_ns` of those after the last one and its
    effects, both without their waits for storage. If there is no fault, `settled_ns` is the second half of `alone_ns`.
    `wait_ns` is the mean wait for storage of all of them, `later` the number of those that are not fault-free,
    `wall_ns` the time of all of them.
    """

    alone_ns: NDArray[np.float64]
    settled_ns: NDArray[np.float64]
    later: int
    wait_ns: float
    wall_ns: int

    @property
    def healthy_ns(self) -> float:
        """Mean length of a fault-free iteration."""
        return float(self.alone_ns.mean())

    @property
    def wait_share(self) -> float:
        """Wait for storage per fault-free iteration: w / D of the formula."""
        return self.wait_ns / self.healthy_ns


def ettr(
    run: RunEvidence,
    base: Baseline | None,
    impacts: Iterable[Impact],
    *,
    first_fault_ns: int,
    settled_ns: int | None = None,
) -> Ettr | None:
    """Measure and predict the ratio; None without iterations, or with too few before the first fault.

    `settled_ns` is when the last fault and its effects were over; None: that was not seen.
    """
    iterations = _iterations(run, first_fault_ns, settled_ns)
    if iterations is None or len(iterations.alone_ns) < _ENOUGH:
        return None
    lost_ns = 0.0 if base is None else sum(impact.lost_bytes / base.mean * 1e9 for impact in impacts)
    return Ettr(
        iterations=iterations_done(run.workload.series),
        healthy_ns=iterations.healthy_ns,
        wall_ns=iterations.wall_ns,
        lost_ns=lost_ns,
        storage_ns=iterations.wait_ns,
        predicted=None if base is None else (1 - lost_ns / iterations.wall_ns) / (1 + iterations.wait_share),
        alone_ns=tuple(iterations.alone_ns.tolist()),
        settled_ns=tuple(iterations.settled_ns.tolist()),
        formula=_formula(run, iterations),
        work_share=work_share(run),
    )


def work_share(run: RunEvidence) -> float:
    """Return the work of a run's iterations over that of as many iterations of all ranks; 1: no rank was lost for good.

    A series holds the last execution of each iteration: by the ranks after the last restart that went back to it, or to
    an earlier one.
    """
    indices = sorted({step.index for rank in run.workload.series for step in rank.iterations})
    restarts = () if run.workload.resilience is None else run.workload.resilience.restarts
    if not indices or not restarts:
        return 1.0
    shares = np.ones(indices[-1] + 1 - indices[0])
    for restart in restarts:
        if restart.restored_iterations is not None and restart.after:
            begin = max(0, restart.restored_iterations - indices[0])
            shares[begin:] = len(restart.after) / len(restarts[0].before)
    return float(shares.mean())


def _iterations(run: RunEvidence, first_fault_ns: int, settled_ns: int | None) -> _Iterations | None:
    """Return the iterations that all ranks finished; None: there are none."""
    count = finished_iterations(run.workload.series)
    if not count:
        return None
    ordered = [
        sorted(rank_series.iterations, key=lambda step: step.index)[:count] for rank_series in run.workload.series
    ]
    begins = np.array([[step.start_ns for step in rank] for rank in ordered]).min(axis=0)
    end_ns = int(max(rank[-1].end_ns for rank in ordered))
    waits = np.array([[step.ingest_ns + step.checkpoint_ns for step in rank] for rank in ordered]).max(axis=0)
    # An iteration extends to the start of the next one, so that the time between them counts.
    lengths = np.diff(np.append(begins, end_ns))
    # A loss may have another cause than an injected fault, and the iteration before it lasts until the restart.
    losses_ns = (
        [restart.progress_ns for restart in run.workload.resilience.restarts]
        if run.workload.resilience is not None
        else []
    )
    indices = np.array([step.index for step in ordered[0]])
    is_followed = np.diff(indices, append=indices[-1] + 1) == 1  # otherwise the record of the next one is lost
    is_healthy = (begins + lengths <= min([first_fault_ns, *losses_ns])) & is_followed
    times_ns = (lengths - waits).astype(np.float64)
    alone_ns = times_ns[is_healthy]
    return _Iterations(
        alone_ns=alone_ns,
        settled_ns=times_ns[_are_settled(run, begins, settled_ns) & is_followed]
        if run.injected.faults or losses_ns
        else alone_ns[len(alone_ns) // 2 :],
        later=count - int(is_healthy.sum()),
        wait_ns=float(waits.mean()),
        wall_ns=_end_of_wall(run, end_ns) - int(begins[0]),
    )


def _are_settled(run: RunEvidence, begins: NDArray[np.int64], settled_ns: int | None) -> NDArray[np.bool_]:
    """Return which iterations began after the last fault and its effects, and after the job had caught up."""
    caught_up_ns = (
        [restart.caught_up_ns for restart in run.workload.resilience.restarts]
        if run.workload.resilience is not None
        else []
    )
    if settled_ns is None or None in caught_up_ns:
        return np.zeros(len(begins), dtype=np.bool_)
    settled: NDArray[np.bool_] = begins >= max([settled_ns, *(at_ns for at_ns in caught_up_ns if at_ns is not None)])
    return settled


def _end_of_wall(run: RunEvidence, last_ns: int) -> int:
    """Return the end of the wall time: that of the last iteration, `last_ns`.

    If the run failed or did not finish its planned iterations, wall time lasts until the run's end. Otherwise an outage
    at the end would cost nothing.
    """
    planned = run.workload.planned.get("iterations")
    is_complete = not isinstance(planned, int) or iterations_done(run.workload.series) >= planned
    return last_ns if run.workload.failure is None and is_complete else max(last_ns, run.workload.end_ns)


def _formula(run: RunEvidence, iterations: _Iterations) -> Formula | None:
    """Return the published formula; None if no restart restored the job's state, or there are no checkpoints."""
    recoveries_ns = _recoveries(run)
    storage = run.workload.planned.get("storage") or {}
    every = storage.get("every")
    if not recoveries_ns or not every:
        return None
    least = _least_lost_share(len(run.workload.ranks), int(every)) if storage.get("mode") == "staggered" else 0.0
    count, interval_ns = len(recoveries_ns), int(every) * iterations.healthy_ns
    recovery_ns = sum(recoveries_ns) / count

    def ratio(lost_share: float) -> float:
        """Return the formula's ratio if each loss costs this share of the work between two checkpoints."""
        lost_ns = count * (recovery_ns + lost_share * interval_ns)
        return max(0.0, 1 - lost_ns / iterations.wall_ns) / (1 + iterations.wait_share)

    # The mean of n values that are uniform over [least, least + 1]: exact for one, and close to normal for more.
    half = _UNIFORM_HALF if count == 1 else min(_UNIFORM_HALF, _NORMAL * math.sqrt(1 / (12 * count)))
    predicted, noise = ratio(least + 0.5), _reach_of_noise(iterations.alone_ns, iterations.later)
    low = high = None
    if noise is not None:
        low = max(0.0, predicted - math.hypot(predicted - ratio(least + 0.5 + half), predicted * noise))
        high = predicted + math.hypot(ratio(least + 0.5 - half) - predicted, predicted * noise)
    return Formula(
        predicted=predicted,
        low=low,
        high=high,
        interruptions=count,
        recovery_ns=recovery_ns,
        interval_ns=interval_ns,
        checkpoint_share=iterations.wait_share,
    )


def _least_lost_share(ranks: int, every: int) -> float:
    """Return the minimum share of a checkpoint interval that a loss costs if checkpoints are staggered.

    The last rank stores the state of an interval's start shortly before the interval ends
    (`faultbed.traffic.node.ranks.feed`).
    """
    return 1 - every // ranks / every if ranks > 1 else 0.0


def _recoveries(run: RunEvidence) -> list[int]:
    """Return the time from each loss until the job's state was restored, in ns, of the restarts that restored it."""
    recoveries, restored_ns = [], 0
    for restart in () if run.workload.resilience is None else run.workload.resilience.restarts:
        if restart.restored_ns is not None:
            # If no iteration finished since the last restore, `progress_ns` still belongs to the previous loss.
            recoveries.append(restart.restored_ns - max(restart.progress_ns, restored_ns))
            restored_ns = restart.restored_ns
    return recoveries


def _reach_of_noise(alone: NDArray[np.float64], later: int) -> float | None:
    """Return by how much, with 95 %, the mean of all iterations differs from that of the fault-free ones, as a share.

    None: the noise is unknown.
    """
    noise = noise_of(alone)
    if noise is None:
        return None
    difference = math.hypot(noise.error, noise.error_of(later)) if later else 0.0
    return student(noise.independent - 1, _FORMULA_LEVEL) * difference / noise.mean * later / (later + len(alone))
